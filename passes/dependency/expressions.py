"""Integer expressions with floor and modulo, in the normal form in which affine maps compare equal.

An expression is a sum of digits of variables. Neighbouring digits of one variable join, so that splitting a dim and
merging it again gives back the variable itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    """A sum of terms and a constant: the index in one dim of the input."""

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
    (d * (a // d) + a % d = a), and a nested sum that is whole again unfolded."""
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
    found: set[int] = set()
    for term in expression.terms:
        found |= {term.source} if isinstance(term.source, int) else variables_of(term.source)
    return found


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
