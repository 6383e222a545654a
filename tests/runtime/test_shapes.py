"""One parallel module, called with other shapes, with more and fewer inputs, and without labels: each form of inputs
has a program, the parameters stay where they are, and all is as on one device."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import assert_close, whole
from ranks import outcomes, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.module import ParallelModule
from autopar.runtime.versions import PROGRAMS_MOST

WORDS, HIDDEN = 12, 8


class Reader(nn.Module):
    """Tokens, an optional mask and optional labels; a loss only with labels; batch norm, which counts tokens."""

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN, affine=False) if counts else nn.Identity()
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, labels: torch.Tensor | None = None, both: bool = True
    ) -> dict[str, Any]:
        x = self.embed(ids)
        if mask is not None:
            x = x * mask[..., None]
        x = torch.tanh(self.mix(x))
        x = x + self.norm(x.transpose(1, 2)).transpose(1, 2).cumsum(1)
        logits = self.head(x)
        out = {"logits": logits, "hidden": x} if both else {"logits": logits}
        if labels is not None:
            out["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return out


def batch(rows: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def masked(rows: int, length: int) -> dict[str, torch.Tensor]:
    given = batch(rows, length)
    return {**given, "mask": (given["ids"] % 3 > 0).float()}


CALLS: tuple[dict[str, Any], ...] = (
    batch(8, 4),
    batch(3, 4),  # the last batch
    batch(8, 7),
    batch(1, 5),
    masked(8, 4),
    {**batch(8, 4), "both": False},
)


def compared(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert list(found) == list(expected), what
    for name, tensor in expected.items():
        assert_close(whole(found[name]), tensor.detach(), f"{name} of {what}")


class Sees(nn.Module):
    """A forward that is given, of a layer and the inputs of a call."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(HIDDEN, HIDDEN), forward

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer, *args, **kwargs)


def in_order(layer: nn.Module, **xs: torch.Tensor) -> torch.Tensor:
    return torch.stack([(i + 1) * layer(x).square().mean() for i, x in enumerate(xs.values())]).sum()


