"""Proof of an op's rule by brute force: the results of shards, put together, equal the result of unsplit tensors.

`check_rule("aten.mm.default", a, b)` takes the rule for these arguments and tries every factor with
every period that it allows, every set of operands that may be Partial together, pairs of these on
two mesh axes and splits nested in each other, on 2, 3 and 4 shards where they divide. Every rank runs
in this process, in lock step where an expansion holds collectives. Shards lie in memory in one of many ways
(`laid_out`), as they may in a program.
"""

import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.graph import Node, Ref, meta_of
from autopar.ir.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Shape,
    is_legal,
    shard,
    valid_shape,
)
from autopar.ir.unsharded import unshard

from .emit import OPERAND, Emission, local_program, local_shapes
from .kernels import kernel_of
from .lockstep import Values, run
from .registry import qualified
from .rule import Call, OpRule
from .rules import rule_of

log = logging.getLogger(__name__)

Coordinate = tuple[int, ...]

LAYOUTS = 7
"""Ways in which `laid_out` lays a tensor out."""


class RuleError(ValueError):
    """An op on shards differs from the op on unsplit tensors, against its rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the oracle tried. `instances` counts the ways to split, `factors` names the factors that were split. `flops`
    are those that the operator is priced by on these arguments, which nothing proves."""

    op: str
    instances: int
    factors: tuple[str, ...]
    linear: int
    flops: float = 0.0

    def __str__(self) -> str:
        priced = f"{self.flops:.4g} flops" if self.flops else "the bytes that it reads and writes, and no flops"
        split = ", ".join(self.factors) or "none"
        return f"{self.op}: {self.instances} instances, factors {split}; priced by {priced}"


@dataclass(frozen=True, slots=True)
class Cut:
    """What one mesh axis does: split a factor with a period, or make a linear set of operands Partial."""

    factor: int | None = None
    period: int = 0
    linear: tuple[int, ...] = ()

    def describe(self, rule: OpRule) -> str:
        if self.factor is None:
            return f"Partial operands {self.linear}"
        return f"factor {rule.factors[self.factor].name} of size {rule.factors[self.factor].size} % {self.period}"


def check_rule(op: str, /, *args: Any, compare_values: bool = True, **kwargs: Any) -> Report:
    """Try everything that the op's rule allows for these arguments.

    `op` is an operator's name ("aten.mm.default", "mylib::scale_rows"), `args` and keywords are the op's own, with
    real tensors, of dims that 2, 3 and 4 divide (12) where they can be split. `compare_values=False` compares
    shapes only, for ops whose values mean nothing.

    Raises `RuleError`, which names the op, the split and the largest error, if a split is wrong, and
    `ValueError` if the op has no rule for these arguments.
    """
    op = qualified(op)
    call, tensors = make_call(op, args, kwargs)
    rule = rule_of(call)
    if rule is None:
        raise ValueError(f"{op} has no rule for {', '.join(map(str, call.inputs))}: there is nothing to check")
    unsplit = _outputs(kernel_of(op)(*args, **kwargs))
    instances, tried, linear = 0, dict.fromkeys(range(len(rule.factors)), False), 0
    for mesh, cuts in _cuts(rule):
        together = {cut.factor for cut in cuts if cut.factor is not None}
        if not rule.may_split_together(together) or not _is_legal(rule, call, mesh, cuts):
            continue
        if not all(factor.may_be_cut(_ranks(mesh, cuts, i)) for i, factor in enumerate(rule.factors)):
            continue
        check_cuts(call, rule, tensors, mesh, cuts, unsplit if compare_values else None, rubbish=instances)
        instances += 1
        for cut in cuts:
            if cut.factor is None:
                linear += 1
            else:
                tried[cut.factor] = True
    names = tuple(rule.factors[f].name for f, done in tried.items() if done)
    report = Report(op=op, instances=instances, factors=names, linear=linear, flops=rule.flops)
    log.debug("%s", report)
    return report


