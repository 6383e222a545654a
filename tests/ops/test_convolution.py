"""Convolutions, batch and group norm, pools: every way to split them, what that communicates, and whole models."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from models import Case, assert_close, assert_same, eager, simulated
from ranks import run
from test_communication import Force, forced
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.ir.graph import overload
from autopar.ir.program import Program
from autopar.ops.emit import Emission
from autopar.ops.oracle import Cut, Report, check_cuts, check_rule, make_call
from autopar.ops.rules import rule_of
from autopar.passes.capture.trace import capture
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.passes.lower.slice import SLICING
from autopar.passes.space.choices import AxisChoice, SiteChoice
from autopar.passes.space.sites import Site
from autopar.planning.planner import Planner
from autopar.runtime.module import ParallelModule
from autopar.runtime.simulate import simulate_step

EXAMPLES = Path(__file__).parents[2] / "examples"
DOUBLE = torch.float64
FLOAT = 4


def numbers(*shape: int, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


# ------------------------------------------------------------------------------------------ each op


def check_convolution(
    source: Sequence[int], weight: Sequence[int], *, stride: Sequence[int] = (1,), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), transposed: bool = False, longer: Sequence[int] = (0,), groups: int = 1,
    bias: bool = True, mask: tuple[bool, bool] = (True, True),
) -> tuple[Report, Report]:  # fmt: skip
    """The oracle on a convolution and on its backward op."""
    x, w = numbers(*source), numbers(*weight)
    outputs = weight[1] * groups if transposed else weight[0]
    b = numbers(outputs) if bias else None
    rest = (list(stride), list(padding), list(dilation), transposed, list(longer), groups)
    made = torch.ops.aten.convolution(x, w, b, *rest)
    gradient = numbers(*made.shape)
    sizes = [outputs] if bias else None
    return (
        check_rule("aten.convolution.default", x, w, b, *rest),
        check_rule("aten.convolution_backward.default", gradient, x, w, sizes, *rest, [*mask, bias]),
    )


SAME = [
    ("1D", {"source": (2, 3, 12), "weight": (4, 3, 3), "padding": [1]}),
    ("1D, 5 wide", {"source": (2, 3, 12), "weight": (4, 3, 5), "padding": [2], "bias": False}),
    ("even kernel", {"source": (2, 3, 12), "weight": (4, 3, 2), "padding": [1], "dilation": [2]}),
    ("dilated", {"source": (2, 2, 12, 8), "weight": (4, 2, 3, 3), "padding": [2, 1], "dilation": [2, 1]}),
    ("3D", {"source": (2, 2, 4, 6, 4), "weight": (2, 2, 3, 3, 1), "padding": [1, 1, 0]}),
    ("transposed", {"source": (2, 4, 12), "weight": (4, 3, 3), "padding": [1], "transposed": True}),
    ("transposed 3D", {"source": (2, 2, 4, 4, 4), "weight": (2, 4, 1, 3, 3), "padding": [0, 1, 1], "transposed": True}),
    ("depthwise", {"source": (2, 4, 8, 6), "weight": (4, 1, 3, 3), "padding": [1, 1], "groups": 4}),
    ("strided", {"source": (2, 3, 24), "weight": (4, 3, 3), "stride": [2], "padding": [1]}),
    ("stem", {"source": (2, 3, 24, 16), "weight": (4, 3, 7, 7), "stride": [2, 2], "padding": [3, 3], "bias": False}),
    ("patches", {"source": (2, 3, 24, 8), "weight": (4, 3, 4, 2), "stride": [4, 2]}),
    ("shortcut", {"source": (2, 4, 12, 8), "weight": (4, 4, 1, 1), "stride": [2, 2], "bias": False}),
    ("strided, dilated", {"source": (2, 2, 24), "weight": (4, 2, 3), "stride": [3], "padding": [2], "dilation": [2]}),
    ("doubled", {"source": (2, 4, 12, 8), "weight": (4, 3, 2, 2), "stride": [2, 2], "transposed": True}),
    ("doubled, 4 wide", {"source": (2, 4, 12), "weight": (4, 3, 4), "stride": [2], "padding": [1], "transposed": True}),
    (
        "output padding",
        {"source": (2, 4, 12), "weight": (4, 3, 3), "stride": [2], "padding": [1], "longer": [1], "transposed": True},
    ),
    ("1 wide, longer", {"source": (2, 4, 12), "weight": (4, 3, 1), "stride": [2], "longer": [1], "transposed": True}),
    ("groups", {"source": (2, 8, 12), "weight": (12, 2, 3), "padding": [1], "groups": 4}),
    (
        "groups, transposed",
        {"source": (2, 8, 12), "weight": (8, 3, 4), "stride": [2], "padding": [1], "groups": 4, "transposed": True},
    ),
    ("depthwise, two each", {"source": (2, 4, 12), "weight": (8, 1, 3), "padding": [1], "groups": 4}),
    ("first layer", {"source": (2, 3, 12), "weight": (4, 3, 3), "padding": [1], "mask": (False, True)}),
    ("frozen weight", {"source": (2, 3, 12, 8), "weight": (4, 3, 3, 3), "padding": [1, 1], "mask": (True, False)}),
]


@pytest.mark.parametrize("options", [options for _, options in SAME], ids=[name for name, _ in SAME])
def test_convolutions_split_in_every_dim(options: dict[str, Any]) -> None:
    """Batch, channels in and out, or groups, and every spatial dim, alone and in pairs, also nested."""
    forward, backward = check_convolution(**options)
    channels = {"g"} if options.get("groups", 1) > 1 else {"c", "o"}
    spatial = {f"s{i}" for i in range(len(options["source"]) - 2)}
    assert set(forward.factors) == set(backward.factors) == {"n"} | channels | spatial


def test_a_spatial_dim_is_whole_where_rows_do_not_keep_step() -> None:
    forward, backward = check_convolution((2, 4, 12, 12), (4, 4, 3, 3), padding=[0, 1])
    assert "s0" not in forward.factors + backward.factors and "s1" in forward.factors


@pytest.mark.parametrize(("groups", "fit"), [(2, False), (4, True)])
def test_axes_together_split_no_more_groups_than_there_are(groups: int, fit: bool) -> None:
    """Though they could split the channels: a group is on one rank."""
    model = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1, groups=groups), nn.Flatten(), nn.Linear(48, 2))
    space = Planner(model, {"a": 2, "b": 2}, (torch.randn(4, 8, 6),), loss_fn=torch.sum).space
    sites = [site for site in space.rest.sites.values() if site.rule and "g" in [f.name for f in site.rule.factors]]
    assert {site.call.node.op for site in sites if site.call} == {
        "aten.convolution.default",
        "aten.convolution_backward.default",
    }
    for site in sites:
        assert site.rule is not None
        axis = [c for c in site.choices[2] if c.splits and site.rule.factors[c.factor].name == "g"]
        assert axis
        for axes in itertools.product(axis, repeat=2):
            assert (space.option(site, SiteChoice(axes)) is not None) == fit


def test_a_halo_is_not_wider_than_a_shard() -> None:
    """With a halo of 4 rows, 12 rows are cut for 2 or 3 ranks, not for 4."""
    call, _ = make_call("aten.convolution.default", (numbers(1, 1, 12), numbers(1, 1, 9), None, [1], [4], [1], False,
                                                     [0], 1), {})  # fmt: skip
    rule = rule_of(call)
    assert rule is not None
    (factor,) = rule.factors
    assert [factor.may_be_cut(ranks) for ranks in (2, 3, 4)] == [True, True, False]


def emission(op: str, *args: Any, split: Sequence[str], ranks: int = 2) -> Emission:
    """The local program with these factors split, each over an axis of its own. It is run, and must be right."""
    call, tensors = make_call(op, args, {})
    rule = rule_of(call)
    assert rule is not None
    cuts = tuple(Cut(i, f.size) for name in split for i, f in enumerate(rule.factors) if f.name == name)
    assert len(cuts) == len(split)
    result = overload(op)(*args)
    wholes = result if isinstance(result, tuple) else (result,)
    return check_cuts(call, rule, tensors, (ranks,) * len(cuts), cuts, wholes)


def communicated(program: Emission) -> list[tuple[str, tuple[int, ...]]]:
    """Kind and local shape of each collective."""
    return [(i.collective, program.metas[i.outputs[0]].shape) for i in program.instructions if i.collective]


def test_only_edge_rows_travel() -> None:
    """A 5 x 3 kernel on an image [2, 3, 8, 6] of which the rows are split in 2, and then the columns too: 2 rows to
    each side, then 1 column, corners included; the input's edges again for the gradient of the weight, and those of the
    gradient of the input back."""
    x, w, b = numbers(2, 3, 8, 6), numbers(4, 3, 5, 3), numbers(4)
    rest: tuple[Any, ...] = ([1, 1], [2, 1], [1, 1], False, [0, 0], 1)
    forward = "aten.convolution.default", x, w, b, *rest
    rows = [("shift", (2, 3, 2, 6))] * 2
    assert communicated(emission(*forward, split=["s0"])) == rows
    both = [("shift", (2, 3, 2, 3))] * 2 + [("shift", (2, 3, 8, 1))] * 2
    assert communicated(emission(*forward, split=["s0", "s1"])) == both

    gradient = numbers(2, 4, 8, 6)

    def backward(*mask: bool) -> list[tuple[str, tuple[int, ...]]]:
        arguments = (gradient, x, w, [4], *rest, list(mask))
        return communicated(emission("aten.convolution_backward.default", *arguments, split=["s0"]))

    assert backward(True, True, True) == rows * 2
    assert backward(False, True, True) == backward(True, False, True) == rows
    assert backward(False, False, True) == []


def test_edge_rows_of_strided_convolutions() -> None:
    """A stride of 2 needs one row of the shard before, none of the one after; transposed, 4 wide, one of each."""
    rest: tuple[Any, ...] = ([2], [1], [1], False, [0], 1)
    made = emission("aten.convolution.default", numbers(2, 3, 8), numbers(4, 3, 3), None, *rest, split=["s0"])
    assert communicated(made) == [("shift", (2, 3, 1))]
    rest = ([2], [1], [1], True, [0], 1)
    x, w, b = numbers(2, 3, 8), numbers(3, 4, 4), numbers(4)
    made = emission("aten.convolution.default", x, w, b, *rest, split=["s0"])
    assert communicated(made) == [("shift", (2, 4, 1))] * 2
    gradients = (numbers(2, 4, 16), x, w, [4], *rest, [True, True, True])
    made = emission("aten.convolution_backward.default", *gradients, split=["s0"])
    assert communicated(made) == [("shift", (2, 4, 1))] * 2


@pytest.mark.parametrize("channels", [3, 6])
def test_indices_of_maxima_count_in_the_whole_plane(channels: int) -> None:
    x = numbers(2, channels, 8, 12)
    values, indices = torch.ops.aten.max_pool2d_with_indices(x, [2, 3], [2, 3])
    forward = check_rule("aten.max_pool2d_with_indices.default", x, [2, 3], [2, 3])
    rest = ([2, 3], [2, 3], [0, 0], [1, 1], False, indices)
    backward = check_rule("aten.max_pool2d_with_indices_backward.default", numbers(*values.shape), x, *rest)
    assert {"s0", "s1"} <= set(forward.factors) and {"s0", "s1"} <= set(backward.factors)


POOLS: list[Any] = [
    ("stem", (2, 3, 24, 12), [3, 3], [2, 2], [1, 1], False),
    ("uneven", (2, 14, 10), [3, 2], [2, 1], [1, 0], False),
    ("rounded up", (1, 2, 24, 12), [3, 3], [2, 2], [0, 0], True),
    ("rounded up, padded", (2, 10, 12), [5, 3], [2, 3], [2, 0], True),
    ("gaps", (2, 24, 9), [1, 2], [2, 3], [0, 0], False),
    ("wide", (1, 24, 12), [7, 5], [1, 3], [3, 1], False),
    ("3D", (1, 12, 4, 6), [3, 1, 2], [2, 1, 1], [1, 0, 1], False),
]


@pytest.mark.parametrize("shape, kernel, stride, padding, up", [p[1:] for p in POOLS], ids=[p[0] for p in POOLS])
def test_overlapping_pools(
    shape: tuple[int, ...], kernel: list[int], stride: list[int], padding: list[int], up: bool
) -> None:
    x, d = numbers(*shape), len(kernel)
    x[..., :4] = -torch.inf  # of nothing above -inf the first is the maximum
    rest: list[Any] = [kernel, stride, padding, [1] * d, up]
    values, indices = overload(f"aten.max_pool{d}d_with_indices.default")(x, *rest)
    made = check_rule(f"aten.max_pool{d}d_with_indices.default", x, *rest)
    back = check_rule(f"aten.max_pool{d}d_with_indices_backward.default", numbers(*values.shape), x, *rest, indices)
    in_step = {f"s{i}" for i in range(d) if values.shape[i - d] > 1 and shape[i - d] == stride[i] * values.shape[i - d]}
    assert in_step == {f for f in made.factors if f[0] == "s"} == {f for f in back.factors if f[0] == "s"}
    x = numbers(*shape)
    for padded, divisor in ((True, None), (False, None), (False, 5)):
        rest = [kernel, stride, padding, up, padded, divisor]
        values = overload(f"aten.avg_pool{d}d.default")(x, *rest)
        made = check_rule(f"aten.avg_pool{d}d.default", x, *rest)
        back = check_rule(f"aten.avg_pool{d}d_backward.default", numbers(*values.shape), x, *rest)
        assert in_step == {f for f in made.factors if f[0] == "s"} == {f for f in back.factors if f[0] == "s"}


def test_edge_rows_of_pools() -> None:
    """A 3 x 3 pool of stride 2 needs one row of the shard before, of what is pooled and of the gradient."""
    x = numbers(2, 3, 8, 6)
    rest: list[Any] = [[3, 3], [2, 2], [1, 1]]
    values, indices = torch.ops.aten.max_pool2d_with_indices(x, *rest)
    row = [("shift", (2, 3, 1, 6))]
    assert communicated(emission("aten.max_pool2d_with_indices.default", x, *rest, split=["s0"])) == row
    backward = numbers(*values.shape), x, *rest, [1, 1], False, indices
    assert communicated(emission("aten.max_pool2d_with_indices_backward.default", *backward, split=["s0"])) == row
    assert communicated(emission("aten.avg_pool2d.default", x, *rest, False, False, split=["s0"])) == row


def test_upsampling_by_whole_factors() -> None:
    """Nearest rows are copies of own ones; linear ones are also made of one row of either neighbour, cubic ones of
    two. Where sizes are not multiples, or corners are aligned, rows are whole."""
    x, gradient = numbers(1, 2, 8, 6), numbers(1, 2, 16, 18)
    sizes = [16, 18], [1, 2, 8, 6]

    def edges(kind: str, *rest: Any) -> list[tuple[str, tuple[int, ...]]]:
        made = communicated(emission(f"aten.{kind}.default", x, sizes[0], *rest, split=["s0"]))
        back = communicated(emission(f"aten.{kind}_backward.default", gradient, *sizes, *rest, split=["s0"]))
        assert made == back
        return made

    assert edges("upsample_nearest2d") == edges("_upsample_nearest_exact2d", 2.0, 3.0) == []
    assert edges("upsample_bilinear2d", False, 2.0, None) == [("shift", (1, 2, 1, 6))] * 2
    assert edges("upsample_bicubic2d", False) == [("shift", (1, 2, 2, 6))] * 2
    for size, *rest in (([17, 18], False), ([16, 18], True), ([16, 18], False, 2.1, 3.0)):
        assert "s0" not in check_rule("aten.upsample_bilinear2d.default", x, size, *rest).factors


def test_pools_exchange_nothing() -> None:
    x = numbers(2, 4, 8, 12)
    for op, *rest in (("max_pool2d_with_indices", [2, 2]), ("avg_pool2d", [2, 2]), ("_adaptive_avg_pool2d", [4, 2])):
        assert communicated(emission(f"aten.{op}.default", x, *rest, split=["s0", "s1"])) == []


def test_a_kernel_of_one_row_exchanges_nothing() -> None:
    rest: tuple[Any, ...] = ([1, 1], [0, 1], [1, 1], False, [0, 0], 1)
    made = emission("aten.convolution.default", numbers(2, 3, 8, 6), numbers(4, 3, 1, 3), None, *rest, split=["s0"])
    assert communicated(made) == []


def test_batch_norm_reduces_two_numbers_a_channel() -> None:
    """Forward a mean and a mean square (float64), backward two sums, whether the batch, a spatial dim or both are
    split. With the channels split nothing, and nothing for a first layer, whose input has no gradient, or in
    evaluation."""
    x, w, b = numbers(4, 6, 8), numbers(6), numbers(6)
    running = numbers(6), numbers(6).abs()
    op = "aten._native_batch_norm_legit_functional.default"

    def forward(*split: str, training: bool = True) -> list[tuple[str, tuple[int, ...]]]:
        return communicated(emission(op, x, w, b, *running, training, 0.1, 1e-5, split=split))

    assert forward("n") == forward("s0") == [("all_reduce", (2, 6))]
    assert forward("n", "s0") == [("all_reduce", (2, 6))] * 2
    assert forward("n", "c") == [("all_reduce", (2, 3))]
    assert forward("c") == forward("n", training=False) == []

    _, mean, scale, *running = overload(op)(x, w, b, *running, True, 0.1, 1e-5)

    def backward(*split: str, input_too: bool = True) -> list[tuple[str, tuple[int, ...]]]:
        arguments = (numbers(4, 6, 8), x, w, *running, mean, scale, True, 1e-5, [input_too, True, True])
        return communicated(emission("aten.native_batch_norm_backward.default", *arguments, split=split))

    assert backward("n") == backward("s0") == [("all_reduce", (2, 6))]
    assert backward("c") == backward("n", input_too=False) == []


def test_group_norm_reduces_two_numbers_a_group_and_sample() -> None:
    """Only where spatial dims are split."""
    x, w, b = numbers(4, 6, 8), numbers(6), numbers(6)
    sizes = (4, 6, 8, 2)

    def forward(*split: str) -> list[tuple[str, tuple[int, ...]]]:
        return communicated(emission("aten.native_group_norm.default", x, w, b, *sizes, 1e-5, split=split))

    assert forward("s0") == [("all_reduce", (2, 4, 2))]
    assert forward("n", "s0") == [("all_reduce", (2, 2, 2))]
    assert forward("n") == forward("g") == []
    _, mean, scale = torch.ops.aten.native_group_norm(x, w, b, *sizes, 1e-5)

    def backward(*split: str, mask: tuple[bool, ...] = (True, True, True)) -> list[tuple[str, tuple[int, ...]]]:
        arguments = (numbers(4, 6, 8), x, mean, scale, w, *sizes, list(mask))
        return communicated(emission("aten.native_group_norm_backward.default", *arguments, split=split))

    assert backward("s0") == [("all_reduce", (2, 4, 2))]
    assert backward("n") == backward("g") == backward("s0", mask=(False, True, True)) == []


def test_batch_norm_far_from_zero() -> None:
    """Variances of 1 around 100 in float32: E[x^2] - E[x]^2 would have three correct digits."""
    x = numbers(8, 4, 6, dtype=torch.float32) + 100
    check_rule("aten._native_batch_norm_legit.no_stats", x, None, None, True, 0.1, 1e-5)


@pytest.mark.parametrize("parameters", [torch.float32, None], ids=str)
def test_batch_norm_in_half_precision(parameters: torch.dtype | None) -> None:
    """As under autocast: the input is narrow, parameters and statistics are not."""
    x = numbers(8, 4, 6, dtype=torch.bfloat16)
    weights = (None, None) if parameters is None else (torch.rand(4), torch.rand(4))
    running = torch.zeros(4), torch.ones(4)
    op = "aten._native_batch_norm_legit_functional.default"
    check_rule(op, x, *weights, *running, True, 0.1, 1e-5)
    _, mean, scale, *_ = overload(op)(x, *weights, *running, True, 0.1, 1e-5)
    mask = [True, parameters is not None, parameters is not None]
    gradient = numbers(8, 4, 6, dtype=torch.bfloat16)
    arguments = (gradient, x, weights[0], *running, mean, scale, True, 1e-5, mask)
    emission("aten.native_batch_norm_backward.default", *arguments, split=["n", "s0"])


# ------------------------------------------------------------------------------------ whole models

Batch = dict[str, torch.Tensor]


@functools.cache
def example(name: str) -> tuple[nn.Module, Batch]:
    """A model of the examples with a batch of 8, or, "uneven", of 6 images of odd sizes."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import resnet
        import unet
    finally:
        sys.path.remove(str(EXAMPLES))
    torch.manual_seed(0)
    model, *options = name.removesuffix(" uneven").split()
    uneven = name.endswith("uneven")
    if model == "resnet":
        return resnet.ResNet((1, 1), 8), resnet.batches(1, 6 if uneven else 8, 40 if uneven else 32)[0]
    return unet.UNet((8, 16), *options), unet.batches(1, 6 if uneven else 8, 20 if uneven else 16)[0]


