"""What the search asks of a joint graph again and again: labels of nodes, who makes and reads a value, and whose
gradient it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.graph import JointGraph
from autopar.passes.dependency.signatures import signatures

from .runs import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`labels[i]` is equal for nodes with equal op, constants and metas, whoever their operands are.
    `middle` is the index of the first backward node. `home[value]` is (node, output slot),
    `outputs[value]` the roles of a graph output, `trained[value]` the graph inputs of the parameters
    whose gradient a value is, `gradients` the same the other way round."""

    graph: JointGraph
    middle: int
    labels: Ints
    operands: tuple[tuple[str, ...], ...]
    home: dict[str, tuple[int, int]]
    readers: dict[str, list[int]]
    outputs: dict[str, tuple[str, ...]]
    trained: dict[str, tuple[str, ...]]
    gradients: dict[str, str]

    @staticmethod
    def of(graph: JointGraph) -> Facts:
        known = signatures(graph)
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
        readers: dict[str, list[int]] = {}
        for i, names in enumerate(known.operands):
            for name in names:
                readers.setdefault(name, []).append(i)
        home = {o: (i, slot) for i, node in enumerate(graph.nodes) for slot, o in enumerate(node.outputs) if o}
        return Facts(
            graph=graph,
            middle=graph.first_backward,
            labels=np.array(known.labels, dtype=np.int64),
            operands=known.operands,
            home=home,
            readers=readers,
            outputs=roles,
            trained=trained,
            gradients={parameter: value for value, of in trained.items() for parameter in of},
        )
