"""Every op rule, by brute force: the op on shards, put together, is the op on the whole.

Each op of the table has an example here, drawn by hypothesis; an op without one fails. The hard cases
stand below by hand, and the ops of captured models' graphs with the shapes they have there.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from conftest import Tally
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.ir.graph import JointGraph, map_references, overload, parameters
from autopar.ir.randomness import keys
from autopar.ops import emit, oracle, sdpa
from autopar.ops.float8 import packed_bytes
from autopar.ops.oracle import Report, RuleError, check_rule, make_call
from autopar.ops.registry import REGISTERED
from autopar.ops.rule import Call, Factor, OpRule
from autopar.ops.rules import RULES, needs_no_rule, rule_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Shape = Sequence[int]


class Draw:
    """Random shapes, numbers and tensors for an example."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), label="seed"))

    def one_of(self, *choices: Any) -> Any:
        return self.data.draw(st.sampled_from(choices))

    def size(self) -> int:
        return self.one_of(4, 7, 6, 3, 12, 5, 1)

    def sizes(self, count: int) -> list[int]:
        return [self.size() for _ in range(count)]

    def floats(self, *shape: int) -> torch.Tensor:
        """Numbers of [-2, 2]."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * 4 - 2

    def positive(self, *shape: int) -> torch.Tensor:
        """Numbers of [0.1, 0.9], in the domain of every function."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * 0.8 + 0.1

    def indices(self, size: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, size, shape, generator=self.generator)

    def bools(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 2, shape, generator=self.generator).bool()

    def broadcast(self, shape: Shape) -> list[int]:
        """A shape that broadcasts to this one."""
        kept = [1 if self.one_of(False, False, True) else size for size in shape]
        return kept[self.one_of(0, 0, 1) :]


Example = Callable[[Draw], Arguments]
EXAMPLES: dict[str, Example] = {}


def example(*ops: str) -> Callable[[Example], Example]:
    """The decorated function draws arguments for these ops."""

    def add(function: Example) -> Example:
        for op in ops:
            EXAMPLES[f"aten.{op}" if "." in op else f"aten.{op}.default"] = function
        return function

    return add


def _key(draw: Draw) -> torch.Tensor:
    return keys(torch.tensor(draw.one_of(0, 1, 2)), 1)[0]


EXAMPLES["autopar.bernoulli.default"] = lambda draw: ((_key(draw), draw.sizes(3), 0.3), {})
EXAMPLES["autopar.dropout.default"] = lambda draw: ((_key(draw), draw.floats(*draw.sizes(3)), 0.3), {})
for _op in ("uniform", "normal"):
    EXAMPLES[f"autopar.{_op}.default"] = lambda draw: ((_key(draw), draw.sizes(3), torch.float64), {})
for _op in ("poisson", "standard_gamma"):
    EXAMPLES[f"autopar.{_op}.default"] = lambda draw: ((_key(draw), draw.positive(*draw.sizes(3))), {})
EXAMPLES["autopar.integers.default"] = lambda draw: ((_key(draw), draw.sizes(3), -5, 1000, torch.int64), {})


@example("_standard_gamma_grad")
def _standard_gamma_grad(draw: Draw) -> Arguments:
    shape = draw.sizes(2)
    return (draw.positive(*shape), draw.positive(*shape)), {}


@example("_dirichlet_grad")
def _dirichlet_grad(draw: Draw) -> Arguments:
    shape = draw.sizes(2)
    return (draw.positive(*shape).sigmoid(), draw.positive(*shape), draw.positive(*shape) + 9), {}


@example("searchsorted.Tensor")
def _searchsorted(draw: Draw) -> Arguments:
    rows, count, wanted = draw.sizes(3)
    if draw.one_of(True, False):
        return (draw.floats(count).sort().values, draw.floats(rows, wanted)), {}
    return (draw.floats(rows, count).sort().values, draw.floats(rows, wanted)), {"right": True}


# contractions


@example("mm")
def _mm(draw: Draw) -> Arguments:
    m, k, n = draw.sizes(3)
    return (draw.floats(m, k), draw.floats(k, n)), {}


@example("bmm")
def _bmm(draw: Draw) -> Arguments:
    b, m, k, n = draw.sizes(4)
    return (draw.floats(b, m, k), draw.floats(b, k, n)), {}


@example("mv")
def _mv(draw: Draw) -> Arguments:
    m, k = draw.sizes(2)
    return (draw.floats(m, k), draw.floats(k)), {}


@example("dot")
def _dot(draw: Draw) -> Arguments:
    k = draw.size()
    return (draw.floats(k), draw.floats(k)), {}


def _expert_mm(draw: Draw) -> Arguments:
    s, e, k, n = draw.sizes(4)
    return (draw.floats(s, k), draw.floats(e, k, n), draw.indices(e, s)), {}


def _expert_mm_weight(draw: Draw) -> Arguments:
    s, e, k, n = draw.sizes(4)
    return (draw.floats(s, k), draw.floats(s, n), draw.indices(e, s), e), {}


def _moved(draw: Draw) -> Arguments:
    s, d = draw.sizes(2)
    return (draw.floats(s, d), draw.indices(4, s), 4), {}


def _ctc(draw: Draw) -> Arguments:
    time, batch, classes, longest = 6, draw.size(), 5, 2
    scores = draw.floats(time, batch, classes).log_softmax(-1)
    targets, lengths = draw.indices(classes - 1, batch, longest) + 1, draw.indices(longest, batch) + 1
    if draw.one_of(False, True):
        targets = targets[torch.arange(longest) < lengths[:, None]]
    return (
        scores,
        targets,
        torch.full((batch,), time) - draw.indices(2, batch),
        lengths,
        0,
        draw.one_of(False, True),
    ), {}


def _ctc_backward(draw: Draw) -> Arguments:
    args, kwargs = _ctc(draw)
    return (draw.floats(args[0].shape[1]), *args), kwargs


EXAMPLES["autopar.ctc_loss.default"] = _ctc
EXAMPLES["autopar.ctc_loss_backward.default"] = _ctc_backward


def _weighted_sum(draw: Draw) -> Arguments:
    tokens, width = draw.sizes(2)
    size = draw.one_of(2, 3, 1)
    return (draw.floats(tokens * size, width), draw.floats(tokens * size, 1), size), {}


EXAMPLES["autopar.to_float8.default"] = lambda draw: ((draw.floats(4, draw.size()), 2), {})
EXAMPLES["autopar.from_float8.default"] = lambda draw: (
    (torch.zeros(packed_bytes(12, 2), dtype=torch.uint8), (4, 3), torch.float32, 2), {})  # fmt: skip
EXAMPLES["autopar.to_experts.default"] = EXAMPLES["autopar.from_experts.default"] = _moved
EXAMPLES["autopar.weighted_sum.default"] = _weighted_sum
EXAMPLES["autopar.row_dot.default"] = lambda draw: (tuple(draw.floats(*shape) for shape in [draw.sizes(2)] * 2), {})
EXAMPLES["autopar.ids_at_experts.default"] = lambda draw: ((draw.indices(4, draw.size()), 4), {})
EXAMPLES["autopar.expert_mm.default"] = _expert_mm
EXAMPLES["autopar.expert_mm_weight.default"] = _expert_mm_weight


