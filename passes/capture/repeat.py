"""Two steps of a model one after the other: does the second compute what the first did?

Every value gets a number that stands for how it was computed: operator, operands, constants. Equal numbers mean equal
expressions. Inputs, parameters and buffers have the same numbers in both steps; what the first one left behind in
Python has a number of its own in the second, unless it is made of constants alone, for then it is the same in each step
(a cached table of sines).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.compat.tensors import value_of
from autopar.ir.graph import Node, producers
from autopar.ops.randomness import may_draw

from .functional import Functional
from .leaves import same_value
from .recorder import SYMBOLS, line_of
from .step import Recording


class RepeatedStep:
    """A step and the one after it, compared. `parting` says in words where the second computes something else, and is
    empty where it does not; `read` are values of the first step, not made of constants, that the second reads. `left`
    are tensors that each step left in Python."""

    def __init__(
        self,
        first: Recording,
        functional: Functional,
        second: Recording,
        left: Sequence[torch.Tensor],
    ) -> None:
        self.first, self.second = first.recorder, second.recorder
        self.parting, self.read = "", set[str]()
        self.expressions: tuple[_Expressions, _Expressions] | None = None
        if _identical(first, second):
            return
        before = _Expressions(first, functional)
        names = (self.second.name(tensor) for tensor in left)
        after = _Expressions(second, second.functional(name for name in names if name), before)
        self.expressions = before, after
        self.parting, self.read = _difference(before, after), after.read

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether a tensor that the first step left is computed as one that the second left."""
        one, other = self.first.name(a), self.second.name(b)
        if one is None or other is None or a.requires_grad != b.requires_grad:
            return False
        if self.expressions is None:
            return one == other
        before, after = self.expressions
        return before.now(one) == after.now(other)


def _identical(first: Recording, second: Recording) -> bool:
    """Whether two steps ran the same operators one by one on the same values, by name."""
    one, other = first.recorder, second.recorder
    return (
        not other.earlier
        and (first.inputs, first.results, len(one.nodes)) == (second.inputs, second.results, len(other.nodes))
        and all(map(alike, one.nodes, other.nodes))
        and first.outcome.same(second.outcome)
        and one.constants.keys() == other.constants.keys()
        and all(x is other.constants[name] or same_value(x, other.constants[name]) for name, x in one.constants.items())
    )


def alike(a: Node, b: Node) -> bool:
    """Whether two nodes do the same to values of the same names, and give what they make the same names."""
    return a.op == b.op and a.outputs == b.outputs and _is_same(a.args, b.args) and _is_same(a.kwargs, b.kwargs)


def _is_same(a: Any, b: Any) -> bool:
    """Whether two arguments are one: numbers of one type, which `Node.form` tells apart as this does."""
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is tuple:
        return len(a) == len(b) and all(map(_is_same, a, b))
    if kind is float or kind is complex:
        return repr(a) == repr(b)  # 0.0 and -0.0 differ, and NaN is itself
    return kind in SYMBOLS or bool(a == b)


class _Expressions:
    """The numbers of a step's values. `earlier` is the step before, with which it has one table of them."""

    def __init__(self, recording: Recording, functional: Functional, earlier: "_Expressions | None" = None) -> None:
        self.recording, self.functional = recording, functional
        self.producer: Mapping[str, Node] = {
            name: functional.nodes[i] for name, i in producers(functional.nodes).items()
        }
        self.of: dict[str, int] = {}
        self.numbers: dict[Any, int] = {} if earlier is None else earlier.numbers
        self.constant: set[int] = set() if earlier is None else earlier.constant
        """Numbers of what is made of constants alone."""
        self.read: set[str] = set()
        """Values of the step before that this one reads and that are not made of constants."""

        def number(*key: Any) -> int:
            return self.numbers.setdefault(key, len(self.numbers))

        for given in recording.inputs:
            self.of[given.name] = number("input", given.role, given.target)
        for name, tensor in recording.recorder.constants.items():
            value = value_of(tensor)
            content = id(tensor) if value is None else value
            self.of[name] = number("constant", content, tensor.dtype, tuple(tensor.shape))
            self.constant.add(self.of[name])
        for name, before in recording.recorder.earlier.items():
            assert earlier is not None
            then = earlier.now(before)
            if then not in self.constant:
                self.read.add(before)
                then = number("earlier", then)
            self.of[name] = then
        draws = 0
        for node in functional.nodes:
            operands = tuple(self.of[name] for name in node.inputs)
            random = may_draw(node.op)
            draws += random
            made = {name: number(node.form, operands, draws * random, i) for i, name in enumerate(node.outputs) if name}
            self.of |= made
            if not random and self.constant.issuperset(operands):
                self.constant.update(made.values())

    def now(self, name: str) -> int:
        """The number of a recorded value, as it is at the end of the step."""
        return self.of[self.functional.at(self.recording.end, name)]

    def results(self) -> dict[tuple[str, str], str | None]:
        """What the step makes, by role and target."""
        return {(o.role, o.target): o.name for o in self.recording.outputs(self.functional)}


def _difference(first: _Expressions, second: _Expressions) -> str:
    """Where two steps part, in words; empty if they do the same."""
    before, after = first.results(), second.results()
    if not first.recording.outcome.same(second.recording.outcome):
        return "it returns another structure or other Python constants"
    for key in {**before, **after}:
        a, b = before.get(key), after.get(key)
        if a is None or b is None:
            if a is not b:
                kept = "only the first" if b is None else "only the second"
                return f"{kept} call makes {key[0]} {key[1]}{_place(first, a) or _place(second, b)}"
        elif first.of[a] != second.of[b]:
            return f"{key[0]} {key[1]} is another: {_parting(first, a, second, b)}"
    return ""


def _parting(first: _Expressions, a: str, second: _Expressions, b: str) -> str:
    """The operators at which two values part that are computed from the same on."""
    while True:
        one, other = first.producer.get(a), second.producer.get(b)
        if one is None or other is None or one.form != other.form or len(one.inputs) != len(other.inputs):
            return f"{_shown(first, a)} in the first call, and {_shown(second, b)} in the second"
        pairs = zip(one.inputs, other.inputs, strict=True)
        parting = next(((x, y) for x, y in pairs if first.of[x] != second.of[y]), None)
        if parting is None:
            return f"{_shown(first, a)} draws random numbers in another order"
        a, b = parting


def _shown(expressions: _Expressions, name: str) -> str:
    node = expressions.producer.get(name)
    if node is None:
        return "what an earlier call left" if name in expressions.recording.recorder.earlier else name
    constants = [repr(x) for x in node.args if isinstance(x, (int, float, complex, bool))]
    shown = f" with {', '.join(constants)}" if constants else ""
    return f"{node.op.removesuffix('.default')}{shown}{_place(expressions, name)}"


def _place(expressions: _Expressions, name: str | None) -> str:
    node = expressions.producer.get(name or "")
    return "" if node is None else line_of(expressions.recording.recorder.lines.get(node.name))
