"""Fingerprints: segments with the same fine-grained dependency graph have the same parallel space (CFP section 4.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from autopar.ir.graph import JointGraph, is_view
from autopar.ops import rule_of
from autopar.ops.rule import call_of
from autopar.passes.dependency.affine import AffineMap, compose, identity
from autopar.passes.dependency.operators import dependency


def fingerprint(graph: JointGraph, nodes: Sequence[int]) -> str:
    """The fine-grained dependency graph of the forward contractions among `nodes` (CFP section 4.1 and
    Fig. 6), as a short hash: what they are, and by which affine maps each depends on the ones before
    it. Equal for segments with the same parallel space, whatever trivial operators lie between."""
    lines: list[str] = []
    paths: dict[str, dict[tuple[int, AffineMap], None]] = {}
    for i in (i for i in nodes if not graph.nodes[i].backward):
        node, metas = graph.nodes[i], graph.metas
        call = call_of(node, metas)
        rule = None if is_view(node) else rule_of(call)
        if rule is not None and rule.contraction:
            lines.append(f"{node.op} {', '.join(map(str, call.inputs))}")
            for operand, name in enumerate(node.inputs):
                lines += sorted(f"{operand} from {source}: {mapping}" for source, mapping in paths.get(name, {}))
            output = node.outputs[0]
            paths[output] = {(len(lines), identity(metas[output].shape)): None}
        elif any(name in paths for name in node.inputs):
            for output, maps in zip(node.outputs, dependency(call, rule), strict=True):
                for name, here in zip(node.inputs, maps, strict=True):
                    for source, mapping in paths.get(name, {}) if here is not None else ():
                        paths.setdefault(output, {})[source, compose(here, mapping)] = None
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
