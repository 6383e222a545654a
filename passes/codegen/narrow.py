"""Narrow: parameters that travel in a narrower dtype than that in which they are used.

They are made narrow before each collective, and wide after it. What a rank reads of such a parameter without a
collective is rounded alike, so that all of a step uses the same numbers, whoever holds them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.ir.emitter import Emitter
from autopar.ir.graph import CAST, WAIT, Node, Ref, TensorMeta, meta_of, readers
from autopar.ir.program import GATHERED, LAYOUT, Program
from autopar.ir.rewrite import distinct, reading
from autopar.ops.aten import PAD, SLICE
from autopar.ops.float8 import CASTS, FROM, TO, from_float8, to_float8
from autopar.passes.space.travel import casting, is_narrower

COLLECTIVES = frozenset(f"collective.{kind}" for kind in GATHERED)


def narrowed(program: Program, dtypes: Mapping[str, torch.dtype]) -> Program:
    """The program whose parameters, by the names of their values, travel in these dtypes."""
    known = {i.name: i.name for i in program.inputs if i.role == "parameter" and i.name in dtypes}
    origin = _origins(program.nodes, known, LAYOUT | COLLECTIVES | {WAIT, PAD, SLICE})
    travelling = {origin[node.name] for node in program.nodes if node.op in COLLECTIVES and node.name in origin}
    if not travelling:
        return program
    used = {name: dtypes[name] for name in travelling}
    writer = _Writer(metas=dict(program.metas), mesh=program.mesh, dtypes=used, origin=origin)
    forward, backward = map(writer.half, program.halves)
    return replace(program, forward=forward, backward=backward, metas=writer.metas)


def narrowed_parameters(program: Program, dtype: torch.dtype) -> set[str]:
    """Names of the parameters that travel in a dtype in a program, however far it is lowered."""
    known = {i.name: i.target for i in program.inputs if i.role == "parameter"}
    origin = _origins(program.nodes, known, LAYOUT | CASTS)
    narrow = (node for node in program.nodes if node.op == TO or dict(node.kwargs).get("dtype") == dtype)
    return {origin[node.name] for node in narrow if node.name in origin}


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter as it arrives where it traveled in a dtype."""
    if not is_narrower(dtype, meta_of(x)):
        return x
    if casting(dtype)[0] == CAST:
        return x.to(dtype).to(x.dtype)
    return from_float8(to_float8(x, 1), x.shape, x.dtype, 1)


def is_gathered(name: str, nodes: Sequence[Node], reading: Mapping[str, Sequence[int]]) -> bool:
    """Whether all that reads a value gathers it."""
    following = [nodes[k] for k in reading.get(name, ())]
    return bool(following) and all(
        node.op in COLLECTIVES or (node.op in LAYOUT | CASTS and is_gathered(node.name, nodes, reading))
        for node in following
    )


def _origins(nodes: Iterable[Node], known: Mapping[str, str], passed: Collection[str]) -> dict[str, str]:
    """What is known of values, and of what such operators make of one alone."""
    origin = dict(known)
    for node in nodes:
        if node.op in passed and len(node.inputs) == 1 and node.inputs[0] in origin:
            origin[node.name] = origin[node.inputs[0]]
    return origin


@dataclass(eq=False, kw_only=True)
class _Writer(Emitter):
    """Writes halves in which parameters travel in these dtypes. `origin` says which parameter a value is, as it lies
    somewhere."""

    dtypes: Mapping[str, torch.dtype]
    origin: Mapping[str, str]

    def half(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        self.written, following = [], readers(nodes)
        local: dict[str, str] = {}
        wide: dict[str, tuple[TensorMeta, int]] = {}
        for node in nodes:
            self.about = {"module": node.module, "serves": node.serves}
            if node.op in COLLECTIVES and node.name in self.origin:
                ranks, dtype = self.mesh[node.args[-1]], self.dtypes[self.origin[node.name]]
                wide[node.name] = self.metas.pop(node.name), ranks
                sent = self._narrow(node.inputs[0], dtype, 1 if node.collective == "all_gather" else ranks)
                self.emit(node.op, (Ref(sent), *node.args[1:]), node.name)
            elif node.inputs and node.inputs[0] in wide:
                there = self.emit(node.op, node.args, distinct(f"{node.name}_narrow", self.metas))
                self._widen(there, *wide[node.inputs[0]], node.name)
            elif node.op in LAYOUT and is_gathered(node.name, nodes, following):
                self.written.append(node)
            else:
                for name in sorted(self.dtypes.keys() & node.inputs - local.keys()):
                    local[name] = distinct(f"{name}_rounded", self.metas)
                    self._widen(self._narrow(name, self.dtypes[name], 1), self.metas[name], 1, local[name])
                self.written.append(reading(node, local))
        return tuple(self.written)

    def _narrow(self, name: str, dtype: torch.dtype, parts: int) -> str:
        """What is sent of a value, in so many parts of which each is scaled by itself."""
        op, narrow = casting(dtype)[0], distinct(f"{name}_to_send", self.metas)
        if op == CAST:
            return self.emit(op, (Ref(name),), narrow, kwargs=(("dtype", dtype),))
        return self.emit(op, (Ref(name), parts), narrow)

    def _widen(self, name: str, meta: TensorMeta, parts: int, wide: str) -> None:
        """What is used of what was sent."""
        self.metas.pop(wide, None)
        if self.metas[name].dtype.is_floating_point:
            self.emit(CAST, (Ref(name),), wide, kwargs=(("dtype", meta.dtype),))
        else:
            self.emit(FROM, (Ref(name), meta.shape, meta.dtype, parts), wide)
