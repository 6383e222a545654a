"""ParallelBlocks (CFP Algorithm 1): groups of operators that split together without communication.

A block grows from a tensor contraction along its users, as long as every dim of the contraction's
result that can be split is still known at the user's result (Eq. 2, on composed dependency maps).
Backward operators join their forward's block. Line 22 of the algorithm returns inside the loop and
would drop sibling users: here all are visited. Whether a graph is flattened to [b*s, h] or keeps
[b, s, h] makes no difference, since views are operators with maps like all others.

Contractions that read one tensor, through whatever views, and whose results meet (q, k, v; gate, up)
are merged into one block, and an operator that also reads an activation from outside of the block (a
residual add) is not claimed. `merge=False` is the paper's form: one contraction a block, first come.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.ir.graph import JointGraph, is_view
from autopar.ops import rule_of
from autopar.ops.rule import Call, OpRule
from autopar.passes.dependency.affine import AffineMap, compose, identity
from autopar.passes.dependency.operators import call_of_node, dependency
from autopar.passes.dependency.preservation import Preserved, preserved, surviving
from autopar.passes.dependency.signatures import signatures

BranchKind = Literal["parameter", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDim:
    """One way to split a block (CFP Fig. 5a): the digit (i // block) % count of dim `dim` of its first
    contraction's result, that is with period block * count in at most `count` pieces. `dim` None is
    the sum that the contraction computes."""

    factor: str
    dim: int | None
    block: int
    count: int

    def __str__(self) -> str:
        return (
            f"{self.factor}: {self.count} x {self.block}"
            if self.dim is not None
            else f"{self.factor}: sum of {self.count}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """An operand of the block that is no activation (CFP Fig. 5b): `value` is a parameter or made from
    parameters alone, or a constant (mask, cos and sin: made from neither). `reader` is the block's node
    that takes it in and that decides how it is split, `nodes` are the operators that make it and
    serve this block only."""

    value: str
    kind: BranchKind
    reader: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelBlock:
    """`merged` are the contractions that it grew from (one, or several that share their input),
    `contractions` all of its forward contractions, `nodes` everything in it, branches and backward too."""

    name: str
    merged: tuple[int, ...]
    contractions: tuple[int, ...]
    nodes: tuple[int, ...]
    dims: tuple[BlockDim, ...]
    branches: tuple[Branch, ...]

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.dims))
        return f"{self.name}: {len(self.contractions)} contractions, {len(self.nodes)} nodes, splits {dims or 'none'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeGroup:
    """Operators that no contraction claims, with options of their own; `reason` says why."""

    name: str
    nodes: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {len(self.nodes)} nodes, {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGroup:
    """Operators on input branches of several groups (CFP Fig. 5c): their split must suit all `readers`."""

    nodes: tuple[int, ...]
    readers: tuple[str, ...]
    kind: BranchKind

    def __str__(self) -> str:
        return f"{self.kind} of {', '.join(self.readers) or 'nobody'}: {len(self.nodes)} nodes"


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Every node of the graph is in exactly one block, free group or shared group."""

    ranks: int
    merge: bool
    blocks: tuple[ParallelBlock, ...]
    free: tuple[FreeGroup, ...]
    shared: tuple[SharedGroup, ...]

    @cached_property
    def home(self) -> dict[int, ParallelBlock | FreeGroup | SharedGroup]:
        """The group of each node."""
        groups: list[ParallelBlock | FreeGroup | SharedGroup] = [*self.blocks, *self.free, *self.shared]
        return {i: group for group in groups for i in group.nodes}

    def __str__(self) -> str:
        lines = [f"{len(self.blocks)} blocks for {self.ranks} ranks, {'merged' if self.merge else 'unmerged'}"]
        for title, groups in (("block", self.blocks), ("free", self.free), ("shared", self.shared)):
            lines += [f"{title} {group}" for group in groups]
        return "\n".join(lines)


def blocks(graph: JointGraph, ranks: int, *, merge: bool = True) -> Blocks:
    """CFP Algorithm 1 for P = `ranks`."""
    facts = _Facts(graph, ranks)
    claims = _Growth(facts, merge).claims()
    groups = _Groups(facts, claims)
    return Blocks(
        ranks=ranks,
        merge=merge,
        blocks=tuple(groups.block(k) for k in range(len(claims))),
        free=tuple(groups.free()),
        shared=tuple(groups.shared()),
    )


# ---- what is known of nodes, once for all that are alike -----------------------------------------------


class _Facts:
    """Rules, dependency maps and their compositions by node signature, so that depth costs little."""

    def __init__(self, graph: JointGraph, ranks: int) -> None:
        self.graph, self.ranks = graph, ranks
        known = signatures(graph)
        self.labels, self.operands = known.labels, known.operands
        self.first = {label: i for i, label in reversed(list(enumerate(self.labels)))}
        self.rules: dict[int, OpRule | None] = {}
        self.maps: list[AffineMap] = []
        self.numbers: dict[AffineMap, int] = {}
        self.direct: dict[int, tuple[tuple[AffineMap | None, ...], ...]] = {}
        self.steps: dict[tuple[int, int, int, int], int] = {}
        self.kept: dict[tuple[int, int], tuple[Preserved | None, ...]] = {}
        self.joint: dict[tuple[tuple[int, ...], int], bool] = {}
        self.made = graph.producer
        self.middle = graph.first_backward
        self.users = {v: [i for i in indices if i < self.middle] for v, indices in graph.consumers.items()}
        self._influences()

    def call(self, i: int) -> Call:
        return call_of_node(self.graph.nodes[i], self.graph.metas)

    def rule(self, i: int) -> OpRule | None:
        label = self.labels[i]
        if label not in self.rules:
            self.rules[label] = None if self.is_view(i) else rule_of(self.call(i))
        return self.rules[label]

    def is_view(self, i: int) -> bool:
        return is_view(self.graph.nodes[i])

    def is_contraction(self, i: int) -> bool:
        rule = self.rule(i)
        return rule is not None and rule.contraction

    def number(self, mapping: AffineMap) -> int:
        if mapping not in self.numbers:
            self.numbers[mapping] = len(self.maps)
            self.maps.append(mapping)
        return self.numbers[mapping]

    def step(self, mapping: int, i: int, slot: int, operand: int) -> int:
        """The map from node i's output to where `mapping` leads from its operand."""
        key = (mapping, self.labels[i], slot, operand)
        if key not in self.steps:
            if self.labels[i] not in self.direct:
                self.direct[self.labels[i]] = dependency(self.call(i), self.rule(i))
            here = self.direct[self.labels[i]][slot][operand]
            assert here is not None
            self.steps[key] = self.number(compose(here, self.maps[mapping]))
        return self.steps[key]

    def preserved(self, mapping: int, ranks: int) -> tuple[Preserved | None, ...]:
        if (mapping, ranks) not in self.kept:
            self.kept[mapping, ranks] = preserved(self.maps[mapping], ranks)
        return self.kept[mapping, ranks]

    def preserves(self, mappings: tuple[int, ...], ranks: int) -> bool:
        """Eq. 2 along all paths at once: every dim of the contraction's result that divides among the
        ranks is known at this output, and all paths agree where."""
        if (mappings, ranks) not in self.joint:
            shape = self.maps[mappings[0]].inputs
            dims = [d for d, size in enumerate(shape) if size % ranks == 0 and size > 1]
            self.joint[mappings, ranks] = all(self._agree(mappings, dim, ranks) for dim in dims)
        return self.joint[mappings, ranks]

    def _agree(self, mappings: Sequence[int], dim: int, ranks: int) -> bool:
        kept = [self.preserved(mapping, ranks)[dim] for mapping in mappings]
        found = [p for p in kept if p is not None]
        tops = {(p.output_dim, p.output_block * p.count, p.block * p.count) for p in found}
        return len(found) == len(kept) and len(tops) == 1 and min(p.count for p in found) % ranks == 0

    # An activation depends on a parameter and on an input, or on an input that a contraction reads along
    # a summed dim (a batch of features, and not a mask). All else are input branches.

    def _influences(self) -> None:
        roles = {i.name: i.role for i in self.graph.inputs}
        trained = {name for name, role in roles.items() if role == "parameter"}
        given = {name for name, role in roles.items() if role == "input"}
        for i in range(self.middle):
            outputs = [o for o in self.graph.nodes[i].outputs if o]
            if any(name in trained for name in self.operands[i]):
                trained.update(outputs)
            if any(name in given for name in self.operands[i]):
                given.update(outputs)
        self.trained = trained
        features = {
            name
            for i in range(self.middle)
            for name in (self.operands[i] if self.is_contraction(i) else ())
            if name in given and name not in trained and self._is_summed(i, name)
        }
        self.activations: set[str] = {name for name in trained & given}
        for root in {self.root(name) for name in features}:
            self.activations.add(root)
        for i in range(self.middle):
            if any(name in self.activations for name in self.operands[i]):
                self.activations.update(o for o in self.graph.nodes[i].outputs if o)

    def _is_summed(self, i: int, name: str) -> bool:
        rule = self.rule(i)
        assert rule is not None
        carried = {f for n, dims in zip(self.operands[i], rule.inputs, strict=True) if n == name for f in dims}
        return any(f is not None and rule.factors[f].reductions[0] for f in carried)

    def root(self, name: str) -> str:
        """The tensor that a value is a view of."""
        while name in self.made and self.is_view(self.made[name]):
            name = self.operands[self.made[name]][0]
        return name

    def is_active(self, i: int) -> bool:
        return any(o in self.activations for o in self.graph.nodes[i].outputs if o)

    def contracted_root(self, i: int) -> str:
        """The tensor behind the first activation that a contraction reads, or, of one with a summed dim of size 1,
        which makes no activation of what it reads, behind the first tensor that is no parameter."""
        names = self.operands[i]
        active = [name for name in names if name in self.activations]
        return self.root(next(iter(active or [name for name in names if name not in self.trained])))


# ---- Algorithm 1 -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Claim:
    """A block in the making: its forward nodes, and for each value in it the maps to the results of
    the contractions that it grew from (a tuple for each of those, one map a path). `refused` says of
    the users that it did not take why."""

    merged: tuple[int, ...]
    nodes: set[int]
    values: dict[str, dict[int, tuple[int, ...]]]
    refused: dict[int, str]


class _Growth:
    """Grow blocks from contractions, in the order of their depth."""

    def __init__(self, facts: _Facts, merge: bool) -> None:
        self.facts, self.merge = facts, merge
        self.grouped: set[int] = set()

    def claims(self) -> list[_Claim]:
        facts = self.facts
        seeds = [i for i in range(facts.middle) if facts.is_contraction(i) and facts.is_active(i)]
        depth = self._depths()
        seeds.sort(key=lambda i: (depth[i], i))
        found: list[_Claim] = []
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

    def _grow(self, merged: tuple[int, ...], ranks: int, *, closed: bool) -> _Claim:
        """DFSAndGroup of Algorithm 1, with all users visited, in the order of the graph so that a
        node's operands are decided before it. `closed`: claim nothing that reads other activations."""
        facts, nodes = self.facts, self.facts.graph.nodes
        claim = _Claim(merged, set(merged), {}, {})
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

    def _reached(self, claim: _Claim, i: int, slot: int) -> dict[int, tuple[int, ...]]:
        """The maps from one output of node i to each contraction that the block grew from."""
        found: dict[int, dict[int, None]] = {}
        for operand, name in enumerate(self.facts.operands[i]):
            for seed, maps in claim.values.get(name, {}).items():
                paths = found.setdefault(seed, {})
                for mapping in maps:
                    paths[self.facts.step(mapping, i, slot, operand)] = None
        return {seed: tuple(sorted(paths)) for seed, paths in found.items()}


# ---- everything into groups -------------------------------------------------------------------------------


class _Groups:
    """Numbers of groups: blocks first, then free groups. -1 is shared."""

    def __init__(self, facts: _Facts, claims: Sequence[_Claim]) -> None:
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
            makers = {facts.made[n] for n in facts.operands[i] if n in facts.activations and n in facts.made}
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
        numbers, which no operator of the loss does. They go where their operands agree."""
        facts, nodes = self.facts, self.facts.graph.nodes
        forward: dict[int, int] = {}
        for i in range(facts.middle):
            if nodes[i].sequence >= 0 and self.group[i] >= 0:
                forward[nodes[i].sequence] = self.group[i]
        for i in range(facts.middle, len(nodes)):
            makers = [facts.made[n] for n in facts.operands[i] if n in facts.made]
            backward = [m for m in makers if m >= facts.middle]
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
            branches=tuple(self._branch(k, i, name) for i in sorted(claim.nodes) for name in self._entering(i)),
        )

    def _entering(self, i: int) -> Iterable[str]:
        facts = self.facts
        return dict.fromkeys(name for name in facts.operands[i] if name not in facts.activations)

    def _branch(self, k: int, reader: int, value: str) -> Branch:
        made, operands = self.facts.made, self.facts.operands
        found: set[int] = set()
        frontier = [value]
        while frontier:
            maker = made.get(frontier.pop())
            if maker is not None and maker not in found and self.group[maker] == k:
                found.add(maker)
                frontier += operands[maker]
        kind: BranchKind = "parameter" if value in self.facts.trained else "constant"
        return Branch(value=value, kind=kind, reader=reader, nodes=tuple(sorted(found)))

    def _dims(self, claim: _Claim) -> tuple[BlockDim, ...]:
        """The dims of the first contraction's result, as far as every value of the block knows them,
        and the dims that the contraction sums over."""
        facts, seed = self.facts, claim.merged[0]
        rule = facts.rule(seed)
        assert rule is not None
        dims: list[BlockDim] = []
        known = {tuple(sorted(found.items())) for found in claim.values.values() if seed in found}
        for f, factor in enumerate(rule.factors):
            if f in rule.outputs[0]:
                dim = rule.outputs[0].index(f)
                kept = [(1, factor.size)]
                for found in sorted(known):
                    kept = _intersection(kept, self._kept(dict(found), seed, dim))
                dims += [BlockDim(factor=factor.name, dim=dim, block=low, count=high // low) for low, high in kept]
            else:
                dims.append(BlockDim(factor=factor.name, dim=None, block=1, count=factor.size))
        return tuple(dims)

    def _kept(self, found: dict[int, tuple[int, ...]], seed: int, dim: int) -> list[tuple[int, int]]:
        """The digits [block, block * count) of a dim of `seed`'s result that one value knows along all
        paths, and at which it knows a digit of every other contraction that it comes from too."""
        facts = self.facts
        kept: list[tuple[int, int]] | None = None
        others = [mapping for other, maps in found.items() if other != seed for mapping in maps]
        for mapping in found[seed]:
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
        """Shared operators by who reads them, through one another, and by what they are made from."""
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
