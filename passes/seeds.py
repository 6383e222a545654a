"""Seeds: random operators that draw from a generator become operators that read a key.

The k-th random operator of the graph reads the graph input of role "seed" with target "k". Its keys are
made anew for each step (`autopar.randomness.keys`), so that the numbers are a function of the
seed of the step, the operator, and the global index, and of nothing else. As each operator has an input of
its own, copies of a repeated layer stay alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from autopar.ir.graph import GraphInput, JointGraph, Node, Ref, TensorMeta, map_references
from autopar.ops.emit import LocalEmitter
from autopar.ops.randomness import KEY_DTYPE, KEY_SHAPE, draws, seeded

from .dependency.operators import call_of_node


def seeds(graph: JointGraph) -> JointGraph:
    """The graph with a key for each random operator. Raises ValueError for those that nothing else can do."""
    if not any(map(draws, graph.nodes)):
        return graph
    metas = dict(graph.metas)
    inputs: list[GraphInput] = []
    refused: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if not draws(node):
            nodes.append(node)
            continue
        key = _fresh(metas, f"seed_{len(inputs)}")
        metas[key] = TensorMeta(KEY_SHAPE, KEY_DTYPE)
        inputs.append(GraphInput(name=key, role="seed", target=str(len(inputs))))
        written = _written(node, key, metas)
        if written is None:
            refused[node.module or "(no module)"] = node.op
        else:
            nodes += written
    if refused:
        shown = ", ".join(f"{module} ({op})" for module, op in list(refused.items())[:5])
        more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise ValueError(
            f"random operators that cannot be made parallel are in {shown}{more}: draw these numbers outside of the "
            f"model and pass them to it, or call eval() first if it does without them there"
        )
    return _living(replace(graph, inputs=(*graph.inputs, *inputs), nodes=tuple(nodes), metas=metas))


def _fresh(metas: dict[str, TensorMeta], wanted: str) -> str:
    name, count = wanted, 0
    while name in metas:
        count += 1
        name = f"{wanted}_{count}"
    return name


def _written(node: Node, key: str, metas: dict[str, TensorMeta]) -> list[Node] | None:
    """The nodes that do what a random node does. The results keep their names."""
    call = call_of_node(node, metas)
    number = itertools.count()
    emitter = LocalEmitter((), metas, lambda hint: _fresh(metas, f"{node.name}_{hint}_{next(number)}"))
    results = seeded(emitter, call, Ref(key))
    if results is None:
        return None
    names = {made.name: name for made, name in zip(results, node.outputs, strict=True) if made is not None and name}

    def rename(name: str) -> Ref:
        return Ref(names.get(name, name))

    return [
        Node(
            op=instruction.op,
            args=map_references(instruction.args, rename),
            kwargs=map_references(instruction.kwargs, rename),
            outputs=tuple(names.get(output, output) for output in instruction.outputs),
            module=node.module,
            backward=node.backward,
            sequence=node.sequence,
        )
        for instruction in emitter.instructions
    ]


def _living(graph: JointGraph) -> JointGraph:
    """Without the nodes, and the outputs of nodes, that nobody reads (an empty tensor that was filled)."""
    read = {output.name for output in graph.outputs}

    def kept() -> Iterator[Node]:
        for node in reversed(graph.nodes):
            outputs = tuple(name if name in read else "" for name in node.outputs)
            if any(outputs):
                read.update(node.inputs)
                yield replace(node, outputs=outputs)

    nodes = tuple(kept())[::-1]
    names = [*(i.name for i in graph.inputs), *(name for node in nodes for name in node.outputs if name)]
    return replace(graph, nodes=nodes, metas={name: graph.metas[name] for name in names})
