"""What the search asks of a joint graph again and again: labels of nodes, and whose gradient a value is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.dataflow import derived
from autopar.ir.graph import JointGraph, is_view
from autopar.ops.rule import call_of
from autopar.ops.rules import rule_of
from autopar.passes.dependency.affine import AffineMap, compose, identity
from autopar.passes.dependency.operators import dependency, signatures

from .periods import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`labels[i]` is equal for nodes with equal op, constants and metas, whoever their operands are. `outputs[value]`
    are the roles of a graph output, `trained[value]` the graph inputs of the parameters whose gradient a value is,
    `gradients` the same the other way round. `untrained` are the values that depend on no parameter, such as masks and
    the tables of rotations, and `may_vary` says whether copies may read different ones of them."""

    graph: JointGraph
    labels: Ints
    outputs: dict[str, tuple[str, ...]]
    trained: dict[str, tuple[str, ...]]
    gradients: dict[str, str]
    untrained: frozenset[str]
    may_vary: bool = True

    @property
    def middle(self) -> int:
        """Index of the first backward node."""
        return self.graph.first_backward

    @staticmethod
    def of(graph: JointGraph, *, may_vary: bool = True) -> Facts:
        roles: dict[str, tuple[str, ...]] = {}
        trained: dict[str, tuple[str, ...]] = {}
        parameters = graph.parameters
        for output in graph.outputs:
            if output.name is None:
                continue
            parameter = parameters.get(output.target) if output.role == "gradient" else None
            role = output.role if parameter is None else "gradient of a parameter"
            roles[output.name] = (*roles.get(output.name, ()), role)
            if parameter is not None:
                trained[output.name] = (*trained.get(output.name, ()), parameter)
        return Facts(
            graph=graph,
            labels=np.array(signatures(graph), dtype=np.int64),
            outputs=roles,
            trained=trained,
            gradients={parameter: value for value, of in trained.items() for parameter in of},
            untrained=_untrained(graph),
            may_vary=may_vary,
        )


def _untrained(graph: JointGraph) -> frozenset[str]:
    """Values of forward that depend on inputs and buffers alone."""
    given = [i.name for i in graph.inputs if i.role in ("buffer", "input")]
    return frozenset(derived(graph.halves[0], given))


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
            output = next(name for name in node.outputs if name)  # a gradient that nobody needs has no name
            paths[output] = {(len(lines), identity(metas[output].shape)): None}
        elif any(name in paths for name in node.inputs):
            for output, maps in zip(node.outputs, dependency(call, rule), strict=True):
                for name, here in zip(node.inputs, maps, strict=True):
                    for source, mapping in paths.get(name, {}) if here is not None else ():
                        paths.setdefault(output, {})[source, compose(here, mapping)] = None
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
