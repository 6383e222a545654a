"""Attention without the parts of its masks that are known.

What models add to scores is mostly 0 where a conjunction of truth values holds and -inf elsewhere. Of the conjunction,
what holds everywhere is left out, and what hides the keys behind a query's own place is the argument `is_causal`.
The rest stays a tensor, which may be of fewer dims: [batch, 1, 1, keys] for padding. What is left out is proved
(`known`), and nothing changes where that cannot be done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import RESHAPE, JointGraph, Node, Ref
from autopar.ir.rewriter import Rewriter
from autopar.ops.kinds import AND, EXPAND
from autopar.ops.local import replaced
from autopar.ops.rule import call_of
from autopar.ops.sdpa import ATTENTION, ATTENTION_BACKWARD

from .known import KnownValues, RuleOf

MASK = (("aten.where.self(condition, 0.0, -inf)", None),)

broadcast: Callable[..., tuple[int, ...]] = torch.broadcast_shapes


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a mask: truth values that must hold together, beside the causal mask if there is one."""

    factors: tuple[str, ...]
    is_causal: bool


def without_masks(graph: JointGraph, rule_of: RuleOf) -> JointGraph:
    """The graph in which no call of attention has a mask that says what an argument can say."""
    if not any(node.op == ATTENTION for node in graph.nodes):
        return graph
    return _Masks(graph, rule_of).run()


class _Masks(Rewriter):
    def __init__(self, graph: JointGraph, rule_of: RuleOf) -> None:
        super().__init__(graph=graph, metas=dict(graph.metas))
        self.known = KnownValues(graph, rule_of)
        self.rests: dict[tuple[str, int, int], Rest | None] = {}
        self.made: dict[str, tuple[str | None, bool]] = {}
        """Mask -> the one that stands for it, and whether the call is causal."""
        self.behind: dict[str, list[Node]] = {}
        """Name of a node that makes a mask -> the nodes of what stands for it."""

    def run(self) -> JointGraph:
        for node in self.graph.nodes:
            if node.op == ATTENTION:
                self._look(node)
        if not self.made:
            return self.graph
        self.written = []
        for node in self.graph.nodes:
            self.keep(self._with_mask(node) if node.op in (ATTENTION, ATTENTION_BACKWARD) else node)
            self.written += self.behind.get(node.name, ())
        return self.done()

    def _look(self, node: Node) -> None:
        """Takes note of what stands for the mask of a call."""
        call = call_of(node, self.graph.metas)
        mask = call.argument("attn_mask")
        if mask is None or mask.name in self.made or call.argument("is_causal"):
            return
        read = self._condition(mask.name)
        rest = None if read is None else self._rest(read[1], *(meta.shape[2] for meta in call.inputs[:2]))
        if read is not None and rest is not None:
            self.made[mask.name] = self._left(read[0], rest), rest.is_causal

    def _with_mask(self, node: Node) -> Node:
        """The call with the mask that stands for its own, if there is one."""
        call = call_of(node, self.graph.metas)
        mask = call.argument("attn_mask")
        if mask is None or mask.name not in self.made or call.argument("is_causal"):
            return node
        name, is_causal = self.made[mask.name]
        given: dict[str, Any] = {"attn_mask": None if name is None else Ref(name)}
        args, kwargs = replaced(replace(call, node=node), **given)
        named = {key: value for key, value in kwargs if (key, value) != ("attn_mask", None)}
        if is_causal:
            named["is_causal"] = True
        return replace(node, args=args, kwargs=tuple(named.items()))

    # --- reading

    def _condition(self, mask: str) -> tuple[Node, str] | None:
        """Of a mask that is 0 where a condition holds and -inf elsewhere: the node that makes it so, the condition."""
        node = self._made_by(mask)
        found = None if node is None else next(self.matcher.find(MASK, node), None)
        if node is None or found is None:
            return None
        condition = found[1]["condition"]
        wide = self.graph.metas[condition].shape
        return (node, condition) if wide == self.graph.metas[node.name].shape and len(wide) in (2, 4) else None

    def _made_by(self, name: str) -> Node | None:
        """The node that makes a value, or what it is a view of with dims of size 1 more."""
        node = self.known.node(name)
        while node is not None and node.op == RESHAPE:
            before, after = (self.graph.metas[value].shape for value in (node.inputs[0], node.outputs[0]))
            if after[len(after) - len(before) :] != before or any(n != 1 for n in after[: len(after) - len(before)]):
                return None
            node = self.known.node(node.inputs[0])
        return node

    def _rest(self, condition: str, queries: int, keys: int) -> Rest | None:
        """What is left of a condition for so many queries and keys; None where all of it is."""
        key = condition, queries, keys
        if key not in self.rests:
            factors: list[str] = []
            is_causal = False
            given = list(dict.fromkeys(self._factors(condition)))
            for factor in given:
                whole = self.graph.metas[factor].shape[-2:] == (queries, keys)
                seen = self.known.visible(factor) if whole else None
                if seen is not None and seen.is_causal(keys):
                    is_causal = True
                elif not self._holds(factor) and (seen is None or not seen.is_all(keys)):
                    factors.append(factor)
            smaller = self._numel(factors) < self.graph.metas[condition].numel
            self.rests[key] = Rest(tuple(factors), is_causal) if is_causal or smaller else None
        return self.rests[key]

    def _holds(self, factor: str) -> bool:
        """Whether a factor holds everywhere."""
        value = self.known.value(factor)
        return value is not None and bool(value.all())

    def _numel(self, factors: list[str]) -> int:
        return math.prod(self._broadcast(*factors)) if factors else 0

    def _factors(self, condition: str) -> Iterator[str]:
        """What must hold together, from left to right. What is repeated along a dim counts as it is before that, with
        dims of size 1 in front."""
        waiting = [condition]
        while waiting:
            name = waiting.pop()
            node = self.known.node(name)
            rank = len(self.graph.metas[name].shape)
            if node is not None and node.op in AND and len(node.inputs) == 2:
                waiting += reversed(node.inputs)
            elif node is not None and node.op == EXPAND and len(self.graph.metas[node.inputs[0]].shape) == rank:
                waiting.append(node.inputs[0])
            else:
                yield name

    # --- writing

    def _left(self, where: Node, rest: Rest) -> str | None:
        """Writes the mask that is left behind the one that it stands for; its name, if there is one."""
        if not rest.factors:
            return None
        self.at(where)
        self.written = self.behind.setdefault(where.name, [])
        joined, *others = map(Ref, rest.factors)
        for other in others:
            joined = self._write(AND[0], joined, other)
        mask = self._write(where.op, joined, *where.args[1:])
        shape = self.metas[mask.name].shape
        if len(shape) not in (2, 4):
            mask = self._write(RESHAPE, mask, (*(1,) * (4 - len(shape)), *shape))
        return mask.name

    def _write(self, op: str, *args: Any) -> Ref:
        return Ref(self.emit(op, args, self.fresh(f"{self.node.name}_left")))

    def _broadcast(self, *names: str) -> tuple[int, ...]:
        return tuple(broadcast(*(self.metas[name].shape for name in names)))
