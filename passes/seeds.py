"""Seeds: random operators that draw from a generator become operators that read a key.

The k-th random operator of the graph reads the graph input of role "seed" with target "k". Its keys
are fresh for each step (`autopar.randomness.keys`), so that the numbers are a function of the
seed of the step, the operator, and the global index, and of nothing else. As each operator has an input of
its own, copies of a repeated layer stay alike.
"""

import itertools

from autopar.ir.graph import GraphInput, JointGraph, Node, TensorMeta
from autopar.ir.rewrite import distinct
from autopar.ir.rewriter import Rewriter, inlined
from autopar.ops.randomness import KEY_DTYPE, KEY_SHAPE, draws, dropped, drops_all, seeded
from autopar.ops.rule import call_of


def seeds(graph: JointGraph) -> JointGraph:
    """The graph with a key for each random operator. Raises ValueError for those that nothing else can do."""
    if not any(draws(node) or drops_all(node) for node in graph.nodes):
        return graph
    rewriter = Rewriter(graph=graph, metas=dict(graph.metas))
    inputs: list[GraphInput] = []
    refused: dict[str, str] = {}
    for node in graph.nodes:
        if drops_all(node):
            _write(rewriter, node, None)
        elif not draws(node):
            rewriter.keep(node)
        else:
            key = distinct(f"seed_{len(inputs)}", rewriter.metas)
            rewriter.metas[key] = TensorMeta(KEY_SHAPE, KEY_DTYPE)
            inputs.append(GraphInput(name=key, role="seed", target=str(len(inputs))))
            if not _write(rewriter, node, key):
                refused[node.module or "(no module)"] = node.op
    if refused:
        shown = ", ".join(f"{module} ({op})" for module, op in list(refused.items())[:5])
        more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise ValueError(
            f"random operators that cannot be made parallel are in {shown}{more}: draw these numbers outside of the "
            f"model and pass them to it, or call eval() first if it does without them there"
        )
    # an empty tensor that was to be filled is read by nobody now
    return rewriter.done(inputs=(*graph.inputs, *inputs))


def _write(rewriter: Rewriter, node: Node, key: str | None) -> bool:
    """Writes what does what a random node does, or, without a key, a dropout of everything, if there is something. The
    results keep their names."""
    call, number, start = call_of(node, rewriter.metas), itertools.count(), len(rewriter.written)
    rewriter.at(node)
    rewriter.named = lambda hint: distinct(f"{node.name}_{hint}_{next(number)}", rewriter.metas)
    results = dropped(rewriter, call) if key is None else seeded(rewriter, call, key)
    if results is None:
        return False
    names = {x.name: name for x, name in zip(results, node.outputs, strict=True) if x is not None and name}
    rewriter.written[start:] = [inlined(written, names) for written in rewriter.written[start:]]
    return True
