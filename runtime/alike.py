"""Whether a program that there is serves what was captured anew: the same operators, and the same values in them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from autopar.ir.graph import JointGraph, Ref, map_references
from autopar.ir.rewrite import living
from autopar.passes.capture.captured import Captured
from autopar.passes.capture.known import same_value


def serves(known: Captured, wanted: Captured) -> bool:
    """Whether the program of a captured step computes all that is wanted of another, and maybe gradients beside."""
    targets = {o.target for o in wanted.graph.outputs if o.role == "gradient" and o.name is not None}
    return lines(known.graph, targets) == lines(wanted.graph, targets)


def same_values(known: Captured, other: Captured) -> bool:
    """Whether two steps of the same operators read equal constants and put their outputs together alike."""
    if known.output_spec != other.output_spec or known.constants.keys() != other.constants.keys():
        return False
    leaves = zip(known.output_leaves, other.output_leaves, strict=True)
    return all((a.path, a.meta) == (b.path, b.meta) and same_value(a.constant, b.constant) for a, b in leaves) and all(
        tensor.device == other.constants[name].device and same_value(tensor, other.constants[name])
        for name, tensor in known.constants.items()
    )


def lines(graph: JointGraph, gradients: Collection[str]) -> list[str]:
    """The graph as text, without the gradients that are not among these and what only they need. Values are numbered,
    so that two graphs of the same operators give the same lines whatever their values are called."""
    outputs = [o for o in graph.outputs if o.name is not None and (o.role != "gradient" or o.target in gradients)]
    nodes = living(graph.nodes, (o.name for o in outputs))
    needed = {o.name for o in outputs}.union(*(node.inputs for node in nodes))
    names: dict[str, Ref] = {}

    def number(name: str) -> Ref:
        return names.setdefault(name, Ref(f"v{len(names)}"))

    text = [f"{number(i.name)}: {graph.metas[i.name]} = {i.role} {i.target}" for i in graph.inputs if i.name in needed]
    for node in nodes:
        arguments: tuple[Any, ...] = (map_references(node.args, number), map_references(node.kwargs, number))
        made = [number(o) if o else "_" for o in node.outputs]
        metas = [str(graph.metas[o]) for o in node.outputs if o]
        text.append(f"{'<' if node.backward else '>'} {made} = {node.op}{arguments}: {metas}")
    return [*text, *(f"{o.role} {o.target} = {number(o.name)}" for o in outputs if o.name is not None)]
