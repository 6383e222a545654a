"""Values of inputs that a model's Python reads: a program for each, and a clear error where there can be none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_close
from ranks import outcomes, run
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import autopar
from autopar import testing
from autopar.passes.capture.errors import CaptureError
from autopar.passes.capture.overrides import windows
from autopar.passes.capture.trace import capture

Forward = Callable[["Net", torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, forward: str) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 8), nn.Linear(8, 8), nn.Dropout(0.0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.body = forward

    def forward(self, x: torch.Tensor, mask: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        given = (mask,) if other is None else (mask, other)
        return READS[self.body](self, self.a(x), *given).square().mean()


def in_place(m: Net, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(3, dtype=torch.long)
    counts[1] = mask.sum()
    counts[0:2] += 1
    return m.b(h)[:, : int(counts[1])]


def in_layers(m: Net, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        h = h + (layer(h).tanh() if (mask > 0).any() else layer(h))
    return h


def picked(m: Net, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows, columns = (mask > 0).nonzero(as_tuple=True)
    kept = torch.zeros_like(h)
    kept[rows, columns] = m.b(h)[rows, columns]
    return kept + h


def replaced(m: Net, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    chosen = (mask > 0).any(1)
    made = m.b(h)
    made[chosen] = made[chosen] * 2
    return made


READS: dict[str, Callable[..., torch.Tensor]] = {
    "a branch": lambda m, h, mask: m.b(h) if mask.any() else h,
    "an item": lambda m, h, mask: m.b(h) * mask.sum().item(),
    "a size": lambda m, h, mask: m.b(h)[:, : mask.sum()],
    "sizes": lambda m, h, mask: torch.cat(
        [p * (k + 1) for k, p in enumerate(m.b(h).split((mask.sum(1) + 1).tolist()))]
    ),
    "a range": lambda m, h, mask: m.b(h)[:, torch.arange(mask.sum())],
    "a narrow": lambda m, h, mask: m.b(h).narrow(1, mask.sum(), 2),
    "places": picked,
    "rows": lambda m, h, mask: m.b(h)[(mask > 0).any(1)],
    "rows that are written": replaced,
    "selected": lambda m, h, mask: m.b(h).masked_select((mask > 0).any(1, keepdim=True)),
    "picked numbers": lambda m, h, mask: m.b(h) * sum(mask[0][mask[0] > 0].tolist()),
    "a list": lambda m, h, mask: m.b(h)[:, : torch.tensor([mask.sum(), 1])[0]],
    "repeats": lambda m, h, mask: m.b(h).repeat_interleave(mask.sum(1) + 1, 0),
    "a unique": lambda m, h, mask: m.b(h)[:, torch.unique(mask).long()],
    "an array": lambda m, h, mask: m.b(h) * float(mask.numpy().sum()),
    "in place": in_place,
    "in layers": in_layers,
    "two": lambda m, h, mask, other: m.b(h) * mask.sum().item() + (h if (other > 0).all() else -h),
    "in evaluation": lambda m, h, mask: m.b(h) if m.training else m.b(h) * mask.sum().item(),
}


def net(body: str) -> Net:
    torch.manual_seed(0)
    return Net(body).double()


def batch(*places: tuple[int, int], rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(rows, 3, dtype=torch.long)
    for place in places:
        mask[place] = 1
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(len(places))), mask


ONE, MOVED, TWO = batch((0, 0)), batch((1, 1)), batch((0, 0), (2, 1))


def inputs(body: str) -> tuple[torch.Tensor, ...]:
    if body == "sizes":
        return TWO[0], torch.tensor([[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    return (*TWO, TWO[1] - 1) if body == "two" else TWO


@pytest.mark.parametrize("body", READS)
def test_values_of_inputs_are_read(body: str) -> None:
    found = testing.check(net(body), {"a": 2}, inputs(body), solver="fsdp", steps=2)
    assert found.equal, str(found)


@pytest.mark.parametrize("body", [body for body in READS if body != "in evaluation"])
def test_a_graph_says_which_inputs_it_is_right_for(body: str) -> None:
    args = inputs(body)
    pinned = capture(net(body), args).pinned
    given = {f"args.{i}": tensor for i, tensor in enumerate(args)}
    assert set(pinned.inputs) == {f"args.{i}" for i in range(1, len(args))}
    assert str(pinned).startswith("values of args.1") and "test_pinned.py" in str(pinned)
    assert pinned.differs(given) is None
    changed = torch.ones_like(args[1]) if body not in ("a branch", "in layers") else torch.zeros_like(args[1])
    assert pinned.differs({**given, "args.1": changed}) is not None
    assert torch.equal(args[1], inputs(body)[1]), "inputs are only read"


def test_what_is_read_counts_and_not_the_input() -> None:
    """Other masks of as many ones are one to a model that counts them."""
    pinned = capture(net("an item"), ONE).pinned
    assert pinned.differs({"args.1": MOVED[1]}) is None
    assert pinned.differs({"args.1": TWO[1]}) is not None
    assert not capture(net("in evaluation"), ONE).pinned


def test_inputs_without_values_are_refused_by_name() -> None:
    x, mask = ONE
    for body in ("an item", "a branch", "sizes", "places"):
        with pytest.raises(CaptureError, match=r"reads a value of input args.1 .*test_pinned.py.* without values"):
            capture(net(body), (x, mask.to("meta")))


@pytest.mark.parametrize(
    "body",
    [
        lambda m, h, mask: torch.cat([p for p in m.b(h).split((h.argmax(1)[:2] + 1).tolist())]),
        lambda m, h, mask: h[:, : (torch.rand(()) * 4).long()] + m.b(h).sum(),
    ],
)
def test_numbers_of_parameters_and_draws_are_refused(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READS, "refused", body)
    with pytest.raises(CaptureError, match=r"a number of a tensor \(.*test_pinned.py.*parameters, buffers or"):
        capture(net("refused"), ONE)


def test_a_plan_says_what_it_is_right_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="autopar"):
        autopar.plan(net("an item"), {"a": 2}, ONE)
    assert "values of args.1" in caplog.text and "inputs of which it reads the same" in caplog.text


# ---------------------------------------------------------------------------------------- ranks


def steps(body: str, batches: list[Any], split: bool, verify: int) -> tuple[list[float], int]:
    """Steps of SGD, each equal to eager; how many programs there are then."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    beside = net(body)
    module = autopar.parallelize(net(body), mesh, batches[0], solver="fsdp", verify=verify)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, beside)]
    losses = []
    for x, mask in batches:
        given = distribute_tensor(mask, mesh, module.input_placements.get("args.1")) if split else mask
        for m, one in ((module, given), (beside, mask)):
            loss = m(x, one)
            loss.backward()
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_close(torch.tensor(losses[-2]), torch.tensor(losses[-1]), "loss")
        module.eval(), beside.eval()
        with torch.no_grad():
            assert_close(module(x, given), beside(x, mask), "loss in evaluation")
        module.train(), beside.train()
    for (name, p), q in zip(module.named_parameters(), beside.parameters(), strict=True):
        assert_close(p.full_tensor(), q, name)
    return losses, len(vars(module)["_versions"].versions)