MODELS = ("resnet", "unet group conv conv", "unet batch pool nearest")
MESHES: tuple[dict[str, int], ...] = ({"a": 4}, {"dp": 2, "tp": 2})


def mesh_id(mesh: dict[str, int]) -> str:
    return "x".join(map(str, mesh.values()))


@functools.cache
def _captured(name: str) -> Planner:
    model, batch = example(name)
    return Planner(model, {"a": 1}, (), batch)


@functools.cache
def _planner(name: str, axes: tuple[tuple[str, int], ...]) -> Planner:
    return _captured(name).on(dict(axes), None)


def planner(name: str, mesh: dict[str, int]) -> Planner:
    """Each model is captured once."""
    return _planner(name, tuple(mesh.items()))


def check(name: str, mesh: dict[str, int], program: Program) -> None:
    """Loss, every gradient and every buffer are those of one process."""
    model, batch = example(name)
    captured = planner(name, mesh).captured
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    made = simulate_step(program, held, captured.bind((), batch), tolerance=1e-4)
    alone = copy.deepcopy(model)
    loss = alone(**batch)
    loss.backward()
    (found,) = made.outputs.values()
    assert_close(found, loss, "loss")
    gradients = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    assert made.gradients.keys() == gradients.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())
    for target, gradient in gradients.items():
        # the bias of a convolution before a batch norm has a gradient of zero by arithmetic
        if float(gradient.abs().max()) > 1e-6 * largest:
            assert_close(made.gradients[target], gradient, f"gradient {target}", 1e-4)
        else:
            assert float(made.gradients[target].abs().max()) < 1e-5 * largest
    buffers = dict(alone.named_buffers())
    assert made.mutations.keys() == buffers.keys()
    for target, value in buffers.items():
        assert_close(made.mutations[target], value, f"buffer {target}")


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", MODELS)
def test_models_under_presets_and_the_solver(name: str, mesh: dict[str, int]) -> None:
    made = planner(name, mesh)
    assert not made.space.without_rule
    for solver in ("ddp", "fsdp", "megatron", *(["dp"] if len(mesh) == 1 else [])):
        check(name, mesh, made.program(made.plan(solver=solver, cost="serial")))