@example("addmm")
def _addmm(draw: Draw) -> Arguments:
    m, k, n = draw.sizes(3)
    scales = draw.one_of({}, {"beta": 2, "alpha": 3})
    return (draw.floats(*draw.broadcast([m, n])), draw.floats(m, k), draw.floats(k, n)), scales


@example("baddbmm")
def _baddbmm(draw: Draw) -> Arguments:
    b, m, k, n = draw.sizes(4)
    scales = draw.one_of({}, {"beta": 0.5})
    return (draw.floats(*draw.broadcast([b, m, n])), draw.floats(b, m, k), draw.floats(b, k, n)), scales


@example("linear")
def _linear(draw: Draw) -> Arguments:
    k, n = draw.sizes(2)
    bias = draw.one_of(None, draw.floats(n))
    return (draw.floats(*draw.sizes(draw.one_of(1, 2)), k), draw.floats(n, k), bias), {}


def _convolved(draw: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[Any]]:
    n, o = draw.one_of(2, 4), draw.one_of(4, 6)
    groups, transposed = draw.one_of((1, False), (2, False), (1, True), (2, True))
    c = draw.one_of(4, 6, groups)
    space = draw.one_of([5], [6, 8], [6, 3, 4])
    kernel = [draw.one_of(1, 2, 3, 4) for _ in space]
    weight = [c, o // groups, *kernel] if transposed else [o, c // groups, *kernel]
    stride = [draw.one_of(1, 1, 2) for _ in space]
    dilation = [draw.one_of(1, 2) if k < 3 else 1 for k in kernel]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding = [draw.one_of(r // 2, (r + 1) // 2, 0) for r in reach]
    # mostly so that coarse and fine rows keep step
    longer = [max(0, s + 2 * p - r - 1) for s, p, r in zip(stride, padding, reach, strict=True)]
    more = [draw.one_of(m, 0) if m < s else 0 for m, s in zip(longer, stride, strict=True)]
    rest = [stride, padding, dilation, transposed, more if transposed else [0] * len(space), groups]
    return draw.floats(n, c, *space), draw.floats(*weight), draw.one_of(draw.floats(o), None), rest


@example("convolution")
def _convolution(draw: Draw) -> Arguments:
    source, weight, bias, rest = _convolved(draw)
    return (source, weight, bias, *rest), {}


@example("convolution_backward")
def _convolution_backward(draw: Draw) -> Arguments:
    source, weight, bias, rest = _convolved(draw)
    gradient = torch.randn_like(torch.ops.aten.convolution(source, weight, None, *rest))
    sizes = None if bias is None else [gradient.shape[1]]
    return (gradient, source, weight, sizes, *rest, [True, True, bias is not None]), {}


# pooling and resampling


def _plane(draw: Draw, spatial: int) -> torch.Tensor:
    batch = draw.one_of([4], [])
    return draw.floats(*batch, draw.one_of(4, 6), *(draw.one_of(8, 6, 5) for _ in range(spatial)))


def _pool(spatial: int) -> Callable[[Draw], list[Any]]:
    def options(draw: Draw) -> list[Any]:
        size = [draw.one_of(2, 2, 1, 3) for _ in range(spatial)]
        padding = [draw.one_of(k // 2, 0) for k in size]
        return [size, *draw.one_of([[]], [size], [[1] * spatial, padding], [[2] * spatial, padding])]

    return options


def _forward(op: str) -> Any:
    return overload(f"aten.{op}.default")


for _dims in (2, 3):

    @example(f"max_pool{_dims}d_with_indices")
    def _max_pool(draw: Draw, spatial: int = _dims) -> Arguments:
        return (_plane(draw, spatial), *_pool(spatial)(draw)), {}

    @example(f"max_pool{_dims}d_with_indices_backward")
    def _max_pool_backward(draw: Draw, spatial: int = _dims) -> Arguments:
        source, size, *rest = _plane(draw, spatial), *_pool(spatial)(draw)
        options = [size, *rest, *([0], [1], draw.one_of(True, False))[len(rest) - 1 :]]
        output, indices = _forward(f"max_pool{spatial}d_with_indices")(source, *options)
        return (draw.floats(*output.shape), source, *options, indices), {}

    @example(f"avg_pool{_dims}d")
    def _average_pool(draw: Draw, spatial: int = _dims) -> Arguments:
        source, size, *rest = _plane(draw, spatial), *_pool(spatial)(draw)
        more = [0], draw.one_of(True, False), draw.one_of(True, False), draw.one_of(None, None, 3)
        return (source, size, *rest, *more[len(rest) - 1 :]), {}

    @example(f"avg_pool{_dims}d_backward")
    def _average_pool_backward(draw: Draw, spatial: int = _dims) -> Arguments:
        (source, *options), _ = _average_pool(draw, spatial)
        output = _forward(f"avg_pool{spatial}d")(source, *options)
        return (draw.floats(*output.shape), source, *options), {}

    @example(f"_adaptive_avg_pool{_dims}d")
    def _adaptive_pool(draw: Draw, spatial: int = _dims) -> Arguments:
        return (_plane(draw, spatial), [draw.one_of(4, 3, 2, 1) for _ in range(spatial)]), {}

    @example(f"_adaptive_avg_pool{_dims}d_backward")
    def _adaptive_pool_backward(draw: Draw, spatial: int = _dims) -> Arguments:
        (source, size), _ = _adaptive_pool(draw, spatial)
        return (draw.floats(*source.shape[:-spatial], *size), source), {}


@example("adaptive_max_pool2d")
def _adaptive_max_pool(draw: Draw) -> Arguments:
    return (_plane(draw, 2), [draw.one_of(4, 3), 2]), {}


@example("adaptive_max_pool2d_backward")
def _adaptive_max_pool_backward(draw: Draw) -> Arguments:
    (source, size), _ = _adaptive_max_pool(draw)
    output, indices = torch.ops.aten.adaptive_max_pool2d(source, size)
    return (draw.floats(*output.shape), source, indices), {}


for _kind, _dims in (
    ("upsample_nearest", 1), ("upsample_nearest", 2), ("upsample_nearest", 3), ("_upsample_nearest_exact", 1),
    ("_upsample_nearest_exact", 2), ("_upsample_nearest_exact", 3), ("upsample_linear", 1), ("upsample_bilinear", 2),
    ("upsample_bicubic", 2), ("upsample_trilinear", 3),
):  # fmt: skip

    @example(f"{_kind}{_dims}d")
    def _upsample(draw: Draw, kind: str = _kind, spatial: int = _dims) -> Arguments:
        space = [draw.one_of(3, 4, 6) for _ in range(spatial)]
        size = [draw.one_of(1, 2, 2, 3) * n if draw.one_of(True, True, False) else n // 2 for n in space]
        aligned = [] if "nearest" in kind else [draw.one_of(True, False, False)]
        scales = draw.one_of([], [made / n for made, n in zip(size, space, strict=True)])
        return (draw.floats(2, draw.one_of(4, 6), *space), size, *aligned, *scales), {}

    @example(f"{_kind}{_dims}d_backward")
    def _upsample_backward(draw: Draw, kind: str = _kind, spatial: int = _dims) -> Arguments:
        (source, size, *rest), _ = _upsample(draw, kind, spatial)
        return (draw.floats(*source.shape[:2], *size), size, list(source.shape), *rest), {}


for _kind, _dims in itertools.product(("reflection", "replication"), (1, 2, 3)):

    @example(f"{_kind}_pad{_dims}d")
    def _edge_pad(draw: Draw, spatial: int = _dims) -> Arguments:
        return (_plane(draw, spatial), [draw.one_of(0, 2) for _ in range(2 * spatial)]), {}

    @example(f"{_kind}_pad{_dims}d_backward")
    def _edge_pad_backward(draw: Draw, kind: str = _kind, spatial: int = _dims) -> Arguments:
        (source, padding), _ = _edge_pad(draw, spatial)
        gradient = torch.randn_like(_forward(f"{kind}_pad{spatial}d")(source, padding))
        return (gradient, source, padding), {}


@example("pixel_shuffle")
def _pixel_shuffle(draw: Draw) -> Arguments:
    return (draw.floats(*draw.one_of([4], []), 4 * draw.one_of(4, 6), draw.one_of(4, 6), 5), 2), {}


@example("pixel_unshuffle")
def _pixel_unshuffle(draw: Draw) -> Arguments:
    return (draw.floats(*draw.one_of([4], []), draw.one_of(4, 6), draw.one_of(8, 12), 6), 2), {}


# attention


def _attended(draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
    b, h, q, k, d = draw.one_of(2, 4), draw.one_of(6, 4, 1), draw.one_of(6, 4), draw.one_of(6, 5), 4
    causal = draw.one_of(False, True)
    k = q if causal else k
    mask = None if causal else draw.one_of(None, [q, k], [b, 1, q, k], [1, h, 1, k], [b, h, q, k])
    tensors = [draw.floats(b, h, q, d), draw.floats(b, h, k, d), draw.floats(b, h, k, draw.one_of(d, 3))]
    kept = draw.one_of(None, draw.floats(b, h, q, k) > 0)
    masks = (draw.floats(*mask) if mask else None, kept)
    if draw.one_of(False, True):
        rows = draw.one_of(b, 1)
        masks += tuple(torch.arange(n).div(4, rounding_mode="floor").expand(rows, -1).clone() for n in (q, k))
    return (*tensors, *masks), {"scale": 0.5, "is_causal": causal} | ({} if kept is None else {"dropout_p": 0.5})


EXAMPLES[sdpa.ATTENTION] = _attended


def _attention_backward(draw: Draw) -> Arguments:
    args, named = _attended(draw)
    results = sdpa.attention(*args, **named)
    return (torch.randn_like(results[0]), *args[:3], *results, *args[3:]), named


EXAMPLES[sdpa.ATTENTION_BACKWARD] = _attention_backward


# embedding and losses


@example("embedding")
def _embedding(draw: Draw) -> Arguments:
    v, d = draw.one_of(12, 6, 5), draw.size()
    padding = draw.one_of(-1, 3)
    return (draw.floats(v, d), draw.indices(v, *draw.sizes(draw.one_of(1, 2))), padding), {}


@example("embedding_dense_backward")
def _embedding_backward(draw: Draw) -> Arguments:
    v, d = draw.one_of(12, 6, 5), draw.size()
    indices = draw.indices(v, *draw.sizes(draw.one_of(1, 2)))
    by_frequency = draw.one_of(False, False, True)
    return (draw.floats(*indices.shape, d), indices, v, draw.one_of(-1, 3), by_frequency), {}


@example("_softmax", "_log_softmax")
def _softmax(draw: Draw) -> Arguments:
    shape = draw.sizes(draw.one_of(1, 2, 3))
    return (draw.floats(*shape) * 10, draw.one_of(-1, 0), False), {}


@example("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(draw: Draw) -> Arguments:
    shape, dim = draw.sizes(draw.one_of(1, 2, 3)), draw.one_of(-1, 0)
    return (draw.floats(*shape), draw.floats(*shape).log_softmax(dim), dim, torch.float64), {}


def _labelled(draw: Draw, flat: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int]:
    n, c = draw.one_of(8, 6, 12), draw.one_of(12, 6)
    space = [] if flat else [2, 3]
    ignored = draw.one_of(-100, 1)
    target = draw.indices(c, n, *space)
    target[: n // 2] = ignored  # a rank sees only ignored labels
    weight = draw.one_of(None, None, draw.positive(c))
    return draw.floats(n, c, *space).log_softmax(1), target, weight, draw.one_of(1, 2, 0), ignored


def _nll(flat: bool) -> Example:
    return lambda draw: (_labelled(draw, flat), {})


def _nll_backward(op: str, flat: bool) -> Example:
    def draw_arguments(draw: Draw) -> Arguments:
        scores, target, weight, reduction, ignored = _labelled(draw, flat)
        loss, total = overload(op)(scores, target, weight, reduction, ignored)
        return (torch.randn_like(loss), scores, target, weight, reduction, ignored, total), {}

    return draw_arguments


example("nll_loss_forward")(_nll(True))
example("nll_loss2d_forward")(_nll(False))
example("nll_loss_backward")(_nll_backward("aten.nll_loss_forward.default", True))
example("nll_loss2d_backward")(_nll_backward("aten.nll_loss2d_forward.default", False))


@example("mse_loss", "smooth_l1_loss", "huber_loss")
def _loss(draw: Draw) -> Arguments:
    shape = draw.sizes(draw.one_of(1, 2))
    return (draw.floats(*shape), draw.floats(*shape), draw.one_of(1, 0, 2)), {}


@example("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")
def _loss_backward(draw: Draw) -> Arguments:
    shape, reduction = draw.sizes(draw.one_of(1, 2)), draw.one_of(1, 0, 2)
    gradient = draw.floats(*(shape if reduction == 0 else ()))
    return (gradient, draw.floats(*shape), draw.floats(*shape), reduction), {}


for _op in ("smooth_l1_loss_backward", "huber_loss_backward"):
    EXAMPLES[f"aten.{_op}.default"] = lambda draw: ((*_loss_backward(draw)[0], 0.5), {})


# norms


@example("native_layer_norm")
def _layer_norm(draw: Draw) -> Arguments:
    batch, shape = draw.sizes(2), draw.sizes(draw.one_of(1, 2))
    weights = draw.one_of((draw.floats(*shape), draw.floats(*shape)), (None, None))
    return (draw.floats(*batch, *shape), shape, *weights, 1e-5), {}


@example("native_layer_norm_backward")
def _layer_norm_backward(draw: Draw) -> Arguments:
    (source, shape, weight, bias, epsilon), _ = _layer_norm(draw)
    output, mean, scale = torch.native_layer_norm(source, shape, weight, bias, epsilon)
    mask = [True, weight is not None, bias is not None]
    return (torch.randn_like(output), source, shape, mean, scale, weight, bias, mask), {}


def _batch(draw: Draw) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    c = draw.one_of(4, 6)
    source = draw.floats(draw.one_of(4, 6), c, *draw.one_of([], [6], [4, 3])) + 100
    weights = draw.one_of((draw.floats(c), draw.floats(c)), (None, None))
    return source, *weights


@example("_native_batch_norm_legit_functional")
def _batch_norm(draw: Draw) -> Arguments:
    source, weight, bias = _batch(draw)
    running = (draw.floats(source.shape[1]), draw.positive(source.shape[1]))
    return (source, weight, bias, *running, draw.one_of(True, True, False), 0.1, 1e-5), {}


@example("_native_batch_norm_legit_no_training")
def _batch_norm_in_evaluation(draw: Draw) -> Arguments:
    source, weight, bias = _batch(draw)
    return (source, weight, bias, draw.floats(source.shape[1]), draw.positive(source.shape[1]), 0.1, 1e-5), {}


@example("_native_batch_norm_legit.no_stats")
def _batch_norm_without_running_statistics(draw: Draw) -> Arguments:
    return (*_batch(draw), True, 0.1, 1e-5), {}


@example("native_batch_norm_backward")
def _batch_norm_backward(draw: Draw) -> Arguments:
    (source, weight, bias, *running, train, _, epsilon), _ = _batch_norm(draw)
    made = torch.ops.aten._native_batch_norm_legit_functional(source, weight, bias, *running, train, 0.1, epsilon)
    running = draw.one_of(made[3:], (None, None)) if train else running
    mask = [draw.one_of(True, False) or weight is None, weight is not None, weight is not None]
    return (draw.floats(*source.shape), source, weight, *running, *made[1:3], train, epsilon, mask), {}


@example("native_group_norm")
def _group_norm(draw: Draw) -> Arguments:
    n, c, space = draw.one_of(4, 6), draw.one_of(4, 8, 6), draw.one_of([5], [6], [4, 3])
    weights = draw.one_of((draw.floats(c), draw.floats(c)), (None, None))
    groups = draw.one_of(2, c, c // 2)
    return (draw.floats(n, c, *space) + 100, *weights, n, c, math.prod(space), groups, 1e-5), {}


@example("native_group_norm_backward")
def _group_norm_backward(draw: Draw) -> Arguments:
    (source, weight, bias, *rest), _ = _group_norm(draw)
    output, mean, scale = torch.native_group_norm(source, weight, bias, *rest)
    mask = [draw.one_of(True, False) or weight is None, weight is not None, weight is not None]
    return (torch.randn_like(output), source, mean, scale, weight, *rest[:-1], mask), {}


# reductions and what mixes elements along a dim


@example("sum", "mean", "max", "min", "any", "all", "prod")
def _reduced(draw: Draw) -> Arguments:
    return (draw.floats(*draw.sizes(draw.one_of(1, 2, 3))),), {}


@example(
    "sum.dim_IntList", "mean.dim", "amax", "amin", "any.dims", "all.dims", "logsumexp", "count_nonzero.dim_IntList"
)
@example("std.correction", "var.correction", "var_mean.correction", "linalg_vector_norm")
def _reduced_dims(draw: Draw) -> Arguments:
    dims = draw.one_of([-1], [0, 2], [1], [0, 1, 2])
    return (draw.floats(*draw.sizes(3)), dims), {"keepdim": draw.one_of(True, False)}


EXAMPLES["aten.linalg_vector_norm.default"] = lambda draw: ((draw.floats(4, 6), 2, [draw.one_of(0, 1)]), {})
EXAMPLES["aten.count_nonzero.dim_IntList"] = lambda draw: ((draw.floats(4, 6), [draw.one_of(0, 1)]), {})
for _op in ("std", "var", "var_mean"):
    EXAMPLES[f"aten.{_op}.correction"] = lambda draw: ((draw.floats(4, 6), [draw.one_of(0, 1)]), {"correction": 1})


@example("max.dim", "min.dim", "argmax", "argmin", "any.dim", "all.dim", "prod.dim_int")
def _reduced_dim(draw: Draw) -> Arguments:
    return (draw.floats(*draw.sizes(3)), draw.one_of(-1, 0, 1), draw.one_of(True, False)), {}


@example("histc")
def _histogram(draw: Draw) -> Arguments:
    return (draw.floats(*draw.sizes(draw.one_of(1, 2))), 4, *draw.one_of((-2, 2), (0, 0))), {}


@example("cumsum", "cumprod", "logcumsumexp", "_safe_softmax", "sort", "argsort")
def _along(draw: Draw) -> Arguments:
    return (draw.floats(*draw.sizes(draw.one_of(2, 3))), draw.one_of(-1, 0)), {}


@example("topk")
def _topk(draw: Draw) -> Arguments:
    return (draw.floats(4, draw.one_of(6, 3), 4), 2, draw.one_of(0, 1, -1)), {}


@example("flip")
def _flip(draw: Draw) -> Arguments:
    return (draw.floats(*draw.sizes(3)), draw.one_of([0], [-1, 1])), {}


@example("roll")
def _roll(draw: Draw) -> Arguments:
    shifts, dims = draw.one_of(([1], [0]), ([2, 1], [-1, 1]), ([3], []))
    return (draw.floats(*draw.sizes(3)), shifts, dims), {}


@example("tril", "triu")
def _triangle(draw: Draw) -> Arguments:
    return (draw.floats(4, 6, draw.one_of(6, 4)), draw.one_of(0, 1)), {}


@example("constant_pad_nd")
def _pad(draw: Draw) -> Arguments:
    return (draw.floats(4, 6, 4), draw.one_of([0, 1], [0, 0, 2, 1], [-1, 2]), draw.one_of(0.0, 1.5)), {}


# parts and wholes


def _window(draw: Draw, size: int) -> tuple[Any, Any, int]:
    return draw.one_of(
        (size // 3, 2 * size // 3, 1), (0, size // 2, 1), (-size // 3, 2**63 - 1, 1), (0, size, 2), (1, 2, 1)
    )


@example("slice.Tensor")
def _slice(draw: Draw) -> Arguments:
    dim = draw.one_of(0, 1, -1)
    shape = [4, 4, 4]
    shape[dim] = draw.one_of(12, 24)
    return (draw.floats(*shape), dim, *_window(draw, shape[dim])), {}


@example("slice_backward")
def _slice_backward(draw: Draw) -> Arguments:
    (whole, dim, *window), _ = _slice(draw)
    return (torch.randn_like(torch.ops.aten.slice(whole, dim, *window)), list(whole.shape), dim, *window), {}


@example("slice_scatter")
def _slice_scatter(draw: Draw) -> Arguments:
    (whole, dim, *window), _ = _slice(draw)
    return (whole, torch.randn_like(torch.ops.aten.slice(whole, dim, *window)), dim, *window), {}


@example("split.Tensor", "unsafe_split.Tensor")
def _split(draw: Draw) -> Arguments:
    return (draw.floats(4, 24, 6), *draw.one_of((8, 1), (12, -2), (16, 1), (2, 0), (2, -1))), {}


@example("split_with_sizes", "unsafe_split_with_sizes")
def _split_sizes(draw: Draw) -> Arguments:
    return (draw.floats(4, 24), draw.one_of([12, 4, 8], [6, 18]), draw.one_of(1, -1)), {}


@example("cat")
def _cat(draw: Draw) -> Arguments:
    dim = draw.one_of(0, 1, -1)
    shapes = [[4, 6, 4] for _ in range(draw.one_of(2, 3))]
    for shape in shapes:
        shape[dim] = draw.one_of(4, 8, 12, 1)
    tensors = [draw.floats(*shape) for shape in shapes]
    return (draw.one_of(tensors, [tensors[0]] * 3), dim), {}


@example("stack")
def _stack(draw: Draw) -> Arguments:
    shape = draw.sizes(2)
    return ([draw.floats(*shape) for _ in range(3)], draw.one_of(0, 1, -1)), {}


@example("select.int")
def _select(draw: Draw) -> Arguments:
    return (draw.floats(4, 6, 4), draw.one_of(0, 1, -1), draw.one_of(2, -1)), {}


@example("unbind.int")
def _unbind(draw: Draw) -> Arguments:
    return (draw.floats(4, 3, 6), draw.one_of(0, 1, -1)), {}


@example("select_backward")
def _select_backward(draw: Draw) -> Arguments:
    (whole, dim, index), _ = _select(draw)
    return (torch.randn_like(whole.select(dim, index)), list(whole.shape), dim, index), {}


@example("select_scatter")
def _select_scatter(draw: Draw) -> Arguments:
    (whole, dim, index), _ = _select(draw)
    return (whole, torch.randn_like(whole.select(dim, index)), dim, index), {}


@example("expand")
def _expand(draw: Draw) -> Arguments:
    return (draw.floats(4, 1, draw.size()), draw.one_of([2, 4, 6, -1], [-1, 6, -1], [4, 4, 3, -1])), {}


@example("repeat")
def _repeat(draw: Draw) -> Arguments:
    return (draw.floats(4, 1, 6), draw.one_of([2, 1, 4, 2], [3, 2, 1])), {}


@example("permute")
def _permute(draw: Draw) -> Arguments:
    return (draw.floats(4, 6, 3), draw.one_of([2, 0, 1], [0, -1, 1])), {}


@example("new_zeros", "new_ones", "new_empty")
def _new(draw: Draw) -> Arguments:
    return (draw.floats(4, 6), draw.sizes(2)), {}


@example("zeros", "ones")
def _zeros_made(draw: Draw) -> Arguments:
    return (draw.sizes(2),), {"dtype": torch.float64}


@example("full")
def _full(draw: Draw) -> Arguments:
    return (draw.sizes(2), 1.5), {"dtype": torch.float64}


@example("new_full")
def _new_full(draw: Draw) -> Arguments:
    return (draw.floats(4, 6), draw.sizes(2), 1.5), {}


# indexing


@example("index.Tensor", "_unsafe_index.Tensor")
def _index(draw: Draw) -> Arguments:
    indices = draw.one_of(
        [draw.indices(4, 6)],
        [None, draw.indices(6, 4, 1), draw.indices(4, 6)],
        [None, None, draw.indices(4, 3, 4)],
        [draw.indices(4, 6, 4), draw.indices(6, 1, 4), draw.indices(4)],
    )
    return (draw.floats(4, 6, 4), indices), {}


@example("index_put", "_unsafe_index_put")
def _index_put(draw: Draw) -> Arguments:
    indices, values = draw.one_of(
        ([torch.arange(3)], draw.floats(3, 6, 4)),
        ([None, torch.arange(4)], draw.floats(4, 4, 4)),
        ([None, torch.arange(4)], draw.floats(1, 1)),
        ([torch.arange(4), torch.arange(4)], draw.floats(4, 4)),
    )
    return (draw.floats(4, 6, 4), indices, values, draw.one_of(True, False)), {}


@example("index_select")
def _index_select(draw: Draw) -> Arguments:
    return (draw.floats(4, 6, 4), draw.one_of(0, 1, -1), draw.indices(4, 6)), {}


@example("gather")
def _gather(draw: Draw) -> Arguments:
    index = draw.one_of([4, 12], [4, 6], [2, 6], [4, 1])
    return (draw.floats(4, 6), 1, draw.indices(6, *index)), {}


@example("scatter.src", "scatter_add")
def _scatter(draw: Draw) -> Arguments:
    index = torch.stack([torch.randperm(6, generator=draw.generator)[:4] for _ in range(6)])
    return (draw.floats(draw.one_of(6, 12), 6), 1, index, draw.floats(6, 4)), {}


@example("scatter.value")
def _scatter_value(draw: Draw) -> Arguments:
    return (draw.floats(4, 6), 1, draw.indices(6, 4, 4), 1.5), {}


@example("scatter_reduce.two")
def _scatter_reduce(draw: Draw) -> Arguments:
    rest = draw.one_of(("sum",), ("amax",), ("sum", False))
    how, include = rest[0], {} if len(rest) == 1 else {"include_self": False}
    return (draw.floats(4, 6), 1, draw.indices(6, 4, 8), draw.floats(4, 8), how), include


def _distinct(draw: Draw, size: int, count: int) -> torch.Tensor:
    return torch.randperm(size, generator=draw.generator)[:count]


@example("index_add", "index_copy")
def _index_add(draw: Draw) -> Arguments:
    dim, count = draw.one_of((0, 4), (1, 6), (-1, 2))
    target = draw.floats(4, 12, 6)
    places = _distinct(draw, target.shape[dim], count)
    return (target, dim, places, torch.randn_like(target.narrow(dim, 0, count))), {}


@example("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(draw: Draw) -> Arguments:
    dim = draw.one_of(0, 1, -1)
    return (draw.floats(4, 12, 6), dim, draw.indices(4, 3), draw.floats()), {}


EXAMPLES["aten.index_fill.int_Scalar"] = lambda draw: ((*_index_fill(draw)[0][:3], 1.5), {})


# other views


@example("unfold")
def _unfold(draw: Draw) -> Arguments:
    return (draw.floats(4, 6, 12), *draw.one_of((1, 3, 1), (-1, 4, 4), (0, 2, 3))), {}


@example("unfold_backward")
def _unfold_backward(draw: Draw) -> Arguments:
    (source, *window), _ = _unfold(draw)
    return (torch.randn_like(source.unfold(*window)), list(source.shape), *window), {}


@example("diagonal")
def _diagonal(draw: Draw) -> Arguments:
    return (draw.floats(4, 6, 12), *draw.one_of((0, 0, 1), (1, 2, 0), (-1, -1, -2))), {}


@example("diagonal_backward")
def _diagonal_backward(draw: Draw) -> Arguments:
    (source, *where), _ = _diagonal(draw)
    return (torch.randn_like(source.diagonal(*where)), list(source.shape), *where), {}


@example("view_as_complex")
def _view_as_complex(draw: Draw) -> Arguments:
    return (draw.floats(*draw.sizes(2), 2),), {}


@example("view_as_real", "_conj", "_conj_physical")
def _view_as_real(draw: Draw) -> Arguments:
    return (torch.view_as_complex(draw.floats(*draw.sizes(2), 2)),), {}


@example("bucketize.Tensor")
def _bucketize(draw: Draw) -> Arguments:
    return (draw.floats(*draw.sizes(2)), draw.floats(4).sort()[0]), {}


@example("binary_cross_entropy_with_logits")
def _binary_cross_entropy(draw: Draw) -> Arguments:
    shape = draw.sizes(2)
    weights = draw.one_of((None, None), (draw.positive(*shape), None), (None, draw.positive(shape[-1])))
    return (draw.floats(*shape), draw.positive(*shape), *weights, draw.one_of(1, 0, 2)), {}


# pointwise, by the schema


@example("_to_copy")
def _to_copy(draw: Draw) -> Arguments:
    dtype = draw.one_of(torch.float32, torch.int64, torch.float64)
    return (draw.floats(*draw.sizes(2)),), {"dtype": dtype}


@example("where.self")
def _where(draw: Draw) -> Arguments:
    shape = draw.sizes(3)
    values = [draw.floats(*shape), draw.floats(*draw.broadcast(shape))]
    return (draw.bools(*draw.broadcast(shape)), *draw.one_of(values, values[::-1])), {}


@example("masked_fill.Tensor")
def _masked_fill(draw: Draw) -> Arguments:
    shape = draw.sizes(3)
    return (draw.floats(*shape), draw.bools(*draw.broadcast(shape)), draw.floats()), {}


@example("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")
def _arithmetic(draw: Draw) -> Arguments:
    shape = draw.sizes(3)
    one, other = draw.positive(*shape), draw.positive(*draw.broadcast(shape))
    return draw.one_of((one, other), (other, one), (one, one), (one, 2.5)), {}


@example("clamp")
def _clamp(draw: Draw) -> Arguments:
    return (draw.floats(*draw.sizes(2)), *draw.one_of((-1.0, 1.0), (None, 1.0))), {}


@example("clamp.Tensor")
def _clamp_tensor(draw: Draw) -> Arguments:
    shape = draw.sizes(2)
    return (draw.floats(*shape), -draw.positive(*draw.broadcast(shape)), draw.positive(*draw.broadcast(shape))), {}


@example("glu")
def _glu(draw: Draw) -> Arguments:
    shape = draw.sizes(draw.one_of(1, 2, 3))
    dim = draw.one_of(0, -1)
    shape[dim] = draw.one_of(8, 12, 24, 2)
    x = draw.floats(*shape)
    return (x, dim), {}


def _glu_backward(draw: Draw) -> Arguments:
    (x, dim), _ = _glu(draw)
    return (draw.floats(*torch.nn.functional.glu(x, dim).shape), x, dim), {}


EXAMPLES["aten.glu_backward.default"] = _glu_backward


@example("log_sigmoid_forward")
def _log_sigmoid(draw: Draw) -> Arguments:
    return (draw.floats(*draw.sizes(draw.one_of(1, 2, 3))),), {}


@example("log_sigmoid_backward")
def _log_sigmoid_backward(draw: Draw) -> Arguments:
    x = draw.floats(*draw.sizes(draw.one_of(1, 2, 3)))
    return (draw.floats(*x.shape), x, torch.ops.aten.log_sigmoid_forward.default(x)[1]), {}


@example("_weight_norm_interface")
def _weight_norm(draw: Draw) -> Arguments:
    dim, shape = draw.one_of((0, draw.sizes(2)), (0, draw.sizes(3)), (1, draw.sizes(2)), (2, draw.sizes(3)))
    return (draw.floats(*shape), draw.positive(*[n if d == dim else 1 for d, n in enumerate(shape)]), dim), {}


@example("_weight_norm_interface_backward")
def _weight_norm_backward(draw: Draw) -> Arguments:
    (v, g, dim), _ = _weight_norm(draw)
    norms = torch.ops.aten._weight_norm_interface.default(v, g, dim)[1]
    return (draw.floats(*v.shape), v, g, norms, dim), {}


_COLUMNS = ([3, 2], [1, 2], [1, 1], [2, 1])
"""Kernel, dilation, padding and stride."""


def _image(draw: Draw) -> list[int]:
    return [*([draw.one_of(4, 6, 12)] if draw.one_of(True, False) else []), draw.one_of(1, 4, 6), 7, 6]


@example("im2col")
def _im2col(draw: Draw) -> Arguments:
    return (draw.floats(*_image(draw)), *_COLUMNS), {}


@example("col2im")
def _col2im(draw: Draw) -> Arguments:
    image = _image(draw)
    columns = torch.ops.aten.im2col.default(draw.floats(*image), *_COLUMNS)
    return (draw.floats(*columns.shape), image[-2:], *_COLUMNS), {}


def _complex(draw: Draw, *shape: int) -> torch.Tensor:
    return torch.complex(draw.floats(*shape), draw.floats(*shape))


def _frequencies(draw: Draw) -> list[int]:
    return draw.one_of([-1], [0], [1, 2], [0, 1, 2])


@example("_fft_c2c")
def _fft(draw: Draw) -> Arguments:
    dims = _frequencies(draw)
    return (_complex(draw, *draw.sizes(3)), [d % 3 for d in dims], draw.one_of(0, 1, 2), draw.one_of(True, False)), {}


@example("_fft_r2c")
def _real_fft(draw: Draw) -> Arguments:
    dims = [d % 3 for d in _frequencies(draw)]
    return (draw.floats(*draw.sizes(3)), dims, draw.one_of(0, 1, 2), draw.one_of(True, False)), {}


@example("_fft_c2r")
def _inverse_real_fft(draw: Draw) -> Arguments:
    dims, shape = [d % 3 for d in _frequencies(draw)], draw.sizes(3)
    real = draw.floats(*shape)
    spectrum = torch.ops.aten._fft_r2c.default(real, dims, 0, True)
    return (spectrum, dims, draw.one_of(0, 1, 2), shape[dims[-1]]), {}


def _pointwise(op: str) -> Example:
    """An example of any pointwise op: operands after the first may be broadcast, unless the op is a
    backward op."""
    masks = {"mask", "condition"}

    def draw_arguments(draw: Draw) -> Arguments:
        shape = draw.sizes(draw.one_of(1, 2, 3))
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in parameters(op):
            mine = draw.broadcast(shape) if args and "backward" not in op else shape
            if parameter.type == "Tensor" and parameter.name == "value":
                args.append(draw.positive())
            elif parameter.type == "Tensor" and parameter.name in masks:
                args.append(draw.bools(*(mine if args else shape)))
            elif "Tensor" in parameter.type and ("bitwise" in op or "floor_divide" in op):
                args.append(draw.indices(3, *mine) + 1)
            elif "Tensor" in parameter.type:
                args.append(draw.positive(*mine))
            elif parameter.name == "rounding_mode":
                kwargs["rounding_mode"] = draw.one_of("floor", "trunc")
            elif parameter.default is None and parameter.type in ("Scalar", "float", "number"):
                args.append(2 if "bitwise" in op or "floor_divide" in op else 0.4)
            elif parameter.default is None and parameter.type == "bool":
                args.append(False)
        return tuple(args), kwargs

    return draw_arguments


@pytest.mark.parametrize("op", sorted({*RULES.rows, *REGISTERED.own}))
def test_rule_of_every_op(op: str) -> None:
    """Whatever the rule allows is right, and it was tried: each factor and each linear set, in some
    example of the op."""
    draw_arguments = EXAMPLES[op] if op in EXAMPLES else _pointwise(op)
    reports: list[tuple[Report, OpRule]] = []

    @settings(
        max_examples=4 if op in EXAMPLES else 2, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def check(data: st.DataObject) -> None:
        args, kwargs = draw_arguments(Draw(data))
        call, _ = make_call(op, args, kwargs)
        rule = rule_of(call)
        assert rule is not None
        reports.append((check_rule(op, *args, compare_values="empty" not in op, **kwargs), rule))

    check()
    assert any(report.instances for report, _ in reports) or not any(rule.factors for _, rule in reports)
    for report, rule in reports:
        splittable = [
            f.name for f in rule.factors if any(f.may_split(p, n) for n in (2, 3, 4) for p in f.periods(n, (n, 2)))
        ]
        assert set(report.factors) == set(splittable)
        assert bool(report.linear) == bool(rule.linear)


# what the lines of the table mean


def _call(op: str, *args: Any, **kwargs: Any) -> Call:
    return make_call(op, args, kwargs)[0]


def _rule(op: str, *args: Any, **kwargs: Any) -> OpRule:
    rule = rule_of(_call(op, *args, **kwargs))
    assert rule is not None
    return rule


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def test_rule_of_a_matrix_product() -> None:
    rule = _rule("aten.mm.default", _zeros(4, 6), _zeros(6, 8))
    assert str(rule) == "m k, k n -> m n"
    assert rule.factors == (Factor("m", 4, ("",)), Factor("n", 8, ("",)), Factor("k", 6, ("sum",)))
    assert rule.linear == ((0,), (1,))
    assert rule.flops == 2 * 4 * 6 * 8 and rule.contraction


def test_a_dim_of_size_one_carries_nothing() -> None:
    assert str(_rule("aten.mul.Tensor", _zeros(4, 1, 6), _zeros(6, 6))) == "d0 ! d2, d1 d2 -> d0 d1 d2"


def test_the_pieces_of_a_fused_projection_are_split_together() -> None:
    rule = _rule("aten.split.Tensor", _zeros(2, 24), 8, 1)
    assert rule.factors[1] == Factor("d1", 8, ("", "", ""), even=True)


@pytest.mark.parametrize(
    ("op", "args", "linear"),
    [
        ("aten.add.Tensor", (_zeros(4), _zeros(4)), ((0, 1),)),
        ("aten.add.Tensor", (_zeros(4), 1.0), ()),
        ("aten.mul.Tensor", (_zeros(4), _zeros(4)), ((0,), (1,))),
        ("aten.mul.Tensor", (_zeros(4), 2.0), ((0,),)),
        ("aten.mul.Tensor", (torch.ones(4),) * 2, ()),
        ("aten.add.Tensor", (torch.ones(4),) * 2, ((0, 1),)),
        ("aten.mm.default", (torch.ones(4, 4),) * 2, ()),
        ("aten.addmm.default", (_zeros(4), _zeros(4, 4), _zeros(4, 4)), ((0, 1), (0, 2))),
        ("aten.where.self", (_zeros(4).bool(), _zeros(4), _zeros(4)), ((1, 2),)),
        ("aten.masked_fill.Scalar", (_zeros(4), _zeros(4).bool(), 0), ((0,),)),
        ("aten.masked_fill.Scalar", (_zeros(4), _zeros(4).bool(), 1), ()),
        ("aten.constant_pad_nd.default", (_zeros(4), (0, 1), -100.0), ()),
        ("aten._to_copy.default", (_zeros(4),), ((0,),)),
        ("aten.bitwise_and.Tensor", (_zeros(4).bool(), _zeros(4).bool()), ()),
    ],
)
def test_what_an_op_is_linear_in(op: str, args: tuple[Any, ...], linear: tuple[tuple[int, ...], ...]) -> None:
    assert _rule(op, *args).linear == linear


def test_random_ops_have_no_rule_and_factories_need_none() -> None:
    for op, args in (("aten.bernoulli.p", (_zeros(4), 0.5)), ("aten.native_dropout.default", (_zeros(4), 0.5, True))):
        assert rule_of(_call(op, *args)) is None
        assert not needs_no_rule(op)
    assert not needs_no_rule("aten.randn.default")
    assert needs_no_rule("aten.arange.default") and needs_no_rule("aten._assert_tensor_metadata.default")


# the vocabulary split: what is communicated


def _collectives(op: str, *args: Any, factors: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Reduction and shape of each all-reduce of an op with these factors split over four ranks."""
    call = _call(op, *args)
    rule = rule_of(call)
    assert rule is not None
    cuts = tuple(oracle.Cut(i, f.size) for name in factors for i, f in enumerate(rule.factors) if f.name == name)
    program = oracle.check_cuts(call, rule, make_call(op, args, {})[1], (2,) * len(cuts), cuts)
    return [(i.args[1], program.metas[i.outputs[0]].shape) for i in program.instructions if i.collective]


def test_cross_entropy_with_the_vocabulary_split_never_gathers_logits() -> None:
    tokens, classes = 8, 12
    logits = torch.randn(tokens, classes, dtype=torch.float64)
    target = torch.randint(0, classes, (tokens,))
    scores = logits.log_softmax(1)
    _, total = torch.ops.aten.nll_loss_forward(scores, target, None, 1, -100)
    gradient = torch.ones((), dtype=torch.float64)

    forward = _collectives("aten._log_softmax.default", logits, 1, False, factors=["c"])
    assert forward == [("max", (tokens, 1)), ("sum", (tokens, 1))]
    assert _collectives("aten._log_softmax_backward_data.default", logits, scores, 1, torch.float64, factors=["c"]) == [
        ("sum", (tokens, 1))
    ]
    loss = ("aten.nll_loss_forward.default", scores, target, None, 1, -100)
    assert _collectives(*loss, factors=["c"]) == []
    assert _collectives(*loss, factors=["n"]) == [("sum", (2,))]
    assert _collectives(*loss, factors=["n", "c"]) == [("sum", (2,))]
    backward = ("aten.nll_loss_backward.default", gradient, scores, target, None, 1, -100, total)
    assert _collectives(*backward, factors=["c"]) == []


def test_a_mean_and_a_bias_are_shared_out_without_communication() -> None:
    assert _collectives("aten.mean.default", torch.randn(4, 6), factors=["d0", "d1"]) == []
    assert _collectives("aten.addmm.default", torch.randn(4), torch.randn(4, 6), torch.randn(6, 4), factors=["k"]) == []


def test_labels_that_are_all_ignored_give_the_same_nan_on_all_ranks() -> None:
    scores = torch.randn(4, 12).log_softmax(1)
    check_rule("aten.nll_loss_forward.default", scores, torch.full((4,), -100), None, 1, -100)


def test_half_precision_counts_tokens_exactly() -> None:
    scores = torch.zeros(600, 2, dtype=torch.bfloat16)
    report = check_rule("aten.nll_loss_forward.default", scores, torch.zeros(600, dtype=torch.long), None, 1, -100)
    assert report.factors == ("n", "c")


def test_softmax_in_half_precision_and_with_minus_infinity() -> None:
    scores = torch.randn(4, 12)
    scores[:, :6] = -torch.inf  # a rank's part may be masked as a whole
    check_rule("aten._softmax.default", scores, 1, False)
    check_rule("aten._log_softmax.default", scores.bfloat16(), 1, False)


# the oracle


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda rule: OpRule(factors=rule.factors, inputs=((0, 2), (2, 1)), outputs=((0, 1),), linear=((0, 1),)),
            r"aten.mm.default.*rule m k, k n -> m n: Partial operands \(0, 1\) on 2 ranks: output 0, the largest error",
        ),
        (
            lambda rule: OpRule(
                factors=(*rule.factors[:2], Factor("k", 6, ("max",))), inputs=rule.inputs, outputs=rule.outputs
            ),
            r"factor k of size 6 % 2 on 2 ranks: output 0, the largest error is",
        ),
        (
            lambda rule: OpRule(factors=rule.factors, inputs=((0, None), (2, 1)), outputs=rule.outputs),
            r"factor k of size 6 % 2 on 2 ranks: does not run on shards",
        ),
    ],
)
def test_the_oracle_finds_wrong_rules(
    wrong: Callable[[OpRule], OpRule], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "rule_of", lambda call: wrong(rule_of(call)))  # type: ignore[arg-type]
    with pytest.raises(RuleError, match=message):
        check_rule("aten.mm.default", torch.randn(4, 6), torch.randn(6, 8))


@pytest.mark.parametrize("op", ["amin", "amax"])
def test_the_oracle_sees_padding_of_integers(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the numbers are, and whichever of them an op looks for."""
    numbers = torch.randint(-50, 50, (7,), generator=torch.Generator().manual_seed(0))
    check_rule(f"aten.{op}.default", numbers)
    monkeypatch.setattr(emit, "_filling", lambda *_: None)
    with pytest.raises(RuleError, match="the largest error is"):
        check_rule(f"aten.{op}.default", numbers)


def test_a_rule_whose_results_want_different_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = (Factor("c", 7, ("max", "sum")),)
    monkeypatch.setattr(oracle, "rule_of", lambda call: OpRule(factors=factors, inputs=((0,),), outputs=((), ())))
    with pytest.raises(ValueError, match=r"of aten.max.dim reduces c by max and sum: no padding changes neither"):
        check_rule("aten.max.dim", torch.arange(7.0), 0, compare_values=False)


def test_the_suite_says_what_the_oracle_tried(tmp_path: Path) -> None:
    rules = [f"{__file__}::test_rule_of_every_op[aten.{name}.default]" for name in ("neg", "mv")]
    suite = ranks.start(
        tmp_path, pytest.console_main, "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *rules
    )
    assert suite.status() == 0, suite.output
    assert re.search(r"^oracle: 2 rules, [1-9]\d+ instances, 0 bad$", suite.output, re.MULTILINE), suite.output


def test_what_the_oracle_tried_is_that_of_all_workers_together() -> None:
    printing = Tally()
    for instances in ({"aten.neg.default": 2}, {"aten.neg.default": 3, "aten.mv.default": 1}):
        worker, session = Tally(), SimpleNamespace(config=SimpleNamespace(workeroutput={}))
        worker.instances.update(instances)
        worker.bad = 1
        worker.pytest_sessionfinish(session)  # type: ignore[arg-type]
        printing.pytest_testnodedown(session.config)
    assert printing.instances == {"aten.neg.default": 5, "aten.mv.default": 1} and printing.bad == 2


def test_the_oracle_refuses_ops_without_a_rule() -> None:
    with pytest.raises(ValueError, match=r"aten\.bernoulli\.p has no rule"):
        check_rule("aten.bernoulli.p", torch.rand(4), 0.5)


# the ops of real models


def _graph(name: str) -> JointGraph:
    from autopar.passes.capture.trace import capture

    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.randint(0, 12, (4, 6))
    batch = {"input_ids": ids, "labels": ids}
    if name == "GPT-2":
        config = transformers.GPT2Config(
            vocab_size=12, n_embd=12, n_layer=1, n_head=6, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return capture(transformers.GPT2LMHeadModel(config), (), batch).graph
    if name == "Llama":
        config = transformers.LlamaConfig(
            vocab_size=12, hidden_size=12, intermediate_size=18, num_hidden_layers=1, num_attention_heads=6,
            num_key_value_heads=3, max_position_embeddings=8, use_cache=False,
        )  # fmt: skip
        return capture(transformers.LlamaForCausalLM(config), (), batch).graph
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.LayerNorm(12), torch.nn.Linear(12, 4))
    model.train()
    loss = torch.nn.MSELoss()
    target = torch.randn(8, 4)
    return capture(model, (torch.randn(8, 8),), {}, loss_fn=lambda output: loss(output, target)).graph


@pytest.mark.parametrize("name", ["MLP", "GPT-2", "Llama"])
def test_every_op_of_a_model(name: str) -> None:
    """The graph is run on random inputs, and each op checked with the operands that it has there."""
    graph = _graph(name)
    generator = torch.Generator().manual_seed(0)
    values: dict[str, torch.Tensor] = {}
    for graph_input in graph.inputs:
        meta = graph.metas[graph_input.name]
        random = torch.randn(meta.shape, generator=generator)
        values[graph_input.name] = (random if meta.dtype.is_floating_point else random.abs() * 3).to(meta.dtype)
    seen: set[str] = set()
    without = set()
    for node in graph.nodes:
        args, kwargs = _concrete(map_references((node.args, node.kwargs), values.__getitem__))
        results = overload(node.op)(*args, **dict(kwargs))
        results = results if isinstance(results, (tuple, list)) else (results,)
        values |= {n: result for n, result in zip(node.outputs, results, strict=True) if n}
        call = Call(
            node,
            tuple(graph.metas[n] for n in node.inputs),
            tuple(graph.metas[n] if n else None for n in node.outputs),
        )
        signature = str((node.op, map_references((node.args, node.kwargs), graph.metas.__getitem__)))
        if rule_of(call) is None:
            without.add(node.op)
        elif signature not in seen:
            seen.add(signature)
            check_rule(node.op, *args, compare_values="empty" not in node.op, **dict(kwargs))
    assert without <= {"aten.reshape.default"}, "reshape is an alias, and all others have a rule"
    assert len(seen) > 10


def _concrete(value: Any) -> Any:
    return [_concrete(item) for item in value] if isinstance(value, tuple) else value
