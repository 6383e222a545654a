"""Writing local programs: instructions, their local shapes, and the expansions of operators.

The op table writes an expansion (say, a softmax whose class dim is split) with an `Emitter`. Costs, codegen and the
oracle run the same expansion, so that ranks run what was priced and proved.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from autopar.ir.graph import WAIT, Node, Ref, TensorMeta, map_references, meta_of, overload, takes
from autopar.ir.layout import Layout, Shape, local_shape, padded_shape
from autopar.ir.program import RankIndex
from autopar.ir.rewrite import NodeWriter

from .expansions import LocalCall, filled_beyond
from .rule import ROUTED, Call, OpRule, neutral
from .rules import expand, localize


@dataclass(frozen=True, slots=True)
class Emission:
    """Instructions with the local metas of all their values; `results` are the op's outputs."""

    instructions: tuple[Node, ...]
    metas: Mapping[str, TensorMeta]
    results: tuple[str | None, ...]


class LocalEmitter(NodeWriter):
    """The `ops.rule.Emitter` that appends instructions. Output metas come from running the op on the
    meta device."""

    def __init__(self, mesh: Shape, metas: dict[str, TensorMeta], fresh: Callable[[str], str]) -> None:
        super().__init__(metas=metas)
        self.mesh, self.fresh = mesh, fresh

    def op(self, op: str, *args: Any, **kwargs: Any) -> Ref:
        (result,) = self.ops(op, *args, **kwargs)
        return result

    def ops(self, op: str, *args: Any, **kwargs: Any) -> tuple[Ref, ...]:
        args = _tuples(args)
        named = tuple((key, _tuples(value)) for key, value in kwargs.items())
        metas = infer(op, *(map_references(each, self.metas.__getitem__) for each in (args, named)))
        return self.append(op, args, named, metas)

    def meta(self, value: Ref) -> TensorMeta:
        return self.metas[value.name]

    def all_reduce(self, value: Ref, reduction: str, axis: int) -> Ref:
        return self._collective("all_reduce", value, reduction, axis)

    def shift(self, value: Ref, offset: int, axis: int) -> Ref:
        return self._collective("shift", value, offset, axis)

    def exchange(self, value: Ref, sizes: Ref, axis: int) -> Ref:
        return self._collective("exchange", value, sizes, axis)

    def _collective(self, kind: str, value: Ref, *args: Any) -> Ref:
        """A collective whose result is like its operand."""
        (started,) = self.append(f"collective.{kind}", (value, *args), (), (self.meta(value),))
        (finished,) = self.append(WAIT, (started,), (), (self.meta(value),))
        return finished

    def ranks(self, axis: int) -> int:
        return self.mesh[axis]

    def coordinate(self, axis: int, stride: int = 1, constant: int = 0) -> RankIndex:
        return RankIndex(((axis, stride),), constant)

    def offset(self, axes: tuple[int, ...], local_size: int) -> RankIndex:
        terms, stride = [], local_size
        for axis in reversed(axes):
            terms.append((axis, stride))
            stride *= self.mesh[axis]
        return RankIndex(tuple(reversed(terms)))

    def append(
        self, op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: tuple[TensorMeta | None, ...]
    ) -> tuple[Ref, ...]:
        """Append an instruction with these outputs; one that nobody uses (None) has no name."""
        hint = op.split(".")[1]
        results = [(self.fresh(hint) if meta else "", meta) for meta in metas]
        self.emit(op, args, *results, kwargs=kwargs)
        return tuple(Ref(name) for name, _ in results)


def infer(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[TensorMeta | None, ...]:
    """Metas of an op's outputs from its arguments, with `TensorMeta`s in the place of tensors."""
    return _inferred(op, args, kwargs, _types((args, kwargs)))


@lru_cache(maxsize=1 << 16)
def _inferred(
    op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], types: Any
) -> tuple[TensorMeta | None, ...]:
    """`types` tells 1, 1.0 and True apart, which are equal."""
    return tuple(None if o is None else meta_of(o) for o in on_meta(op, args, kwargs))


def _types(value: Any) -> Any:
    return tuple(map(_types, value)) if isinstance(value, tuple) else type(value)


