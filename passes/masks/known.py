"""What masks that are made from nothing hold, proved without making them.

Indices, and what is computed of them, are integers of a few dims: they are evaluated. A mask [..., queries, keys] of
truth values is never made. A comparison of a column of queries with a sorted row of keys lets each query see keys that
stand side by side, and so do the conjunctions of such masks: `Visible` holds the first and the last key of each query.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.graph import RESHAPE, JointGraph, Node, TensorMeta, map_references, overload, takes
from autopar.ops.kinds import AND, EXPAND, LOWER_TRIANGLE, ONES
from autopar.ops.randomness import draws
from autopar.ops.rule import Call, OpRule, call_of
from autopar.ops.rules import localize

CPU = torch.device("cpu")
"""Where values are computed, whatever the default device is."""

MOST = 1 << 24
"""Elements of a tensor that is evaluated."""

TURNED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}
"""Comparisons, and what they are with their operands exchanged."""


@dataclass(frozen=True, slots=True, eq=False)
class Visible:
    """Query q sees the keys first[..., q] <= k < end[..., q] of a mask [..., queries, keys], which broadcast to it."""

    first: torch.Tensor
    end: torch.Tensor

    def intersection(self, other: Visible) -> Visible:
        return Visible(torch.maximum(self.first, other.first), torch.minimum(self.end, other.end))

    def is_all(self, keys: int) -> bool:
        return bool((self.first <= 0).all() and (self.end >= keys).all())

    def is_causal(self, keys: int) -> bool:
        """Whether a query sees the keys up to its own place."""
        places = torch.arange(1, self.end.shape[-1] + 1, device=CPU).clamp(max=keys)
        return self.end.shape[-1] > 1 and bool((self.first <= 0).all() and (self.end == places).all())


RuleOf = Callable[[Call], OpRule | None]


class KnownValues:
    """The values of a graph that depend on no input, as far as they are integers."""

    def __init__(self, graph: JointGraph, rule_of: RuleOf) -> None:
        self.graph, self.rule_of = graph, rule_of
        self._values: dict[str, torch.Tensor | None] = {}
        self._visible: dict[str, Visible | None] = {}

    def node(self, name: str) -> Node | None:
        """What makes a value, if it is no input."""
        index = self.graph.producer.get(name)
        return None if index is None else self.graph.nodes[index]

    def meta(self, name: str) -> TensorMeta:
        return self.graph.metas[name]

    # --- values

    def value(self, name: str) -> torch.Tensor | None:
        """The value, expanded along dims in which all is alike; None if it is unknown, too large or no integers."""
        waiting = [name]
        while waiting:  # without recursion: chains are as long as a model is deep
            top = waiting[-1]
            if top in self._values:
                waiting.pop()
                continue
            node = self.node(top)
            if node is None or not self._may_be_known(node):
                self._values[top] = None
                continue
            missing = [operand for operand in node.inputs if operand not in self._values]
            if missing:
                waiting += missing
            else:
                self._evaluate(node)
        return self._values[name]

    def _may_be_known(self, node: Node) -> bool:
        metas = [self.meta(output) for output in node.outputs if output]
        return (
            node.op.startswith("aten.")
            and not draws(node)
            and node.op.split(".")[1] not in ("empty", "new_empty", "empty_like")
            and all(not m.dtype.is_floating_point and not m.dtype.is_complex for m in metas)
            and (node.op == EXPAND or all(m.numel <= MOST for m in metas))
        )

    def _evaluate(self, node: Node) -> None:
        self._values.update(dict.fromkeys((output for output in node.outputs if output), None))
        operands = {name: value for name in node.inputs if (value := self._values[name]) is not None}
        if len(operands) < len(set(node.inputs)):
            return
        alike = self._alike_in_rows(node, operands)
        if alike:
            operands = {name: value.narrow(0, 0, 1) for name, value in operands.items()}
        results = _run(node, operands)
        for name, result in zip(node.outputs, results, strict=True):
            if name:
                shape = self.meta(name).shape
                self._values[name] = result.expand(shape) if alike else _compact(result)

    def _alike_in_rows(self, node: Node, operands: Mapping[str, torch.Tensor]) -> bool:
        """Whether the op does the same to each index of dim 0, in which all operands are alike: one is enough."""
        call = call_of(node, self.graph.metas)
        rows = {meta.shape[:1] for meta in (*call.inputs, *call.outputs) if meta}
        if len(rows) != 1 or not all(value.dim() and value.stride(0) == 0 for value in operands.values()):
            return False
        rule = self.rule_of(call)
        if rule is None or None in call.outputs or not rule.inputs or not all((*rule.inputs, *rule.outputs)):
            return False
        number = rule.inputs[0][0]
        carried = [(dims[0], *(n for n in dims[1:] if n == number)) for dims in (*rule.inputs, *rule.outputs)]
        if number is None or set(carried) != {(number,)} or rule.factors[number].expands:
            return False
        few = [tuple((1, *meta.shape[1:]) for meta in metas if meta) for metas in (call.inputs, call.outputs)]
        return bool(localize(call, few[0], few[1], (), ()) == (node.args, node.kwargs))

    # --- masks

    def visible(self, name: str) -> Visible | None:
        """What each query sees of a mask [..., queries, keys], if that is known and stands side by side."""
        if name not in self._visible:
            self._visible[name] = None
            meta = self.meta(name)
            if meta.dtype is torch.bool and len(meta.shape) > 1:
                self._visible[name] = self._seen(name, meta.shape)
        return self._visible[name]

    def _seen(self, name: str, shape: tuple[int, ...]) -> Visible | None:
        node = self.node(name)
        if node is None:
            return None
        keys, kind = shape[-1], node.op.split(".")[1]
        if node.op in ONES:
            return Visible(torch.zeros(1, dtype=torch.int64, device=CPU), torch.full((1,), keys, device=CPU))
        if node.op in AND:
            parts = [self.visible(operand) for operand in node.inputs]
            one, other = parts[0], parts[-1]
            whole = all(self.meta(operand).shape[-2:] == shape[-2:] for operand in node.inputs)
            return one.intersection(other) if whole and one is not None and other is not None else None
        if node.op == LOWER_TRIANGLE:
            seen = self.visible(node.inputs[0])
            diagonal = call_of(node, self.graph.metas).argument("diagonal")
            ends = torch.arange(1, shape[-2] + 1, device=CPU) + diagonal
            below = Visible(torch.zeros(1, dtype=torch.int64, device=CPU), ends.clamp(min=0, max=keys))
            return None if seen is None else seen.intersection(below)
        if node.op in (EXPAND, RESHAPE):
            source = self.meta(node.inputs[0]).shape
            seen = self.visible(node.inputs[0]) if source[-2:] == shape[-2:] else None
            return seen if node.op == EXPAND or (seen is not None and seen.end.numel() == seen.end.shape[-1]) else None
        if node.op.endswith(".Tensor") and kind in TURNED:
            return self._compared(node, kind, keys)
        return None

    def _compared(self, node: Node, kind: str, keys: int) -> Visible | None:
        """A column of queries compared with a row of keys."""
        left, right = (self._operand(argument) for argument in node.args[:2])
        if left is None or right is None or not left.dim() or not right.dim():
            return None
        if left.shape[-1] == 1 and right.shape[-1] == keys:
            left, right, kind = right, left, TURNED[kind]
        row, column = _row(left), right
        if row is None or column.shape[-1] != 1 or column.dim() < 2 or bool((row[1:] < row[:-1]).any()):
            return None
        places = _compact(column.squeeze(-1))
        places = places.narrow(0, 0, 1) if places.dim() > 1 and places.stride(0) == 0 else places
        before, up_to = (torch.searchsorted(row, places.contiguous(), right=right) for right in (False, True))
        none, all_keys = torch.zeros_like(before), torch.full_like(before, keys)
        first, end = {
            "le": (none, up_to), "lt": (none, before), "ge": (before, all_keys), "gt": (up_to, all_keys),
            "eq": (before, up_to),
        }[kind]  # fmt: skip
        return Visible(first, end)

    def _operand(self, argument: Any) -> torch.Tensor | None:
        return self.value(argument.name) if hasattr(argument, "name") else None


def _row(x: torch.Tensor) -> torch.Tensor | None:
    """The one row of a tensor [..., 1, keys] that is the same along all dims before; None if there is none."""
    while x.dim() > 1:
        if x.shape[0] != 1 and x.stride(0) != 0:
            return None
        x = x[0]
    return x.contiguous()


def _compact(x: torch.Tensor) -> torch.Tensor:
    """The same, expanded along dim 0 if all is alike in it."""
    if x.dim() and x.shape[0] > 1 and x.stride(0) and x.numel() and bool((x == x[:1]).all()):
        return x[:1].expand(x.shape)
    return x


def _run(node: Node, operands: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    def listed(value: Any) -> Any:
        return [listed(item) for item in value] if isinstance(value, tuple) else value

    args, kwargs = (listed(map_references(given, operands.__getitem__)) for given in (node.args, node.kwargs))
    named = {**dict(kwargs), **({"device": CPU} if takes(node.op, "device") else {})}
    results = overload(node.op)(*args, **named)
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)
