"""Absent: a program whose backward is given no gradient of some outputs.

What backward makes of these alone is not computed, and is zero to what reads it: it is linear in the gradients that it
is given, and a product of zero with an infinite derivative would be no number.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from autopar.ir.dataflow import reached
from autopar.ir.emitter import Emitter
from autopar.ir.program import Program
from autopar.ir.rewrite import living


def without(program: Program, absent: Collection[str]) -> Program | None:
    """The program without the inputs of role "tangent" of these names. Gradients of parameters and inputs that come
    from nowhere else are zero. None where backward would not write then what it writes, such as a buffer."""
    present = [i.name for i in program.tangents if i.name not in absent]
    zero = reached(program.backward, absent) - reached(program.backward, present)
    if any(o.name in zero and o.role != "gradient" for o in program.outputs):
        return None
    results = [o.name for o in program.gradients if o.name is not None]
    kept = living([node for node in program.backward if zero.isdisjoint(node.outputs)], results)
    wanted = {name for node in kept for name in node.inputs}.union(results)
    emitter = Emitter(metas=dict(program.metas))
    for name in sorted(zero & wanted):
        meta = program.metas[name]
        where = ("dtype", meta.dtype), ("device", torch.device("cpu"))  # programs run where they run
        emitter.emit("aten.full.default", (meta.shape, 0), name, kwargs=where, serves=name)
    return replace(
        program,
        inputs=tuple(i for i in program.inputs if i.name not in absent),
        backward=(*emitter.written, *kept),
        metas=emitter.metas,
    )
