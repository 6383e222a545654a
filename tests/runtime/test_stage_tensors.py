"""Parameters and gradients of a module in stages: what PyTorch, and people, do with several of them, or read of one, is
what it is on one device, on all ranks alike."""

from __future__ import annotations

import copy
import io
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.compat.redistributing import full_tensor

CLOSE = 1e-12


class Net(nn.Module):
    """The loss of three layers, the last of which is on the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.second(torch.tanh(self.first(x))))), y)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(4, 4, generator=made, dtype=torch.float64), torch.randint(0, 3, (4,), generator=made)


def pair(split: int = 1) -> tuple[Any, Net]:
    """A module in two stages, and the model. Each stage may split its matrices over ranks."""
    plain = Net().double()
    sizes = {"pp": 2, "tp": split} if split > 1 else {"pp": 2}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    constraints: dict[str, dict[str, Any]] = {"second": {"pp": 0}, "head": {"pp": 1}}
    if split > 1:
        constraints |= {"first.weight": {"tp": "S(0)"}, "head.weight": {"tp": "S(1)"}}
    return autopar.parallelize(copy.deepcopy(plain), mesh, batch(), micro_batches=2, constraints=constraints), plain


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return full_tensor(tensor.detach()) if isinstance(tensor, DTensor) else tensor.detach()


def difference(some: Iterable[Any], others: Iterable[Any]) -> float:
    return max(float((whole(a) - whole(b)).abs().max()) for a, b in zip(some, others, strict=True))


def gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def _steps() -> dict[str, float]:
    found = {}
    parallel, plain = pair()
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
        "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
        "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
        "Adafactor, foreach": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1, foreach=True),
    }
    for name, kind in kinds.items():
        for model in (parallel, plain):
            optimizer = kind(model)
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
            for step in range(2):
                model(*batch(step)).backward()
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
            if model is parallel:
                ours = average
        found[name] = difference(parallel.parameters(), plain.parameters())
        found[f"average after {name}"] = difference(ours.module.parameters(), average.module.parameters())
    for model in (parallel, plain):
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        muon = torch.optim.Muon(matrices) if model is plain else parallel.optimizer(torch.optim.Muon, matrices)
        model(*batch()).backward()
        muon.step()
    found["Muon"] = difference(parallel.parameters(), plain.parameters())
    return found


def test_steps_change_the_parameters_of_all_stages() -> None:
    """Optimizers, clipping by value and averages, which compute with lists of parameters; those that read numbers of
    each; and Muon, to whose owners the ranks of a stage give its matrices."""
    for found in ranks.run(2, _steps, timeout_seconds=120):
        assert all(value < CLOSE for value in found.values()), found


def _scaled() -> tuple[float, float]:
    parallel, plain = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    scaler.scale(parallel(*batch())).backward()
    if dist.get_rank() == 1:
        parallel.head.bias.grad.to_local()[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), difference(parallel.parameters(), plain.parameters())


def test_an_infinity_in_one_stage_is_one_in_all() -> None:
    assert ranks.run(2, _scaled, timeout_seconds=120) == [(4.0, 0.0)] * 2


def _reads() -> dict[str, float]:
    parallel, plain = pair()
    for model in (parallel, plain):
        model(*batch()).backward()
    found = {}
    for name, weight, true in (
        ("first", parallel.first.weight, plain.first.weight),
        ("head", parallel.head.weight, plain.head.weight),
    ):
        assert bool(torch.isfinite(weight.grad).all())
        assert torch.equal(weight, weight.detach().clone())
        pairs = {
            "full_tensor": (weight.full_tensor().norm(), true.norm()),
            "redistribute": (weight.redistribute(placements=[Replicate()]).to_local().norm(), true.norm()),
            "item": (weight.norm().item(), true.norm().item()),
            "float": (float(weight.grad.sum()), float(true.grad.sum())),  # type: ignore[union-attr]
            "argmax": (weight.argmax(), true.argmax()),
            "argmin of a dim": (torch.argmin(weight.grad, 1).sum(), torch.argmin(true.grad, 1).sum()),  # type: ignore
            "tolist": (weight.sum(1).tolist()[0], true.sum(1).tolist()[0]),
        }
        found |= {f"{what} of {name}": abs(float(one) - float(other)) for what, (one, other) in pairs.items()}
    held = "nothing" if dist.get_rank() == 0 else "tensor("
    assert f"[3, 4] on stage 1, torch.float64, placed [Replicate()]; this rank holds {held}" in repr(
        parallel.head.weight
    )
    for model in (parallel, plain):  # a penalty of numbers
        numbers = [p.square().sum() for p in model.parameters()]
        model.zero_grad()
        (model(*batch()) + sum(n.full_tensor() if isinstance(n, DTensor) else n for n in numbers)).backward()
    found["penalty"] = difference(gradients(parallel), gradients(plain))
    parts = torch.autograd.grad(parallel(*batch()), list(parallel.parameters()))
    plain.zero_grad()
    plain(*batch()).backward()
    found["autograd.grad"] = difference(parts, gradients(plain))
    return found


def test_what_python_reads_is_the_same_on_all_ranks() -> None:
    for found in ranks.run(2, _reads, timeout_seconds=120):
        assert all(value < CLOSE for value in found.values()), found


def _split() -> dict[str, float]:
    parallel, plain = pair(2)
    assert not any(getattr(parallel, name).weight.placements[0].is_replicate() for name in ("first", "head"))
    for model in (parallel, plain):
        numbers = [p.square().sum() for p in model.parameters()]
        (model(*batch()) + sum(n.full_tensor() if isinstance(n, DTensor) else n for n in numbers)).backward()
    found = {"gradients": difference(gradients(parallel), gradients(plain))}
    norms = autopar.clip_grad_norm_(parallel.parameters(), 1.0), torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    found["norm"] = abs(float(norms[0] - norms[1]))
    for model in (parallel, plain):
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        (torch.optim.Muon(matrices) if model is plain else parallel.optimizer(torch.optim.Muon, matrices)).step()
        torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True).step()
    found["steps"] = difference(parallel.parameters(), plain.parameters())
    set_model_state_dict(parallel, dict(plain.state_dict()), options=StateDictOptions(full_state_dict=True))
    found["state_dict"] = difference(parallel.parameters(), plain.parameters())
    return found


def test_stages_that_split_their_parameters() -> None:
    """A penalty outside of the model, the norm of its gradient, steps, and a state_dict."""
    for found in ranks.run(4, _split, timeout_seconds=120):
        assert all(value < CLOSE for value in found.values()), found


def _refused() -> dict[str, str]:
    parallel, _ = pair()

    def closure() -> Any:
        loss = parallel(*batch())
        loss.backward()
        return loss

    closure()
    asked: dict[str, Callable[[], Any]] = {
        "LBFGS": lambda: torch.optim.LBFGS(parallel.parameters()).step(closure),
        "vector": lambda: torch.nn.utils.parameters_to_vector(parallel.parameters()),
        "norm": lambda: torch.nn.utils.get_total_norm(gradients(parallel)),
        "penalty": lambda: sum(p.square().sum() for p in parallel.parameters()),
    }
    found = {}
    for name, ask in asked.items():
        with pytest.raises(ValueError) as error:
            ask()
        found[name] = str(error.value)
    return found


def test_what_needs_all_stages_at_once_says_so() -> None:
    one, other = ranks.run(2, _refused, timeout_seconds=120)
    assert one == other
    assert one["penalty"] == (
        "add is given tensors of several stages of a pipeline, each of which lies on the ranks of its stage: [] on "
        "stage 0, [] on stage 1. Give full_tensor() of each, on all ranks at once; for the norm of gradients call "
        "autopar.clip_grad_norm_, and compute a penalty on parameters in forward or in loss_fn="
    )
    assert all("is given tensors of several stages" in words for words in one.values()), one


def _states(folder: str) -> dict[str, float]:
    found = {}
    parallel, plain = pair()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (parallel, plain)]
    for model, optimizer in zip((parallel, plain), optimizers, strict=True):
        model(*batch()).backward()
        optimizer.step()
    gathers = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(parallel, options=gathers)
    states = get_optimizer_state_dict(parallel, optimizers[0], options=gathers)
    true_states = get_optimizer_state_dict(plain, optimizers[1])
    if dist.get_rank() == 0:
        file = Path(folder, "weights.pt")
        torch.save(weights, file)
        again = Net().double()
        again.load_state_dict(torch.load(file))
        found["weights"] = difference(again.parameters(), plain.parameters())
        moments = ([s["exp_avg"] for s in each["state"].values()] for each in (states, true_states))  # type: ignore
        found["moments"] = difference(*moments)

    def restored(name: str, restore: Callable[[], Any]) -> None:
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
                optimizers[0].state[parameter]["exp_avg"].zero_()
        restore()
        found[name] = difference(parallel.parameters(), plain.parameters())
        pairs = zip(parallel.parameters(), plain.parameters(), strict=True)
        moments = [(optimizers[0].state[p]["exp_avg"], optimizers[1].state[q]["exp_avg"]) for p, q in pairs]
        found[f"moments, {name}"] = max(difference([one], [other]) for one, other in moments)

    for first in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=first)
        given = not first or dist.get_rank() == 0

        def put(options: StateDictOptions = options, given: bool = given) -> None:
            true = {name: value.clone() for name, value in plain.state_dict().items()}
            set_model_state_dict(parallel, true if given else {}, options=options)
            held: Any = copy.deepcopy(true_states) if given else {}
            set_optimizer_state_dict(parallel, optimizers[0], held, options=options)

        restored(f"broadcast {first}", put)
    asked = {"model": parallel.state_dict(), "optimizer": get_optimizer_state_dict(parallel, optimizers[0])}
    dcp.save(asked, checkpoint_id=f"{folder}/dcp")

    def load() -> None:
        dcp.load(asked, checkpoint_id=f"{folder}/dcp")
        parallel.load_state_dict(asked["model"])
        set_optimizer_state_dict(parallel, optimizers[0], asked["optimizer"])

    restored("distributed checkpoint", load)
    for safe in (False, True):
        file_of_rank = io.BytesIO()
        torch.save(parallel.state_dict(), file_of_rank)
        file_of_rank.seek(0)
        parallel.load_state_dict(torch.load(file_of_rank, weights_only=safe))
    copied, alone = copy.deepcopy(parallel), copy.deepcopy(parallel.head.weight)
    assert isinstance(alone, nn.Parameter) and float(alone.norm()) == float(parallel.head.weight.norm())
    found["copies"] = difference(copied.parameters(), plain.parameters())
    return found


def test_whole_states_have_the_values_of_all_stages(tmp_path: Path) -> None:
    """As `torch.distributed.checkpoint.state_dict` gathers and sets them; and distributed checkpoints, files of
    `torch.save` and copies."""
    for found in ranks.run(2, _states, str(tmp_path), timeout_seconds=120):
        assert all(value < CLOSE for value in found.values()), found


def _norms(folder: str) -> tuple[list[float], list[float]]:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from autopar.integrations.transformers import Trainer

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29578")  # as torchrun tells its processes
    options: dict[str, Any] = {
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
    }
    quiet: dict[str, Any] = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(folder, max_grad_norm=0.5, optim="sgd", per_device_train_batch_size=4, **options, **quiet)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    plain = LlamaForCausalLM(config)
    ids = torch.randint(0, 17, (4, 5))
    example = {"input_ids": ids, "labels": ids}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    parallel = autopar.parallelize(copy.deepcopy(plain), mesh, kwargs=example)
    trainer = Trainer(parallel, args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    optimizer, true = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        plain(**example).loss.backward()
        true.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
    assert difference(parallel.parameters(), plain.parameters()) < 1e-6
    return [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry], true


def test_a_trainer_clips_by_the_norm_of_all_stages(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    for norms, true in ranks.run(2, _norms, str(tmp_path), timeout_seconds=120):
        assert norms == pytest.approx(true, rel=1e-5)
