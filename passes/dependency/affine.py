"""Affine maps: which elements of an operand an element of a result reads (CFP section 3.2).

CFP Eq. 1 and Table 1: an operator maps the indices of its output to the indices of its input by an affine expression
with floor and modulo. Maps compose along a path. Where an operator needs a dim unsplit, the index is "*" (any
index); this says too much for a few (a slice reads a part of the dim), never too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from autopar.ir.layout import Shape


@dataclass(frozen=True, slots=True)
class Term:
    """coefficient * ((source // divisor) % modulus). `source` is a variable's number, or, where a
    general reshape nests them, an expression."""

    coefficient: int
    source: int | Expression
    divisor: int
    modulus: int


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of terms and a constant: the index in one dim of the input. The terms are digits of variables, in the
    normal form in which maps compare equal: neighbouring digits of one variable join, so that splitting a dim and
    merging it again gives back the variable itself."""

    terms: tuple[Term, ...]
    constant: int = 0


def variable(number: int, size: int) -> Expression:
    """A dim of no indices has no digits either."""
    return Expression(()) if size < 2 else Expression((Term(1, number, 1, size),))


def times(expression: Expression, factor: int) -> Expression:
    if not factor:
        return Expression(())
    terms = tuple(Term(t.coefficient * factor, t.source, t.divisor, t.modulus) for t in expression.terms)
    return Expression(terms, expression.constant * factor)


def add(*expressions: Expression) -> Expression:
    """The sum in normal form: highest coefficient first, neighbouring digits of one source joined
    (d * (a // d) + a % d = a), and a nested sum that is complete again unfolded."""
    terms = [t for e in expressions for t in e.terms]
    constant = sum(e.constant for e in expressions)
    while (pair := _neighbours(terms)) is not None:
        high, low = pair
        terms.remove(high)
        terms.remove(low)
        joined = Term(low.coefficient, low.source, low.divisor, low.modulus * high.modulus)
        if isinstance(joined.source, int) or joined.divisor > 1 or joined.modulus <= maximum(joined.source):
            terms.append(joined)
        else:
            unfolded = times(joined.source, joined.coefficient)
            terms += unfolded.terms
            constant += unfolded.constant
    return Expression(tuple(sorted(terms, key=_order)), constant)


def _order(term: Term) -> tuple[int, str, int, int]:
    return -term.coefficient, repr(term.source), -term.divisor, term.modulus


def _neighbours(terms: Sequence[Term]) -> tuple[Term, Term] | None:
    for high in terms:
        for low in terms:
            adjacent = high.divisor == low.divisor * low.modulus and high.coefficient == low.coefficient * low.modulus
            if adjacent and high.source == low.source:
                return high, low
    return None


def maximum(expression: Expression) -> int:
    return expression.constant + sum(t.coefficient * (t.modulus - 1) for t in expression.terms)


def digit(expression: Expression, divisor: int, modulus: int) -> Expression:
    """(expression // divisor) % modulus; nothing where a dim has no indices."""
    if not divisor or not modulus:
        return Expression(())
    high, low = _cut(expression, divisor)
    if divisor > 1 and maximum(low) >= divisor:
        return _nested(expression, divisor, modulus)
    quotient = Expression(
        tuple(Term(t.coefficient // divisor, t.source, t.divisor, t.modulus) for t in high.terms),
        high.constant // divisor,
    )
    _, low = _cut(quotient, modulus)
    if maximum(low) >= modulus:
        return _nested(expression, divisor, modulus)
    return add(low)


def _nested(expression: Expression, divisor: int, modulus: int) -> Expression:
    """A floor or modulo of a sum whose digits overlap: general reshapes have them."""
    reach = maximum(expression) // divisor + 1
    return (
        Expression((Term(1, expression, divisor, min(modulus, reach)),)) if min(modulus, reach) > 1 else Expression(())
    )


def _cut(expression: Expression, at: int) -> tuple[Expression, Expression]:
    """The terms that are multiples of `at`, and the rest. A digit that straddles `at` is two digits."""
    high: list[Term] = []
    low: list[Term] = []
    for term in expression.terms:
        inner, uneven = divmod(at, term.coefficient)
        if term.coefficient % at == 0:
            high.append(term)
        elif uneven == 0 and inner < term.modulus and term.modulus % inner == 0:
            low.append(Term(term.coefficient, term.source, term.divisor, inner))
            high.append(Term(at, term.source, term.divisor * inner, term.modulus // inner))
        else:
            low.append(term)
    constant = expression.constant // at * at
    return Expression(tuple(high), constant), Expression(tuple(low), expression.constant - constant)


def substitute(expression: Expression, values: Sequence[Expression]) -> Expression:
    parts = [Expression((), expression.constant)]
    for term in expression.terms:
        source = values[term.source] if isinstance(term.source, int) else substitute(term.source, values)
        parts.append(times(digit(source, term.divisor, term.modulus), term.coefficient))
    return add(*parts)


def variables_of(expression: Expression) -> set[int]:
    numbers: set[int] = set()
    for term in expression.terms:
        numbers |= {term.source} if isinstance(term.source, int) else variables_of(term.source)
    return numbers


def text_of(expression: Expression, names: Sequence[str], sizes: Sequence[int]) -> str:
    shown = []
    for term in expression.terms:
        if isinstance(term.source, int):
            base, largest = names[term.source], sizes[term.source] - 1
        else:
            base, largest = f"({text_of(term.source, names, sizes)})", maximum(term.source)
        if term.divisor > 1:
            base = f"⌊{base}/{term.divisor}⌋"
        if term.divisor * term.modulus <= largest:
            base += f"%{term.modulus}"
        shown.append(f"{term.coefficient}·{base}" if term.coefficient != 1 else base)
    if expression.constant or not shown:
        shown.append(str(expression.constant))
    return " + ".join(shown)


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
        full = {Expression((Term(1, len(self.outputs) + j, 1, size),)): size for j, size in enumerate(self.free)}
        sources = [term.source for index in self.indices for term in index.terms]
        shown: list[str] = []
        bounded: set[int] = set()
        for size, index in zip(self.inputs, self.indices, strict=True):
            if full.get(index) == size and sources.count(index.terms[0].source) == 1:
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
    digits overlap."""
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


@dataclass(frozen=True, slots=True)
class Preserved:
    """A digit of an input index that an output index still knows: (b_i // block) % count =
    (a_j // output_block) % count, with j = `output_dim`. Below it there may be anything."""

    block: int
    output_dim: int
    output_block: int
    count: int


@cache
def surviving(mapping: AffineMap) -> tuple[tuple[Preserved, ...], ...]:
    """For each input dim, the digits of its index that output indices know, outermost first. A dim survives as far as
    some index of the output still knows its digits: if the outermost of them divides among the ranks, nobody
    communicates on the way."""
    return tuple(_digits(index, mapping) for index in mapping.indices)


def _digits(index: Expression, mapping: AffineMap) -> tuple[Preserved, ...]:
    digits: list[Preserved] = []
    for position, term in enumerate(index.terms):
        below = Expression(index.terms[position + 1 :], index.constant)
        # not where the digits below overflow into this one, and not where the digit is free
        if isinstance(term.source, int) and term.source < len(mapping.outputs) and maximum(below) < term.coefficient:
            digits.append(Preserved(term.coefficient, term.source, term.divisor, term.modulus))
    return tuple(digits)


def preserved(mapping: AffineMap, ranks: int) -> tuple[Preserved | None, ...]:
    """CFP Eq. 2 for P = `ranks`: b_i = floor(a / d) * d + k, 0 <= k < d, (A / d) mod P = 0.

    For each input dim, the outermost digit of its index that an output index still knows and that
    divides among the ranks; None if there is none: splitting this dim of X would need communication
    on the way to Y. The subgraph preserves X's parallelism if none is None. Input dims that P does
    not divide could not be split to begin with.
    """
    return tuple(next((p for p in digits if p.count % ranks == 0), None) for digits in surviving(mapping))
