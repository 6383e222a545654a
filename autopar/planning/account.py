"""The account: the cost of an assignment, item by item.

The sum of the items is the solver's objective; the collectives listed are those that codegen writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from autopar.files.kinds import Count
from autopar.ir.layout import Layout, local_meta
from autopar.ir.program import COLLECTIVES
from autopar.passes.space.choices import KEEP, REGATHER, Policy
from autopar.passes.space.items import (
    ACTIVATIONS,
    COMPUTE,
    COPIES,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    ROUTE,
    STATES,
    Item,
    operand_layouts,
    operator_items,
    parameter_items,
)
from autopar.passes.space.problem import Assignment, Decisions
from autopar.passes.space.sites import Option, Recomputed, Region, Site
from autopar.passes.space.space import Space
from autopar.passes.space.tensors import root_tensors, tensor_items

from .texts import layer_of

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """`count` collectives of one kind on one mesh axis. `bytes` adds up, for each, the larger of a rank's input and
    output."""

    kind: str
    axis: str
    count: Count
    bytes: Count
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Seconds of one step and bytes of one rank.

    `compute_seconds` are the local operators, `copy_seconds` local slices and the reordering of chunks,
    `communication_seconds` the collectives (nothing overlaps, but inside of a ring), `optimizer_seconds` its step. The
    search weighs the sum of the bytes of parameters at rest, their gradients, the optimizer's states, and what forward
    keeps for backward. (What is alive at once is `memory.peak`.)
    """

    compute_seconds: float
    communication_seconds: float
    copy_seconds: float
    optimizer_seconds: float
    parameter_bytes: Count
    gradient_bytes: Count
    optimizer_bytes: Count
    activation_bytes: Count
    collectives: tuple[Collective, ...]

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds + self.copy_seconds + self.optimizer_seconds

    @property
    def bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def account(space: Space, assignment: Assignment) -> Account:
    """The items of an assignment's objective, added up."""
    sums: dict[str, float] = dict.fromkeys((COMPUTE, COPIES, OPTIMIZER, PARAMETERS, GRADIENTS, STATES, ACTIVATIONS), 0)
    kinds: dict[tuple[str, str], list[float]] = {}
    communication = 0.0
    for _, _, item in _items(space, assignment):
        if item.axis < 0:
            sums[item.kind] += item.times * (item.seconds or item.bytes)
            continue
        communication += item.times * item.seconds
        _add(kinds, (item.kind, space.axes[item.axis]), item)
    return Account(
        compute_seconds=sums[COMPUTE],
        communication_seconds=communication,
        copy_seconds=sums[COPIES],
        optimizer_seconds=sums[OPTIMIZER],
        parameter_bytes=round(sums[PARAMETERS]),
        gradient_bytes=round(sums[GRADIENTS]),
        optimizer_bytes=round(sums[STATES]),
        activation_bytes=round(sums[ACTIVATIONS]),
        collectives=tuple(
            Collective(kind=kind, axis=axis, count=int(count), bytes=int(size), seconds=seconds)
            for (kind, axis), (count, size, seconds) in sorted(kinds.items())
        ),
    )