@pytest.mark.parametrize("body", ["places", "in layers", "in evaluation", "in place"])
def test_masks_that_change_from_step_to_step(body: str) -> None:
    run(2, steps, body, [ONE, TWO, ONE], False, 1)


def test_masks_that_each_rank_has_a_part_of() -> None:
    run(2, steps, "an item", [ONE, TWO, MOVED], True, 0)


def test_so_many_programs_are_kept() -> None:
    batches = [batch(*[(k // 3, k % 3) for k in range(n)]) for n in (0, 1, 2, 0)]
    assert {count for _, count in run(2, steps, "a branch", batches, False, 0)} == {4}, "two, in each of two modes"
    assert {count for _, count in run(2, steps, "an item", batches, False, 0)} == {6}, "three"


def differing() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    module = autopar.parallelize(net("an item"), mesh, ONE, solver="ddp")
    module(*ONE)
    module(*(TWO if torch.distributed.get_rank() else ONE))


def test_ranks_that_read_different_values_are_refused() -> None:
    for outcome in outcomes(2, differing):
        assert isinstance(outcome.error, ValueError), outcome.traceback
        assert "input args.0 differs between ranks" in str(outcome.error)


# ---------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("shape", "size", "stride"),
    [
        ((3, 8, 4), (3, 3, 4, 4), (32, 8, 4, 1)),  # those of LED and Longformer
        ((12,), (4, 6), (2, 1)),
        ((2, 12), (2, 3, 6), (12, 3, 1)),
        ((3, 12), (3, 4), (12, 1)),  # a part
        ((12,), (5, 5), (1, 1)),
        ((4, 4), (3, 3), (5, 1)),  # diagonal
        ((3, 8, 4), (4, 1, 3, 3), (4, 7, 32, 1)),
    ],
)
def test_windows_in_memory_are_views(shape: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for given in (x, x.movedim(0, -1).contiguous().movedim(-1, 0)):
        found = windows(given, size, stride)
        assert found is not None and found.data_ptr() == given.data_ptr()
        assert torch.equal(found, given.as_strided(size, stride))


@pytest.mark.parametrize(("size", "stride"), [((4, 3), (2, 2)), ((3, 5), (0, 1)), ((13,), (1,)), ((4, 0), (2, 1))])
def test_what_is_no_windows_has_no_view(size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert windows(torch.randn(24)[:12], size, stride) is None


def test_a_tensor_attribute_whose_number_is_read_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READS, "scaled", lambda m, h, mask: m.b(h) * m.scale.item())
    made = net("scaled")
    made.scale = torch.tensor(2.0)
    assert "scale" in capture(made, ONE).reads.values
