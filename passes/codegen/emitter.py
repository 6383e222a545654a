"""The emitter: instructions of both halves as they are written, under names that are nowhere taken."""

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.graph import Ref, TensorMeta
from autopar.ir.rewrite import NodeWriter, numbered


@dataclass(eq=False)
class Emitter:
    """`taken` are names of the graph, which values of the program may not have unless they are those."""

    taken: Container[str]
    metas: dict[str, TensorMeta] = field(default_factory=dict)
    uneven: set[str] = field(default_factory=set)
    """Values of as many rows as happen to come."""
    context: tuple[str, str] = ("", "")
    """Module and node that instructions are written for."""
    numbers: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.halves = NodeWriter(metas=self.metas), NodeWriter(metas=self.metas)
        """Forward and backward."""

    def fresh(self, hint: str) -> str:
        hint = hint.replace("|", "_")
        name = numbered(hint, self.metas, self.taken, start=self.numbers[hint] + 1)
        self.numbers[hint] = int(name.rpartition("_")[2])
        return name

    def emit(self, phase: int, op: str, args: tuple[Any, ...], name: str, meta: TensorMeta) -> str:
        if any(isinstance(value, Ref) and value.name in self.uneven for value in args):
            self.uneven.add(name)
        module, serves = self.context
        return self.halves[phase].emit(op, args, (name, meta), module=module, serves=serves)