def on_meta(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[torch.Tensor | None, ...]:
    """An op's outputs, without values. Operands are tensors of the meta device, or `TensorMeta`s of contiguous ones. An
    op that knows no shapes, which few of torch's are, runs on zeros."""
    try:
        return _on(torch.device("meta"), op, args, kwargs)
    except NotImplementedError:
        outputs = _on(torch.device("cpu"), op, args, kwargs)
        return tuple(o if o is None else torch.empty_like(o, device="meta") for o in outputs)


def _on(
    device: torch.device, op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> tuple[torch.Tensor | None, ...]:
    def concrete(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            return torch.zeros(value.shape, dtype=value.dtype, device=device)
        if isinstance(value, torch.Tensor):
            if value.device == device:
                return value
            return torch.zeros_like(value, device=device)
        if isinstance(value, RankIndex):
            return value.constant
        if isinstance(value, torch.device):
            return device
        if isinstance(value, tuple):
            return [concrete(item) for item in value]
        return value

    named = {key: concrete(value) for key, value in kwargs}
    if takes(op, "device"):
        named["device"] = device
    outputs = overload(op)(*(concrete(a) for a in args), **named)
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


OPERAND = "operand_{}"
"""Name, inside an expansion, of the op's i-th tensor operand."""


def local_program(
    call: Call,
    rule: OpRule | None,
    splits: tuple[tuple[str, tuple[int, ...]], ...],
    operands: tuple[Layout, ...],
    results: tuple[Layout, ...],
    mesh: Shape,
    zeros: tuple[bool, ...] = (),
) -> Emission:
    """The local program of an op, as a value of its own: the op, or its expansion if a split factor
    `expands`, after filling padding. Every operand has a name of its own, even if the op reads one tensor
    twice. `operands` and `results` are layouts; `zeros` says which operands have zeros as padding already
    (none given: none)."""
    local_inputs, local_outputs = local_shapes(call, operands, results, mesh)
    shapes = zip(local_inputs, call.inputs, strict=True)
    metas = {OPERAND.format(i): TensorMeta(shape, meta.dtype) for i, (shape, meta) in enumerate(shapes)}
    counter = iter(range(1 << 30))
    emitter = LocalEmitter(mesh, metas, lambda hint: f"{hint}_{next(counter)}")
    values = [Ref(OPERAND.format(i)) for i in range(len(local_inputs))]
    if rule is not None:
        for i, dim, value in fillings(call, rule, operands, zeros):
            values[i] = filled_beyond(emitter, values[i], call.inputs[i].shape, operands[i], dim, value)
    feed = iter(values)
    given = localize(call, local_inputs, local_outputs, results, mesh)
    args, kwargs = map_references(given, lambda _: next(feed))
    if rule is not None and expands(rule, splits):
        local = LocalCall(call, args, kwargs, dict(splits), operands, results, local_outputs)
        produced: Sequence[Ref | None] = _named(emitter, expand(emitter, local))
    else:
        local_metas = tuple(
            None if meta is None or shape is None else TensorMeta(shape, meta.dtype)
            for meta, shape in zip(call.outputs, local_outputs, strict=True)
        )
        produced = emitter.append(call.node.op, args, kwargs, local_metas)
    return Emission(tuple(emitter.written), metas, tuple(r.name or None if r else None for r in produced))


def _named(emitter: LocalEmitter, results: tuple[Ref | None, ...]) -> list[Ref | None]:
    """Results under names of their own: one may be an operand unchanged (the gradient of a bias without rows to sum),
    or equal to another."""
    taken = {OPERAND.format(i) for i in range(len(emitter.metas))}
    named: list[Ref | None] = []
    for result in results:
        if result is not None and result.name in taken:
            result = emitter.op("aten.reshape.default", result, emitter.meta(result).shape)
        if result is not None and result.name:
            taken.add(result.name)
        named.append(result)
    return named


def expands(rule: OpRule, splits: tuple[tuple[str, tuple[int, ...]], ...]) -> bool:
    """Whether the op expands because of a split factor."""
    names = {name for name, _ in splits}
    return ROUTED in names or any(factor.expands and factor.name in names for factor in rule.factors)


def fillings(
    call: Call, rule: OpRule, operands: tuple[Layout, ...], zeros: tuple[bool, ...]
) -> list[tuple[int, int, float]]:
    """(operand, dim, value): the padding that the op would read, and what to fill it with."""
    fills = []
    for i, (meta, layout) in enumerate(zip(call.inputs, operands, strict=True)):
        padded = padded_shape(meta.shape, layout)
        for dim, (size, longer) in enumerate(zip(meta.shape, padded, strict=True)):
            factor = rule.inputs[i][dim]
            if size != longer and factor is not None:
                value = _filling(call, rule, i, factor)
                if value is not None and not (value == 0 and zeros and zeros[i]):
                    fills.append((i, dim, value))
    return fills


def _filling(call: Call, rule: OpRule, operand: int, factor: int) -> float | None:
    stated = {(i, f): value for i, f, value in rule.padding}
    if (operand, factor) in stated:
        return stated[operand, factor]
    dtype = call.inputs[operand].dtype
    outputs = zip(rule.factors[factor].reductions, call.outputs, strict=True)
    wanted = {reduction for reduction, meta in outputs if reduction and meta is not None}
    if len(wanted) > 1:
        raise ValueError(
            f"the rule {rule} of {call.node.op} reduces {rule.factors[factor].name} by {' and '.join(sorted(wanted))}: "
            f"no padding changes neither, so say what to fill it with (OpRule.padding), or make the factor even"
        )
    for reduction in wanted:
        return neutral(reduction, dtype)
    is_index = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    return 0 if is_index and not rule.elementwise else None


def local_shapes(
    call: Call, operands: tuple[Layout, ...], results: tuple[Layout, ...], mesh: Shape
) -> tuple[tuple[Shape, ...], tuple[Shape | None, ...]]:
    """Local shapes of an op's operands and outputs."""
    return (
        tuple(local_shape(m.shape, layout, mesh) for m, layout in zip(call.inputs, operands, strict=True)),
        tuple(
            None if m is None else local_shape(m.shape, layout, mesh)
            for m, layout in zip(call.outputs, results, strict=True)
        ),
    )
