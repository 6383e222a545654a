"""Codegen: the program of one rank under an assignment.

Every operator runs on local shapes (`values`); where a reader wants another layout than a tensor has, the route that
the cost model priced is written out as local reshapes and collectives (`redistribution`). The sites of
all copies of a repeated segment are those of the first one, renamed (`demand`).
"""

from collections.abc import Mapping

from autopar.ir.emitter import Emitter
from autopar.ir.layout import REPLICATE, Layout
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.ir.rewrite import needed
from autopar.passes.space.collapse import from_root
from autopar.passes.space.problem import Assignment
from autopar.passes.space.sites import output_name
from autopar.passes.space.space import Space

from .demand import Demand, Placed, placed, reacquired_roots
from .values import Values


def codegen(space: Space, assignment: Assignment) -> Program:
    """The program that runs `assignment`, the same on every rank. Parameters rest as they are used: `precision` adds
    the casts of those that do not.

    Raises ValueError where the assignment asks for a layout that cannot be had.
    """
    items = list(placed(space, assignment))
    demand = Demand.of(space, items, reacquired_roots(space, assignment))
    values = Values(space, demand, Emitter(metas={}, mesh=space.mesh, taken=space.graph.metas))
    inputs: dict[str, Layout] = {}
    outputs: dict[str, Placed] = {}
    gradients: dict[str, list[Placed]] = {}
    ops: list[Placed] = []
    for item in items:
        if item.site.kind in ("parameter", "buffer", "input", "tangent", "seed"):
            name = item.name(item.site.name)
            layout = item.option.makes[0]
            phase = int(item.site.kind == "tangent")
            values.define(name, layout, phase, name)
            inputs[name] = layout
            for read in item.site.reads:
                gradients.setdefault(item.name(read.alias.root), []).append(item)
        elif item.site.kind == "op" and not item.site.made:
            ops.append(item)
        elif item.site.kind == "output":
            outputs[item.name(item.site.name)] = item
    gradient_values: dict[str, str] = {}
    ops.sort(key=lambda item: item.order)
    for item in ops:
        values.operator(item, int(item.site.backward))
        for root in item.site.makes:
            for owner in gradients.pop(item.name(root), ()) if root else ():
                gradient_values[owner.name(owner.site.name)] = values.gradient(owner)
    for owners in gradients.values():  # a gradient that is an input (a tangent) passed on
        for owner in owners:
            gradient_values[owner.name(owner.site.name)] = values.gradient(owner)
    return _finish(values, inputs, outputs, gradient_values)


def _finish(
    values: Values, inputs: Mapping[str, Layout], outputs: Mapping[str, Placed], gradients: Mapping[str, str]
) -> Program:
    """The program around the instructions: its inputs and outputs, and what forward saves for backward."""
    graph, space = values.space.graph, values.space
    results = []
    for number, output in enumerate(graph.outputs):
        meta = graph.metas[output.name] if output.name is not None else None
        layout: Layout = (REPLICATE,) * len(space.mesh)
        name: str | None = None
        if output.name is None:
            pass
        elif output.role == "gradient" and output.target in graph.parameters:
            parameter = graph.parameters[output.target]
            name, layout = gradients[parameter], inputs[parameter]
        else:
            item = outputs[output_name(number)]
            (read,) = item.site.reads
            values.emitter.about = {"serves": f"{output.role} {output.target}"}
            phase = int(item.site.backward)
            name = values.view(item.name(read.alias.root), read.alias.steps, item.option.reads[0], phase)
            of_view = from_root(read.alias.steps, item.option.reads[0], space.mesh)
            assert of_view is not None
            layout = of_view
        results.append(ProgramOutput(name=name, role=output.role, target=output.target, meta=meta, layout=layout))
    forward, backward = values.halves
    tangents = {i.name for i in graph.inputs if i.role == "tangent"}
    saved = tuple(name for name in needed(backward, [o.name for o in results if o.backward]) if name not in tangents)
    return Program(
        axes=space.axes,
        mesh=space.mesh,
        inputs=tuple(
            ProgramInput(name=i.name, role=i.role, target=i.target, meta=graph.metas[i.name], layout=inputs[i.name])
            for i in graph.inputs
        ),
        forward=tuple(forward),
        backward=tuple(backward),
        saved=saved,
        outputs=tuple(results),
        metas=values.emitter.metas,
        uneven=frozenset(values.uneven),
    )