class Declares(Sees):
    """It names its inputs."""

    def __init__(self) -> None:
        super().__init__(in_order)

    def forward(self, *, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.function(self.layer, a=a, b=b)


def one_object(layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (layer(x).square().mean() + layer(y).mean()) * (2 if x is y else 1)


def unseen(layer: nn.Module, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    return layer(x).square().mean() + (layer(x if y is None else y).mean())


def contiguous(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x if x.is_contiguous() else 2 * x).square().mean()


def offset(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x).square().mean() * (1 + x.storage_offset())


ROWS, TURNED, BOTH = (
    torch.randn(n, m, generator=torch.Generator().manual_seed(n)) for n, m in ((4, 8), (8, 4), (8, 8))
)
X, Y, STRIDED = ROWS, ROWS + 1, TURNED.t()
SEEN: dict[Callable[..., torch.Tensor], tuple[list[Any], int]] = {
    in_order: ([{"a": X, "b": Y}, {"b": Y, "a": X}, {"a": Y, "b": X}], 2),
    Declares: ([{"a": X, "b": Y}, {"b": Y, "a": X}], 1),
    one_object: ([(X, X), (X, Y), (Y, Y)], 2),
    unseen: ([(X, X), (X, Y), (STRIDED, Y), (X, STRIDED)], 1),
    contiguous: ([(X,), (STRIDED,), (Y,), (BOTH[4:],), (BOTH[1:5].clone(),)], 2),
    offset: ([(BOTH[:4],), (BOTH[4:],), (X,)], 2),
}
"""What forward sees of how inputs are given: calls, and how many programs they need."""


def seen(forward: Callable[..., torch.Tensor]) -> None:
    calls, programs = SEEN[forward]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    net, beside = (forward() if isinstance(forward, type) else Sees(forward) for _ in range(2))
    first = {"kwargs": calls[0]} if isinstance(calls[0], dict) else {"args": calls[0]}
    module = autopar.parallelize(net, mesh, **first)
    for call in calls:
        args, kwargs = ((), call) if isinstance(call, dict) else (call, {})
        found, expected = module(*args, **kwargs), beside(*args, **kwargs)
        assert_close(whole(found), expected.detach(), "loss")
        found.backward(), expected.backward()
    for (name, p), q in zip(module.named_parameters(), beside.parameters(), strict=True):
        assert_close(whole(p.grad), q.grad, name)
    assert len(vars(module)["_versions"].versions) == programs


@pytest.mark.parametrize("forward", SEEN, ids=lambda forward: forward.__name__)
def test_what_forward_sees_of_how_inputs_are_given(forward: Callable[..., torch.Tensor]) -> None:
    run(2, seen, forward)


def any_form(shape: tuple[int, ...], solver: str, calls: int) -> None:
    """Training steps of so many forms, and of the first ones again, with an evaluation without labels after each."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    beside, module = Reader(), autopar.parallelize(Reader(), mesh, kwargs=CALLS[0], solver=solver)
    assert isinstance(module, ParallelModule)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, beside)]
    places = {name: p.placements for name, p in module.named_parameters()}
    for number, given in enumerate(CALLS[:calls] + CALLS[:2]):
        found, expected = module(**given), beside(**given)
        compared(found, expected, f"call {number}")
        found["loss"].backward(), expected["loss"].backward()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        for name, parameter in beside.named_parameters():
            assert_close(whole(gradients[name]), parameter.grad, f"gradient of {name} in call {number}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        module.eval(), beside.eval()
        with torch.no_grad():
            unlabelled = {name: x for name, x in given.items() if name != "labels"}
            compared(module(**unlabelled), beside(**unlabelled), f"evaluation after call {number}")
        module.train(), beside.train()
    assert {name: p.placements for name, p in module.named_parameters()} == places
    for (name, p), q in zip(module.named_parameters(), beside.parameters(), strict=True):
        assert_close(whole(p), q.detach(), name)
    for (name, p), q in zip(module.named_buffers(), beside.buffers(), strict=True):
        assert_close(whole(p), q, name)
    assert len(vars(module)["_versions"].versions) == 2 * calls, "one for each form in each mode"


@pytest.mark.parametrize(("shape", "solver", "calls"), [((2, 2), "fsdp", 2), ((2,), "megatron", len(CALLS))], ids=str)
def test_any_form_of_inputs_is_as_on_one_device(shape: tuple[int, ...], solver: str, calls: int) -> None:
    run(2 ** len(shape), any_form, shape, solver, calls)


# ---------------------------------------------------------------------------------------------------- agreement


def by_rank(other: Any) -> None:
    """Calls of one module, the last of which rank 1 makes in its own way, and is told so with the others."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    module = autopar.parallelize(Reader(), mesh, kwargs=batch(8, 4), solver="ddp")
    for _ in range(3):
        module(**batch(8, 4))["loss"].backward()
    module(**(other if torch.distributed.get_rank() else batch(8, 4)))["loss"].backward()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (batch(3, 4), r"rank 0: .*int64\[8, 4\].*rank 1: .*int64\[3, 4\]"),
        (batch(8, 4, seed=1), r"input kwargs.ids differs between ranks: .* Digests of call 4: rank 0"),
        ({**batch(8, 4), "ids": "words"}, "rank 0: .*rank 1: .*'words'"),
    ],
    ids=["shape", "data", "no tensor"],
)
def test_ranks_that_call_differently_all_raise(other: dict[str, Any], message: str) -> None:
    for outcome in outcomes(2, by_rank, other):
        assert outcome.error is not None, "no rank goes on"
        assert re.search(message, str(outcome.error)), outcome.traceback


# --------------------------------------------------------------------------------------------------- programs


def recaptured() -> tuple[list[str], int]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    module = autopar.parallelize(nn.Linear(2, 2), mesh, (torch.ones(1, 2),), loss_fn=torch.sum)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("autopar.runtime.versions").addHandler(handler)
    logging.getLogger("autopar").addHandler(handler)
    logging.getLogger("autopar").setLevel(logging.INFO)
    for rows in range(1, PROGRAMS_MOST + 4):
        module(torch.ones(rows, 2))
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(3x5 and 2x2\)") as caught:
        module(torch.ones(3, 5))
    assert "args.0 is float32[3, 5] and was float32[35, 2]" in "".join(caught.value.__notes__)
    before = len(lines)
    module(torch.ones(20, 2))
    assert len(lines) == before, "its program is kept"
    return lines, len(vars(module)["_versions"].versions)


def test_each_capture_is_logged_and_many_are_warned_of() -> None:
    ((lines, kept),) = run(1, recaptured)
    found = [line for line in lines if "captured again" in line]
    assert len(found) == PROGRAMS_MOST + 2 and kept == PROGRAMS_MOST
    assert re.fullmatch(
        r"INFO captured again in [\d.]+ s, for training with gradients, where args.0 is float32\[2, 2\] and was "
        r"float32\[1, 2\]", found[0],
    )  # fmt: skip
    warned = [line for line in lines if line.startswith("WARNING")]
    assert [line.split()[1] for line in warned] == ["8", "16", "32"]
    assert all("autopar.Padding" in line for line in warned)


# ---------------------------------------------------------------------------------------------------- padding

PADDING = autopar.Padding(values={"ids": 0, "labels": -100, "mask": 0})


def padded() -> None:
    """Batches of other sizes run the programs of two lengths, and give the loss and the gradients of their own."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    beside = Reader(counts=False)
    module = autopar.parallelize(
        Reader(counts=False), mesh, kwargs=batch(8, 3), solver="fsdp", padding=PADDING, lengths=(8, 4)
    )
    for given in (batch(8, 4), batch(3, 4), batch(1, 2), batch(5, 7), batch(8, 8), masked(8, 4), masked(2, 3)):
        found, expected = module(**given), beside(**given)
        assert_close(whole(found["loss"]), expected["loss"].detach(), "loss")
        rows = given["ids"].shape[0]
        assert found["logits"].shape[1:] == expected["logits"].shape[1:], "cut back to the batch's length"
        assert_close(whole(found["logits"])[:rows], expected["logits"].detach(), "logits")
        found["loss"].backward(), expected["loss"].backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for name, parameter in beside.named_parameters():
        assert_close(whole(gradients[name]), parameter.grad, f"gradient of {name}")
    assert len(vars(module)["_versions"].versions) == 3, "two lengths, and a mask"
    with pytest.raises(ValueError, match=r"input kwargs.ids is int64\[2, 4\], of 8 rows, and padding has no value"):
        without = autopar.Padding(values={"labels": -100})
        autopar.parallelize(Reader(), mesh, kwargs=batch(8, 4), solver="ddp", padding=without)(**batch(2, 4))
    with pytest.raises(ValueError, match=r"padding names label, and the inputs are both, ids, labels, mask"):
        wrong = autopar.Padding(values={"label": -100})
        autopar.parallelize(Reader(), mesh, kwargs=batch(8, 4), solver="ddp", padding=wrong)


def test_padded_batches_are_as_they_are_on_one_device() -> None:
    run(2, padded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": {}}, "give a value by input"),
        ({"values": {"labels": "x"}}, "padding value of 'labels' is 'x': give a number"),
        ({"values": {"labels": 0}, "dims": {"labels": 1}}, "give the dims that are the length"),
        ({"values": {"labels": 0}, "dims": {"ids": (1,)}}, "has dims of 'ids' and no value"),
    ],
)
def test_what_is_no_padding(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autopar.Padding(**options)


class Lacking(nn.Module):
    """Has a parameter without a gradient, an operator without a rule, and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, HIDDEN, sparse=True)
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return x.square().mean() + torch.linalg.eigvalsh(torch.einsum("bth,btk->hk", x, x)).sum()


def warned_once() -> list[list[str]]:
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    logging.getLogger("autopar").addHandler(Kept())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    found = []
    for _ in range(2):
        said.clear()
        module = autopar.parallelize(Lacking(), mesh, (batch(8, 4)["ids"],), solver="ddp")
        for rows in (8, 6, 4):
            module(batch(rows, 4)["ids"]).backward()
        with torch.no_grad():
            module.eval()(batch(8, 4)["ids"])
        found.append([*said])
    return found


def test_what_a_model_lacks_is_said_once() -> None:
    for found in run(2, warned_once):
        for said in found:
            for what in ("no gradient reaches", "no rule", "sparse=True"):
                assert len([line for line in said if what in line]) == 1, (what, said)
