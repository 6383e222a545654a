"""Names, hooks and states of checkpoints are those of the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import whole
from ranks import run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import autopar

safetensors = pytest.importorskip("safetensors.torch")

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Plain(nn.Module):
    """Layers of which some are wrapped."""

    def __init__(self, *, wrapped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        if wrapped:
            self.a = checkpoint_wrapper(self.a)
            self.b = torch.compile(self.b, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh()).square().mean()


def parallel(model: nn.Module, *batch: torch.Tensor, solver: str = "fsdp") -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return autopar.parallelize(model, mesh, batch or (X,), solver=solver)


def wrapped(folder: str) -> None:
    plain, module = Plain(wrapped=False), parallel(Plain(wrapped=True))
    module.save_pretrained(folder)
    files = safetensors.load_file(Path(folder) / "model.safetensors")
    assert files.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(files[name], value)
    other = Plain(wrapped=False)
    with torch.no_grad():
        other.c.weight.zero_()
    module.load_state_dict(other.state_dict())
    assert module(X).item() == pytest.approx(other(X).item())


def test_wrapped_modules_are_saved_and_loaded_under_the_plain_models_names(tmp_path: Path) -> None:
    run(2, wrapped, str(tmp_path / "files"))


class Hooked(nn.Module):
    """Renames a key of old files, and keeps a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.count = nn.Linear(8, 8), 3
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}old.weight" in state:
            state[f"{prefix}layer.weight"] = state.pop(f"{prefix}old.weight")

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Hooked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def hooked() -> None:
    for make, prefix in ((Hooked, ""), (Outer, "inner.")):
        module = parallel(make())  # the original is gone
        state = {name: whole(x) if isinstance(x, torch.Tensor) else x for name, x in module.state_dict().items()}
        assert state[f"{prefix}_extra_state"] == 3
        state[f"{prefix}old.weight"] = 2 * state.pop(f"{prefix}layer.weight")
        state[f"{prefix}_extra_state"] = 5
        module.load_state_dict(state)
        torch.testing.assert_close(whole(module.state_dict()[f"{prefix}layer.weight"]), state[f"{prefix}old.weight"])
        assert module.state_dict()[f"{prefix}_extra_state"] == 5


def test_hooks_and_extra_states_of_state_dicts_are_the_models() -> None:
    run(2, hooked)


class Scored(nn.Module):
    """A trainable weight that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score, self.layer = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight = self.score(x).sigmoid()
        return (self.layer(x) * weight).square().mean()


def resumed(folder: str) -> list[float]:
    def train(module: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = module(X)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    module = parallel(Scored())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    first = train(module, optimizer, 2)
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
    expected = train(module, optimizer, 2)
    again = parallel(Scored(), solver="ddp")
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(again, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(again, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert train(again, optimizer, 2) == pytest.approx(expected)
    return first


def test_a_weight_that_never_gets_a_gradient_does_not_break_resuming(tmp_path: Path) -> None:
    one, other = run(2, resumed, str(tmp_path / "checkpoint"))
    assert one == pytest.approx(other)
