"""The account: the cost of an assignment, item by item.

The sum of the items is the solver's objective; the collectives listed are those that codegen writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cluster.collectives import collective_seconds
from autopar.files.kinds import Count
from autopar.ir.layout import Layout, local_meta
from autopar.ir.program import COLLECTIVES
from autopar.ops.emit import Emission, expands, local_program
from autopar.passes.space.choices import REGATHER, Policy
from autopar.passes.space.operator_layouts import splits_of
from autopar.passes.space.problem import Assignment, Decisions, ProblemBuilder
from autopar.passes.space.recompute import reacquired, recomputed
from autopar.passes.space.setting import cast_seconds, used_of
from autopar.passes.space.sites import Option, Region, Site
from autopar.passes.space.space import Space, operand_layouts


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
    `communication_seconds` the collectives (nothing overlaps), `optimizer_seconds` the optimizer's step. The search
    weighs the sum of the bytes of parameters at rest, their gradients, the optimizer's states, and what forward keeps
    for backward. (What is alive at once is `memory.peak`.)
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
    """The items of an assignment's objective."""
    return _tally(space, assignment).account()


def least_seconds(space: Space, assignment: Assignment) -> float:
    """The seconds that overlap cannot hide: operators run one after the other, and so do the collectives of one axis;
    the optimizer comes last."""
    return _tally(space, assignment).least_seconds


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
    told: dict[tuple[str, str, str, str], list[float]] = {}
    for source in _tally(space, assignment).sources:
        total = told.setdefault((source.root, source.module, source.kind, source.axis), [0, 0, 0.0])
        for i, more in enumerate((source.count, source.bytes, source.seconds)):
            total[i] += more
    return [
        Traffic(root=root, module=module, kind=kind, axis=axis, count=int(count), bytes=int(size), seconds=seconds)
        for (root, module, kind, axis), (count, size, seconds) in told.items()
    ]


def optimizer_seconds(space: Space, assignment: Assignment) -> float:
    """`account(space, assignment).optimizer_seconds`, of parameters alone."""
    total = _Tally(space)
    for region, decisions, count, _ in _regions(space, assignment):
        for site in region.sites.values():
            if site.kind == "parameter":
                total.parameter(site, _option(space, site, decisions), count)
    return total.optimizer


def _option(space: Space, site: Site, decisions: Decisions) -> Option:
    option = space.option(site, decisions[site.name])
    if option is None:
        raise ValueError(f"{site.kind} {site.name} ({site.module}) cannot take {decisions[site.name]}")
    return option


def _tally(space: Space, assignment: Assignment) -> _Tally:
    total = _Tally(space)
    for region, decisions, count, again in _regions(space, assignment):
        total.region(region, decisions, count, again)
    return total


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