@pytest.mark.parametrize("name", MODELS)
def test_products_of_several_results_in_slices(name: str) -> None:
    """A backward of a convolution makes sums that travel, and gradients of weights that no instruction reads."""
    made = planner(name, {"a": 4})
    plan = made.plan(solver="atp", cost="serial")
    check(name, {"a": 4}, SLICING.everywhere(made.program(plan), 2))


@pytest.mark.parametrize("name", [f"{name} uneven" for name in MODELS])
def test_models_with_a_batch_that_ranks_do_not_divide(name: str) -> None:
    made = planner(name, {"a": 4})
    check(name, {"a": 4}, made.program(made.plan(solver="ddp")))
    check(name, {"a": 4}, bucket(codegen(made.space, plans.random_assignment(made.space, 0))))


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", MODELS)
def test_models_under_random_plans(name: str, mesh: dict[str, int]) -> None:
    made = planner(name, mesh)
    check(name, mesh, bucket(codegen(made.space, plans.random_assignment(made.space, seed=0))))


def spatially(dim: int) -> Force:
    """Whatever can split this spatial dim of images does; all else is whole, or passes partial sums on."""
    names = f"s{dim}", f"d{2 + dim}"

    def force(site: Site, choices: Sequence[AxisChoice]) -> Sequence[AxisChoice]:
        found: list[AxisChoice] = []
        if site.rule is not None:
            found = [c for c in choices if c.splits and site.rule.factors[c.factor].name in names]
        elif site.kind in ("input", "border") and site.meta is not None and len(site.meta.shape) == 4:
            found = [c for c in choices if c.splits and c.factor == 2 + dim]
        return found or [c for c in choices if not c.splits]

    return force


