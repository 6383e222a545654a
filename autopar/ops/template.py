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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import torch

from autopar.ir.graph import TensorMeta, parameters, references

from .rule import Call, Dims, Factor, OpRule

Name = str | tuple[str, int] | None
"""A factor, a factor with a scale (see `OpRule`), or None: not split."""

Named = Sequence[Name]
"""One name for each dim of a tensor."""

Linear = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """What is said of a named dim beside where it stands; all but `padding` and `size` are as in `Factor`.

    `size` is the factor's where dims of this name differ by more than their scale; without it, such dims are not split.
    `reductions` says for each result that lacks the dim what a split leaves, by default Partial(sum). A dim that
    `expands` is split evenly, unless `even` is False. `padding` says for operands, by number, with what to fill it.
    """

    size: int | None = None
    reductions: tuple[str, ...] | None = None
    expands: bool = False
    contiguous: bool = False
    least: int = 1
    even: bool | None = None
    padding: Mapping[int, float] = field(default_factory=dict)


PLAIN = Dim()

OWN_PART = Dim(expands=True, contiguous=True, even=False)
"""Each rank looks up what lies in its own part of such a dim."""


def assemble(
    call: Call,
    inputs: Sequence[Named],
    outputs: Sequence[Named],
    dims: Mapping[str, Dim] = MappingProxyType({}),
    linear: Linear = (),
) -> OpRule:
    """The rule with these names on the dims of the call's operands and results. `dims` holds what else is said of some
    of the names. A factor's size is the size of its dims by their scale."""
    counts: dict[str, int] = {}
    longer: set[str] = set()
    given = list(zip(outputs, call.outputs, strict=True)) + list(zip(inputs, call.inputs, strict=True))
    for names, meta in given:
        if meta is None:
            continue
        assert len(names) == len(meta.shape), f"{call.node}: {names} for {meta}"
        for (name, scale), size in zip(map(_scaled, names), meta.shape, strict=True):
            if name is not None and size != 1:
                stated = dims.get(name, PLAIN).size
                count = size // scale if size % scale == 0 else 1
                if counts.setdefault(name, count if stated is None else stated) != count:
                    longer.add(name)
                    if stated is None:
                        counts[name] = 1
    indices = {name: i for i, name in enumerate(n for n, size in counts.items() if size > 1)}

    def carried(names: Named, meta: TensorMeta | None) -> Dims:
        if meta is None:
            return ()
        return tuple(
            indices.get(name) if name is not None and size != 1 else None
            for (name, _), size in zip(map(_scaled, names), meta.shape, strict=True)
        )

    def scales(several: Sequence[Named], metas: Sequence[TensorMeta | None]) -> tuple[tuple[int, ...], ...]:
        of = tuple(tuple(_scaled(n)[1] for n in names) if m else () for names, m in zip(several, metas, strict=True))
        return of if any(scale != 1 for each in of for scale in each) else ()

    input_dims = tuple(map(carried, inputs, call.inputs))
    output_dims = tuple(map(carried, outputs, call.outputs))
    factors = []
    for name, i in indices.items():
        dim = dims.get(name, PLAIN)
        left = dim.reductions or (("sum" if any(i in of for of in input_dims) else "",) * len(output_dims))
        factors.append(
            Factor(
                name=name,
                size=counts[name],
                reductions=tuple("" if i in of else r for of, r in zip(output_dims, left, strict=True)),
                expands=dim.expands,
                contiguous=dim.contiguous,
                least=dim.least,
                even=name in longer or (dim.expands if dim.even is None else dim.even),
            )
        )
    return OpRule(
        factors=tuple(factors),
        inputs=input_dims,
        outputs=output_dims,
        linear=_summable(call, linear),
        padding=tuple((i, f, x) for name, f in indices.items() for i, x in dims.get(name, PLAIN).padding.items()),
        input_scales=scales(inputs, call.inputs),
        output_scales=scales(outputs, call.outputs),
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