def least_seconds(space: Space, assignment: Assignment) -> float:
    """The seconds that overlap cannot hide: operators run one after the other, and so do the collectives of one axis;
    the optimizer comes last."""
    on_axis: dict[int, float] = {}
    local = updating = 0.0
    for _, _, item in _items(space, assignment):
        seconds = item.times * item.seconds
        if item.kind == OPTIMIZER:
            updating += seconds
        elif item.axis >= 0:
            on_axis[item.axis] = on_axis.get(item.axis, 0.0) + seconds
        elif not item.bucketed:  # of copies into and out of buckets, what travels alone does not need some
            local += seconds
    return updating + max(local, *on_axis.values(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind on one axis that bring one tensor into the layouts that its readers chose, or that the
    operator that makes it holds inside. The tensor stands for those of all copies of a layer."""

    root: str
    module: str
    kind: str
    axis: str
    count: int
    bytes: int
    seconds: float


def sources(space: Space, assignment: Assignment) -> list[Traffic]:
    """Where the collectives of an account are from."""
    sums: dict[tuple[str, str, str, str], list[float]] = {}
    for root, site, item in _items(space, assignment):
        if item.axis >= 0:
            _add(sums, (root, site.module, item.kind, space.axes[item.axis]), item)
    return [
        Traffic(root=root, module=module, kind=kind, axis=axis, count=int(count), bytes=int(size), seconds=seconds)
        for (root, module, kind, axis), (count, size, seconds) in sums.items()
    ]


def _add(sums: dict[Key, list[float]], key: Key, item: Item) -> None:
    """Count a collective, its bytes and its seconds."""
    total = sums.setdefault(key, [0, 0, 0.0])
    for i, more in enumerate((1, item.sent_bytes, item.seconds)):
        total[i] += item.times * more


def _items(space: Space, assignment: Assignment) -> Iterator[tuple[str, Site, Item]]:
    """All items of a step, each with the root of a tensor, or the site, that it is of, and the site that makes it.
    Routes are told as what they consist of."""
    copies = {id(body): repeat.count for body, repeat in zip(space.bodies, space.repeats, strict=True)}
    for region, decisions, count, again in _regions(space, assignment):
        for root, site, item in _region_items(space, region, decisions, copies.get(id(region), 1), again=again):
            for part in _parts(space, item):
                yield root, site, part._replace(times=count * part.times)


def _region_items(
    space: Space, region: Region, decisions: Decisions, copies: int, *, again: bool
) -> Iterator[tuple[str, Site, Item]]:
    """The items of one of the copies of a region, which is recomputed in backward or is not."""
    sites, repeated = list(region.sites.values()), region.again if again else Recomputed()
    options = [space.decided(site, decisions[site.name]) for site in sites]
    for site, option in zip(sites, options, strict=True):
        times = 1 if site.kind == "parameter" else space.micro_batches * (1 + (site.name in repeated.operators))
        for item in _site_items(space, site, option):
            yield site.name, site, item._replace(times=times)
    for tensor in root_tensors(region, [(option,) for option in options], copies):
        readings, maker = tensor.readings(repeated), sites[tensor.maker]
        moved = tensor.moved(space, readings, again=True)
        ((produced, policy),) = tensor.produced
        policy = REGATHER if tensor.root in repeated.roots else policy
        wanted = [(options[r].reads[p], phase == "backward") for (r, p), (_, at) in readings.items() for phase in at]
        items = tensor_items(space, moved, produced, policy, wanted, crosses=maker.kind == "border")
        if items is None:
            raise ValueError(f"tensor {tensor.root} cannot be had in the layouts that its readers chose")
        for item in items:
            yield tensor.root, maker, item


def _site_items(space: Space, site: Site, option: Option) -> Iterator[Item]:
    """The items of a site under an option: together its seconds and its bytes."""
    if site.kind == "parameter":
        yield from parameter_items(space, site, option.makes[0])
    elif site.kind == "op" and not site.made:
        operands = operand_layouts(space, site, option)
        inside = [
            i for i in operator_items(space, site, site.rule, operands, option.makes, option.choice) if i.axis >= 0
        ]
        yield Item(COMPUTE, option.seconds - sum(item.seconds for item in inside))
        yield from inside


def _parts(space: Space, item: Item) -> Iterator[Item]:
    """A route as its collectives, and the copies around them; another item as it is."""
    redistributor = space.redistributor
    for step in item.steps:
        moving = redistributor.link_seconds(step, item.bucketed)
        copying = redistributor.step_seconds(step, item.bucketed) - moving
        yield Item(COPIES, copying, times=item.times, bucketed=item.bucketed)
        if step.kind in COLLECTIVES:
            yield Item(step.kind, moving, times=item.times, axis=step.axis, sent_bytes=step.bytes)
    if item.kind != ROUTE:
        yield item


def _regions(space: Space, assignment: Assignment) -> Iterator[tuple[Region, Decisions, int, bool]]:
    """Each region with its decisions, how many copies take these, and whether they are recomputed."""
    yield space.rest, assignment.rest, 1, False
    for number, (region, copies) in enumerate(zip(space.bodies, assignment.copies, strict=True)):
        same: list[tuple[tuple[Decisions, bool], int]] = []
        for copy in zip(copies, assignment.again(number), strict=True):
            key = next((k for k, (other, _) in enumerate(same) if other == copy), len(same))
            same[key:] = [(copy, 1 + (same[key][1] if key < len(same) else 0)), *same[key + 1 :]]
        for (decisions, again), count in same:
            yield region, decisions, count, again


def parameter_layouts(space: Space, assignment: Assignment) -> Iterator[tuple[str, Layout, tuple[Layout, ...], Policy]]:
    """(parameter, at rest, in use, "keep" or "regather") of every parameter, in the graph's order."""
    layouts: dict[str, tuple[Layout, tuple[Layout, ...], Policy]] = {}
    for region, decisions, rename in placements(space, assignment):
        uses: dict[str, dict[Layout, None]] = {}
        for name, site in region.sites.items():
            option = space.decided(site, decisions[name])
            for read, layout in zip(site.reads, option.reads, strict=True):
                uses.setdefault(read.alias.root, {})[layout] = None
        for name, site in region.sites.items():
            if site.kind == "parameter":
                option = space.decided(site, decisions[name])
                layouts[rename.get(name, name)] = (option.makes[0], tuple(uses.get(name, ())), option.choice.policy)
    for i in space.graph.inputs:
        if i.role == "parameter":
            yield (i.target, *layouts[i.name])


def unit_bytes(space: Space, assignment: Assignment) -> int:
    """What is gathered of the largest unit at once."""
    sizes: dict[str, int] = {}
    for name, _, uses, _ in parameter_layouts(space, assignment):
        meta, layer = space.graph.metas[space.graph.parameters[name]], layer_of(name)
        sizes[layer] = sizes.get(layer, 0) + max((local_meta(meta, use, space.mesh).bytes for use in uses), default=0)
    return max(sizes.values(), default=0)


def gathered_once(space: Space, assignment: Assignment) -> set[str]:
    """The parameters that are gathered once a step, and kept."""
    return {name for name, _, _, policy in parameter_layouts(space, assignment) if policy == KEEP}


def placements(space: Space, assignment: Assignment) -> Iterator[tuple[Region, Decisions, Mapping[str, str]]]:
    yield space.rest, assignment.rest, {}
    for repeat, region, copies in zip(space.repeats, space.bodies, assignment.copies, strict=True):
        for k, decisions in enumerate(copies):
            yield region, decisions, dict(zip(repeat.own[0], repeat.own[k], strict=True))
