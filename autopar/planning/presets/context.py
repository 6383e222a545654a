"""What presets read off a model: where batch, sequence, classes and heads travel, and which values are weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from autopar.extensions import unknown
from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Split, periods_of
from autopar.passes.blocks.block import Blocks, ParallelBlock
from autopar.passes.space.choices import AxisChoice
from autopar.passes.space.reached import Reached, reached
from autopar.passes.space.sites import Site
from autopar.passes.space.space import Space
from autopar.planning.options import unique_sites
from autopar.planning.provenance import samples

Starts = Callable[["Context", int], Iterator[tuple[str, Split]]]
"""Roots with splits over so many ranks."""


@dataclass(frozen=True)
class Context:
    """A space, its blocks, and where batch, sequence, classes and heads travel in it."""

    space: Space
    blocks: Blocks

    @cached_property
    def sites(self) -> dict[str, Site]:
        return unique_sites(self.space)

    @cached_property
    def parameters(self) -> dict[str, str]:
        """Root -> parameter, for one copy of a repeated layer."""
        names = {value: name for name, value in self.space.graph.parameters.items()}
        return {name: names[name] for name, site in self.sites.items() if site.kind == "parameter"}

    def parameter_of(self, root: str) -> str:
        """The parameter that a root is, or that was cast to it; "" of others."""
        maker = self.making[root]
        while maker.kind == "op" and len(maker.reads) == 1:
            maker = self.making[maker.reads[0].alias.root]
        return self.parameters.get(maker.name, "")

    @cached_property
    def inputs(self) -> list[Site]:
        return [site for site in self.sites.values() if site.kind == "input" and site.meta and site.meta.shape]

    @cached_property
    def batch(self) -> int:
        return samples(site.meta.shape for site in self.inputs if site.meta)

    @cached_property
    def sequence(self) -> int:
        lengths = [site.meta.shape[1] for site in self.inputs if site.meta and _has_sequence(site.meta)]
        return lengths[0] if lengths else 0

    def digits(self, axis: int, what: str | Starts) -> Reached:
        """Where the "batch", "sequence", "class", "heads" or "feature" digit travels on an axis, or those of other
        roots."""
        key = (self.space.mesh[axis], what)
        if key not in self._digits:
            ranks = key[0]
            starts = what if callable(what) else DIGITS.get(what)
            if starts is None:
                raise ValueError(unknown("digit", what, tuple(DIGITS)))
            self._digits[key] = reached(self.space, ranks, list(starts(self, ranks)))
        return self._digits[key]

    @cached_property
    def _digits(self) -> dict[tuple[int, str | Starts], Reached]:
        return {}

    def _rows(self, ranks: int, what: str) -> Iterator[tuple[str, Split]]:
        dim, size = (0, self.batch) if what == "batch" else (1, self.sequence)
        for site in self.inputs:
            assert site.meta is not None
            if (dim == 0 or _has_sequence(site.meta)) and site.meta.shape[dim] == size:
                yield from ((site.name, Split(dim, p)) for p in periods_of(size, ranks, self.space.mesh))

    def _classes(self, ranks: int) -> Iterator[tuple[str, Split]]:
        for site in self.sites.values():
            for number, factor in enumerate(site.rule.factors if site.rule else ()):
                if not (factor.expands and factor.contiguous and _points_into(site, number)):
                    continue
                assert site.rule is not None
                periods = factor.periods(ranks, self.space.mesh)
                read = zip(site.reads, site.rule.inputs, strict=True)
                named = [(r.alias.root, dims) for r, dims in read if not r.alias.steps]
                for name, dims in (*named, *zip(site.makes, site.rule.outputs, strict=True)):
                    for dim, carried in enumerate(dims):
                        if name and carried == number:
                            yield from ((name, Split(dim, period)) for period in periods)

    def _heads(self, ranks: int) -> Iterator[tuple[str, Split]]:
        """Dims, except for rows, that both operands of a product of two activations share with its result."""
        batch = self.digits(self.space.mesh.index(ranks), "batch")
        for site in self.sites.values():
            rule = site.rule
            if rule is None or not rule.flops or site.backward or len(rule.inputs) < 2 or self.weights_of(site):
                continue
            rows = set(batch.choices(site))
            for choice in site.choices[ranks]:
                if not choice.splits or choice in rows:
                    continue
                if all(choice.factor in dims for dims in (*rule.inputs[:2], rule.outputs[0])):
                    for split in rule.input_splits(0, choice.factor, choice.period):
                        yield from site.reads[0].alias.of_root(split, ranks)

    def _features(self, ranks: int) -> Iterator[tuple[str, Split]]:
        """Rows and columns of weights, and the dims of activations that products with weights produce."""
        for site in self.sites.values():
            rule = site.rule
            if rule is None or site.backward:
                continue
            carried = {factor for position in self.weights_of(site) for factor in rule.inputs[position]}
            for choice in site.choices[ranks]:
                number, period = choice.factor, choice.period
                if not choice.splits or number not in carried:
                    continue
                for position, read in enumerate(site.reads):
                    for part in rule.input_splits(position, number, period):
                        yield from read.alias.of_root(part, ranks)
                for position, name in enumerate(site.makes):
                    yield from ((name, part) for part in rule.output_splits(position, number, period) if name)

    def features(self, site: Site, axis: int) -> list[AxisChoice]:
        """The choices of an operator that split dims of weights: hidden sizes, heads, channels, classes."""
        offered, rows = site.choices[self.space.mesh[axis]], self.rows(site, axis)
        return [c for c in self.digits(axis, "feature").choices(site) if c in offered and c not in rows]

    def rows(self, site: Site, axis: int) -> set[AxisChoice]:
        """The choices of an operator that split the batch or the sequence."""
        return {*self.digits(axis, "batch").choices(site), *self.digits(axis, "sequence").choices(site)}

    def splits(self, name: str, axis: int, what: str) -> list[AxisChoice]:
        """The splits of a root by the "batch" (or other) digit, as choices of a stored value."""
        return [AxisChoice("S", s.dim, s.period) for s in self.digits(axis, what).splits.get(name, {})]

    def parameters_of(self, site: Site) -> list[int]:
        """Operands of an operator that are parameters of two dims or more."""
        makers = [self.sites.get(read.alias.root) for read in site.reads]
        return [position for position, maker in enumerate(makers) if maker is not None and _is_matrix(maker)]

    def weights_of(self, site: Site) -> list[int]:
        """Operands of an operator that are such parameters, or casts of them."""
        return [position for position, read in enumerate(site.reads) if self._is_weight(read.alias.root)]

    def _is_weight(self, root: str) -> bool:
        maker = self.making.get(root)
        if maker is None:
            return False
        if maker.kind == "op":
            return _keeps_shape(maker) and len(maker.reads) == 1 and self._is_weight(maker.reads[0].alias.root)
        return _is_matrix(maker)

    @cached_property
    def making(self) -> dict[str, Site]:
        """Root -> the site that makes it."""
        return {name: site for site in self.sites.values() for name in site.makes if name and site.kind != "shared"}

    @cached_property
    def weight_gradients(self) -> frozenset[str]:
        """Roots that are gradients of parameters of two dims or more, or that add up or cast to one."""
        gradients: set[str] = set()
        waiting = [read.alias.root for site in self.sites.values() if _is_matrix(site) for read in site.reads]
        while waiting:
            root = waiting.pop()
            maker = self.making.get(root)
            if root in gradients or maker is None or maker.kind != "op":
                continue
            gradients.add(root)
            if _keeps_shape(maker):
                waiting += [read.alias.root for read in maker.reads]
        return frozenset(gradients)

    def is_weighted(self, site: Site) -> bool:
        """Whether an operator depends on a parameter or on an input of numbers: positions and masks do not."""
        return site.node is not None and any(name in self._weighted for name in site.node.inputs)

    @cached_property
    def _weighted(self) -> frozenset[str]:
        graph = self.space.graph
        weighted = {
            value.name
            for value in graph.inputs
            if value.role in ("parameter", "tangent")
            or (value.role == "input" and graph.metas[value.name].dtype.is_floating_point)
        }
        for node in self.space.graph.nodes:
            if any(name in weighted for name in node.inputs):
                weighted.update(name for name in node.outputs if name)
        return frozenset(weighted)

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


def _is_matrix(site: Site) -> bool:
    """Whether a site is a parameter of two dims or more."""
    return site.kind == "parameter" and site.meta is not None and len(site.meta.shape) > 1


def _has_sequence(meta: TensorMeta) -> bool:
    """Tokens [batch, sequence], or [batch, sequence, features]."""
    return len(meta.shape) == 3 or (len(meta.shape) == 2 and not meta.dtype.is_floating_point)


def _points_into(site: Site, factor: int) -> bool:
    """Whether an operand of integers, such as tokens or labels, indexes a factor."""
    assert site.rule is not None and site.call is not None
    operands = zip(site.rule.inputs, site.call.inputs, strict=True)
    return any(factor not in dims and not meta.dtype.is_floating_point for dims, meta in operands)


def _keeps_shape(site: Site) -> bool:
    """Whether an operator works element by element: a cast, an add."""
    call, rule = site.call, site.rule
    if call is None or rule is None or rule.flops or len(call.outputs) != 1 or call.outputs[0] is None:
        return False
    return all(meta.numel == call.outputs[0].numel for meta in call.inputs)


DIGITS: Mapping[str, Starts] = {
    "batch": partial(Context._rows, what="batch"),
    "sequence": partial(Context._rows, what="sequence"),
    "class": Context._classes,
    "heads": Context._heads,
    "feature": Context._features,
}
"""What travels, by name."""
