"""A graph written anew, node by node: values that stand for others, operators in the place of a node, no dead code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from .emitter import Emitter
from .graph import GraphOutput, JointGraph, Node, Ref
from .matcher import Matcher, Rules
from .program import ProgramOutput
from .rewrite import living, reading, with_own_metas

Output = TypeVar("Output", GraphOutput, ProgramOutput)


@dataclass(eq=False, kw_only=True)
class Rewriter(Emitter):
    """The emitter of a graph that is rewritten."""

    graph: JointGraph
    same: dict[str, str] = field(default_factory=dict)
    """Value -> the one that stands for it."""
    such: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    """What variables of patterns must be, by their names."""

    @cached_property
    def matcher(self) -> Matcher:
        return Matcher(graph=self.graph, such=self.such)

    def at(self, node: Node) -> None:
        """What is emitted from here on stands in the place of a node, and says of itself what that does."""
        names = ("module", "backward", "sequence", "serves", "region")
        self.node, self.about = node, {name: getattr(node, name) for name in names}

    def now(self, name: str) -> Ref:
        """The value of the new graph that stands for this one."""
        return Ref(self.same.get(name, name))

    def keep(self, node: Node, **changes: Any) -> None:
        """Append a node that reads what stands for its operands."""
        self.written.append(reading(node, self.same, **changes))

    def apply(self, rules: Rules[Callable[..., Any]], node: Node) -> bool:
        """Writes what stands in the place of a node by the first of these rules that matches it, and that does not
        return False. A rule takes the rewriter, and what the variables of its pattern stand for."""
        return any(write(self, **found) is not False for write, found in self.matcher.find(rules, node))

    def done(self, **changes: Any) -> JointGraph:
        """The new graph."""
        outputs = tuple(returning(o, self.same) for o in self.graph.outputs)
        nodes = living(self.written, (o.name for o in outputs))
        return with_own_metas(replace(self.graph, nodes=nodes, outputs=outputs, metas=self.metas, **changes))


def returning(output: Output, names: Mapping[str, str]) -> Output:
    """The output with another value in the place of one that `names` maps."""
    return replace(output, name=names[output.name]) if output.name and output.name in names else output


def inlined(node: Node, names: Mapping[str, str], **changes: Any) -> Node:
    """The node with its inputs and outputs renamed."""
    return reading(node, names, outputs=tuple(names.get(output, output) for output in node.outputs), **changes)
