"""What growth asks of a graph: rules and maps, computed once for nodes that are alike, and its activations."""

from collections.abc import Sequence

from autopar.ir.dataflow import reached, viewed
from autopar.ir.graph import JointGraph, is_view
from autopar.ops.rule import Call, OpRule, call_of
from autopar.ops.rules import rule_of
from autopar.passes.dependency.affine import AffineMap, Preserved, compose, preserved
from autopar.passes.dependency.operators import dependency, signatures


class RuleFacts:
    """Rules, dependency maps and their compositions by node signature, so that depth costs little."""

    def __init__(self, graph: JointGraph, ranks: int) -> None:
        self.graph, self.ranks = graph, ranks
        self.labels, self.operands = signatures(graph), [node.inputs for node in graph.nodes]
        self.first = {label: i for i, label in reversed(list(enumerate(self.labels)))}
        self.rules: dict[int, OpRule | None] = {}
        self.maps: list[AffineMap] = []
        self.numbers: dict[AffineMap, int] = {}
        self.direct: dict[int, tuple[tuple[AffineMap | None, ...], ...]] = {}
        self.steps: dict[tuple[int, int, int, int], int] = {}
        self.kept: dict[tuple[int, int], tuple[Preserved | None, ...]] = {}
        self.joint: dict[tuple[tuple[int, ...], int], bool] = {}
        self.producer = graph.producer
        self.middle = graph.first_backward
        self.users = {v: [i for i in indices if i < self.middle] for v, indices in graph.consumers.items()}
        self._influences()

    def call(self, i: int) -> Call:
        return call_of(self.graph.nodes[i], self.graph.metas)

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
        ranks survives at this output, and all paths agree where."""
        if (mappings, ranks) not in self.joint:
            shape = self.maps[mappings[0]].inputs
            dims = [d for d, size in enumerate(shape) if size % ranks == 0 and size > 1]
            self.joint[mappings, ranks] = all(self._agree(mappings, dim, ranks) for dim in dims)
        return self.joint[mappings, ranks]

    def _agree(self, mappings: Sequence[int], dim: int, ranks: int) -> bool:
        kept = [self.preserved(mapping, ranks)[dim] for mapping in mappings]
        digits = [p for p in kept if p is not None]
        tops = {(p.output_dim, p.output_block * p.count, p.block * p.count) for p in digits}
        return len(digits) == len(kept) and len(tops) == 1 and min(p.count for p in digits) % ranks == 0

    # An activation depends on a parameter and on an input, or on an input that a contraction reads along
    # a summed dim (a batch of features, and not a mask). All else are input branches.

    def _influences(self) -> None:
        forward = self.graph.nodes[: self.middle]
        trained, given = (
            reached(forward, (i.name for i in self.graph.inputs if i.role == role)) for role in ("parameter", "input")
        )
        self.trained = trained
        features = {
            name
            for i in range(self.middle)
            for name in (self.operands[i] if self.is_contraction(i) else ())
            if name in given and name not in trained and self._is_summed(i, name)
        }
        self.activations = reached(forward, (trained & given).union(map(self.root, features)))

    def _is_summed(self, i: int, name: str) -> bool:
        rule = self.rule(i)
        assert rule is not None
        carried = {f for n, dims in zip(self.operands[i], rule.inputs, strict=True) if n == name for f in dims}
        return any(f is not None and rule.factors[f].reductions[0] for f in carried)

    def root(self, name: str) -> str:
        """The tensor that a value is a view of."""
        return viewed(self.graph, name)[0]

    def is_active(self, i: int) -> bool:
        return any(o in self.activations for o in self.graph.nodes[i].outputs if o)

    def contracted_root(self, i: int) -> str:
        """The tensor behind the first activation that a contraction reads, or, of one with a summed dim of size 1,
        which makes no activation of what it reads, behind the first tensor that is no parameter."""
        names = self.operands[i]
        active = [name for name in names if name in self.activations]
        return self.root(next(iter(active or [name for name in names if name not in self.trained])))
