"""Collapse: views become aliases of a root tensor.

q, k and v each read a `view` of their own of the norm's output; that they share it shows only at the
root. A view moves no data and makes no decision, so it is no site of the search: it maps layouts of
its root to layouts of what is read (`layout.reshape_split`), and codegen runs it where it is read.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache

from autopar.ir.graph import PERMUTE, RESHAPE, JointGraph, is_view
from autopar.ir.layout import Layout, Shape, is_legal, permute_layout, reshape_layout

Step = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(RESHAPE, shape before, shape after) or (PERMUTE, order, shape after)"""
Steps = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Alias:
    """A value as a view of a root: the steps that lead from the root to the value."""

    root: str
    steps: Steps = ()


@dataclass(frozen=True, slots=True)
class Roots:
    """Resolves values to roots. `crossing[v]` renames a value that is read across a border of
    repeated segments: there it is a root of its own. `home[i]` is the segment copy of node i, and
    `entering[c]` are the values that copy c reads across a border: one that the rest of the graph makes
    may enter one run across its border, and be read by all copies of another."""

    graph: JointGraph
    crossing: dict[str, str]
    home: dict[int, int]
    entering: Mapping[int, Collection[str]] = field(default_factory=dict)

    def alias(self, value: str, reader_home: int) -> Alias:
        """The root behind `value` as seen by a reader that lives in segment copy `reader_home`."""
        steps: list[Step] = []
        graph, here = self.graph, reader_home
        while True:
            index = graph.producer.get(value)
            home = -1 if index is None else self.home.get(index, -1)
            if home != here and value in self.crossing and (home >= 0 or value in self.entering[here]):
                return Alias(self.crossing[value], tuple(reversed(steps)))
            if index is None or not is_view(graph.nodes[index]):
                return Alias(value, tuple(reversed(steps)))
            here = home
            node = graph.nodes[index]
            source = node.args[0].name
            after = graph.metas[value].shape
            if node.op == RESHAPE:
                steps.append((RESHAPE, graph.metas[source].shape, after))
            else:
                steps.append((PERMUTE, tuple(node.args[1]), after))
            value = source


@cache
def to_root(steps: Steps, layout: Layout, mesh: Shape) -> Layout | None:
    """The root's layout that gives the view this layout, or None."""
    current: Layout | None = layout
    for kind, before, after in reversed(steps):
        assert current is not None
        if kind == RESHAPE:
            current = reshape_layout(after, before, current, mesh)
        else:
            inverse = tuple(before.index(d) for d in range(len(before)))
            current = permute_layout(inverse, current, mesh)
        if current is None:
            return None
    return current


@cache
def from_root(steps: Steps, layout: Layout, mesh: Shape) -> Layout | None:
    """The view's layout when its root has this one, or None."""
    current: Layout | None = layout
    for kind, before, after in steps:
        assert current is not None
        if kind == RESHAPE:
            current = reshape_layout(before, after, current, mesh)
        else:
            current = permute_layout(before, current, mesh)
        if current is None or not is_legal(after, current, mesh):
            return None
    return current
