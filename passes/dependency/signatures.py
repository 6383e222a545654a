"""Signatures: nodes with the same operator, constants and metas get the same number.

Rules, maps and fingerprints depend on nothing else, so each is worked out once for all nodes that are alike.
"""

from __future__ import annotations

from typing import Any

from autopar.ir.graph import JointGraph, Ref, TensorMeta


def signatures(graph: JointGraph) -> tuple[int, ...]:
    """A number for each node, equal for nodes of equal op, constants and metas: their rules and their maps are equal,
    whoever their operands are."""
    kinds: dict[TensorMeta, int] = {}
    kind = {name: kinds.setdefault(meta, len(kinds)) for name, meta in graph.metas.items()}
    known: dict[Any, int] = {}
    labels: list[int] = []
    for node in graph.nodes:
        names: list[str] = []
        constants = (constants_of(node.args, names), tuple([(k, constants_of(v, names)) for k, v in node.kwargs]))
        metas = tuple([kind[name] for name in names]), tuple([kind[o] if o else -1 for o in node.outputs])
        labels.append(known.setdefault((node.op, node.backward, constants, metas), len(known)))
    return tuple(labels)


def constants_of(value: Any, names: list[str]) -> Any:
    """What of an argument is constant, hashable and told apart by type (1, 1.0 and True are not
    alike to an operator); the names of its references are appended to `names`."""
    if isinstance(value, Ref):
        names.append(value.name)
        return Ref
    if isinstance(value, tuple):
        return tuple([constants_of(item, names) for item in value])
    return (value.__class__, repr(value) if isinstance(value, float) else value)
