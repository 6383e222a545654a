"""What the search asks of a joint graph again and again: labels of nodes, and whose gradient a value is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.graph import JointGraph
from autopar.passes.dependency.signatures import signatures

from .runs import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`labels[i]` is equal for nodes with equal op, constants and metas, whoever their operands are. `outputs[value]`
    are the roles of a graph output, `trained[value]` the graph inputs of the parameters whose gradient a value is,
    `gradients` the same the other way round."""

    graph: JointGraph
    labels: Ints
    outputs: dict[str, tuple[str, ...]]
    trained: dict[str, tuple[str, ...]]
    gradients: dict[str, str]

    @property
    def middle(self) -> int:
        """Index of the first backward node."""
        return self.graph.first_backward

    @staticmethod
    def of(graph: JointGraph) -> Facts:
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
        )
