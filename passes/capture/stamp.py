"""Stamping: from the joint graph of a record that was cut, the joint graph of the full record.

    Cut, its JointGraph --segments--> the repeats --_Plan--> checked copies --_Stamp--> JointGraph of all layers

In the graph of the shorter record the ends of each run must be copies of one repeat of `segments`: isomorphic node by
node, forward and backward, with all of what crosses between them listed. One copy is then repeated after itself as
often as periods were taken out. Names of tensors and modules are read off the full record: a node one period further
in the record belongs to the module, and reads the tensors, that stand there.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import GraphOutput, JointGraph, Node, TensorMeta
from autopar.ir.rewrite import distinct, reading, with_own_metas
from autopar.passes.segments.search import segments
from autopar.passes.segments.segment import Repeated

from .cut import Cut, CutRun
from .numbered import are_numbered_on, further, moved
from .order import in_order
from .varied import read_by_missing


class Unfit(Exception):
    """The graph cannot be stamped; the message says why."""


def stamped(graph: JointGraph, places: Mapping[str, int], cut: Cut) -> JointGraph:
    """The joint graph of the full record from that of its cut.

    `places` says of nodes, by name, which call of the record made them, or whose gradient they compute. Raises Unfit
    where the graph does not repeat as the record does.
    """
    repeats = segments(graph, may_vary=bool(cut.varied)).repeats
    plans = [_plan(graph, places, cut, run, repeats) for run in cut.runs]
    for plan in plans:
        graph = _Stamp(graph, plan).graph()
    return in_order(graph, cut.order)


# ---- what a run is in the graph --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A run of the record as a repeat of the graph. Copy `middle` is repeated `run.count` times after itself; what
    stands behind it in the record moves by as much. `copies` are nodes by name, which stamping other runs does not
    change, `middles` the first and the last place of the middle copy; a copy's sequence numbers are `stride` above
    those of the copy before it."""

    cut: Cut
    run: CutRun
    places: Mapping[str, int]
    copies: tuple[tuple[str, ...], ...]
    repeat: Repeated
    middle: int
    middles: tuple[int, int]
    stride: int
    varied: Mapping[str, tuple[str, ...]]
    """What the middle copy reads of what varies -> what each of the copies that are missing reads instead."""

    @property
    def shift(self) -> int:
        return self.run.count * self.run.period

    def place(self, index: int) -> int:
        """Where a call of the full record stands in the shorter one, counted within the run."""
        return index - self.shift if index >= self.run.stop else index

    def slot(self, target: str) -> tuple[int, int] | None:
        """The first slot of the shorter record that reads a tensor, if it is in the run."""
        index, slot = self.cut.readers.get(target, (-1, 0))
        return (self.place(index), slot) if index in self.run else None

    def is_late(self, place: int) -> bool:
        return place > self.middles[1]

    def target(self, name: str, periods: int | None = None) -> str:
        """The tensor that stands a number of periods further than this one; by default, where the tensors of the
        shorter record belong in the full one."""
        slot = self.slot(name)
        if slot is None:
            return name
        steps = self.run.count * self.is_late(slot[0]) if periods is None else periods
        return self.cut.targets.get((slot[0] + steps * self.run.period, slot[1]), name)

    def is_own(self, target: str) -> bool:
        """Whether other tensors stand in its place in other periods."""
        return self.target(target, 1) != self.target(target, 0)

    def is_in_the_middle(self, target: str) -> bool:
        slot = self.slot(target)
        return slot is not None and self.middles[0] <= slot[0] <= self.middles[1] and self.is_own(target)

    def path(self, node: Node, periods: int) -> str:
        """The module of a node a number of periods further."""
        index = self.places.get(node.name)
        if index is None or index not in self.run or not node.module:
            return node.module
        return self.cut.paths[self.place(index) + periods * self.run.period]


def _plan(graph: JointGraph, places: Mapping[str, int], cut: Cut, run: CutRun, repeats: Sequence[Repeated]) -> _Plan:
    """The repeat of a run, if everything about it fits."""
    last: Unfit | None = None
    for repeat in filter(None, (_within(graph, places, run, repeat) for repeat in repeats)):
        for middle in range(repeat.count - 1):
            draft = _draft(graph, places, cut, run, repeat, middle)
            if draft is None:
                continue
            try:
                _check(graph, draft)
                varied = _varied(graph, draft)
            except Unfit as error:
                last = error
            else:
                return replace(draft, stride=_stride(graph, draft), varied=varied)
    raise last or Unfit(f"no repeat of the graph is the run of {_shown(cut, run)}")


def _shown(cut: Cut, run: CutRun) -> str:
    return f"{cut.paths[run.begin] or 'the model'} to {cut.paths[run.end - 1] or 'the model'}"


