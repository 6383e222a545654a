"""Builds rules from named dims: what the table's lines mean.

A template names the factor of each dim of each operand and result, einsum-like:

    "m k, k n -> m n"           a matrix product
    "v d, *i -> *i d"           `*i`: any number of dims, the same for every operand that has it
    "b h q d!, b h k! d!"       `!`: not split
    "...b h q k!"               may come with fewer leading dims, or size 1, and is broadcast

Operands stand for the tensor arguments of the op's schema, in its order; those that a call does not
give drop out. A dim of size 1 carries nothing.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from autopar.ir.graph import TensorMeta, parameters, references

from .rule import Call, Dims, Factor, OpRule

Name = str | tuple[str, int] | None
"""A factor, a factor with a scale (see `OpRule`), or None: not split."""

Named = Sequence[Name]
"""One name for each dim of a tensor."""

Linear = tuple[tuple[int, ...], ...]


def assemble(
    call: Call,
    inputs: Sequence[Named],
    outputs: Sequence[Named],
    *,
    linear: Linear = (),
    sizes: Mapping[str, int] | None = None,
    reductions: Mapping[str, tuple[str, ...]] | None = None,
    expands: Collection[str] = (),
    contiguous: Collection[str] = (),
    least: Mapping[str, int] | None = None,
    even: Collection[str] = (),
    uneven: Collection[str] = (),
    padding: Mapping[tuple[int, str], float] | None = None,
    **facts: Any,
) -> OpRule:
    """The rule with these names on the dims of the call's operands and results.

    A factor's size is the size of its dims by their scale, or `sizes[name]` where those differ. Dims that
    differ without an entry there are not split. An output without an input's factor is Partial(sum) in
    it, unless `reductions[name]` says otherwise, output by output. `facts` are fields of `OpRule` without
    names: `flops`, `inside_bytes`, `contraction`, `moves_nothing`, `elementwise`.
    """
    sizes = sizes or {}
    counts: dict[str, int] = {}
    longer: set[str] = set()
    given = list(zip(outputs, call.outputs, strict=True)) + list(zip(inputs, call.inputs, strict=True))
    for names, meta in given:
        if meta is None:
            continue
        assert len(names) == len(meta.shape), f"{call.node}: {names} for {meta}"
        for (name, scale), size in zip(map(_scaled, names), meta.shape, strict=True):
            if name is not None and size != 1:
                count = size // scale if size % scale == 0 else 1
                if counts.setdefault(name, sizes.get(name, count)) != count:
                    longer.add(name)
                    if name not in sizes:
                        counts[name] = 1
    indices = {name: i for i, name in enumerate(n for n, size in counts.items() if size > 1)}

    def dims(names: Named, meta: TensorMeta | None) -> Dims:
        if meta is None:
            return ()
        return tuple(
            indices.get(name) if name is not None and size != 1 else None
            for (name, _), size in zip(map(_scaled, names), meta.shape, strict=True)
        )

    def scales(several: Sequence[Named], metas: Sequence[TensorMeta | None]) -> tuple[tuple[int, ...], ...]:
        of = tuple(tuple(_scaled(n)[1] for n in names) if m else () for names, m in zip(several, metas, strict=True))
        return of if any(scale != 1 for each in of for scale in each) else ()

    input_dims = tuple(map(dims, inputs, call.inputs))
    output_dims = tuple(map(dims, outputs, call.outputs))
    factors = []
    for name, i in indices.items():
        read = any(i in carried for carried in input_dims)
        unpadded = name in even or name in longer or (name in expands and name not in uneven)
        stated = (reductions or {}).get(name, ("sum" if read else "",) * len(output_dims))
        reduced = tuple("" if i in carried else r for carried, r in zip(output_dims, stated, strict=True))
        factors.append(
            Factor(
                name, counts[name], reduced, expands=name in expands, contiguous=name in contiguous,
                least=(least or {}).get(name, 1),
                even=unpadded,
            )
        )  # fmt: skip
    return OpRule(
        factors=tuple(factors),
        inputs=input_dims,
        outputs=output_dims,
        linear=_summable(call, linear),
        padding=tuple((i, indices[name], value) for (i, name), value in (padding or {}).items() if name in indices),
        input_scales=scales(inputs, call.inputs),
        output_scales=scales(outputs, call.outputs),
        **facts,
    )


def unsplit(call: Call) -> OpRule:
    """The rule without factors."""
    inputs, outputs = ([(None,) * len(meta.shape) if meta else () for meta in m] for m in (call.inputs, call.outputs))
    return assemble(call, inputs, outputs)


def _scaled(name: Name) -> tuple[str | None, int]:
    return name if isinstance(name, tuple) else (name, 1)


def _summable(call: Call, linear: Linear) -> Linear:
    """The sets that can be Partial(sum) in this call: sets of numbers, not truth values, that hold all uses of a tensor
    or none (x * x is not linear in x)."""
    if not linear or any(meta is not None and meta.dtype is torch.bool for meta in call.outputs):
        return ()
    names = call.node.inputs
    kept = []
    for operands in linear:
        inside = {names[i] for i in operands}
        outside = {name for i, name in enumerate(names) if i not in operands}
        if operands and not inside & outside and not any(call.inputs[i].dtype is torch.bool for i in operands):
            kept.append(operands)
    return tuple(kept)


def roles(call: Call) -> tuple[str, ...]:
    """For each tensor operand, the name of the argument that it comes in."""
    node = call.node
    positional = zip((p.name for p in parameters(node.op)), node.args, strict=False)
    return tuple(name for name, value in (*positional, *node.kwargs) for _ in references(value))


@cache
def tensor_arguments(op: str) -> tuple[str, ...]:
    """Names of the tensor arguments of an op's schema."""
    return tuple(p.name for p in parameters(op) if "Tensor" in p.type)


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a template: names left and right of its variadic part, if it has one."""

    left: tuple[str | None, ...]
    right: tuple[str | None, ...] = ()
    variadic: str | None = None
    unsplit: bool = False
    broadcast: bool = False

    def names(self, rank: int) -> Named:
        """The names of the dims of a tensor of this rank."""
        if self.variadic is None:
            return self.left[len(self.left) - rank :] if self.broadcast else self.left
        middle = range(rank - len(self.left) - len(self.right))
        return (*self.left, *((None if self.unsplit else f"{self.variadic}{i}") for i in middle), *self.right)


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    def operands(self, call: Call) -> tuple[Operand, ...]:
        """The template's operand for each tensor operand of the call. What is not a tensor in the
        schema (a size that flows through the graph) has no dims."""
        order = tensor_arguments(call.node.op)
        return tuple(self.inputs[order.index(role)] if role in order else Operand(()) for role in roles(call))

    def bind(self, call: Call) -> tuple[list[Named], list[Named]]:
        """Names for the dims of the call's operands and results."""
        inputs = [o.names(len(m.shape)) for o, m in zip(self.operands(call), call.inputs, strict=True)]
        outputs = [o.names(len(m.shape)) if m else () for o, m in zip(self.outputs, call.outputs, strict=True)]
        return inputs, outputs

    def positions(self, call: Call, linear: Linear) -> Linear:
        """Sets of template operands as sets of operands of the call; those with one absent drop out."""
        order = tensor_arguments(call.node.op)
        where = {order.index(role): i for i, role in enumerate(roles(call)) if role in order}
        return tuple(tuple(where[i] for i in operands) for operands in linear if all(i in where for i in operands))


def parse(text: str) -> Template:
    """Read a template."""
    inputs, outputs = text.split("->")
    return Template(tuple(map(_operand, inputs.split(","))), tuple(map(_operand, outputs.split(","))))


def _operand(text: str) -> Operand:
    text = text.strip()
    broadcast = text.startswith("...")
    tokens = text.removeprefix("...").split()
    names = tuple(None if t.endswith("!") or t == "1" else t for t in tokens)
    for i, token in enumerate(tokens):
        if token.startswith("*"):
            return Operand(names[:i], names[i + 1 :], token[1:], token.endswith("!"), broadcast)
    return Operand(names, broadcast=broadcast)


def contraction_flops(inputs: Sequence[Named], outputs: Sequence[Named], call: Call) -> float:
    """A multiplication and an addition for every combination of indices of the named dims."""
    sizes: dict[str, int] = {}
    for names, meta in (*zip(inputs, call.inputs, strict=True), *zip(outputs, call.outputs, strict=True)):
        if meta is not None:
            for name, size in zip(names, meta.shape, strict=True):
                label, scale = _scaled(name)
                if label is not None:
                    sizes[label] = max(size // scale, sizes.get(label, 1))
    return 2.0 * math.prod(sizes.values())