SPLIT: list[tuple[str, dict[str, int], list[int]]] = [
    *((name, {"dp": 2, "tp": 2}, [0, 1]) for name in MODELS),
    *((f"{name} uneven", {"a": 4}, [0]) for name in MODELS),
]


@pytest.mark.parametrize("name, mesh, dims", SPLIT, ids=[name for name, _, _ in SPLIT])
def test_models_with_spatial_dims_split(name: str, mesh: dict[str, int], dims: list[int]) -> None:
    made = planner(name, mesh)
    program = bucket(codegen(made.space, forced(made.space, *map(spatially, dims))))
    assert sum(kind == "shift" for kind, _, _ in program.collectives()) >= 20
    check(name, mesh, program)


@pytest.mark.parametrize("name", [*MODELS, "unet group conv bilinear"])
def test_rows_of_models_split_gather_nothing(name: str) -> None:
    """From the first layer to the last gradient only edges travel, and sums: of statistics and of the gradients of
    parameters."""
    made = planner(name, {"a": 4})
    program = codegen(made.space, forced(made.space, spatially(0)))
    assert {kind for kind, _, _ in program.collectives()} == {"shift", "all_reduce"}
    found = {size for kind, _, size in program.collectives() if kind == "shift"}
    assert found == {8 * rows * channels * width * FLOAT for rows, channels, width in EDGES[name]}
    largest = max(parameter.numel() for parameter in example(name)[0].parameters()) * FLOAT
    assert max(size for kind, _, size in program.collectives() if kind == "all_reduce") <= largest
    check(name, {"a": 4}, bucket(program))