def _draft(
    graph: JointGraph, places: Mapping[str, int], cut: Cut, run: CutRun, repeat: Repeated, middle: int
) -> _Plan | None:
    """What to check; None where the copies are no periods of the run."""
    plan = _Plan(
        cut=cut, run=run, places=places, repeat=repeat, middle=middle, middles=(0, 0), stride=0, varied={},
        copies=tuple(tuple(graph.nodes[i].name for i in copy) for copy in repeat.copies),
    )  # fmt: skip
    inside = [
        plan.place(places[name])
        for name, i in zip(plan.copies[middle], repeat.copies[middle], strict=True)
        if not graph.nodes[i].backward and places.get(name, -1) in run
    ]
    return replace(plan, middles=(min(inside), max(inside))) if inside else None


def _within(graph: JointGraph, places: Mapping[str, int], run: CutRun, repeat: Repeated) -> Repeated | None:
    """The copies of a repeat that lie in a run."""

    def lies(copy: tuple[int, ...]) -> bool:
        return all(places.get(graph.nodes[i].name, run.begin) in run for i in copy)

    ranges = [[k for k, _ in group] for inside, group in itertools.groupby(
        enumerate(repeat.copies), lambda pair: lies(pair[1])) if inside]  # fmt: skip
    longest = max(ranges, key=len, default=[])
    if len(longest) < 2:
        return None
    low, high = longest[0], longest[-1] + 1
    return replace(
        repeat,
        copies=repeat.copies[low:high],
        borders=tuple(replace(border, values=border.values[low : high + 1]) for border in repeat.borders),
        varied=repeat.varied[low:high],
        own=repeat.own[low:high],
        results=repeat.results[low:high],
    )


def _check(graph: JointGraph, plan: _Plan) -> None:
    _check_order(graph, plan)
    _check_places(graph, plan)
    _check_tensors(graph, plan)
    aligned = ([graph.nodes[i].region for i in indices] for indices in zip(*plan.repeat.copies, strict=True))
    if not all(are_numbered_on(regions, plan.middle, plan.run.count + 1) for regions in aligned):
        raise Unfit(f"the checkpoints of {_shown(plan.cut, plan.run)} are not numbered alike")


def _check_order(graph: JointGraph, plan: _Plan) -> None:
    """Copies are intervals: forward ones side by side, and backward ones in reverse."""
    for backward in (False, True):
        parts = [[i for i in copy if graph.nodes[i].backward == backward] for copy in plan.repeat.copies]
        joined = [i for part in (reversed(parts) if backward else parts) for i in part]
        if joined and joined != list(range(joined[0], joined[-1] + 1)):
            raise Unfit(f"the operators of {_shown(plan.cut, plan.run)} are mixed with others")


def _check_places(graph: JointGraph, plan: _Plan) -> None:
    """A copy is one period of the record, each one period behind the copy before it, and every node of the periods
    between the first and the last copy is in a copy."""
    shown = _shown(plan.cut, plan.run)
    for names, indices in zip(zip(*plan.copies, strict=True), zip(*plan.repeat.copies, strict=True), strict=True):
        nodes = [graph.nodes[i] for i in indices]
        positions = [plan.places.get(name) for name in names]
        for (a, one), (b, other) in itertools.pairwise(zip(positions, nodes, strict=True)):
            if a is None or b is None or not (a in plan.run and b in plan.run):
                if a != b or one.module != other.module:
                    raise Unfit(f"{one.name} and {other.name} of {shown} do not come from one place of a period")
            elif plan.place(b) - plan.place(a) != plan.run.period:
                raise Unfit(f"{one.name} and {other.name} of {shown} are not one period apart")
    low, high = plan.middles
    first, last = low - plan.middle * plan.run.period, high + (plan.repeat.count - 1 - plan.middle) * plan.run.period
    if high - low >= plan.run.period:
        raise Unfit(f"a copy of {shown} is more than a period")
    if not first < plan.run.start <= last:
        raise Unfit(f"the copies of {shown} do not stand where periods were taken out")
    inside = {name for copy in plan.copies for name in copy}
    for node in graph.nodes:
        place = plan.places.get(node.name)
        if place is not None and place in plan.run and node.name not in inside and first <= plan.place(place) <= last:
            raise Unfit(f"{node.name} of {shown} is no part of the repeat")


