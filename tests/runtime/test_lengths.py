"""Batches of several lengths: each runs the program of the smallest length that holds it, planned with the others
before the first step, and gives the loss, the gradients and the outputs that it has alone on one device."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from models import assert_close, whole
from ranks import outcomes, run
from test_shapes import Reader
from test_shapes import batch as words
from torch.distributed.device_mesh import init_device_mesh

import autopar

LENGTHS = {8: 0.5, 16: 0.3, 32: 0.2}
PADDING = autopar.Padding(values={"input_ids": 0, "labels": -100, "attention_mask": 0})


def text(length: int, seed: int, rows: int = 4, *, masked: bool = False) -> dict[str, torch.Tensor]:
    """A batch as tokenizers make it: rows end at lengths of their own, the longest at `length`."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, models.VOCABULARY, (rows, length), generator=draw)
    ends = torch.randint(max(2, length // 2), length + 1, (rows, 1), generator=draw)
    ends[0] = length
    mask = torch.arange(length) < ends
    batch = {"input_ids": ids * mask, "labels": torch.where(mask, ids, -100)}
    return {**batch, "attention_mask": mask.long()} if masked else batch


def trained(shape: tuple[int, ...], masked: bool, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Steps on batches of many lengths, beside one process; what was logged, and for what there are programs."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)
    logging.getLogger("autopar").setLevel(logging.INFO)
    torch.manual_seed(0)
    beside = models.llama()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) if len(shape) == 2 else None
    module = autopar.parallelize(
        copy.deepcopy(beside), mesh, kwargs=text(13, 0, masked=masked), padding=PADDING, lengths=LENGTHS, **options
    )
    places = {name: p.placements for name, p in module.named_parameters()}
    before = sum(line.startswith("capture: ") for line in logged)
    optimizers = [models.adamw(module), models.adamw(beside)]
    for step, length in enumerate((5, 32, 16, 9, 8, 31, 17, 2)):
        given = text(length, step, masked=masked)
        found, expected = module(**given), beside(**given)
        assert_close(whole(found.loss), expected.loss.detach(), f"loss of {length}")
        if options.get("whole_outputs"):
            assert_close(found.logits, expected.logits.detach(), f"logits of {length}")
        found.loss.backward(), expected.loss.backward()
        if step < 3:
            for (name, p), q in zip(module.named_parameters(), beside.parameters(), strict=True):
                assert_close(whole(p.grad), q.grad, f"gradient of {name} at {length}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert sum(line.startswith("capture: ") for line in logged) == before == len(LENGTHS), "once a length, before steps"
    assert {name: p.placements for name, p in module.named_parameters()} == places
    for (name, p), q in zip(module.named_parameters(), beside.parameters(), strict=True):
        assert_close(whole(p), q.detach(), name, 1e-4)
    assert [one.length for one in module.plan.lengths] == [32, 16, 8]
    assert bool(module.plan.offload_bytes) == bool(options.get("offload"))
    assert all(one.seconds > 0 and one.bytes > 0 for one in module.plan.lengths)
    return logged, [what for what, _ in module.programs]


@pytest.mark.parametrize(
    ("shape", "masked", "options"),
    [
        ((2,), False, {}),
        ((2, 2), True, {"solver": "fsdp", "whole_outputs": True}),
        ((2,), False, {"solver": "fsdp", "offload": True, "cluster": "dgx-h100", "memory_limit_bytes": 5.6e5}),
    ],
    ids=["searched, as the mesh is", "fsdp, masked", "with the host"],
)
def test_a_llama_trains_on_batches_of_all_lengths(
    shape: tuple[int, ...], masked: bool, options: dict[str, Any]
) -> None:
    (logged, programs), *_ = run(2 ** len(shape), trained, shape, masked, options)
    assert len(programs) == len(LENGTHS) and not any("captured again" in line for line in logged)
    written = [line for line in logged if line.startswith("wrote a program that was planned")]
    assert len(written) == len(LENGTHS) - 1, "the longest one is written first, and others when they are called for"
    seconds = [float(re.search(r"in ([\d.]+) s", line)[1]) for line in written]  # type: ignore[index]
    assert max(seconds) < 10, "no capture and no search"


def read(length: int, seed: int = 0, rows: int = 8) -> dict[str, torch.Tensor]:
    return words(rows, length, seed)


def same_gradients(module: torch.nn.Module, beside: torch.nn.Module) -> None:
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for name, parameter in beside.named_parameters():
        assert_close(whole(gradients[name]), parameter.grad, f"gradient of {name}")


def cut_back(solver: str) -> None:
    """Outputs have the length of the batch, and pass gradients on, where no loss is in the model; in evaluation too."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    beside = Reader(counts=False)
    ids = {"ids": read(5)["ids"]}
    padding = autopar.Padding(values={"ids": 0})
    module = autopar.parallelize(
        Reader(counts=False), mesh, kwargs=ids, solver=solver, padding=padding, lengths=(4, 8, 12)
    )
    for step, length in enumerate((3, 8, 11)):
        given, target = {"ids": read(length, step)["ids"]}, read(length, step)["labels"].flatten()
        found, expected = module(**given), beside(**given)
        for name in ("logits", "hidden"):
            assert found[name].shape == expected[name].shape
            assert_close(whole(found[name]).detach(), expected[name].detach(), f"{name} of {length}")
        for out in (found, expected):
            (F.cross_entropy(out["logits"].flatten(0, 1), target) + out["hidden"].square().sum()).backward()
        with torch.no_grad():
            assert_close(whole(module.eval()(**given)["hidden"]), beside(**given)["hidden"], f"evaluation at {length}")
        module.train()
    same_gradients(module, beside)
    twin = copy.deepcopy(module)
    assert_close(whole(twin(**ids)["hidden"]).detach(), beside(**ids)["hidden"].detach(), "of a copy")


@pytest.mark.parametrize("solver", ["ddp", "auto"])
def test_outputs_are_cut_back_to_the_length_of_the_batch(solver: str) -> None:
    run(2, cut_back, solver)


def accumulated(shape: tuple[int, ...], axes: tuple[str, ...], options: dict[str, Any]) -> None:
    """Micro-batches of several lengths, whose gradients are reduced once; and a hook on an output that is cut back."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    torch.manual_seed(0)
    beside = models.llama()
    module = autopar.parallelize(
        copy.deepcopy(beside), mesh, kwargs=text(8, 0), padding=PADDING, lengths=(4, 8, 12), **options
    )
    for step, lengths in enumerate(((3, 9, 8), (12, 2))):
        for length in lengths[:-1]:
            with module.no_sync():
                module(**text(length, step)).loss.backward()
            beside(**text(length, step)).loss.backward()
        for one in (module, beside):
            one(**text(lengths[-1], step)).loss.backward()
        same_gradients(module, beside)
    assert len(module.programs) == 3
    if "pp" not in axes:
        found = module(**text(3, 0))
        found.logits.retain_grad()
        with pytest.raises(ValueError, match=r"logits has a hook or retain_grad\(\)"):
            found.loss.backward()


@pytest.mark.parametrize(
    ("shape", "axes", "options"),
    [((2,), ("a",), {"solver": "ddp"}), ((2,), ("a",), {"solver": "fsdp", "whole_outputs": True}), ((2,), ("pp",), {})],
    ids=["ddp", "fsdp", "in stages"],
)
def test_micro_batches_of_several_lengths(
    shape: tuple[int, ...], axes: tuple[str, ...], options: dict[str, Any]
) -> None:
    run(2, accumulated, shape, axes, options)


def local() -> None:
    """Ranks whose own parts are of different lengths."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    padding = autopar.Padding(values={"ids": 0, "labels": -100})
    module = autopar.parallelize(
        Reader(counts=False), mesh, kwargs=read(8), solver="ddp", padding=padding, lengths=(4, 8, 16)
    )
    beside, longer = Reader(counts=False), (3, 7)
    parts = [read(length, length, rows=4) for length in longer]
    found = module(**module.shard_batch(parts[module.data_rank]))["loss"]
    sums = [
        F.cross_entropy(beside(p["ids"])["logits"].flatten(0, 1), p["labels"].flatten(), reduction="sum") for p in parts
    ]
    assert_close(whole(found).detach(), (sum(sums) / (4 * sum(longer))).detach(), "loss")
    module.shard_batch(read(17 if module.data_rank else 2, rows=4))


def test_local_batches_take_the_length_of_the_longest_rank_and_all_raise_if_one_is_too_long() -> None:
    for outcome in outcomes(2, local):
        assert re.search("the batch has length 17, and the longest of lengths is 16", str(outcome.error)), (
            outcome.traceback
        )


def wrong(which: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    padding = autopar.Padding(values={"ids": 0, "labels": -100})
    options: dict[str, Any] = {"solver": "ddp", "lengths": (4, 8), "padding": padding}
    if which == "no padding":
        options["padding"] = None
    if which == "no value":
        options["padding"] = autopar.Padding(values={"ids": 0})
    if which == "no lengths":
        options["lengths"] = (8, 0)
    module = autopar.parallelize(Reader(counts=False), mesh, kwargs=read(8), **options)
    if which == "on one rank":
        module(**read(9 if torch.distributed.get_rank() else 8))
    if which == "a new input":
        module(**read(3), mask=torch.ones(8, 3))
    module(**read(9))


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("too long", "the batch has length 9, and the longest of lengths is 8: cut it, or add a longer one"),
        ("on one rank", "the batch has length 9, and the longest of lengths is 8"),
        ("no padding", r"lengths has 4, 8, and nothing says what batches are padded with: give padding="),
        ("no value", r"input kwargs.labels is int64\[8, 8\], as long as the batch, and padding has no value for it"),
        ("no lengths", r"lengths is \(8, 0\) \(tuple\): give the lengths that batches are padded to"),
        ("a new input", r"input kwargs.mask is float32\[8, 3\], as long as the batch, and padding has no value"),
    ],
)
def test_every_rank_says_what_no_length_holds_and_what_has_no_value(which: str, message: str) -> None:
    for outcome in outcomes(2, wrong, which):
        assert isinstance(outcome.error, ValueError) and re.search(message, str(outcome.error)), outcome.traceback
