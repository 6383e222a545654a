"""Presets: the plans that people write by hand, as restrictions of the search space.

A preset says, for every site, which of its options it may take; the solver picks among what is left,
so a preset is never a second implementation of anything. Axes named like "tp", "tensor" or "model"
carry tensor parallelism; on other axes a tensor-parallel preset is data parallel. On a mesh without
such a name the last axis carries it.

- `ddp`: every operator that can split the batch does; parameters are replicated.
- `fsdp`: the same, with parameters sharded at rest, gathered before use, and again in backward.
- `megatron`: every contraction with a weight splits a dim of it, attention its heads, embedding and
  head the vocabulary; the residual stream is replicated.
- `megatron_sp`: the same, with norms and residual stream split by sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

from .layout import Split, periods_of
from .passes.blocks import Blocks, ParallelBlock
from .passes.problem import Allowed
from .passes.strategies import KEEP, REGATHER, WHOLE, AxisChoice, Reached, Site, SiteChoice, Space, reached
from .search import unique_sites

TENSOR_AXIS_NAMES = ("tp", "tensor", "model", "mp")


@dataclass(frozen=True)
class _Context:
    """A space, its blocks, and where batch, sequence and classes travel in it."""

    space: Space
    blocks: Blocks

    @cached_property
    def sites(self) -> dict[str, Site]:
        return unique_sites(self.space)

    @cached_property
    def inputs(self) -> list[Site]:
        return [site for site in self.sites.values() if site.kind == "input" and site.meta and site.meta.shape]

    @cached_property
    def batch(self) -> int:
        return self.inputs[0].meta.shape[0] if self.inputs and self.inputs[0].meta else 0

    @cached_property
    def sequence(self) -> int:
        lengths = [site.meta.shape[1] for site in self.inputs if site.meta and len(site.meta.shape) > 1]
        return lengths[0] if lengths else 0

    def digits(self, axis: int, what: str) -> Reached:
        """Where the "batch", "sequence" or "class" digit travels on an axis."""
        key = (self.space.mesh[axis], what)
        if key not in self._digits:
            self._digits[key] = reached(self.space, self.space.mesh[axis], self._starts(what, self.space.mesh[axis]))
        return self._digits[key]

    @cached_property
    def _digits(self) -> dict[tuple[int, str], Reached]:
        return {}

    def _starts(self, what: str, ranks: int) -> list[tuple[str, Split]]:
        starts: list[tuple[str, Split]] = []
        if what in ("batch", "sequence"):
            dim, size = (0, self.batch) if what == "batch" else (1, self.sequence)
            for site in self.inputs:
                assert site.meta is not None
                if dim < len(site.meta.shape) and site.meta.shape[dim] == size:
                    starts += [(site.name, Split(dim, p)) for p in periods_of(size, ranks, self.space.mesh)]
            return starts
        for site in self.sites.values():
            for number, factor in enumerate(site.rule.factors if site.rule else ()):
                if factor.expands and factor.contiguous and _points_into(site, number):
                    assert site.rule is not None
                    for read, dims in zip(site.reads, site.rule.inputs, strict=True):
                        starts += [
                            (read.alias.root, Split(dim, period))
                            for period in factor.periods(ranks, self.space.mesh)
                            for dim, carried in enumerate(dims)
                            if carried == number and not read.alias.steps
                        ]
                    for name, dims in zip(site.makes, site.rule.outputs, strict=True):
                        starts += [
                            (name, Split(dim, period))
                            for period in factor.periods(ranks, self.space.mesh)
                            for dim, carried in enumerate(dims)
                            if name and carried == number
                        ]
        return starts

    def parameters_of(self, site: Site) -> list[int]:
        """Operands of an operator that are parameters of two dims or more."""
        found = []
        for position, read in enumerate(site.reads):
            maker = self.sites.get(read.alias.root)
            if maker is not None and maker.kind == "parameter" and maker.meta and len(maker.meta.shape) > 1:
                found.append(position)
        return found

    def feeds_contraction(self, parameter: Site) -> bool:
        return parameter.name in self._contracted

    @cached_property
    def _contracted(self) -> set[str]:
        return {
            read.alias.root
            for site in self.sites.values()
            if site.rule is not None and site.rule.contraction
            for read in site.reads
        }

    def in_block(self, site: Site) -> bool:
        index = self.space.graph.producer.get(site.name)
        return index is not None and isinstance(self.blocks.home.get(index), ParallelBlock)


def _linear(site: Site, ranks: int) -> tuple[AxisChoice, ...]:
    return tuple(c for c in site.choices[ranks] if c[0] == "P")


def _data(context: _Context, site: Site, axis: int, *, shard: bool) -> tuple[AxisChoice, ...]:
    """Data parallel on one axis, with parameters sharded at rest or not."""
    space, ranks = context.space, context.space.mesh[axis]
    batch = context.digits(axis, "batch")
    if site.kind == "op":
        return (*(batch.choices(site) or (WHOLE,)), *_linear(site, ranks))
    if site.kind == "parameter":
        assert site.meta is not None
        ways = math.prod(space.mesh)
        shape = site.meta.shape
        # a dim that all ranks together divide, or else the first one, unevenly
        even = [dim for dim, size in enumerate(shape) if size % ways == 0 and size > 1]
        for dim in (*even, *range(len(shape))) if shard else ():
            choices = tuple(c for c in site.choices[ranks] if c[0] == "S" and c[1] == dim)
            if choices:
                return choices
        return (WHOLE,)
    if site.kind == "output":
        return site.choices[ranks]
    root = site.makes[0]
    splits = [("S", s.dim, s.period) for s in batch.splits.get(root, {})]
    kept = tuple(c for c in splits if c in site.choices[ranks])
    if site.kind == "border":
        return kept or tuple(c for c in site.choices[ranks] if c[0] != "S")
    return kept or (WHOLE,)


def _tensor(context: _Context, site: Site, axis: int, *, by_sequence: bool) -> tuple[AxisChoice, ...]:
    """Megatron on one axis."""
    ranks = context.space.mesh[axis]
    choices = site.choices[ranks]
    sequence, classes = context.digits(axis, "sequence"), context.digits(axis, "class")
    if site.kind == "op" and site.rule is not None:
        by_class = tuple(c for c in classes.choices(site) if c in choices)
        if by_class:
            return (*by_class, *_linear(site, ranks))
        weights = context.parameters_of(site)
        if context.in_block(site) or weights:
            rows = {*context.digits(axis, "batch").choices(site), *sequence.choices(site)}
            allowed = [c for c in choices if c not in rows and c[0] != "X"]
            if weights and site.rule.flops:
                allowed = [c for c in allowed if c[0] == "S" and _splits_weight(site, weights, c[1])] or [WHOLE]
            return tuple(allowed)
        along = tuple(c for c in sequence.choices(site) if c in choices) if by_sequence else ()
        return (*(along or (WHOLE,)), *_linear(site, ranks))
    if site.kind == "border":
        splits = [("S", s.dim, s.period) for s in sequence.splits.get(site.name, {})] if by_sequence else []
        return tuple(c for c in splits if c in choices) or (WHOLE,)
    if site.kind == "parameter":
        by_class = tuple(c for c in choices if c[0] == "S" and Split(c[1], c[2]) in classes.splits.get(site.name, {}))
        if by_class:
            return by_class
        # vectors are replicated, but for the biases of contractions
        assert site.meta is not None
        return choices if len(site.meta.shape) > 1 or context.feeds_contraction(site) else (WHOLE,)
    return choices if site.kind == "output" else (WHOLE,)


def _points_into(site: Site, factor: int) -> bool:
    """Whether an operand of integers says which of a factor's indices are meant: tokens, labels."""
    assert site.rule is not None and site.call is not None
    operands = zip(site.rule.inputs, site.call.inputs, strict=True)
    return any(factor not in dims and not meta.dtype.is_floating_point for dims, meta in operands)