class _Tally:
    def __init__(self, space: Space) -> None:
        self.space, self.builder = space, ProblemBuilder(space)
        self.compute = self.copies = self.communication = self.optimizer = 0.0
        self.bucketed_copies = 0.0
        """Seconds of copies into and out of buckets, some of which what travels alone does not need."""
        self.parameters = self.gradients = self.states = 0
        self.activations = 0.0
        self.kinds: dict[tuple[str, str], list[float]] = {}
        self.sources: list[Traffic] = []

    @property
    def least_seconds(self) -> float:
        on_axis: dict[str, float] = {}
        for (_, axis), (_, _, seconds) in self.kinds.items():
            on_axis[axis] = on_axis.get(axis, 0.0) + seconds
        return self.optimizer + max(self.compute + self.copies - self.bucketed_copies, *on_axis.values(), 0.0)

    def region(self, region: Region, decisions: Decisions, count: int, again: bool = False) -> None:
        twice = recomputed(region) if again else frozenset()
        reacquire = reacquired(region) if again else frozenset()
        shared = {root for site in region.sites.values() if site.kind == "shared" for root in site.makes}
        pairs = zip(self.space.bodies, self.space.repeats, strict=True)
        copies = next((repeat.count for body, repeat in pairs if body is region), 1)
        options: dict[str, Option] = {}
        for name, site in region.sites.items():
            options[name] = option = _option(self.space, site, decisions)
            self._site(site, option, count * (2 if name in twice else 1))
        wanted: dict[str, list[tuple[Site, Layout, bool]]] = {}
        makers: dict[str, tuple[Site, Layout, Policy]] = {}
        for name, site in region.sites.items():
            option = options[name]
            for root, layout in zip(site.makes, option.makes, strict=True):
                if root:
                    policy = option.choice.policy
                    policy = REGATHER if root in reacquire else policy
                    makers[root] = (site, layout, policy)
            for read, layout in () if site.made else zip(site.reads, option.reads, strict=True):
                readers = wanted.setdefault(read.alias.root, [])
                readers.append((site, layout, read.backward))
                if name in twice and read.alias.root not in shared:
                    readers.append((site, layout, True))
        for root, readers in wanted.items():
            self._tensor(root, makers[root], readers, count, copies)

    def _site(self, site: Site, option: Option, count: int) -> None:
        if site.kind == "parameter":
            self.parameter(site, option, count)
            return
        count *= self.space.micro_batches
        emission = self._emission(site, option)
        if emission is None:
            self.compute += count * option.seconds
            return
        inside = 0.0
        for instruction in emission.instructions:
            if kind := instruction.collective:
                size = max(emission.metas[n].bytes for n in (*instruction.inputs, *instruction.outputs))
                axis = instruction.args[-1]
                seconds = collective_seconds(kind, size, self.space.redistributor.links[axis])
                self._collective(kind, axis, count, size, seconds, site)
                inside += seconds
        self.compute += count * (option.seconds - inside)

    def parameter(self, site: Site, option: Option, count: int) -> None:
        assert site.meta is not None
        local = local_meta(site.meta, option.makes[0], self.space.mesh)
        used = used_of(self.space, site, option.makes[0])
        casts = cast_seconds(self.space, local, used, bool(site.reads))
        self.parameters += count * local.bytes
        self.activations += count * (used.bytes if used else 0)
        self.compute += count * casts
        self.optimizer += count * (option.seconds - casts)
        if site.reads:
            self.gradients += count * local.bytes
            self.states += count * self.space.optimizer.bytes(local)

    def _emission(self, site: Site, option: Option) -> Emission | None:
        rule, call = site.rule, site.call
        splits = splits_of(rule, option.choice) if rule is not None else ()
        if rule is None or call is None or not expands(rule, splits):
            return None
        operands = operand_layouts(site, option, self.space)
        return local_program(call, rule, splits, operands, option.makes, self.space.mesh, site.zeros)

    def _collective(
        self, kind: str, axis: int, count: int, size: int, seconds: float, site: Site, root: str = ""
    ) -> None:
        entry = self.kinds.setdefault((kind, self.space.axes[axis]), [0, 0, 0.0])
        entry[0] += count
        entry[1] += count * size
        entry[2] += count * seconds
        self.communication += count * seconds
        self.sources.append(
            Traffic(
                root=root or site.name,
                module=site.module,
                kind=kind,
                axis=self.space.axes[axis],
                count=count,
                bytes=count * size,
                seconds=count * seconds,
            )
        )

    def _tensor(
        self,
        root: str,
        maker: tuple[Site, Layout, Policy],
        readers: list[tuple[Site, Layout, bool]],
        count: int,
        copies: int,
    ) -> None:
        site, produced, policy = maker
        moved = self.builder.moved(root, site, [(reader, late) for reader, _, late in readers], copies)
        wanted = [(layout, late) for _, layout, late in readers]
        if moved.made:
            priced = self.builder.made(moved, wanted)
            assert priced is not None
            seconds, held = priced
            self.compute += count * seconds
            self.activations += count * held
            return
        phases = self.builder.acquired(moved, produced, policy, wanted)
        if phases is None:
            raise ValueError(f"tensor {root} cannot be had in the layouts that its readers chose")
        self.compute += count * self.space.reduction_cast_seconds(moved, phases)
        redistributor = self.space.redistributor
        steps = (
            (step, count * times)
            for late, phase in enumerate(phases)
            for item, times in zip(phase, self.space.times(moved, phase, wanted, late=bool(late)), strict=True)
            for step in item.route.steps
        )
        for step, often in steps:
            moving = redistributor.link_seconds(step, moved.bucketed)
            copying = often * (redistributor.step_seconds(step, moved.bucketed) - moving)
            self.copies += copying
            self.bucketed_copies += copying if moved.bucketed else 0.0
            if step.kind in COLLECTIVES:
                self._collective(step.kind, step.axis, often, step.bytes, moving, site, root)
        self.activations += count * self.builder.held_bytes(moved, produced, policy, wanted)
        if site.kind == "border" and policy == REGATHER and moved.kept:
            self.activations += count * local_meta(moved.meta, produced, self.space.mesh).bytes

    def account(self) -> Account:
        return Account(
            compute_seconds=self.compute,
            communication_seconds=self.communication,
            copy_seconds=self.copies,
            optimizer_seconds=self.optimizer,
            parameter_bytes=self.parameters,
            gradient_bytes=self.gradients,
            optimizer_bytes=self.states,
            activation_bytes=round(self.activations),
            collectives=tuple(
                Collective(kind=kind, axis=axis, count=int(count), bytes=int(size), seconds=seconds)
                for (kind, axis), (count, size, seconds) in sorted(self.kinds.items())
            ),
        )


def parameter_layouts(space: Space, assignment: Assignment) -> Iterator[tuple[str, Layout, tuple[Layout, ...], Policy]]:
    """(parameter, at rest, in use, "keep" or "regather") of every parameter, in the graph's order."""
    layouts: dict[str, tuple[Layout, tuple[Layout, ...], Policy]] = {}
    for region, decisions, rename in _placements(space, assignment):
        uses: dict[str, dict[Layout, None]] = {}
        for name, site in region.sites.items():
            option = space.option(site, decisions[name])
            assert option is not None
            for read, layout in zip(site.reads, option.reads, strict=True):
                uses.setdefault(read.alias.root, {})[layout] = None
        for name, site in region.sites.items():
            if site.kind == "parameter":
                option = space.option(site, decisions[name])
                assert option is not None
                layouts[rename.get(name, name)] = (option.makes[0], tuple(uses.get(name, ())), option.choice.policy)
    for i in space.graph.inputs:
        if i.role == "parameter":
            yield (i.target, *layouts[i.name])


def _placements(space: Space, assignment: Assignment) -> Iterator[tuple[Region, Decisions, Mapping[str, str]]]:
    yield space.rest, assignment.rest, {}
    for repeat, region, copies in zip(space.repeats, space.bodies, assignment.copies, strict=True):
        for k, decisions in enumerate(copies):
            yield region, decisions, dict(zip(repeat.own[0], repeat.own[k], strict=True))
