"""Collapse: views become aliases of a root tensor.

q, k and v each read a `view` of their own of the norm's output; that they share it shows only at the
root. A view moves no data and makes no decision, so it is no site of the search: it maps layouts of
its root to layouts of what is read (`layout.reshape_split`), and codegen runs it where it is read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from autopar.ir.graph import PERMUTE, RESHAPE, JointGraph, Node, TensorMeta, is_view
from autopar.ir.layout import Layout, Shape, Split, is_legal, permute_layout, reshape_layout

Step = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(RESHAPE, shape before, shape after) or (PERMUTE, order, shape after)"""
Steps = tuple[Step, ...]


def step_of(view: Node, metas: Mapping[str, TensorMeta]) -> Step:
    """What a view does."""
    after = metas[view.outputs[0]].shape
    if view.op == PERMUTE:
        return PERMUTE, tuple(view.args[1]), after
    return RESHAPE, metas[view.inputs[0]].shape, after


@dataclass(frozen=True, slots=True)
class Alias:
    """A value as a view of a root: the steps that lead from the root to the value."""

    root: str
    steps: Steps = ()

    def of_root(self, split: Split, ranks: int) -> Iterator[tuple[str, Split]]:
        """The root, with the split that gives the value this one on an axis of so many ranks, if it has one."""
        for placement in to_root(self.steps, (split,), (ranks,)) or ():
            if isinstance(placement, Split):
                yield self.root, placement


@dataclass(frozen=True, slots=True)
class Roots:
    """Resolves values to roots."""

    graph: JointGraph

    def seen(self, value: str, home: int) -> tuple[str, int]:
        """What a value is called where a reader in the copy `home` of a layer sees it, and the copy that makes it: -1
        outside of layers."""
        return value, -1

    def alias(self, value: str, home: int = -1) -> Alias:
        """The root behind `value` as seen by a reader in the copy `home` of a layer."""
        steps: list[Step] = []
        graph = self.graph
        while True:
            name, home = self.seen(value, home)
            index = graph.producer.get(value)
            if name != value or index is None or not is_view(graph.nodes[index]):
                return Alias(name, tuple(reversed(steps)))
            steps.append(step_of(graph.nodes[index], graph.metas))
            value = graph.nodes[index].inputs[0]


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
