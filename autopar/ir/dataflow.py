"""What of a list of nodes depends on what: forward from values, and back from them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from .graph import JointGraph, Node, is_view, producers, readers

Such = Callable[[Node], bool]


def every(node: Node) -> bool:
    """All nodes are such."""
    return True


def reads_some(node: Node) -> bool:
    """Whether a node makes what it makes of something."""
    return bool(node.inputs)


def reached(nodes: Iterable[Node], values: Iterable[str], such: Such = every) -> set[str]:
    """The values, and what such nodes make of any of them, one after the other."""
    found = set(values)
    for node in nodes:
        if not found.isdisjoint(node.inputs) and such(node):
            found.update(filter(None, node.outputs))
    return found


def derived(nodes: Iterable[Node], values: Iterable[str], such: Such = every) -> set[str]:
    """The values, and what such nodes make of them and of nothing else."""
    found = set(values)
    for node in nodes:
        if found.issuperset(node.inputs) and such(node):
            found.update(filter(None, node.outputs))
    return found


def leading(
    nodes: Sequence[Node], values: Iterable[str], such: Such = every, made: Mapping[str, int] | None = None
) -> set[int]:
    """Positions of the nodes that values come from, by way of such nodes alone. `made`: who makes what, if known."""
    made = producers(nodes) if made is None else made
    found, waiting = set[int](), list(values)
    while waiting:
        position = made.get(waiting.pop())
        if position is not None and position not in found and such(nodes[position]):
            found.add(position)
            waiting += nodes[position].inputs
    return found


def ending(nodes: Sequence[Node], such: Such, results: Collection[str]) -> list[Node]:
    """The nodes that are such, and of which all is a result, or is read by others of them alone."""
    following, found = readers(nodes), set[int]()
    for position in reversed(range(len(nodes))):
        named = [name for name in nodes[position].outputs if name]
        if (
            such(nodes[position])
            and all(name in results or name in following for name in named)
            and all(reader in found for name in named for reader in following.get(name, ()))
        ):
            found.add(position)
    return [nodes[position] for position in sorted(found)]


def viewed(graph: JointGraph, name: str) -> tuple[str, list[Node]]:
    """What a value is a view of, itself if it is none; and the views that lead there, the last first."""
    views: list[Node] = []
    while (index := graph.producer.get(name)) is not None and is_view(graph.nodes[index]):
        views.append(graph.nodes[index])
        name = views[-1].inputs[0]
    return name, views
