"""Masks that keep documents apart: comparisons of what numbers the document of a query with what numbers that of a key.

What is compared are values of the graph. Nothing is read of what they hold in the example.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from autopar.ir.graph import RESHAPE, Node
from autopar.ir.matcher import Matcher, Rules

from .known import KnownValues

EQUAL = (("aten.eq.Tensor({query, key})", None),)
NO_LATER = (("aten.le.Tensor(key, query)", None), ("aten.ge.Tensor(query, key)", None))
LOOKED_UP = (("aten.index.Tensor(source, places)", None),)
BEGUN_ANEW = (
    (
        "aten.cumsum.default(aten.ne.Scalar(aten.sub.Tensor("
        "(here := aten.slice.Tensor((joined := aten.cat.default((_, positions), -1)), -1, 1, _)), "
        "(before := aten.slice.Tensor(joined, -1, 0, _))), 1), -1)",
        None,
    ),
)
"""Numbers of documents: one more wherever a position is not one more than that before it."""

INTEGERS = torch.int32, torch.int64

Shape = tuple[int, ...]
Numbers = tuple[tuple[str, Shape], ...]
"""Of queries and of keys: values, and the shapes [batch or 1, queries] and [batch or 1, keys] that they can be viewed
in."""


class Comparisons(KnownValues):
    """Reads truth values that broadcast to [batch, 1, queries, keys]."""

    @cached_property
    def matcher(self) -> Matcher:
        return Matcher(graph=self.graph)

    def compared(self, factor: str, shape: Shape, forms: Rules[None] = EQUAL) -> Numbers | None:
        """What a factor that can be viewed in this shape compares in one of these forms, if those are integers."""
        node = self.node(factor)
        *leading, queries, keys = [1] * 3 + [*shape]
        if node is None or len(leading) > 5 or leading[-1] > 1:
            return None
        for _, found in self.matcher.find(forms, node):
            both = self._viewed(found["query"], (queries, 1)), self._viewed(found["key"], (1, keys))
            if all(of[0] in (1, math.prod(leading)) for _, of in both):
                return both
        return None

    def is_causal(self, factor: str, shape: Shape, documents: Numbers) -> bool:
        """Whether, within these documents, a factor lets a query see the keys up to its own place. It does where it
        compares positions, and each document begins where these do not go on by 1: within one, positions are ordered as
        places are (but for integers that overflow)."""
        (name, (rows, length)), other = documents
        node = self.node(name)
        if node is None or other != documents[0]:
            return False
        for _, found in self.matcher.find(BEGUN_ANEW, node):
            shapes = [self.meta(found[part]).shape for part in ("here", "before", "positions", "joined")]
            order = found["positions"], (rows, length)
            if shapes == [order[1]] * 3 + [(rows, length + 1)]:
                return self.compared(factor, shape, NO_LATER) == (order, order)
        return False

    def _viewed(self, name: str, ends: Shape) -> tuple[str, Shape]:
        """The first value that has the elements of another in their order, in rows, or that other; without rows of what
        are no integers that end in these dims."""
        meta, length = self.meta(name), max(ends)
        if meta.dtype not in INTEGERS or (1, *meta.shape)[-2:] != ends or length == 1:
            return name, (0, 0)
        shape, source = (meta.numel // length, length), name
        while (node := self.node(source)) is not None and (node.op == RESHAPE or self._is_whole(node)):
            source = node.inputs[0]
            name = source if self.meta(source).shape == shape else name
        return name, shape

    def _is_whole(self, node: Node) -> bool:
        """Whether a node looks up all elements of its first operand, one after the other."""
        for _, found in self.matcher.find(LOOKED_UP, node):
            shape = self.meta(found["source"]).shape
            places = [at for place in found["places"] if place and (at := self.value(place.name)) is not None]
            every = torch.arange(math.prod(shape), device="cpu")
            return len(places) == len(shape) and torch.equal(every.view(shape)[tuple(places)].flatten(), every)
        return False
