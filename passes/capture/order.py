"""The order of a joint graph's inputs and outputs: that of the full record, wherever they were taken from."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from autopar.ir.graph import GraphInput, GraphOutput, JointGraph
from autopar.ir.rewrite import with_own_metas

Item = TypeVar("Item", GraphInput, GraphOutput)


def in_order(graph: JointGraph, order: Sequence[str]) -> JointGraph:
    """Inputs and outputs in the order of the full record: those of a role stand together."""
    rank = {target: i for i, target in enumerate(dict.fromkeys(order))}

    def sorted_by(items: Sequence[Item], roles: tuple[str, ...]) -> tuple[Item, ...]:
        first = {role: i for i, role in reversed([*enumerate(item.role for item in items)])}
        return tuple(
            sorted(items, key=lambda i: (first[i.role], rank.get(i.target, len(rank)) if i.role in roles else 0))
        )

    inputs = sorted_by(graph.inputs, ("parameter", "buffer"))
    return with_own_metas(replace(graph, inputs=inputs, outputs=sorted_by(graph.outputs, ("gradient", "mutation"))))
