"""Whether a program fits a mesh, and whether DTensors can express what leaves it."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from autopar.ir.layout import Layout, Partial, Replicate, describe
from autopar.ir.program import Program

from .placements import is_gatherable


def is_replicated(layout: Layout) -> bool:
    return all(isinstance(placement, Replicate) for placement in layout)


def mismatch(program: Program, mesh: DeviceMesh) -> ValueError | None:
    """What about the program does not fit the mesh or the module."""
    if tuple(mesh.shape) != program.mesh:
        return ValueError(f"the plan is for a mesh of {program.mesh}, and this mesh is {tuple(mesh.shape)}")
    for i in program.inputs:
        if i.role == "parameter" and not is_gatherable(i.layout, i.meta.shape, program.mesh):
            return _unserved("parameter", i.target, i.layout, program)
    at_rest = {i.target: i.layout for i in program.inputs if i.role == "parameter"}
    for o in program.outputs:
        if o.name is None:
            continue
        if o.role == "gradient" and (rest := at_rest.get(o.target, o.layout)) != o.layout:
            return ValueError(
                f"the gradient of {o.target} is {describe(o.layout, program.axes)} and the parameter "
                f"{describe(rest, program.axes)} at rest: they must be equal"
            )
        if o.role == "output" and o.meta is not None and not is_gatherable(o.layout, o.meta.shape, program.mesh):
            return _unserved("output", o.target, o.layout, program)
        if o.role == "mutation" and not is_replicated(o.layout):
            return ValueError(
                f"{o.target} is written as {describe(o.layout, program.axes)}: what forward writes is whole"
            )
        if any(isinstance(placement, Partial) for placement in o.layout):
            return ValueError(
                f"{o.role} {o.target} is {describe(o.layout, program.axes)}: what leaves a program is not partial"
            )
    return None


def _unserved(role: str, target: str, layout: Layout, program: Program) -> ValueError:
    return ValueError(
        f"{role} {target} is {describe(layout, program.axes)}, which a DTensor can express and cannot gather: "
        f"let only the last mesh axis that splits a dim take scattered pieces of it"
    )
