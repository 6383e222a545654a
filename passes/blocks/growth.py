"""Growth (CFP Algorithm 1, DFSAndGroup): from a tensor contraction along its users.

A block takes in a user as long as every dim of the contraction's result that can be split is still known at the user's
result (Eq. 2, on composed dependency maps). Line 22 of the algorithm returns inside the loop and would drop sibling
users: here all are visited. Whether a graph is flattened to [b*s, h] or keeps [b, s, h] makes no difference, since
views are operators with maps like all others.

Contractions that read one tensor, through whatever views, and whose results meet (q, k, v; gate, up) are merged into
one block, and an operator that also reads an activation from outside of the block (a residual add) is not claimed.
`merge=False` is the paper's form: one contraction a block, first come.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.passes.dependency.affine import identity

from .facts import Facts


@dataclass(slots=True)
class Claim:
    """A block in the making: its forward nodes, and for each value in it the maps to the results of
    the contractions that it grew from (a tuple for each of those, one map a path). `refused` says of
    the users that it did not take why."""

    merged: tuple[int, ...]
    nodes: set[int]
    values: dict[str, dict[int, tuple[int, ...]]]
    refused: dict[int, str]


class Growth:
    """Grow blocks from contractions, in the order of their depth."""

    def __init__(self, facts: Facts, merge: bool) -> None:
        self.facts, self.merge = facts, merge
        self.grouped: set[int] = set()

    def claims(self) -> list[Claim]:
        facts = self.facts
        seeds = [i for i in range(facts.middle) if facts.is_contraction(i) and facts.is_active(i)]
        depth = self._depths()
        seeds.sort(key=lambda i: (depth[i], i))
        found: list[Claim] = []
        for seed in seeds:
            if seed not in self.grouped:
                merged = self._siblings(seed, seeds) if self.merge else (seed,)
                claim = self._grow(merged, self.facts.ranks, closed=self.merge)
                self.grouped |= claim.nodes
                found.append(claim)
        return found

    def _depths(self) -> list[int]:
        """Length of the longest path that ends in each forward node, views not counted."""
        facts = self.facts
        depth: list[int] = []
        for i in range(facts.middle):
            before = max((depth[facts.made[name]] for name in facts.operands[i] if name in facts.made), default=0)
            depth.append(before + (not facts.is_view(i)))
        return depth

    def _siblings(self, seed: int, seeds: Iterable[int]) -> tuple[int, ...]:
        """The ungrouped contractions that read what `seed` reads and whose results meet its own, or
        meet those of one that does. That they meet is asked for one rank: it must not depend on the mesh."""
        root = self.facts.contracted_root(seed)
        others = [i for i in seeds if i not in self.grouped and self.facts.contracted_root(i) == root]
        if len(others) == 1:
            return (seed,)
        reach = {i: self._grow((i,), 1, closed=False).nodes for i in others}
        joined, frontier = {seed}, [seed]
        while frontier:
            here = frontier.pop()
            met = [i for i in others if i not in joined and reach[i] & reach[here]]
            joined.update(met)
            frontier += met
        return tuple(sorted(joined))

    def _grow(self, merged: tuple[int, ...], ranks: int, *, closed: bool) -> Claim:
        """DFSAndGroup of Algorithm 1, with all users visited, in the order of the graph so that a
        node's operands are decided before it. `closed`: claim nothing that reads other activations."""
        facts, nodes = self.facts, self.facts.graph.nodes
        claim = Claim(merged, set(merged), {}, {})
        queue: list[int] = []
        queued: set[int] = set(merged)

        def visit(outputs: Iterable[str]) -> None:
            for user in (u for o in outputs for u in facts.users.get(o, ()) if u not in queued):
                queued.add(user)
                heapq.heappush(queue, user)

        for seed in merged:
            output = nodes[seed].name
            claim.values[output] = {seed: (facts.number(identity(facts.graph.metas[output].shape)),)}
        visit(nodes[seed].name for seed in merged)
        while queue:
            i = heapq.heappop(queue)
            if i in self.grouped:
                continue
            outside = [n for n in facts.operands[i] if n in facts.activations and n not in claim.values]
            if closed and outside:
                claim.refused[i] = f"reads {outside[0]} too"
                continue
            reached = [self._reached(claim, i, slot) if o else {} for slot, o in enumerate(nodes[i].outputs)]
            if not all(facts.preserves(maps, ranks) for found in reached for maps in found.values()):
                claim.refused[i] = "Equation 2 does not hold"
                continue
            claim.nodes.add(i)
            claim.values.update((o, found) for o, found in zip(nodes[i].outputs, reached, strict=True) if o)
            visit(o for o in nodes[i].outputs if o)
        return claim

    def _reached(self, claim: Claim, i: int, slot: int) -> dict[int, tuple[int, ...]]:
        """The maps from one output of node i to each contraction that the block grew from."""
        found: dict[int, dict[int, None]] = {}
        for operand, name in enumerate(self.facts.operands[i]):
            for seed, maps in claim.values.get(name, {}).items():
                paths = found.setdefault(seed, {})
                for mapping in maps:
                    paths[self.facts.step(mapping, i, slot, operand)] = None
        return {seed: tuple(sorted(paths)) for seed, paths in found.items()}