def _check_tensors(graph: JointGraph, plan: _Plan) -> None:
    """A copy's own inputs are tensors of its period, its results belong to those, and it makes no other output of the
    graph but at the ends of the run."""
    shown, repeat = _shown(plan.cut, plan.run), plan.repeat
    targets = {i.name: i.target for i in graph.inputs if i.role in ("parameter", "buffer")}

    def check(names: Sequence[str]) -> None:
        slots = [plan.slot(name) for name in names]
        for k, slot in enumerate(slots):
            ahead = (k - plan.middle) * plan.run.period
            if slot is None or not plan.middles[0] <= slot[0] - ahead <= plan.middles[1]:
                raise Unfit(f"{names[k]} of {shown} is no tensor of its period")
            if slot != (slots[0][0] + k * plan.run.period, slots[0][1]):  # type: ignore[index]
                raise Unfit(f"{', '.join(names)} of {shown} are not one period apart")

    for names in zip(*repeat.own, strict=True):
        if any(name not in targets for name in names):
            raise Unfit(f"{names[0]} of {shown} is no tensor of the model")
        check([targets[name] for name in names])
    outputs: dict[str, list[GraphOutput]] = {}
    for output in graph.outputs:
        if output.name is not None:
            outputs.setdefault(output.name, []).append(output)
    for names in zip(*repeat.results, strict=True):
        uses = [outputs[name] for name in names]
        if any(len(each) != 1 or each[0].role not in ("gradient", "mutation") for each in uses):
            raise Unfit(f"{names[0]} of {shown} is an output of the model")
        check([each[0].target for each in uses])
    results = {name for copy in repeat.results for name in copy}
    leaving = {b.values[0] if b.backward else b.values[-1] for b in repeat.borders}
    produced = {name for copy in repeat.copies for i in copy for name in graph.nodes[i].outputs if name}
    for name in produced & outputs.keys() - results - leaving:
        raise Unfit(f"{name} of {shown} is an output of the graph: {outputs[name][0].target}")
    own = {targets[name] for copy in repeat.own for name in copy}
    first = plan.middles[0] - plan.middle * plan.run.period
    last = plan.middles[1] + (repeat.count - 1 - plan.middle) * plan.run.period
    for name, target in targets.items():
        slot = plan.slot(target)
        is_inside = slot is not None and first <= slot[0] <= last and plan.is_own(target)
        if is_inside and target not in own and graph.consumers.get(name):
            raise Unfit(f"{target} of {shown} is read outside of the repeat")
    for output in graph.outputs:
        if output.role in ("gradient", "mutation") and output.name is not None and output.name not in results:
            slot = plan.slot(output.target)
            if slot is not None and first <= slot[0] <= last and plan.is_own(output.target):
                raise Unfit(f"the {output.role} of {output.target} is computed outside of the repeat")


def _varied(graph: JointGraph, plan: _Plan) -> dict[str, tuple[str, ...]]:
    """What the copies that are missing read where copies read different values. In the full record these stand in slots
    that read, in each copy that is there, what the value of this copy was made of, and in no two copies the same unless
    their values are."""
    run, middle = plan.run, plan.middle
    there = [k - middle + run.count * (k > middle) for k in range(plan.repeat.count)]
    varied: dict[str, tuple[str, ...]] = {}
    for names in zip(*plan.repeat.varied, strict=True):
        makers = [plan.places.get(graph.nodes[graph.producer[n]].name) if n in graph.producer else None for n in names]
        slots = [slot for slot in plan.cut.varied if plan.middles[0] <= slot[0] <= plan.middles[1]]
        found = set(read_by_missing(plan.cut.varied, slots, run.period, dict(zip(there, names, strict=True)), makers,
                                    range(1, run.count + 1)))  # fmt: skip
        if len(found) != 1 or "" in (known := found.pop()):
            raise Unfit(f"{', '.join(dict.fromkeys(names))} of {_shown(plan.cut, run)} vary as no operand does")
        varied[names[middle]] = known
    return varied


def _stride(graph: JointGraph, plan: _Plan) -> int:
    strides: set[int] = set()
    for position in zip(*plan.repeat.copies, strict=True):
        numbers = [graph.nodes[i].sequence for i in position]
        numbered = [number for number in numbers if number >= 0]
        if numbered:
            strides.update(b - a if len(numbered) == len(numbers) else -1 for a, b in itertools.pairwise(numbers))
    if len(strides) != 1 or min(strides) <= 0:
        raise Unfit(f"the operators of {_shown(plan.cut, plan.run)} are not numbered alike")
    return strides.pop()


# ---- stamping --------------------------------------------------------------------------------------


