"""Dispatch: marks where rows may travel to their experts.

Rows set out where a product by expert reads them, and come back where another operator reads them. Operators in between
that treat rows one by one run where the rows are.
"""

from dataclasses import replace

from autopar.ir.graph import RESHAPE, JointGraph, Node, Ref, map_references
from autopar.ir.rewrite import reading
from autopar.ops.experts import FROM, MM, MM_WEIGHT, TO, WANTED, experts_of

from .rewrite import RoutingRewrite, RuleOf, row_factor


class Dispatch(RoutingRewrite):
    """Marks the way of rows to their experts and back."""

    def __init__(self, graph: JointGraph, rule_of: RuleOf) -> None:
        super().__init__(graph)
        self.rule_of = rule_of
        self.away: dict[str, tuple[str, int]] = {}
        """Rows (along dim 0) at their experts: the name of their ids, and the number of experts."""
        self.sent: dict[tuple[str, str], Ref] = {}
        self.back: dict[str, Ref] = {}

    def run(self) -> JointGraph:
        for node in self.graph.nodes:
            self.at(node)
            if node.op in (MM, MM_WEIGHT):
                self.multiplied(node)
            elif not self.goes_along(node):
                self.keep(reading(node, {name: self.home(name).name for name in node.inputs}))
            for output in self.graph.outputs:
                if output.name in node.outputs and output.name in self.away:
                    self.home(output.name)
        self.same.update({name: ref.name for name, ref in self.back.items()})
        return self.done()

    def multiplied(self, node: Node) -> None:
        """A product by expert, which reads rows at their experts."""
        call = self.call(node)
        ids = call.argument("ids").name
        experts = experts_of(call)
        rows = ("x",) if node.op == MM else ("x", "gradient")
        there = {call.argument(name).name: self.send(call.argument(name).name, ids, experts) for name in rows}
        there[ids] = self.send(ids, ids, experts)
        self.keep(replace(node, args=map_references(node.args, lambda name: there.get(name) or self.home(name))))
        if node.op == MM:
            self.away[node.name] = (ids, experts)

    def send(self, name: str, ids: str, experts: int) -> Ref:
        if self.away.get(name) == (ids, experts):
            return Ref(name)
        if (name, ids) not in self.sent:
            table = () if name == ids else (self.home(ids),)
            op = WANTED if name == ids else TO
            self.sent[name, ids] = self.write(op, self.home(name), *table, experts)
        return self.sent[name, ids]

    def home(self, name: str) -> Ref:
        """A value with its rows back from their experts."""
        if name not in self.away:
            return Ref(name)
        if name not in self.back:
            ids, experts = self.away[name]
            self.back[name] = self.write(FROM, Ref(name), self.home(ids), experts)
        return self.back[name]

    def goes_along(self, node: Node) -> bool:
        """Whether the op runs at the experts, because it treats rows one by one."""
        away = [self.away.get(name) for name in node.inputs]
        ways = {way for way in away if way is not None}
        if len(ways) != 1:
            return False
        (way,) = ways
        count = self.shape(way[0])[0]
        dims: list[int | None]
        if node.op == RESHAPE:
            before, after = self.shape(node.inputs[0]), self.shape(node.name)
            dims = [0] if after and after[0] == before[0] else []
        else:
            rule = self.rule_of(self.call(node))
            number = None if rule is None else row_factor(rule, [None if w is None else 0 for w in away], count)
            if rule is None or number is None:
                return False
            dims = [carried.index(number) if number in carried else None for carried in rule.outputs]
        if any(dim != 0 for name, dim in zip(node.outputs, dims, strict=False) if name) or not dims:
            return False
        self.keep(node)
        self.away.update({name: way for name in node.outputs if name})
        return True