UNET_EDGES = {(1, 3, 16), (1, 8, 16), (1, 16, 16), (1, 16, 8)}
EDGES = {
    "resnet": {(3, 3, 32), (2, 3, 32), (1, 8, 16), (1, 8, 8), (1, 16, 4)},
    "unet group conv conv": UNET_EDGES,
    "unet batch pool nearest": UNET_EDGES,
    "unet group conv bilinear": UNET_EDGES,
}
"""Rows, channels and width of what is shifted."""


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("grad", [True, False])
def test_upsampling_is_captured_whole(mode: str, grad: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(4, 2, 1))
    with torch.set_grad_enabled(grad):
        nodes = capture(model, (torch.rand(2, 3, 4, 6),), loss_fn=lambda made: made.square().mean()).graph.nodes
    kernel = {"nearest": "upsample_nearest", "nearest-exact": "_upsample_nearest_exact"}.get(mode, f"upsample_{mode}")
    found = [node.op for node in nodes if "sample" in node.op or "index" in node.op]
    backward = [f"aten.{kernel}2d_backward.default"] if grad else []
    assert found == [f"aten.{kernel}2d.default", *backward]


@pytest.mark.parametrize("name", ["resnet", "unet batch pool nearest"])
def test_models_in_bfloat16(name: str) -> None:
    """Under any plan gradients are as far from those in float64 as eager's are, and buffers have eager's dtypes."""
    model, batch = example(name)
    model = copy.deepcopy(model).bfloat16()
    batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
    made = Planner(model, {"dp": 2, "tp": 2}, (), batch)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **made.captured.constants}

    def gradients(alone: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        alone(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}).backward()
        return {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}

    exact = gradients(copy.deepcopy(model).double(), DOUBLE)
    alone = copy.deepcopy(model)
    expected = gradients(alone, torch.bfloat16)

    def error(found: Mapping[str, torch.Tensor]) -> float:
        return sum(float((found[n].double() - g).square().sum()) for n, g in exact.items()) ** 0.5

    for program in (made.program(made.plan(solver="ddp")), codegen(made.space, plans.random_assignment(made.space, 0))):
        result = simulate_step(program, held, made.captured.bind((), batch), tolerance=0.1)
        assert error(result.gradients) < 2 * error(expected)
        assert all(result.gradients[n].dtype == g.dtype for n, g in expected.items())
        for target, value in alone.named_buffers():
            assert result.mutations[target].dtype == value.dtype
            torch.testing.assert_close(result.mutations[target], value, rtol=2e-2, atol=2e-2)


