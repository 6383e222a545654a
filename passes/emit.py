"""Writing local programs: instructions, their local shapes, and the expansions of operators.

An expansion (say, a softmax whose class dim is split) is written by the op table with an `Emitter`.
Costs and codegen run the same expansion, so that what is priced is what is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..graph import Ref, TensorMeta, map_references, overload
from ..layout import Shape
from ..ops import expand, localize
from ..ops.rule import Call
from ..program import Instruction, RankIndex


@dataclass(frozen=True, slots=True)
class Emission:
    """Instructions with the local metas of all that they read and make; `results` are the op's outputs."""

    instructions: tuple[Instruction, ...]
    metas: Mapping[str, TensorMeta]
    results: tuple[str | None, ...]


class LocalEmitter:
    """The `ops.rule.Emitter` that appends instructions. Output metas come from running the op on the
    meta device."""

    def __init__(self, mesh: Shape, metas: dict[str, TensorMeta], fresh: Callable[[str], str]) -> None:
        self.mesh, self.metas, self.fresh = mesh, metas, fresh
        self.instructions: list[Instruction] = []

    def op(self, op: str, *args: Any, **kwargs: Any) -> Ref:
        (result,) = self.ops(op, *args, **kwargs)
        return result

    def ops(self, op: str, *args: Any, **kwargs: Any) -> tuple[Ref, ...]:
        args = _tuples(args)
        named = tuple((key, _tuples(value)) for key, value in kwargs.items())
        metas = infer(op, map_references(args, self._lookup), map_references(named, self._lookup))
        return self._append(op, args, named, metas)

    def meta(self, value: Ref) -> TensorMeta:
        return self.metas[value.name]

    def all_reduce(self, value: Ref, reduction: str, axis: int) -> Ref:
        (started,) = self._append("collective.all_reduce", (value, reduction, axis), (), (self.meta(value),))
        (finished,) = self._append("collective.wait", (started,), (), (self.meta(value),))
        return finished

    def ranks(self, axis: int) -> int:
        return self.mesh[axis]

    def offset(self, axes: tuple[int, ...], local_size: int) -> RankIndex:
        terms, stride = [], local_size
        for axis in reversed(axes):
            terms.append((axis, stride))
            stride *= self.mesh[axis]
        return RankIndex(tuple(reversed(terms)))

    def _lookup(self, name: str) -> TensorMeta:
        return self.metas[name]

    def _append(
        self, op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: tuple[TensorMeta, ...]
    ) -> tuple[Ref, ...]:
        hint = op.split(".")[1]
        names = tuple(self.fresh(hint) for _ in metas)
        self.metas.update(zip(names, metas, strict=True))
        self.instructions.append(Instruction(op=op, args=args, kwargs=kwargs, outputs=names))
        return tuple(Ref(name) for name in names)


def infer(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[TensorMeta, ...]:
    """Metas of an op's outputs from its arguments, with `TensorMeta`s in the place of tensors."""

    def concrete(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, RankIndex):
            return value.constant
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, tuple):
            return [concrete(item) for item in value]
        return value

    outputs = overload(op)(*(concrete(a) for a in args), **{key: concrete(value) for key, value in kwargs})
    if isinstance(outputs, torch.Tensor):
        outputs = (outputs,)
    return tuple(TensorMeta(tuple(o.shape), o.dtype) for o in outputs)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


OPERAND = "operand_{}"
"""Name, inside an expansion, of the op's i-th tensor operand."""


def expansion(
    call: Call,
    splits: tuple[tuple[str, tuple[int, ...]], ...],
    local_inputs: tuple[Shape, ...],
    local_outputs: tuple[Shape | None, ...],
    mesh: Shape,
) -> Emission:
    """The local program of an op whose split factor `expands`, as a value of its own. Every operand has
    a name of its own, also where the op reads one tensor twice."""
    shapes = zip(local_inputs, call.inputs, strict=True)
    metas = {OPERAND.format(i): TensorMeta(shape, meta.dtype) for i, (shape, meta) in enumerate(shapes)}
    counter = iter(range(1 << 30))
    emitter = LocalEmitter(mesh, metas, lambda hint: f"{hint}_{next(counter)}")
    feed = iter(range(len(local_inputs)))
    arguments = map_references(localize(call, local_inputs, local_outputs), lambda _: Ref(OPERAND.format(next(feed))))
    args, kwargs = arguments
    results = expand(emitter, call, args, kwargs, dict(splits), local_outputs)
    return Emission(tuple(emitter.instructions), metas, tuple(r.name if r is not None else None for r in results))