def _splits_weight(site: Site, weights: list[int], factor: int) -> bool:
    """Whether a factor lies in a weight operand."""
    assert site.rule is not None
    return any(factor in site.rule.inputs[position] for position in weights)


AxisRule = Callable[[_Context, Site, int], tuple[AxisChoice, ...]]

PRESETS: Mapping[str, tuple[AxisRule, AxisRule | None]] = {
    "ddp": (partial(_data, shard=False), None),
    "fsdp": (partial(_data, shard=True), None),
    "megatron": (partial(_data, shard=False), partial(_tensor, by_sequence=False)),
    "megatron_sp": (partial(_data, shard=False), partial(_tensor, by_sequence=True)),
}
"""Name -> what a site may choose on a data axis, and on the tensor axis if it has one."""


def preset(space: Space, blocks: Blocks, name: str) -> Allowed:
    """The options that a preset leaves to every site.

    Raises ValueError for a preset that is not known, and where the model has no batch to split.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    context = _Context(space, blocks)
    on_data, on_tensor = PRESETS[name]
    tensor_axis = _tensor_axis(space) if on_tensor is not None else None
    ways = math.prod(n for a, n in enumerate(space.mesh) if a != tensor_axis)
    if ways > 1 and context.batch < 2:
        axes = ", ".join(f"{space.axes[a]}={space.mesh[a]}" for a in range(len(space.mesh)) if a != tensor_axis)
        raise ValueError(
            f"preset {name!r} splits the batch by {ways} ({axes}), and the batch is {context.batch}: give a batch of "
            f"two or more, or a mesh without data axes"
        )
    allowed: dict[str, list[SiteChoice]] = {}
    for site_name, site in context.sites.items():
        per_axis = [
            (WHOLE,)
            if ranks == 1
            else on_tensor(context, site, axis)
            if on_tensor is not None and axis == tensor_axis
            else on_data(context, site, axis)
            for axis, ranks in enumerate(space.mesh)
        ]
        suffix = ((REGATHER if name == "fsdp" else KEEP),) if site.kind == "parameter" else ()
        legal = [(*c, *suffix) for c in product(*per_axis)]
        legal = [c for c in legal if space.option(site, c) is not None]
        if all(any(part[0] == "P" for part in c) for c in legal):
            # a dim that is split unevenly may not be seen through a view: there the work is whole
            wider = [tuple(dict.fromkeys((*choices, WHOLE))) for choices in per_axis]
            legal = [(*c, *suffix) for c in product(*wider)]
            legal = [c for c in legal if space.option(site, c) is not None]
        allowed[site_name] = legal
    return allowed


def _tensor_axis(space: Space) -> int:
    """The axis with a tensor-parallel name, or the last of more than one rank."""
    named = [a for a, name in enumerate(space.axes) if name in TENSOR_AXIS_NAMES]
    wide = [a for a, n in enumerate(space.mesh) if n > 1] or [0]
    return named[0] if named else wide[-1]