def layers(dims: int) -> Case:
    """Layers of one or three spatial dims, instance norm among them, to a mean square."""
    torch.manual_seed(0)
    if dims == 1:
        model = nn.Sequential(
            nn.Conv1d(4, 8, 3, stride=2, padding=1), nn.InstanceNorm1d(8, affine=True),
            nn.Conv1d(8, 8, 5, padding=2, groups=8), nn.BatchNorm1d(8, track_running_stats=False), nn.AvgPool1d(2),
            nn.ConvTranspose1d(8, 6, 4, 2, 1, groups=2), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(24, 4),
        )  # fmt: skip
    else:
        model = nn.Sequential(
            nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d(4), nn.MaxPool3d(2), nn.ConvTranspose3d(4, 2, 2, 2),
            nn.AvgPool3d(2),
        )  # fmt: skip
    x = torch.rand((8, 4, 16) if dims == 1 else (4, 4, 8, 8, 4))
    return Case(model=model, batch=lambda step: ((x,), {}), loss_fn=lambda made: made.square().mean())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dims", [1, 3])
def test_layers_of_one_and_three_dims(dims: int, training: bool) -> None:
    made = layers(dims)
    made.model.train(training)
    found = Planner(made.model, {"a": 2, "b": 2}, made.args, made.kwargs, loss_fn=made.loss_fn)
    assert not found.space.without_rule
    for seed in range(3):
        program = codegen(found.space, plans.random_assignment(found.space, seed))
        assert_same(simulated(program, found.captured, made), eager(made), 1e-4)


# ---------------------------------------------------------------------------------------- real ranks

STEPS = 2


def train(module: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """A few steps of SGD: losses, then parameters and buffers by name."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    state = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in module.state_dict().items()}
    return {"losses": torch.stack(losses), **state}


def trained_on_ranks(names: Sequence[str]) -> list[tuple[dict[str, torch.Tensor], set[str]]]:
    """State of each model, and the kinds of its collectives, with rows split."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    results = []
    for name in names:
        model, batch = example(name)
        made = planner(name, {"a": 2})
        program = bucket(codegen(made.space, forced(made.space, spatially(0))))
        module = ParallelModule(model, made.captured, program, "rows split", mesh)
        results.append((train(module, batch), {kind for kind, _, _ in program.collectives()}))
    return results


def test_models_on_real_ranks() -> None:
    names = "resnet", "unet batch pool nearest"
    expected = [train(copy.deepcopy(model), batch) for model, batch in map(example, names)]
    for found in run(2, trained_on_ranks, names):
        for (state, kinds), reference in zip(found, expected, strict=True):
            assert {"shift", "all_reduce"} <= kinds
            assert state.keys() == reference.keys()
            for name, value in reference.items():
                assert_close(state[name], value, name, 1e-4)
