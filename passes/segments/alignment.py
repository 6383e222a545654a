"""Alignment: whether copies are isomorphic, node by node, and what each operand is to its copy.

An operand is a result at one position of the own copy, or crosses a border from the neighbour, or is shared by all
copies, or is one of a few values of one form that depend on no parameter, or is an input of the copy's own. Copies at
either end that do not fit are dropped.
"""

import itertools
from collections.abc import Sequence

from autopar.ir.dataflow import viewed
from autopar.ir.graph import JointGraph

from .facts import Facts, fingerprint
from .segment import Border, Repeated


def shortened(facts: Facts, copies: Sequence[Sequence[int]]) -> Repeated | None:
    """The copies, or those that are left after dropping, from either end, what does not fit."""
    while len(copies) >= 2:
        aligned = align(facts, copies)
        if isinstance(aligned, Repeated):
            # copies side by side (the projections q, k, v) are alike too, but are not layers
            return aligned if any(not border.backward for border in aligned.borders) else None
        copies = copies[aligned + 1 :] if aligned < len(copies) / 2 else copies[:aligned]
    return None


def align(facts: Facts, copies: Sequence[Sequence[int]]) -> Repeated | int:
    """Verify copies position by position. Returns the index of a copy that does not fit, if one does."""
    count = len(copies)
    place = {i: (k, j) for k, copy in enumerate(copies) for j, i in enumerate(copy)}
    roles = _Roles(facts, place, count)
    for position in zip(*copies, strict=True):
        expected = facts.labels[position[count // 2]]
        for k, i in enumerate(position):
            if facts.labels[i] != expected:
                return k
        for names in zip(*(facts.graph.nodes[i].inputs for i in position), strict=True):
            misfit = roles.add(names)
            if misfit is not None:
                return misfit
    misfit = roles.misfit_outside()
    if misfit is None:
        misfit = roles.misfit_roots()
    if misfit is None:
        misfit = roles.misfit_gradients()
    if misfit is not None:
        return misfit
    results = roles.results()
    if isinstance(results, int):
        return results
    return Repeated(
        name=_name(facts.graph, copies),
        copies=tuple(map(tuple, copies)),
        borders=tuple(roles.borders.values()),
        shared=tuple(roles.shared),
        varied=tuple(zip(*roles.varied, strict=True)) if roles.varied else ((),) * count,
        own=tuple(zip(*roles.own, strict=True)) if roles.own else ((),) * count,
        results=results,
    )


class _Roles:
    """What the operands of aligned nodes are to their copies, gathered argument by argument."""

    def __init__(self, facts: Facts, place: dict[int, tuple[int, int]], count: int) -> None:
        self.facts, self.place, self.count = facts, place, count
        self.inputs = {i.name: i.role for i in facts.graph.inputs}
        self.judged: dict[tuple[str, ...], int | None] = {}
        self.borders: dict[tuple[int, int, bool], Border] = {}
        self.shared: dict[str, None] = {}
        self.varied: dict[tuple[str, ...], None] = {}
        self.own: dict[tuple[str, ...], None] = {}

    def maker(self, name: str) -> tuple[int, int, int] | None:
        """(copy, position, output slot) that makes a value, None if it comes from outside."""
        index = self.facts.graph.producer.get(name)
        if index is None or index not in self.place:
            return None
        return (*self.place[index], self.facts.graph.nodes[index].outputs.index(name))

    def add(self, names: tuple[str, ...]) -> int | None:
        """Take note of one argument, names[k] in copy k. Returns a copy that does not fit, if any."""
        if names not in self.judged:
            self.judged[names] = self._judge(names)
        return self.judged[names]

    def _judge(self, names: tuple[str, ...]) -> int | None:
        makers = [self.maker(name) for name in names]
        if not any(makers):
            return self._outside(names)
        kinds = [None if m is None else (m[0] - k, *m[1:]) for k, m in enumerate(makers)]
        usual = kinds[self.count // 2] or kinds[0]
        if usual is None or abs(usual[0]) > 1:
            return next((m[0] for m in makers if m is not None), None)
        step, position, slot = usual
        entry = {0: None, -1: 0, 1: self.count - 1}[step]
        for k, kind in enumerate(kinds):
            if kind != (None if k == entry else usual):
                return k
        if step == 0:
            return None
        return self._border(names, position, slot, backward=step == 1)

    def _border(self, names: tuple[str, ...], position: int, slot: int, *, backward: bool) -> int | None:
        maker = next(i for i, place in self.place.items() if place == (0 if backward else self.count - 1, position))
        leaving = self.facts.graph.nodes[maker].outputs[slot]
        border = Border(values=(leaving, *names) if backward else (*names, leaving), backward=backward)
        if not leaving or self.borders.setdefault((position, slot, backward), border) != border:
            # the tensor that enters the run differs by reader: the first layer is not like the others
            return self.count - 1 if backward else 0
        return None

    def _outside(self, names: tuple[str, ...]) -> int | None:
        if len(set(names)) == 1:
            self.shared[names[0]] = None
            return None
        misfit = self._misfit_own(names)
        if misfit is None:
            self.own[names] = None
        elif self.facts.may_vary and self._vary(names):
            self.varied[names] = None
            return None
        return misfit

    def _misfit_own(self, names: tuple[str, ...]) -> int | None:
        """A copy whose value is no input of the graph that it alone reads, or one of another role than its peers'."""
        for k, name in enumerate(names):
            if name in self.facts.graph.producer or name in self.facts.outputs or names.count(name) > 1:
                return k if name != names[self.count // 2] else 0
            if any(self.place.get(reader, (-1,))[0] != k for reader in self.facts.graph.consumers[name]):
                return k
        roles = [self.inputs[name] for name in names]
        return next((k for k, role in enumerate(roles) if role != roles[self.count // 2]), None)

    def _vary(self, names: tuple[str, ...]) -> bool:
        """Whether these are values of one form that depend on no parameter."""
        metas = {self.facts.graph.metas[name] for name in names}
        return self.facts.untrained.issuperset(names) and len(metas) == 1

    def misfit_roots(self) -> int | None:
        """A copy with a varied value that is no such view of a value of the same form as its peers' is, or that stands
        for two."""
        if not self.varied:
            return None
        usual = self.count // 2
        each = [[self._root(name) for name in (*self.shared, *(names[k] for names in self.varied))]
                for k in range(self.count)]  # fmt: skip
        for k, here in enumerate(each):
            for (root, steps), (peer, as_usual) in zip(here, each[usual], strict=True):
                if steps != as_usual or self.facts.graph.metas[root] != self.facts.graph.metas[peer]:
                    return k
            pairs = {(root, peer) for (root, _), (peer, _) in zip(here, each[usual], strict=True)}
            if len(pairs) != len({root for root, _ in pairs}) or len(pairs) != len({peer for _, peer in pairs}):
                return k
        return None

    def _root(self, name: str) -> tuple[str, tuple[tuple[object, ...], ...]]:
        """What a value is a view of, and how."""
        graph = self.facts.graph
        root, views = viewed(graph, name)
        return root, tuple((view.op, str(view.args[1:]), graph.metas[view.name]) for view in views)

    def misfit_outside(self) -> int | None:
        """A copy with a value that the rest of the graph reads although it is no end of a border, or
        with a value from outside that has two roles."""
        leaving = self._leaving()
        for i, (k, _) in self.place.items():
            for output in self.facts.graph.nodes[i].outputs:
                if output not in leaving and any(
                    r not in self.place for r in self.facts.graph.consumers.get(output, ())
                ):
                    return k
        # a value is one thing to a copy, so that names can be mapped from copy to copy and back
        reads = [
            *self.own,
            *self.varied,
            *(b.values[1:] if b.backward else b.values[:-1] for b in self.borders.values()),
        ]
        seen = {(k, name) for name in self.shared for k in range(self.count)}
        for names in reads:
            for k, name in enumerate(names):
                if (k, name) in seen:
                    return k
                seen.add((k, name))
        return None

    def misfit_gradients(self) -> int | None:
        """A copy whose gradients are not those of its own parameters, at the places of its peers: the copies are cut
        inside a layer."""
        facts = self.facts
        for names in self.own:
            gradients = [facts.gradients.get(name) for name in names]
            places = [None if g is None else self.maker(g) or (-1, -1, -1) for g in gradients]
            usual = places[self.count // 2]
            for k, place in enumerate(places):
                if place != (None if usual is None else (k, *usual[1:])):
                    return k
        owner = {name: k for names in self.own for k, name in enumerate(names)}
        leaving = self._leaving()
        for value, parameters in facts.trained.items():
            maker = self.maker(value)
            if maker is not None and value not in leaving and any(owner.get(p) != maker[0] for p in parameters):
                return maker[0]
        return None

    def _leaving(self) -> set[str]:
        """What the rest of the graph may read of the copies."""
        return {b.values[0] if b.backward else b.values[-1] for b in self.borders.values()}

    def results(self) -> tuple[tuple[str, ...], ...] | int:
        """The graph outputs that the copies make, aligned, or a copy that has one and its peers do not."""
        by_place: dict[tuple[int, int], dict[int, str]] = {}
        for name in self.facts.outputs:
            maker = self.maker(name)
            if maker is not None:
                by_place.setdefault(maker[1:], {})[maker[0]] = name
        leaving = self._leaving()
        aligned: list[tuple[str, ...]] = []
        for _, names in sorted(by_place.items()):
            roles = {self.facts.outputs[name] for name in names.values()}
            if len(names) == self.count and len(roles) == 1:
                aligned.append(tuple(names[k] for k in range(self.count)))
            elif any(name not in leaving for name in names.values()):
                have = [k for k, name in sorted(names.items()) if name not in leaving]
                lack = [k for k in range(self.count) if k not in names]
                return have[0] if len(have) <= len(lack) or not lack else lack[0]
        return tuple(zip(*aligned, strict=True)) if aligned else ((),) * self.count


def _name(graph: JointGraph, copies: Sequence[Sequence[int]]) -> str:
    """The module path that all nodes of a copy share, with "*" where the copies differ; where modules
    are unknown, the fingerprint."""
    paths = []
    for copy in copies:
        modules = zip(*(graph.nodes[i].module.split(".") for i in copy if graph.nodes[i].module), strict=False)
        paths.append([names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, modules)])
    aligned = zip(*paths, strict=False)
    path = ".".join(names[0] if len(set(names)) == 1 else "*" for names in aligned)
    return path or f"segment {fingerprint(graph, copies[0])}"
