"""Attention without the parts of its masks that are known.

What models add to scores is mostly 0 where a conjunction of truth values holds and -inf elsewhere. Of the conjunction,
what holds everywhere is left out, what hides the keys behind a query's own place is the argument `is_causal`, and what
keeps documents apart are their numbers (`documents`).
The rest stays a tensor, which may be of fewer dims: [batch, 1, 1, keys] for padding. What is left out is proved
(`known`), and nothing changes where that cannot be done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import RESHAPE, JointGraph, Node, Ref
from autopar.ir.rewriter import Rewriter
from autopar.ops.kinds import AND, EXPAND
from autopar.ops.local import replaced
from autopar.ops.rule import call_of
from autopar.ops.sdpa import ATTENTION, ATTENTION_BACKWARD, DOCUMENTS

from .documents import Comparisons, Numbers
from .known import RuleOf

MASK = (("aten.where.self(condition, 0.0, -inf)", None),)

Factor = tuple[str, bool]
"""Truth values, and whether they are [batch, queries, keys], without a dim for heads."""

broadcast: Callable[..., tuple[int, ...]] = torch.broadcast_shapes


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a mask: truth values that must hold together, beside the causal mask and documents if there are
    any."""

    factors: tuple[Factor, ...]
    is_causal: bool
    documents: Numbers = ()


def without_masks(graph: JointGraph, rule_of: RuleOf) -> JointGraph:
    """The graph in which no call of attention has a mask that says what an argument can say."""
    if not any(node.op == ATTENTION for node in graph.nodes):
        return graph
    return _Masks(graph, rule_of).run()


class _Masks(Rewriter):
    def __init__(self, graph: JointGraph, rule_of: RuleOf) -> None:
        super().__init__(graph=graph, metas=dict(graph.metas))
        self.known = Comparisons(graph, rule_of)
        self.rests: dict[tuple[str, int, int], Rest | None] = {}
        self.made: dict[str, tuple[dict[str, Any], bool]] = {}
        """Mask -> the arguments that stand for it, and whether the call is causal."""
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
        given, is_causal = self.made[mask.name]
        args, kwargs = replaced(replace(call, node=node), **given)
        named = {key: value for key, value in kwargs if value is not None}
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
            if after != (1,) * (len(after) - len(before)) + before:
                return None
            node = self.known.node(node.inputs[0])
        return node

    def _rest(self, condition: str, queries: int, keys: int) -> Rest | None:
        """What is left of a condition for so many queries and keys; None where all of it is."""
        key = condition, queries, keys
        if key not in self.rests:
            factors: list[Factor] = []
            is_causal = False
            for factor in dict.fromkeys(self._factors(condition)):
                whole = self._shape(factor)[-2:] == (queries, keys)
                seen = self.known.visible(factor[0]) if whole else None
                if seen is not None and seen.is_causal(keys):
                    is_causal = True
                elif not self._holds(factor[0]) and (seen is None or not seen.is_all(keys)):
                    factors.append(factor)
            most = self.graph.metas[condition].numel
            rest = self._within_documents(factors)
            if rest is None or self._numel(rest.factors) == most:
                rest = Rest(tuple(factors), is_causal)
            rest = replace(rest, is_causal=is_causal or rest.is_causal)
            self.rests[key] = rest if rest.is_causal or self._numel(rest.factors) < most else None
        return self.rests[key]

    def _within_documents(self, factors: list[Factor]) -> Rest | None:
        """What is left of factors beside one that keeps documents apart, if there is one."""
        for factor in factors:
            if (of := self.known.compared(factor[0], self._shape(factor))) is not None:
                rest = [other for other in factors if other != factor]
                left = tuple(other for other in rest if not self.known.is_causal(other[0], self._shape(other), of))
                return Rest(left, len(left) < len(rest), of)
        return None

    def _holds(self, factor: str) -> bool:
        """Whether a factor holds everywhere."""
        value = self.known.value(factor)
        return value is not None and bool(value.all())

    def _shape(self, factor: Factor) -> tuple[int, ...]:
        name, lifted = factor
        shape = self.metas[name].shape
        return (*(1, 1, *shape)[-3:-2], 1, *shape[-2:]) if lifted else shape

    def _numel(self, factors: Sequence[Factor]) -> int:
        return math.prod(broadcast(*map(self._shape, factors))) if factors else 0

    def _factors(self, name: str, lifted: bool = False) -> Iterator[Factor]:
        """What must hold together, from left to right. What is repeated along a dim counts as it is before that."""
        node = self.known.node(name)
        operands = node.inputs if node is not None else ()
        if node is not None and node.op == RESHAPE and self._shape((operands[0], True)) == self.metas[name].shape:
            lifted = True
        elif node is None or (node.op != EXPAND and (node.op not in AND or len(operands) != 2)):
            operands = ()
            yield name, lifted
        for operand in operands:
            yield from self._factors(operand, lifted)

    # --- writing

    def _left(self, where: Node, rest: Rest) -> dict[str, Any]:
        """Writes what is left behind the mask that it stands for; as arguments."""
        self.at(where)
        self.written = self.behind.setdefault(where.name, [])
        numbers = zip(DOCUMENTS, rest.documents, strict=False)
        return {"attn_mask": self._mask(where, rest), **{role: self._viewed(*of) for role, of in numbers}}

    def _mask(self, where: Node, rest: Rest) -> Ref | None:
        if not rest.factors:
            return None
        joined, *others = (self._viewed(factor[0], self._shape(factor)) for factor in rest.factors)
        for other in others:
            joined = self._write(AND[0], joined, other)
        mask = self._write(where.op, joined, *where.args[1:])
        shape = self.metas[mask.name].shape
        if len(shape) not in (2, 4):
            mask = self._write(RESHAPE, mask, (*(1,) * (4 - len(shape)), *shape))
        return mask

    def _write(self, op: str, *args: Any) -> Ref:
        return Ref(self.emit(op, args, self.fresh(f"{self.node.name}_left")))

    def _viewed(self, name: str, shape: tuple[int, ...]) -> Ref:
        return Ref(name) if shape == self.metas[name].shape else self._write(RESHAPE, Ref(name), shape)
