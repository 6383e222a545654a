"""Seeds: random operators that draw from a generator become operators that read a key.

The k-th random operator of the graph reads the graph input of role "seed" with target "k". Its keys
are fresh for each step (`autopar.randomness.keys`), so that the numbers are a function of the
seed of the step, the operator, and the global index, and of nothing else. As each operator has an input of
its own, copies of a repeated layer stay alike.
"""

import itertools
from dataclasses import replace

from autopar.ir.emitter import Emitter
from autopar.ir.graph import GraphInput, JointGraph, Node, Ref, TensorMeta
from autopar.ir.rewrite import distinct, inlined, living, with_own_metas
from autopar.ops.randomness import KEY_DTYPE, KEY_SHAPE, draws, dropped, drops_all, seeded
from autopar.ops.rule import call_of


def seeds(graph: JointGraph) -> JointGraph:
    """The graph with a key for each random operator. Raises ValueError for those that nothing else can do."""
    if not any(draws(node) or drops_all(node) for node in graph.nodes):
        return graph
    metas = dict(graph.metas)
    inputs: list[GraphInput] = []
    refused: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if drops_all(node):
            nodes += _written(node, None, metas) or ()
            continue
        if not draws(node):
            nodes.append(node)
            continue
        key = distinct(f"seed_{len(inputs)}", metas)
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
    # an empty tensor that was to be filled is read by nobody now
    left = living(nodes, (output.name for output in graph.outputs))
    return with_own_metas(replace(graph, inputs=(*graph.inputs, *inputs), nodes=left, metas=metas))


def _written(node: Node, key: str | None, metas: dict[str, TensorMeta]) -> list[Node] | None:
    """The nodes that do what a random node does, or, without a key, a dropout of everything. The results keep their
    names."""
    call = call_of(node, metas)
    number = itertools.count()
    emitter = Emitter(metas=metas, named=lambda hint: distinct(f"{node.name}_{hint}_{next(number)}", metas))
    results = dropped(emitter, call) if key is None else seeded(emitter, call, Ref(key))
    if results is None:
        return None
    names = {ref.name: name for ref, name in zip(results, node.outputs, strict=True) if ref is not None and name}
    about = {"module": node.module, "backward": node.backward, "sequence": node.sequence, "region": node.region}
    return [inlined(written, names, **about) for written in emitter.written]
