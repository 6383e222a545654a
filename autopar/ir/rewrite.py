"""Shared by all passes that write graphs and programs: fresh names, renamed nodes, last reads and dead code."""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .graph import JointGraph, Node, Ref, TensorMeta, map_references
from .program import Program

T = TypeVar("T", JointGraph, Program)


def numbered(hint: str, *taken: Container[str], start: int = 1) -> str:
    """The first of `hint_1`, `hint_2`, ... that is not taken."""
    names = (f"{hint}_{number}" for number in itertools.count(start))
    return next(name for name in names if not any(name in some for some in taken))


def distinct(name: str, taken: Container[str]) -> str:
    """The name, with a number behind it if it is taken."""
    return numbered(name, taken) if name in taken else name


def reading(node: Node, names: Mapping[str, str], **changes: Any) -> Node:
    """The node reading other values in place of those that `names` maps; the rest stay."""
    if not changes and names.keys().isdisjoint(node.inputs):
        return node

    def other(name: str) -> Ref:
        return Ref(names.get(name, name))

    args, kwargs = map_references(node.args, other), map_references(node.kwargs, other)
    return replace(node, args=args, kwargs=kwargs, **changes)


def input_and_output_metas(node: Node, metas: Mapping[str, TensorMeta]) -> tuple[list[TensorMeta], list[TensorMeta]]:
    """Metas of what a node reads, and of its named outputs."""
    return [metas[name] for name in node.inputs], [metas[name] for name in node.outputs if name]


def last_reads(nodes: Sequence[Node]) -> dict[str, int]:
    """Value -> position of the last node that reads it."""
    return {name: position for position, node in enumerate(nodes) for name in node.inputs}


def living(nodes: Sequence[Node], results: Iterable[str | None]) -> tuple[Node, ...]:
    """The nodes without dead code: outputs that nobody reads and that are not among `results` lose their names."""
    read = set(results)
    kept: list[Node] = []
    for node in reversed(nodes):
        outputs = tuple(name if name in read else "" for name in node.outputs)
        if any(outputs):
            read.update(node.inputs)
            kept.append(node if outputs == node.outputs else replace(node, outputs=outputs))
    return tuple(reversed(kept))


def needed(nodes: Sequence[Node], results: Iterable[str | None] = ()) -> tuple[str, ...]:
    """Values that nodes and results read, in the order of reading, and that no node makes."""
    made = {None, *(name for node in nodes for name in node.outputs)}
    read = [*(name for node in nodes for name in node.inputs), *results]
    return tuple(name for name in dict.fromkeys(read) if name is not None and name not in made)


def with_own_metas(graph: T) -> T:
    """The graph, or program, without metas of values that it does not have."""
    names = [*(i.name for i in graph.inputs), *(name for node in graph.nodes for name in node.outputs if name)]
    return replace(graph, metas={name: graph.metas[name] for name in names})
