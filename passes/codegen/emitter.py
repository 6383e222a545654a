"""The emitter: instructions of both halves as they are written, under names that are nowhere taken."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.graph import Ref, TensorMeta
from autopar.ir.program import Instruction


@dataclass(eq=False)
class Emitter:
    """`taken` are names of the graph, which values of the program may not have unless they are those."""

    taken: Container[str]
    instructions: tuple[list[Instruction], list[Instruction]] = field(default_factory=lambda: ([], []))
    """Of forward and of backward."""
    metas: dict[str, TensorMeta] = field(default_factory=dict)
    uneven: set[str] = field(default_factory=set)
    """Values of as many rows as happen to come."""
    context: tuple[str, str] = ("", "")
    """Module and node that instructions are written for."""
    _counter: dict[str, int] = field(default_factory=dict)

    def fresh(self, hint: str) -> str:
        hint = hint.replace("|", "_")
        number = self._counter.get(hint, 0)
        while True:
            number += 1
            name = f"{hint}_{number}"
            if name not in self.metas and name not in self.taken:
                self._counter[hint] = number
                return name

    def emit(self, phase: int, op: str, args: tuple[Any, ...], name: str, meta: TensorMeta) -> str:
        self.metas[name] = meta
        if any(isinstance(value, Ref) and value.name in self.uneven for value in args):
            self.uneven.add(name)
        module, node = self.context
        self.instructions[phase].append(Instruction(op=op, args=args, outputs=(name,), module=module, node=node))
        return name
