"""Affine maps: which elements of an operand an element of a result reads (CFP section 3.2).

CFP Eq. 1 and Table 1: an operator maps the indices of its output to the indices of its input by an affine expression
with floor and modulo. Maps compose along a path. Where an operator needs a dim whole, the index is "*" (any
index); this says too much for a few (a slice reads a part of the dim), never too little.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from autopar.ir.layout import Shape

from .expressions import Expression, Term, add, digit, substitute, text_of, times, variable, variables_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineMap:
    """The elements of X[inputs] that an element of Y[outputs] depends on.

    Variable j < len(outputs) is index a_j of Y. The variables after them are free, each with its
    range in `free`: all their values are meant. `indices[i]` is the index b_i of X (CFP Eq. 1).
    """

    outputs: Shape
    inputs: Shape
    indices: tuple[Expression, ...]
    free: tuple[int, ...] = ()

    @property
    def sizes(self) -> Shape:
        """Ranges of all variables."""
        return self.outputs + self.free

    def __str__(self) -> str:
        names = [f"a{j}" for j in range(len(self.outputs))] + [f"s{j}" for j in range(len(self.free))]
        whole = {Expression((Term(1, len(self.outputs) + j, 1, size),)): size for j, size in enumerate(self.free)}
        sources = [term.source for index in self.indices for term in index.terms]
        shown: list[str] = []
        bounded: set[int] = set()
        for size, index in zip(self.inputs, self.indices, strict=True):
            if whole.get(index) == size and sources.count(index.terms[0].source) == 1:
                shown.append("*")
            else:
                shown.append(text_of(index, names, self.sizes))
                bounded |= variables_of(index)
        ranges = [f"0 ≤ {names[j]} < {self.sizes[j]}" for j in sorted(bounded) if j >= len(self.outputs)]
        text = f"({', '.join(names[: len(self.outputs)])}) -> ({', '.join(shown)})"
        return f"{text} : {', '.join(ranges)}" if ranges else text


def identity(shape: Shape) -> AffineMap:
    """Element-wise (CFP Table 1)."""
    indices = tuple(variable(j, size) for j, size in enumerate(shape))
    return AffineMap(outputs=shape, inputs=shape, indices=indices)


@cache
def reshape(before: Shape, after: Shape) -> AffineMap:
    """Row-major view of X[before] as Y[after] (CFP Table 1: split and merge; Eq. 4 and 6)."""
    flat, stride = Expression(()), 1
    for j in reversed(range(len(after))):
        flat = add(flat, times(variable(j, after[j]), stride))
        stride *= after[j]
    indices, stride = [], 1
    for size in reversed(before):
        indices.append(digit(flat, stride, size))
        stride *= size
    return AffineMap(outputs=after, inputs=before, indices=tuple(reversed(indices)))


@cache
def permute(before: Shape, order: tuple[int, ...]) -> AffineMap:
    """Y's dim d is X's dim order[d] (CFP Table 1: transpose)."""
    after = tuple(before[d] for d in order)
    indices = tuple(variable(order.index(d), before[d]) for d in range(len(before)))
    return AffineMap(outputs=after, inputs=before, indices=indices)


@cache
def compose(first: AffineMap, second: AffineMap) -> AffineMap:
    """Y -> W from Y -> X (first) and X -> W (second). Exact: a floor of a sum stays one where its
    digits cannot be told apart."""
    assert first.inputs == second.outputs, f"{first.inputs} is not {second.outputs}"
    sizes = first.sizes + second.free
    moved = [variable(len(first.sizes) + j, size) for j, size in enumerate(second.free)]
    values = (*first.indices, *moved)
    indices = tuple(substitute(index, values) for index in second.indices)
    return _pruned(
        AffineMap(outputs=first.outputs, inputs=second.inputs, indices=indices, free=sizes[len(first.outputs) :])
    )


def _pruned(mapping: AffineMap) -> AffineMap:
    """Without free variables that no index reads, the others numbered anew, and each narrowed to
    the digits that are read."""
    used = sorted(set().union(*map(variables_of, mapping.indices)) if mapping.indices else ())
    kept = [j for j in used if j >= len(mapping.outputs)]
    ranges = [mapping.sizes[j] for j in kept]
    number = {j: len(mapping.outputs) + i for i, j in enumerate(kept)}
    for i, j in enumerate(kept):
        digits = {(t.divisor, t.modulus) for e in mapping.indices for t in e.terms if t.source == j}
        nested = any(
            not isinstance(t.source, int) and j in variables_of(t.source) for e in mapping.indices for t in e.terms
        )
        if len(digits) == 1 and not nested:
            ((_, ranges[i]),) = digits

    def renamed(expression: Expression) -> Expression:
        terms = []
        for t in expression.terms:
            if not isinstance(t.source, int):
                terms.append(Term(t.coefficient, renamed(t.source), t.divisor, t.modulus))
            elif t.source in number:
                fresh = number[t.source]
                narrowed = ranges[fresh - len(mapping.outputs)] != mapping.sizes[t.source]
                terms.append(Term(t.coefficient, fresh, 1 if narrowed else t.divisor, t.modulus))
            else:
                terms.append(t)
        return Expression(tuple(terms), expression.constant)

    indices = tuple(map(renamed, mapping.indices))
    return AffineMap(outputs=mapping.outputs, inputs=mapping.inputs, indices=indices, free=tuple(ranges))
