"""The matcher: finds in a graph, or in a program, what a pattern says.

A pattern is what a text (`ir.text`) has behind `=`, nested as the values are made of each other:

    aten.sum.dim_IntList(only(aten.mul.Tensor({rows, weights})), (1,) | (-1,), keepdim=True)

| written | matches |
|---|---|
| `x` | any argument, the same one wherever `x` stands; `_` any |
| `f(x, 2)` | the first result of such a node; what is left out must be as by default, unless `...` stands last |
| `2.0` | this constant, or a value of one element that the graph makes of it |
| `a | b` | either |
| `f({a, b})` | `f(a, b)` or `f(b, a)` |
| `only(a)` | what `a` matches, where one node alone reads it, and it is no result |
| `(y := f(x))` | what `f(x)` matches, which is `y` |
"""

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, permutations, product
from types import EllipsisType
from typing import Any, TypeVar

from .graph import FULL, JointGraph, Node, Ref, parameters, producers, readers
from .program import Program

MOST = 20
"""More arguments than any operator has."""

T = TypeVar("T")
Rules = tuple[tuple[str, T], ...]
"""Patterns, and what is done where one matches."""
Found = dict[str, Any]
"""What the variables of a pattern stand for: the names of values, and constants."""


@dataclass(frozen=True, kw_only=True)
class Matcher:
    """Finds patterns in a graph. `such` are conditions on variables, by name."""

    graph: JointGraph | Program
    such: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)

    @cached_property
    def _producer(self) -> Mapping[str, int]:
        return producers(self.graph.nodes)

    @cached_property
    def _readers(self) -> Mapping[str, Sequence[int]]:
        return readers(self.graph.nodes)

    def made_by(self, name: Any) -> Node | None:
        """The node that makes a value, if it is no input."""
        index = self._producer.get(name)
        return None if index is None else self.graph.nodes[index]

    def find(self, rules: Rules[T], node: Node) -> Iterator[tuple[T, Found]]:
        """The rows whose patterns match a node, and what their variables stand for."""
        for form, row in _forms(rules).get(node.op, ()):
            found: Found = {}
            if self._node(form, node, found):
                yield row, found

    def _node(self, pattern: Node, node: Node, found: Found) -> bool:
        if pattern.op != node.op:
            return False
        wanted, given = arguments(pattern), arguments(node)
        return len(wanted) == len(given) and all(self._value(wanted[name], given[name], found) for name in given)

    def _value(self, pattern: Any, value: Any, found: Found) -> bool:
        name = value.name if isinstance(value, Ref) else None
        match pattern:
            case EllipsisType() | Ref("_"):
                return True
            case Ref(variable):
                value = name or value
                fits = variable not in self.such or self.such[variable](value)
                return fits and bool(found.setdefault(variable, value) == value)
            case Node(op="only", args=(inner,)):
                alone = len(self._readers.get(name or "", ())) == 1
                return alone and all(o.name != name for o in self.graph.outputs) and self._value(inner, value, found)
            case tuple():
                alike = isinstance(value, tuple) and len(value) == len(pattern)
                return alike and all(self._value(p, v, found) for p, v in zip(pattern, value, strict=True))
        made = self.made_by(name)
        if isinstance(pattern, Node):
            found.update(dict.fromkeys(pattern.outputs, name))
            return made is not None and made.outputs[0] == name and self._node(pattern, made, found)
        if name and made and made.op in FULL and self.graph.metas[name].numel == 1:
            value = made.args[-1]
        return bool(value == pattern)


@cache
def _forms(rules: Rules[T]) -> Mapping[str, Sequence[tuple[Node, T]]]:
    """The rows of rules without choices, by the operator that they begin with. A pattern is a node whose references are
    variables, and that may stand in arguments."""
    forms: dict[str, list[tuple[Node, T]]] = {}
    for text, row in rules:
        for form in _read(ast.parse(text, mode="eval").body):
            forms.setdefault(form.op, []).append((form, row))
    return forms


def _read(tree: ast.expr) -> list[Any]:
    match tree:
        case ast.Name(id=name):
            return [math.inf if name == "inf" else Ref(name)]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return [-number for number in _read(inner)]
        case ast.Tuple(elts=items):
            return [*product(*map(_read, items))]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return [*_read(left), *_read(right)]
        case ast.NamedExpr(target=target, value=inner):
            return [replace(form, outputs=(target.id,)) for form in _read(inner)]
        case ast.Call(func=function, args=items, keywords=keywords):
            orders = product(*(permutations(i.elts) if isinstance(i, ast.Set) else [(i,)] for i in items))
            forms = [form for order in orders for form in product(*map(_read, chain(*order)))]
            if forms[0][-1:] == (...,):
                forms = [(*form, *(...,) * MOST) for form in forms]
            names = [str(keyword.arg) for keyword in keywords]
            named = [tuple(zip(names, values, strict=True)) for values in product(*(_read(k.value) for k in keywords))]
            return [
                Node(op=ast.unparse(function), args=args, kwargs=kwargs, outputs=())
                for args, kwargs in product(forms, named)
            ]
    return [ast.literal_eval(tree)]


def arguments(node: Node) -> dict[Any, Any]:
    """What a node gives each argument of its operator, by name, or the default; a collective's by number."""
    names = {} if node.op.startswith("collective.") else {p.name: p.default for p in parameters(node.op)}
    return {**names, **dict(zip(names or range(len(node.args)), node.args, strict=False)), **dict(node.kwargs)}