class _Stamp:
    """Makes the nodes of the periods that are missing. Step s is the period s after the middle copy."""

    def __init__(self, graph: JointGraph, plan: _Plan) -> None:
        self.source, self.plan = graph, plan
        self.metas: dict[str, TensorMeta] = dict(graph.metas)
        self.copies = [[graph.nodes[graph.producer[name]] for name in copy] for copy in plan.copies]
        self.steps = range(1, plan.run.count + 1)
        pairs = zip(*self.copies[plan.middle : plan.middle + 2], strict=True)
        self.further = {one.name: further(one.region, other.region, plan.run.count + 1) for one, other in pairs}
        self.fresh: dict[tuple[str, int], str] = {}
        tensors = [i for i in graph.inputs if i.role in ("parameter", "buffer")]
        self.own = {i.name for i in tensors if plan.is_in_the_middle(i.target)}
        for step in self.steps:
            for i in graph.inputs:
                if i.name in self.own:
                    self._take(i.name, step, re.sub(r"\W", "_", plan.target(i.target, step)))
            layer = self._layer(step)
            for node in self.copies[plan.middle]:
                for name in node.outputs:
                    if name:
                        self._take(name, step, f"{name}_layer_{layer}")

    def _layer(self, step: int) -> str:
        """What tells this period from others: the number in the path of its modules."""
        for node in self.copies[self.plan.middle]:
            one, other, wanted = (self.plan.path(node, k).split(".") for k in (0, 1, step))
            differing = [here for a, b, here in zip(one, other, wanted, strict=False) if a != b]
            if differing:
                return differing[0]
        return str(step)

    def _take(self, name: str, step: int, wanted: str) -> None:
        wanted = f"_{wanted}" if wanted[0].isdigit() else wanted
        taken = distinct(wanted, self.metas)
        self.metas[taken] = self.source.metas[name]
        self.fresh[name, step] = taken

    def graph(self) -> JointGraph:
        plan, graph = self.plan, self.source
        inputs = [replace(i, target=plan.target(i.target)) if i.role in ("parameter", "buffer") else i
                  for i in graph.inputs]  # fmt: skip
        outputs = [replace(o, target=plan.target(o.target)) if o.role in ("gradient", "mutation") else o
                   for o in graph.outputs]  # fmt: skip
        for step in self.steps:
            for i in graph.inputs:
                if i.name in self.own:
                    inputs.append(replace(i, name=self.fresh[i.name, step], target=plan.target(i.target, step)))
            for o in graph.outputs:
                if o.role in ("gradient", "mutation") and plan.is_in_the_middle(o.target):
                    name = None if o.name is None else self.fresh[o.name, step]
                    outputs.append(replace(o, name=name, target=plan.target(o.target, step)))
        return with_own_metas(
            JointGraph(inputs=tuple(inputs), nodes=tuple(self._nodes()), outputs=tuple(outputs), metas=self.metas)
        )

    def _nodes(self) -> Iterator[Node]:
        plan, middle, last = self.plan, self.plan.middle, self.plan.run.count
        enters = {b.values[middle]: b.values[middle + 1] for b in plan.repeat.borders if not b.backward}
        leaves = {b.values[middle + 1]: b.values[middle] for b in plan.repeat.borders if b.backward}
        home = {node.name: k for k, copy in enumerate(self.copies) for node in copy}
        numbers = [node.sequence for node in self.copies[middle + 1] if node.sequence >= 0]
        # the copies before and after the new ones are connected to them
        after = {name: self.fresh[name, last] for name in enters.values()}
        before = {name: self.fresh[inner, 1] for name, inner in leaves.items()}
        pending = {False: True, True: True}
        for node in self.source.nodes:
            k = home.get(node.name)
            if pending[node.backward] and k == (middle if node.backward else middle + 1):
                pending[node.backward] = False
                for step in reversed(self.steps) if node.backward else self.steps:
                    for own in self.copies[middle]:
                        if own.backward == node.backward:
                            yield self._node(own, step, enters, leaves)
            renamed = {} if k is None else after if k == middle + 1 else before if k == middle else {}
            late = k > middle if k is not None else node.sequence >= min(numbers)
            yield reading(
                node,
                renamed,
                module=plan.path(node, last * (k > middle if k is not None else self._is_late(node))),
                sequence=node.sequence + late * last * plan.stride if node.sequence >= 0 else node.sequence,
            )

    def _is_late(self, node: Node) -> bool:
        place = self.plan.places.get(node.name)
        return place is not None and place in self.plan.run and self.plan.is_late(self.plan.place(place))

    def _node(self, node: Node, step: int, enters: Mapping[str, str], leaves: Mapping[str, str]) -> Node:
        """A node of the middle copy, in the copy `step` after it."""
        names: dict[str, str] = {}
        for name in node.inputs:
            if name in enters:
                source = enters[name]
                names[name] = source if step == 1 else self.fresh[source, step - 1]
            elif name in leaves:
                names[name] = name if step == self.plan.run.count else self.fresh[leaves[name], step + 1]
            elif name in self.plan.varied:
                names[name] = self.plan.varied[name][step - 1]
            else:
                names[name] = self.fresh.get((name, step), name)
        return reading(
            node,
            names,
            outputs=tuple(self.fresh[name, step] if name else "" for name in node.outputs),
            module=self.plan.path(node, step),
            sequence=node.sequence + step * self.plan.stride if node.sequence >= 0 else node.sequence,
            region=moved(node.region, self.further[node.name], step),
        )
