"""What is known of values that come from a sort of rows by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import JointGraph, Ref

from .patterns import RuleOf
from .rewrite import Rewrite


@dataclass(frozen=True, slots=True)
class Fact:
    """What a value is, because of a sort. `kind`:

    order           order of the sort: row i of what is sorted was row order[i]
    tokens          order // size: the token of row i, where every token has `size` rows
    inverse         the place to which the sort moved row i
    ids             the sorted experts
    counts, ends    how many rows each of `size` experts has; up to and with each
    rows            a tensor whose rows, along dim `size`, stand in the order of the sort
    """

    sort: str
    kind: str
    size: int = 0


class SortedRows(Rewrite):
    """Facts are by the names of the old graph; the new graph has in the place of sorted rows the same rows
    in the order that they had before."""

    def __init__(self, graph: JointGraph, rule_of: RuleOf) -> None:
        super().__init__(graph)
        self.rule_of = rule_of
        self.facts: dict[str, Fact] = {}
        self.ids: dict[str, str] = {}
        """Name of a sort -> what it sorts."""

    def kind(self, value: Any) -> str:
        fact = self.facts.get(value.name) if isinstance(value, Ref) else None
        return fact.kind if fact else ""

    def is_rows(self, value: Any, dim: int = 0) -> bool:
        fact = self.facts.get(value.name)
        return fact is not None and ((fact.kind == "ids" and dim == 0) or (fact.kind == "rows" and fact.size == dim))

    def has_rows(self, name: str) -> bool:
        return self.facts[name].kind in ("rows", "ids")

    def know(self, name: str, sort: str, kind: str, size: int = 0) -> bool:
        self.facts[name] = Fact(sort, kind, size)
        return True

    def count(self, sort: str) -> int:
        return self.shape(self.ids[sort])[0]
