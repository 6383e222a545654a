"""What of a tensor is had without a collective: problems that say so, and the builder that makes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from autopar.ir.graph import TensorMeta
from autopar.ir.layout import REPLICATE, Layout
from autopar.passes.space.problem import ProblemBuilder
from autopar.passes.space.space import Space
from autopar.passes.space.tables import Movement
from autopar.solve.problem import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeTensor(Tensor):
    """A tensor of which `free` says, by the layout that it is made in, which layouts (a bitmask) local slices give."""

    free: dict[int, int]


def free_of(tensor: Tensor) -> dict[int, int] | None:
    """None: not given, and every layout is allowed inside a group."""
    return tensor.free if isinstance(tensor, FreeTensor) else None


class FreeBuilder(ProblemBuilder):
    """Builds problems whose tensors are `FreeTensor`s."""

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self.free: dict[int, dict[int, int]] = {}
        """By the identity of a table's costs, which tensors share."""

    def _tensors(self, *args: Any) -> Iterator[Tensor]:
        for tensor in super()._tensors(*args):
            copied = {field.name: getattr(tensor, field.name) for field in fields(Tensor)}
            yield FreeTensor(**copied, free=self.free[id(tensor.costs)])

    def _table(self, movement: Movement, made: Any, wanted: Any) -> Any:
        table = super()._table(movement, made, wanted)
        items = list(dict.fromkeys(item for of_reader in wanted for each in of_reader for item in each))
        meta = movement.ways[0].meta
        self.free[id(table.costs)] = {
            code: _bits(each is None or self._is_free(meta, each[0], item.layout) for item in items)
            for code, each in enumerate(dict.fromkeys(made))
        }
        return table

    def _is_free(self, meta: TensorMeta, produced: Layout, wanted: Layout) -> bool:
        """Whether a layout is had by local slices alone."""
        if any(here not in (there, REPLICATE) for here, there in zip(produced, wanted, strict=True)):
            return False
        route = self.space.redistributor.route(meta.shape, meta.dtype, produced, wanted)
        return route is not None and all(step.kind == "slice" for step in route.steps)


def _bits(allowed: Iterable[bool]) -> int:
    return sum(1 << bit for bit, here in enumerate(allowed) if here)