def make_call(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, dict[str, torch.Tensor]]:
    """A call of an op as a node of a graph, and its tensors by name. The same tensor given twice has
    one name."""
    names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}

    def freeze(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = names.setdefault(id(value), f"t{len(names)}")
            tensors[name] = value
            return Ref(name)
        return tuple(map(freeze, value)) if isinstance(value, (tuple, list)) else value

    outputs = _outputs(kernel_of(op)(*args, **kwargs))
    node = Node(
        op=op,
        args=freeze(tuple(args)),
        kwargs=tuple((key, freeze(value)) for key, value in kwargs.items()),
        outputs=tuple("" if value is None else f"y{i}" for i, value in enumerate(outputs)),
    )
    metas = tuple(None if value is None else meta_of(value) for value in outputs)
    return Call(node, tuple(meta_of(tensors[name]) for name in node.inputs), metas), tensors


def _outputs(result: Any) -> tuple[torch.Tensor | None, ...]:
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(value if isinstance(value, torch.Tensor) else None for value in results)


def _cuts(rule: OpRule) -> Iterator[tuple[Shape, tuple[Cut, ...]]]:
    """Meshes, and what each of their axes does."""
    shared = [Cut(linear=operands) for operands in rule.linear]
    for ranks in (2, 3, 4):
        for i, factor in enumerate(rule.factors):
            periods = {*range(2, factor.size + 1), *factor.periods(ranks, (ranks, 2))}
            yield from (((ranks,), (Cut(i, p),)) for p in sorted(periods) if factor.may_split(p, ranks))
        yield from (((ranks,), (cut,)) for cut in shared)
    single = [
        Cut(i, period)
        for i, factor in enumerate(rule.factors)
        for period in factor.periods(2, (2, 2))
        if factor.may_split(period, 2)
    ]
    for pair in itertools.permutations(single + shared, 2):
        yield (2, 2), pair
    for i, factor in enumerate(rule.factors):
        for outer, inner in ((2, 2), (2, 3), (3, 2)):
            for period in factor.periods(outer, (outer, inner)):
                if factor.may_split(period, outer) and period // outer % inner == 0:
                    nested = Cut(i, period), Cut(i, period // outer)
                    yield (outer, inner), nested
                    yield (inner, outer), nested[::-1]


def _ranks(mesh: Shape, cuts: tuple[Cut, ...], factor: int) -> int:
    """Over how many ranks a factor is split."""
    return math.prod(n for n, cut in zip(mesh, cuts, strict=True) if cut.factor == factor)


def _operand_layout(rule: OpRule, operand: int, cuts: tuple[Cut, ...]) -> Layout:
    placements: list[Placement] = []
    for cut in cuts:
        if cut.factor is None:
            placements.append(PARTIAL if operand in cut.linear else REPLICATE)
        else:
            placements += rule.input_splits(operand, cut.factor, cut.period)[:1] or [REPLICATE]
    return tuple(placements)


def _output_layout(rule: OpRule, output: int, cuts: tuple[Cut, ...]) -> Layout:
    placements: list[Placement] = []
    for cut in cuts:
        if cut.factor is None:
            placements.append(PARTIAL)
        elif reduction := rule.factors[cut.factor].reductions[output]:
            placements.append(Partial(reduction))
        else:
            placements += rule.output_splits(output, cut.factor, cut.period)[:1] or [REPLICATE]
    return tuple(placements)


def _is_legal(rule: OpRule, call: Call, mesh: Shape, cuts: tuple[Cut, ...]) -> bool:
    operands = ((meta, _operand_layout(rule, i, cuts)) for i, meta in enumerate(call.inputs))
    results = ((meta, _output_layout(rule, i, cuts)) for i, meta in enumerate(call.outputs))
    return all(meta is None or is_legal(meta.shape, layout, mesh) for meta, layout in (*operands, *results))


def check_cuts(
    call: Call,
    rule: OpRule,
    tensors: dict[str, torch.Tensor],
    mesh: Shape,
    cuts: tuple[Cut, ...],
    unsplit: tuple[torch.Tensor | None, ...] | None = None,
    rubbish: int = 0,
) -> Emission:
    """Run a call with each mesh axis doing its cut, and return the local program. Without `unsplit`, the results of the
    unsplit op, only shapes are compared. `rubbish` picks the value that stands in padding. Raises `RuleError`."""
    coordinates = list(itertools.product(*map(range, mesh)))
    operands = tuple(_operand_layout(rule, i, cuts) for i in range(len(call.inputs)))
    results = tuple(_output_layout(rule, i, cuts) if m else () for i, m in enumerate(call.outputs))

    def complain(what: str) -> RuleError:
        done = " and ".join(f"{cut.describe(rule)} on {n} ranks" for cut, n in zip(cuts, mesh, strict=True))
        return RuleError(f"{call.node} with rule {rule}: {done}: {what}")

    local_outputs = local_shapes(call, operands, results, mesh)[1]
    shards = [
        {c: laid_out(part, rubbish + i) for c, part in _shards(tensors[name], lay, mesh, rubbish).items()}
        for i, (name, lay) in enumerate(zip(call.node.inputs, operands, strict=True))
    ]
    held = list(zip(shards, operands, strict=True))
    values: dict[Coordinate, Values] = {
        c: {OPERAND.format(i): of[_first(lay, c)] for i, (of, lay) in enumerate(held)} for c in coordinates
    }
    splits = tuple(_splits(rule, cuts).items())
    try:
        program = local_program(call, rule, splits, operands, results, mesh)
        for instruction in program.instructions:
            run(instruction, mesh, values)
    except (RuntimeError, IndexError, TypeError, NotImplementedError) as error:
        raise complain(f"does not run on shards: {error}") from error
    locals_ = {c: tuple(values[c].get(r) if r else None for r in program.results) for c in coordinates}

    for i, (meta, layout) in enumerate(zip(call.outputs, results, strict=True)):
        if meta is None:
            continue
        parts = {}
        for c in coordinates:
            part = locals_[c][i]
            if part is None or tuple(part.shape) != local_outputs[i] or part.dtype != meta.dtype:
                given = "missing" if part is None else meta_of(part)
                raise complain(f"output {i} on rank {c} is {given}, not {local_outputs[i]} of {meta.dtype}")
            parts[c] = part
        if unsplit is not None:
            wrong = _error(unsplit[i], parts, layout, mesh)
            if wrong:
                raise complain(f"output {i}, {wrong}")
    return program


def _splits(rule: OpRule, cuts: tuple[Cut, ...]) -> dict[str, tuple[int, ...]]:
    """Factor name -> mesh axes that split it, outermost (of the largest period) first."""
    by_name: dict[str, list[tuple[int, int]]] = {}
    for axis, cut in enumerate(cuts):
        if cut.factor is not None:
            by_name.setdefault(rule.factors[cut.factor].name, []).append((-cut.period, axis))
    return {name: tuple(axis for _, axis in sorted(axes)) for name, axes in by_name.items()}


def _first(layout: Layout, coordinate: Coordinate) -> Coordinate:
    """The first rank that holds the same as the one at `coordinate`."""
    return tuple([0 if p == REPLICATE else i for p, i in zip(layout, coordinate, strict=True)])


def _shards(tensor: torch.Tensor, layout: Layout, mesh: Shape, rubbish: int) -> dict[Coordinate, torch.Tensor]:
    """What ranks hold, the first of each replica. The parts of a Partial are random numbers that add up to the
    tensor."""
    terms: dict[Coordinate, torch.Tensor] = {(): tensor}
    for axis, (placement, ranks) in enumerate(zip(layout, mesh, strict=True)):
        grown: dict[Coordinate, torch.Tensor] = {}
        for prefix, value in terms.items():
            parts = [value] * (1 if placement == REPLICATE else ranks)
            if isinstance(placement, Partial):
                parts = _summands(value, ranks, torch.Generator().manual_seed(axis))
            grown |= {(*prefix, i): part for i, part in enumerate(parts)}
        terms = grown
    splits = tuple(REPLICATE if isinstance(p, Partial) else p for p in layout)
    return {c: shard(value, splits, mesh, c, _rubbish(value.dtype, rubbish)) for c, value in terms.items()}


def laid_out(x: torch.Tensor, way: int) -> torch.Tensor:
    """The same numbers in one of several memory layouts: contiguous, transposed, with channels last, as every second
    element, within a larger tensor, with meaningless strides of dims of size 1."""
    order = list(range(x.dim()))
    orders = {1: order[::-1], 2: [*order[:1], *order[2:], *order[1:2]], 3: [*order[:-2], *order[-2:][::-1]]}
    way %= LAYOUTS
    if way in orders:
        order = orders[way]
        back = [order.index(d) for d in range(x.dim())]
        return x.permute(order).contiguous().permute(back)
    if way == 4 and x.dim():
        return torch.stack([x, x.flip(-1)], -1)[..., 0]
    if way == 5 and x.dim():
        return torch.cat([x.flip(0), x]).narrow(0, x.shape[0], x.shape[0])
    if way == 6:
        strides = [7 if n == 1 else stride for n, stride in zip(x.shape, x.contiguous().stride(), strict=True)]
        return x.clone(memory_format=torch.contiguous_format).as_strided(x.shape, strides)
    return x


def _rubbish(dtype: torch.dtype, number: int) -> float:
    """One of several values that stand in padding, to expose a rule whose op reads it."""
    values: tuple[float, ...]
    if dtype.is_floating_point or dtype.is_complex:
        values = (math.nan, math.inf, -math.inf)
    elif dtype is torch.bool:
        values = (True, False)
    else:
        info = torch.iinfo(dtype)
        values = (99, info.max, 0, info.min, max(-1, info.min))
    return values[number % len(values)]


def _summands(value: torch.Tensor, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Tensors that add up to the value: small random multiples of it, so that rounding stays in
    proportion, with all infinities in the first."""
    finite = torch.where(torch.isfinite(value), value, 0)
    factors = [torch.randint(-2, 3, value.shape, generator=generator).to(value) for _ in range(count - 1)]
    rest = [finite * factor for factor in factors]
    return [value - sum(rest, torch.zeros_like(value)), *rest]


def _error(expected: torch.Tensor | None, parts: dict[Coordinate, torch.Tensor], layout: Layout, mesh: Shape) -> str:
    """How the parts of a result differ from the expected tensor, "" if they do not."""
    assert expected is not None
    if any(isinstance(p, Partial) for p in layout):
        for c, part in parts.items():
            first = _first(layout, c)
            valid = tuple(map(slice, valid_shape(tuple(expected.shape), layout, mesh, c)))
            if first != c and (worst := _difference(parts[first][valid], part[valid])):
                return f"replicas {first} and {c} differ by {worst}"
        worst = _difference(expected, unshard(parts, tuple(expected.shape), layout, mesh))
        return f"the largest error is {worst}" if worst else ""
    shards = {first: shard(expected, layout, mesh, first) for first in {_first(layout, c) for c in parts}}
    for c, part in parts.items():
        valid = tuple(map(slice, valid_shape(tuple(expected.shape), layout, mesh, c)))
        if worst := _difference(shards[_first(layout, c)][valid], part[valid]):
            return f"the largest error is {worst} on rank {c}"
    return ""


def _difference(expected: torch.Tensor, given: torch.Tensor) -> float:
    """The largest difference if it is more than rounding, else 0."""
    if expected.dtype.is_complex:
        expected, given = torch.view_as_real(expected.resolve_conj()), torch.view_as_real(given.resolve_conj())
    if not expected.dtype.is_floating_point:
        return float((expected != given).any())
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-5}.get(expected.dtype, 4e-2)
    if torch.equal(expected, given) or not expected.numel():
        return 0.0
    worst = float((expected - given).abs().max())
    if worst <= tolerance:
        return 0.0
    finite = expected[torch.isfinite(expected)]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    if torch.allclose(expected, given, rtol=0.0, atol=tolerance * scale, equal_nan=True):
        return 0.0
    return worst if worst else float("nan")
