"""A lower bound on the step of every plan in a search space: how long a rank computes at least.

A rank's own operators run one after the other on one stream, and the optimizer comes last. Whatever overlaps with them,
a step takes at least their sum. So no step is shorter than the sum, over all sites, of the least seconds of any option
of the site. A layer counts once for each copy, and an operator once for each micro-batch. The proof has four parts:

- *Every operator runs.* Codegen writes each operator of the graph once or more often: recomputing adds to it. Values
  that are made where they are read count as nothing. What several micro-batches may share counts once, or not at all
  (`_Repetition`).
- *A rank's share.* An operator that is split over r ranks in all along a dim of n has at least ceil(n / r) indices of
  it. So the least over which axis splits what, legal or not, is below all options that are. A period decides which
  indices a rank has, and not how many, but for padding, which adds to them.
- *Expansions.* Where an operator does not run on shards as it is, its local program is priced, without its collectives
  and without what depends on no operand, which codegen writes once for all. One choice without padding stands for all
  choices that split the same dims over as many ranks, as their local shapes are the same.
- *Lowerings* of this package run operators as they are, or in parts. The device's curves are changed so that parts
  together take no less than the whole (`without_falling_efficiency`).

Communication, stalls and local copies come on top. Measured operators follow no curve: for them there is no bound.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, permutations, product
from typing import Any, TypeVar

from autopar.cluster.machine import Device
from autopar.cost.roofline import FREE
from autopar.ir.graph import CAST, WAIT, TensorMeta, schema
from autopar.ir.layout import padded_shape
from autopar.ir.rewrite import input_and_output_metas
from autopar.ops.emit import Emission, expands, local_program
from autopar.ops.kinds import ADDING, SUMMABLE
from autopar.ops.rule import Call, Dims, OpRule, call_of
from autopar.ops.rules import rule_of
from autopar.passes.space.choices import AxisChoice, SiteChoice
from autopar.passes.space.operator_layouts import operator_layouts, splits_of
from autopar.passes.space.sites import Region, Site
from autopar.passes.space.space import Space
from autopar.solve.effort import EFFORT, Effort

T = TypeVar("T")

Ranks = Mapping[int, int]
"""Factor of an operator, or dim of a tensor -> over how many ranks it is split."""


def least_step_seconds(space: Space, effort: Effort = EFFORT) -> float:
    """Seconds that no step of `space` undercuts; 0 if its operators are measured."""
    if space.cluster.device.operators is not None:
        return 0.0
    counts = (1, *(repeat.count for repeat in space.repeats))
    of_sites = least_seconds_of_sites(space, effort)
    return math.fsum(
        count * of_sites[site.key]
        for region, count in zip(space.regions(), counts, strict=True)
        for site in region.sites.values()
    )


def least_seconds_of_sites(space: Space, effort: Effort = EFFORT) -> dict[str, float]:
    """Key of a site -> seconds that what a rank computes for it in a step does not undercut, in each copy of its
    layer."""
    device, repetition = without_falling_efficiency(space.cluster.device), _Repetition.of(space)
    least = _Least(space, device, effort.bound_options)
    sites = [site for region in space.regions() for site in region.sites.values()]
    return {site.key: repetition.times(site) * least.seconds(site) for site in sites}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repetition:
    """How often operators run in a step of several micro-batches, by the names of their sites: those that parameters
    alone lead to may run `once`, where what forward gathers is kept; those in the `tail` of backward, which adds up
    gradients, run once, and on other dtypes where these are reduced in one of their own."""

    micro_batches: int
    once: frozenset[str]
    tail: frozenset[str]

    @staticmethod
    def of(space: Space) -> "_Repetition":
        once = _of_parameters(space) if space.holds and space.micro_batches > 1 else frozenset()
        tails = map(_tail, space.regions()) if space.has_own_reductions else ()
        return _Repetition(micro_batches=space.micro_batches, once=once, tail=frozenset().union(*tails))

    def times(self, site: Site) -> int:
        if site.kind == "parameter":
            return 1
        return 0 if site.name in self.tail else 1 if site.name in self.once else self.micro_batches


def _of_parameters(space: Space) -> frozenset[str]:
    """Operators of forward that parameters alone lead to, in some copy of their layer (`passes.lower.hold`)."""
    graph = space.graph
    known = set(graph.parameters.values())
    for node in graph.nodes[: graph.first_backward]:
        if node.inputs and known.issuperset(node.inputs):
            known.update(filter(None, node.outputs))
    firsts = {
        graph.nodes[copy].name: graph.nodes[copies[0]].name
        for repeat in space.repeats
        for copies in zip(*repeat.copies, strict=True)
        for copy in copies
    }
    return frozenset(firsts.get(name, name) for name in known)


def _tail(region: Region) -> frozenset[str]:
    """Linear operators of backward that nothing but gradients of parameters may depend on
    (`passes.lower.accumulate`)."""
    readers: dict[str, list[Site]] = {}
    for site in region.sites.values():
        for read in site.reads:
            readers.setdefault(read.alias.root, []).append(site)
    tail: set[str] = set()
    for site in reversed(list(region.sites.values())):
        if site.node is None or not site.backward or site.node.op not in SUMMABLE:
            continue
        behind = [reader for root in site.makes if root for reader in readers.get(root, ())]
        if all(reader.node is None or reader.name in tail for reader in behind):
            tail.add(site.name)
    return frozenset(tail)


@dataclass(frozen=True, slots=True)
class _Least:
    """The least seconds of sites, cached for those that are alike. A site with more than `most` options that expand is
    not enumerated."""

    space: Space
    device: Device
    most: int
    cache: dict[Any, float] = field(default_factory=dict)

    def seconds(self, site: Site) -> float:
        """Of an operator in one micro-batch, of a parameter in a step; 0 for what a rank computes nothing of."""
        if site.kind == "parameter":
            used = self.space.metas[site.makes[0]].dtype
            key: Any = site.meta, used, bool(site.reads), self._choices(site)
            return self._cached(key, lambda: self._parameter(site))
        if site.kind != "op" or site.made:
            return 0.0
        return self._cached((site.form, site.zeros, self._choices(site)), lambda: self._operator(site))

    def _cached(self, key: Any, compute: Callable[[], float]) -> float:
        if key not in self.cache:
            self.cache[key] = compute()
        return self.cache[key]

    def _choices(self, site: Site) -> tuple[tuple[AxisChoice, ...], ...]:
        return tuple(site.choices[ranks] for ranks in self.space.mesh)

    # --- parameters

    def _parameter(self, site: Site) -> float:
        """The optimizer's step, and the casts that a step cannot do without."""
        dims = {n: tuple({c.factor for c in site.choices[n] if c.splits}) or (None,) for n in self.space.mesh}
        assert site.meta is not None
        carried = tuple(range(len(site.meta.shape)))
        return min(self._updated(site, _share(site.meta, carried, ranks)) for ranks in _shares(self.space.mesh, dims))

    def _updated(self, site: Site, local: TensorMeta) -> float:
        space, device, optimizer = self.space, self.device, self.space.optimizer
        used = TensorMeta(local.shape, space.metas[site.makes[0]].dtype)
        seconds = 0.0
        if site.reads:
            seconds += optimizer.seconds(device, [local])
        if used.dtype != local.dtype:
            times = 1 if space.holds else space.micro_batches
            seconds += times * device.operator_seconds(CAST, [local], [used], 0.0)
            if site.reads and space.reduced_in is None:
                seconds += device.operator_seconds(CAST, [used], [local], 0.0)
        return seconds

    # --- operators

    def _operator(self, site: Site) -> float:
        rule, call = site.rule, site.call
        assert call is not None
        if rule is None:
            return self._replicated(call)
        if any(factor.of and factor.offered for factor in rule.factors):
            return self._balanced(call, rule)
        seconds = self._plain(site, call, rule)
        for least in self._expanded(site, call, rule):
            seconds = min(seconds, least)
        return seconds

    def _balanced(self, call: Call, rule: OpRule) -> float:
        """Of an op that may be split in more ways than are worth writing: its arithmetic, shared by all ranks."""
        least = [TensorMeta((), call.inputs[0].dtype)]
        return self._roofline(call, least, (), rule.flops / math.prod(self.space.mesh), 0.0)

    def _replicated(self, call: Call) -> float:
        """Of an op that runs in full. The result may be a view, where nothing says that it is none."""
        rule, results = rule_of(call), schema(call.node.op).returns
        if any(result.alias_info for result in results) or (rule is not None and rule.moves_nothing):
            return self.device.seconds_per_op
        return self._roofline(call, call.inputs, call.outputs, 0.0, 0.0)

    def _plain(self, site: Site, call: Call, rule: OpRule) -> float:
        """Of options in which the op runs on shards as it is."""
        if rule.moves_nothing:
            return self.device.seconds_per_op
        factors = {
            n: tuple({c.factor for c in site.choices[n] if c.splits and not rule.factors[c.factor].expands}) or (None,)
            for n in self.space.mesh
        }
        return min(self._on_shares(call, rule, ranks) for ranks in _shares(self.space.mesh, factors))

    def _on_shares(self, call: Call, rule: OpRule, ranks: Ranks) -> float:
        inputs = [_share(meta, dims, ranks) for meta, dims in zip(call.inputs, rule.inputs, strict=True)]
        outputs = [meta and _share(meta, dims, ranks) for meta, dims in zip(call.outputs, rule.outputs, strict=True)]
        sizes = ((rule.factors[factor].size, n) for factor, n in ranks.items())
        part = math.prod(-(-size // n) / size for size, n in sizes)
        return self._roofline(call, inputs, outputs, rule.flops * part, rule.inside_bytes * part)

    def _roofline(
        self,
        call: Call,
        inputs: Sequence[TensorMeta],
        outputs: Iterable[TensorMeta | None],
        flops: float,
        inside_bytes: float,
    ) -> float:
        results = [meta for meta in outputs if meta is not None]
        return self.device.operator_seconds(call.node.op, inputs, results, flops, inside_bytes)

    def _expanded(self, site: Site, call: Call, rule: OpRule) -> Iterator[float]:
        """Of options in which a local program stands for the op."""
        mesh, left = self.space.mesh, self.most
        for ways in _expanding(mesh, site.choices, rule):
            for choice in ways:
                left -= 1
                if left < 0:
                    yield 0.0
                    return
                layouts = operator_layouts(call, rule, choice, mesh)
                if layouts is None:
                    continue
                emission = local_program(call, rule, splits_of(rule, choice), *layouts, mesh, site.zeros)
                yield self._emitted(emission)
                metas = (*zip(call.inputs, layouts[0], strict=True), *zip(call.outputs, layouts[1], strict=True))
                if all(meta is None or padded_shape(meta.shape, layout) == meta.shape for meta, layout in metas):
                    break

    def _emitted(self, emission: Emission) -> float:
        """Of a local program's operators, as the timeline prices them."""
        fixed: set[str] = set()
        seconds = 0.0
        for instruction in emission.instructions:
            if instruction.collective or instruction.op == WAIT:
                continue
            if fixed.issuperset(instruction.inputs) and emission.results.count(instruction.name) == 0:
                fixed.update(instruction.outputs)
                continue
            call = call_of(instruction, emission.metas)
            rule = rule_of(call)
            if instruction.op in FREE:
                continue
            if rule is None or rule.moves_nothing:
                seconds += self.device.seconds_per_op
                continue
            metas = input_and_output_metas(instruction, emission.metas)
            seconds += self.device.operator_seconds(instruction.op, *metas, rule.flops, rule.inside_bytes)
        return seconds


def _share(meta: TensorMeta, carried: Dims, ranks: Ranks) -> TensorMeta:
    """A rank's least part of a tensor whose dims carry these factors."""
    dims = zip(meta.shape, carried, strict=True)
    return TensorMeta(tuple(-(-size // ranks.get(f, 1)) if f is not None else size for size, f in dims), meta.dtype)


def _ways(mesh: Sequence[int], on_axis: Mapping[int, Sequence[T]]) -> Iterator[list[tuple[int, tuple[T, ...]]]]:
    """What axes may take of what `on_axis` has for their sizes: each size with what its axes take, in any order."""
    sizes = Counter(mesh)
    for taken in product(*(combinations_with_replacement(on_axis[n], count) for n, count in sizes.items())):
        yield list(zip(sizes, taken, strict=True))


def _shares(mesh: Sequence[int], factors: Mapping[int, Sequence[int | None]]) -> Iterator[dict[int, int]]:
    for way in _ways(mesh, factors):
        ranks: dict[int, int] = {}
        for n, taken in way:
            for factor in taken:
                if factor is not None:
                    ranks[factor] = n * ranks.get(factor, 1)
        yield ranks


def _expanding(
    mesh: Sequence[int], choices: Mapping[int, Sequence[AxisChoice]], rule: OpRule
) -> Iterator[Iterator[SiteChoice]]:
    """Joint choices with which an op expands, those together that split the same factors over as many ranks. (A choice
    that takes partial sums works on what a replicated one does.)"""
    periods: dict[int, dict[tuple[str, int], list[AxisChoice]]] = {n: {} for n in mesh}
    for n, of_size in periods.items():
        for choice in choices[n]:
            if not choice.is_partial:
                of_size.setdefault((choice.kind, choice.factor), []).append(choice)
    for way in _ways(mesh, {n: tuple(of_size) for n, of_size in periods.items()}):
        alike = _joint(mesh, way, periods)
        if expands(rule, splits_of(rule, next(alike))):
            yield _joint(mesh, way, periods)


def _joint(
    mesh: Sequence[int],
    way: Sequence[tuple[int, tuple[tuple[str, int], ...]]],
    periods: Mapping[int, Mapping[tuple[str, int], Sequence[AxisChoice]]],
) -> Iterator[SiteChoice]:
    orders = (dict.fromkeys(permutations(taken)) for _, taken in way)
    for order in product(*orders):
        waiting = {n: iter(taken) for (n, _), taken in zip(way, order, strict=True)}
        yield from map(SiteChoice, product(*(periods[n][next(waiting[n])] for n in mesh)))


def without_falling_efficiency(device: Device) -> Device:
    """The device, no slower, and without what makes parts of an operator cheaper than the whole, or a larger one
    cheaper than a smaller one: efficiency never falls with size, and never rises faster than it. A product has the
    ratio of that which also adds, if it is smaller."""
    joined = {op: min(device.ratio(op), device.ratio(adds)) for op, adds in ADDING.items()}
    return replace(
        device,
        efficiency=_rising(device.efficiency),
        memory_efficiency=_rising(device.memory_curve),
        operator_ratios={**device.operator_ratios, **joined},
    )


def _rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    sizes, values = [size for size, _ in points], [value for _, value in points]
    for i in range(1, len(values)):
        values[i] = max(values[i], values[i - 1])
    for i in reversed(range(len(values) - 1)):
        values[i] = max(values[i], values[i + 1] * sizes[i] / sizes[i + 1])
    return tuple(zip(sizes, values, strict=True))
