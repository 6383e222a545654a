"""The partition of a graph: every node goes to exactly one block, free group or shared group.

Blocks claim forward operators (`Growth`). Input branches join their only reader, what no block claims forms groups by
module, and backward operators join their forward's group.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.ir.graph import JointGraph
from autopar.passes.dependency.affine import identity, surviving

from .block import BlockDim, Blocks, BranchKind, FreeGroup, ParallelBlock, SharedGroup
from .facts import RuleFacts


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
    """Blocks grow from contractions along their users, in the order of depth (CFP Algorithm 1, DFSAndGroup).

    A block takes in a user as long as every dim of the contraction's result that can be split survives in the
    user's result (Eq. 2, on composed dependency maps). Line 22 of the algorithm returns inside the loop and would drop
    sibling users: here all are visited. Whether a graph is flattened to [b*s, h] or keeps [b, s, h] makes no
    difference, since views are operators with maps like all others.

    Contractions that read one tensor, through whatever views, and whose results meet (q, k, v; gate, up) are merged
    into one block, and an operator that also reads an activation from outside of the block (a residual add) is not
    claimed. `merge=False` is the paper's form: one contraction a block, first come.
    """

    def __init__(self, facts: RuleFacts, merge: bool) -> None:
        self.facts, self.merge = facts, merge
        self.grouped: set[int] = set()

    def claims(self) -> list[Claim]:
        facts = self.facts
        seeds = [i for i in range(facts.middle) if facts.is_contraction(i) and facts.is_active(i)]
        depth = self._depths()
        seeds.sort(key=lambda i: (depth[i], i))
        claims: list[Claim] = []
        for seed in seeds:
            if seed not in self.grouped:
                merged = self._siblings(seed, seeds) if self.merge else (seed,)
                claim = self._grow(merged, self.facts.ranks, closed=self.merge)
                self.grouped |= claim.nodes
                claims.append(claim)
        return claims

    def _depths(self) -> list[int]:
        """Length of the longest path that ends in each forward node, views not counted."""
        facts = self.facts
        depth: list[int] = []
        for i in range(facts.middle):
            before = max(
                (depth[facts.producer[name]] for name in facts.operands[i] if name in facts.producer), default=0
            )
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
            if not all(facts.preserves(maps, ranks) for paths in reached for maps in paths.values()):
                claim.refused[i] = "Equation 2 does not hold"
                continue
            claim.nodes.add(i)
            claim.values.update((o, paths) for o, paths in zip(nodes[i].outputs, reached, strict=True) if o)
            visit(o for o in nodes[i].outputs if o)
        return claim

    def _reached(self, claim: Claim, i: int, slot: int) -> dict[int, tuple[int, ...]]:
        """The maps from one output of node i to each contraction that the block grew from."""
        reached: dict[int, dict[int, None]] = {}
        for operand, name in enumerate(self.facts.operands[i]):
            for seed, maps in claim.values.get(name, {}).items():
                paths = reached.setdefault(seed, {})
                for mapping in maps:
                    paths[self.facts.step(mapping, i, slot, operand)] = None
        return {seed: tuple(sorted(paths)) for seed, paths in reached.items()}


def blocks(graph: JointGraph, ranks: int, *, merge: bool = True) -> Blocks:
    """CFP Algorithm 1 for P = `ranks`."""
    facts = RuleFacts(graph, ranks)
    claims = Growth(facts, merge).claims()
    groups = _Partition(facts, claims)
    return Blocks(
        ranks=ranks,
        merge=merge,
        blocks=tuple(groups.block(k) for k in range(len(claims))),
        free=tuple(groups.free()),
        shared=tuple(groups.shared()),
    )


class _Partition:
    """Numbers of groups: blocks first, then free groups. -1 is shared."""

    def __init__(self, facts: RuleFacts, claims: Sequence[Claim]) -> None:
        self.facts, self.claims = facts, claims
        self.group: dict[int, int] = {i: k for k, claim in enumerate(claims) for i in claim.nodes}
        self.reasons: dict[int, str] = {}
        self.count = len(claims)
        self._input_views()
        self._free_forward()
        self._branches()
        self._backward()
        self.members: dict[int, list[int]] = {}
        for i in range(len(facts.graph.nodes)):
            self.members.setdefault(self.group[i], []).append(i)
        self.names = self._names()

    def _fresh(self, reason: str) -> int:
        self.count += 1
        self.reasons[self.count - 1] = reason
        return self.count - 1

    def _input_views(self) -> None:
        """A view of an activation that one block alone reads is the block's."""
        facts = self.facts
        for i in reversed(range(facts.middle)):
            if facts.is_view(i) and facts.is_active(i) and i not in self.group:
                readers = {self.group.get(u, -1) for u in facts.users.get(facts.graph.nodes[i].name, ())}
                if len(readers) == 1 and 0 <= (reader := readers.pop()) < len(self.claims):
                    self.group[i] = reader

    def _free_forward(self) -> None:
        """What no block claims, and is no branch: operators of one module that read one another. An
        operator that reads an activation of a block begins a group."""
        facts, nodes = self.facts, self.facts.graph.nodes
        for i in range(facts.middle):
            if i in self.group or not facts.is_active(i):
                continue
            makers = {facts.producer[n] for n in facts.operands[i] if n in facts.activations and n in facts.producer}
            groups = {self.group[maker] for maker in makers}
            # a norm reads the residual stream twice: it goes on where its own module began
            alike = {self.group[maker] for maker in makers if nodes[maker].module == nodes[i].module}
            if len(alike) == 1 and min(groups) >= len(self.claims):
                self.group[i] = alike.pop()
            else:
                self.group[i] = self._fresh(self._why(i))

    def _why(self, i: int) -> str:
        reasons = [
            f"{claim.refused[i]}, after {self._name(k)}" for k, claim in enumerate(self.claims) if i in claim.refused
        ]
        return "; ".join(reasons) or "no block reaches it"

    def _branches(self) -> None:
        """What is no activation belongs to its only reader, or is shared (CFP Fig. 5b and 5c)."""
        facts = self.facts
        for i in reversed(range(facts.middle)):
            if i not in self.group:
                readers = {self.group[u] for o in facts.graph.nodes[i].outputs for u in facts.users.get(o, ())}
                self.group[i] = readers.pop() if len(readers) == 1 else -1

    def _backward(self) -> None:
        """A backward operator goes where the forward operator of its sequence number went. The adds
        that autograd makes carry the loss's number: they read gradients of operators with smaller
        numbers, which no operator of the loss does. They go where their operands agree. What is made again goes where
        it was made."""
        facts, nodes = self.facts, self.facts.graph.nodes
        forward: dict[int, int] = {}
        for i in range(facts.middle):
            if nodes[i].sequence >= 0 and self.group[i] >= 0:
                forward[nodes[i].sequence] = self.group[i]
        for i in range(facts.middle, len(nodes)):
            makers = [facts.producer[n] for n in facts.operands[i] if n in facts.producer]
            backward = [m for m in makers if m >= facts.middle]
            if nodes[i].serves:
                self.group[i] = self.group[facts.producer[nodes[i].serves]]
                continue
            sequence = nodes[i].sequence
            if sequence in forward and all(nodes[m].sequence < 0 or nodes[m].sequence >= sequence for m in backward):
                self.group[i] = forward[sequence]
                continue
            groups = {self.group[m] for m in backward or makers}
            self.group[i] = groups.pop() if len(groups) == 1 else self._fresh("gradients accumulate")

    # ---- values ----

    def _names(self) -> dict[int, str]:
        """The module path of a group, numbered where two groups have one path."""
        nodes = self.facts.graph.nodes
        names: dict[int, str] = {}
        seen: Counter[str] = Counter()
        for k, members in sorted(self.members.items()):
            if k < 0:
                continue
            name = self._name(k) if k < len(self.claims) else nodes[members[0]].module or nodes[members[0]].name
            seen[name] += 1
            names[k] = name if seen[name] == 1 else f"{name}#{seen[name]}"
        return names

    def _name(self, k: int) -> str:
        nodes, merged = self.facts.graph.nodes, self.claims[k].merged
        return _join([nodes[i].module for i in merged]) or nodes[merged[0]].name

    def block(self, k: int) -> ParallelBlock:
        facts, claim = self.facts, self.claims[k]
        return ParallelBlock(
            name=self.names[k],
            merged=claim.merged,
            contractions=tuple(i for i in sorted(claim.nodes) if facts.is_contraction(i)),
            nodes=tuple(self.members[k]),
            dims=self._dims(claim),
        )

    def _dims(self, claim: Claim) -> tuple[BlockDim, ...]:
        """The dims of the first contraction's result, as far as every value of the block knows them,
        and the dims that the contraction sums over."""
        facts, seed = self.facts, claim.merged[0]
        rule = facts.rule(seed)
        assert rule is not None
        dims: list[BlockDim] = []
        maps = {tuple(sorted(of_value.items())) for of_value in claim.values.values() if seed in of_value}
        for f, factor in enumerate(rule.factors):
            if f in rule.outputs[0]:
                dim = rule.outputs[0].index(f)
                kept = [(1, factor.size)]
                for of_value in sorted(maps):
                    kept = _intersection(kept, self._kept(dict(of_value), seed, dim))
                dims += [BlockDim(factor=factor.name, dim=dim, block=low, count=high // low) for low, high in kept]
            else:
                dims.append(BlockDim(factor=factor.name, dim=None, block=1, count=factor.size))
        return tuple(dims)

    def _kept(self, of_value: dict[int, tuple[int, ...]], seed: int, dim: int) -> list[tuple[int, int]]:
        """The digits [block, block * count) of a dim of `seed`'s result that one value knows along all
        paths, and at which it knows a digit of every other contraction that it comes from too."""
        facts = self.facts
        kept: list[tuple[int, int]] | None = None
        others = [mapping for other, maps in of_value.items() if other != seed for mapping in maps]
        for mapping in of_value[seed]:
            digits: list[tuple[int, int]] = []
            for p in surviving(facts.maps[mapping])[dim]:
                spans = [(p.output_block, p.output_block * p.count)]
                for other in others:
                    theirs = [q for qs in surviving(facts.maps[other]) for q in qs if q.output_dim == p.output_dim]
                    spans = _intersection(spans, [(q.output_block, q.output_block * q.count) for q in theirs])
                digits += [(low // p.output_block * p.block, high // p.output_block * p.block) for low, high in spans]
            kept = _joined(digits) if kept is None else _intersection(kept, _joined(digits))
        return kept or []

    def free(self) -> Iterable[FreeGroup]:
        for k, members in sorted(self.members.items(), key=lambda item: item[1][0]):
            if k >= len(self.claims):
                yield FreeGroup(name=self.names[k], nodes=tuple(members), reason=self.reasons[k])

    def shared(self) -> Iterable[SharedGroup]:
        """Shared operators by who reads them, through one another, and by what they come from."""
        facts, nodes = self.facts, self.facts.graph.nodes
        readers: dict[int, frozenset[int]] = {}
        for i in reversed(self.members.get(-1, [])):
            users = {u for o in nodes[i].outputs if o for u in facts.graph.consumers.get(o, ())}
            direct = {self.group[u] for u in users} - {-1}
            readers[i] = frozenset(direct).union(*(readers[u] for u in users if self.group[u] == -1))
        alike: dict[tuple[tuple[int, ...], BranchKind], list[int]] = {}
        for i in self.members.get(-1, []):
            kind: BranchKind = "parameter" if any(o in facts.trained for o in nodes[i].outputs) else "constant"
            alike.setdefault((tuple(sorted(readers[i])), kind), []).append(i)
        for (groups, kind), members in alike.items():
            yield SharedGroup(nodes=tuple(members), readers=tuple(self.names[k] for k in groups), kind=kind)


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of digits, outermost first, with neighbours joined: [32, 128) and [1, 32) are [1, 128)."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(spans, reverse=True):
        if joined and joined[-1][0] == high:
            joined[-1] = (low, joined[-1][1])
        else:
            joined.append((low, high))
    return joined


def _intersection(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    spans = [(max(a, c), min(b, d)) for a, b in left for c, d in right]
    return [(low, high) for low, high in spans if low < high and high % low == 0]


def _join(paths: Sequence[str]) -> str:
    """a.b.q, a.b.k -> a.b.{q,k}"""
    split = [path.split(".") for path in dict.fromkeys(paths)]
    if len(split) == 1:
        return ".".join(split[0])
    common = [names[0] for names in itertools.takewhile(lambda n: len(set(n)) == 1, zip(*split, strict=False))]
    tails = [".".join(names[len(common) :]) for names in split]
    return ".".join([*common, "{" + ",".join(tails) + "}"])
