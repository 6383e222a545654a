"""Pieces: a part cut out of a value, and a value put together from its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopar.ir.graph import RESHAPE, Node, Ref, TensorMeta
from autopar.ir.layout import Partial, Shape, Split
from autopar.ir.rewrite import NodeWriter

from .regions import Region


@dataclass(eq=False, kw_only=True)
class Pieces(NodeWriter):
    """The parts of a region's values, by name, and the instructions that make them."""

    region: Region
    label: str
    part_names: dict[tuple[str, int], str] = field(default_factory=dict)
    """(value, part) -> that part of it, once written."""

    def _name(self, value: str, part: int) -> str:
        name = f"{value}_{self.label}{part}"
        while name in self.metas:
            name += "_"
        return name

    def _emit(self, like: Node, op: str, args: tuple[Any, ...], name: str, meta: TensorMeta) -> str:
        return self.emit(op, args, (name, meta), module=like.module, serves=like.serves)

    def _shape(self, value: str) -> Shape:
        shape, cut = list(self.metas[value].shape), self.region.cuts[value]
        if isinstance(cut, Split):
            shape[cut.dim] //= self.region.parts
        return tuple(shape)

    def _cut_out(self, reader: Node, value: str, source: str, cut: Split, part: int) -> str:
        parts, (shape, dtype) = self.region.parts, (self.metas[value].shape, self.metas[value].dtype)
        each, small = cut.period // parts, TensorMeta(self._shape(value), self.metas[value].dtype)
        if cut.period == shape[cut.dim]:
            args = (Ref(source), cut.dim, part * each, (part + 1) * each)
            return self._emit(reader, "aten.slice.Tensor", args, self._name(value, part), small)
        above, below = shape[: cut.dim], shape[cut.dim + 1 :]
        blocks = (*above, shape[cut.dim] // cut.period, parts, each, *below)
        wide = self._emit(
            reader, RESHAPE, (Ref(source), blocks), self._name(f"{value}_blocks", part), TensorMeta(blocks, dtype)
        )
        taken = (*blocks[: cut.dim + 1], *blocks[cut.dim + 2 :])
        select = (Ref(wide), cut.dim + 1, part)
        name = self._name(f"{value}_block", part)
        one = self._emit(reader, "aten.select.int", select, name, TensorMeta(taken, dtype))
        return self._emit(reader, RESHAPE, (Ref(one), small.shape), self._name(value, part), small)

    def _together(self, instruction: Node, value: str, whole: str) -> None:
        """All parts of a value, under the name `whole`."""
        cut = self.region.cuts[value]
        parts = [Ref(self.part_names[value, part]) for part in range(self.region.parts)]
        meta = self.metas[value]
        if isinstance(cut, Partial):
            total = parts[0]
            for number, more in enumerate(parts[1:], 1):
                name = whole if number == len(parts) - 1 else self._name(f"{value}_sum", number)
                total = Ref(self._emit(instruction, "aten.add.Tensor", (total, more), name, meta))
            return
        assert isinstance(cut, Split)
        size = meta.shape[cut.dim]
        if cut.period == size:
            self._emit(instruction, "aten.cat.default", (tuple(parts), cut.dim), whole, meta)
            return
        above, below = meta.shape[: cut.dim], meta.shape[cut.dim + 1 :]
        each = (*above, size // cut.period, 1, cut.period // len(parts), *below)
        one, all_of_them = TensorMeta(each, meta.dtype), (*each[: cut.dim + 1], len(parts), *each[cut.dim + 2 :])
        blocks = tuple(
            Ref(self._emit(instruction, RESHAPE, (part, each), self._name(f"{value}_block", n), one))
            for n, part in enumerate(parts)
        )
        together = TensorMeta(all_of_them, meta.dtype)
        apart = self._name(f"{value}_blocks", 0)
        self._emit(instruction, "aten.cat.default", (blocks, cut.dim + 1), apart, together)
        self._emit(instruction, RESHAPE, (Ref(apart), meta.shape), whole, meta)
