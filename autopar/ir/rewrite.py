"""What all passes share that write graphs and programs: names that are free, nodes under other names, who makes and
reads a value, and what nobody needs."""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .graph import JointGraph, Node, Ref, TensorMeta, map_references


def numbered(hint: str, *taken: Container[str], start: int = 1) -> str:
    """The first of `hint_1`, `hint_2`, ... that is in none of what is taken."""
    names = (f"{hint}_{number}" for number in itertools.count(start))
    return next(name for name in names if not any(name in some for some in taken))


def distinct(name: str, taken: Container[str]) -> str:
    """The name, with a number behind it where it is taken."""
    return numbered(name, taken) if name in taken else name


def reading(node: Node, names: Mapping[str, str], **changes: Any) -> Node:
    """The node with other values in the place of those that it reads, by name; those without another name stay."""
    if not changes and names.keys().isdisjoint(node.inputs):
        return node

    def other(name: str) -> Ref:
        return Ref(names.get(name, name))

    args, kwargs = map_references(node.args, other), map_references(node.kwargs, other)
    return replace(node, args=args, kwargs=kwargs, **changes)


def inlined(node: Node, names: Mapping[str, str], **changes: Any) -> Node:
    """The node with what it reads and what it makes under other names."""
    return reading(node, names, outputs=tuple(names.get(output, output) for output in node.outputs), **changes)


def read_and_made(node: Node, metas: Mapping[str, TensorMeta]) -> tuple[list[TensorMeta], list[TensorMeta]]:
    """Metas of what a node reads, and of those of its results that have a name."""
    return [metas[name] for name in node.inputs], [metas[name] for name in node.outputs if name]


def producers(nodes: Sequence[Node]) -> dict[str, int]:
    """Position of the node that makes a value."""
    return {name: position for position, node in enumerate(nodes) for name in node.outputs if name}


def readers(nodes: Sequence[Node]) -> dict[str, list[int]]:
    """Positions of the nodes that read a value, ascending, each once."""
    found: dict[str, list[int]] = {}
    for position, node in enumerate(nodes):
        for name in dict.fromkeys(node.inputs):
            found.setdefault(name, []).append(position)
    return found


def last_reads(nodes: Sequence[Node]) -> dict[str, int]:
    """Position of the last node that reads a value."""
    return {name: position for position, node in enumerate(nodes) for name in node.inputs}


def living(nodes: Sequence[Node], results: Iterable[str | None]) -> tuple[Node, ...]:
    """Without the nodes, and the names of results of nodes, that nobody reads and that are none of `results`."""
    read = set(results)
    kept: list[Node] = []
    for node in reversed(nodes):
        outputs = tuple(name if name in read else "" for name in node.outputs)
        if any(outputs):
            read.update(node.inputs)
            kept.append(node if outputs == node.outputs else replace(node, outputs=outputs))
    return tuple(reversed(kept))


def with_own_metas(graph: JointGraph) -> JointGraph:
    """The graph with the metas of its inputs and of what its nodes make, and of nothing else."""
    names = [*(i.name for i in graph.inputs), *(name for node in graph.nodes for name in node.outputs if name)]
    return replace(graph, metas={name: graph.metas[name] for name in names})


@dataclass(eq=False, kw_only=True)
class NodeWriter:
    """Writes nodes one by one, and knows the metas of what they make."""

    metas: dict[str, TensorMeta]
    written: list[Node] = field(default_factory=list)

    def emit(
        self,
        op: str,
        args: tuple[Any, ...],
        *made: tuple[str, TensorMeta | None],
        kwargs: tuple[tuple[str, Any], ...] = (),
        module: str = "",
        serves: str = "",
    ) -> str:
        """Append a node, and return the name of the first value that it makes. A result that nobody uses has the name
        "" and no meta."""
        self.metas.update({name: meta for name, meta in made if meta is not None})
        outputs = tuple(name for name, _ in made)
        self.written.append(Node(op=op, args=args, kwargs=kwargs, outputs=outputs, module=module, serves=serves))
        return made[0][0]
