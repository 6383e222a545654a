"""Parallelism preservation (CFP Eq. 2): along which dims an input can be split so that the output is split with it.

A dim of the input survives a map as far as some index of the output still knows its digits. If the outermost surviving
digit divides among the ranks, nobody communicates on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .affine import AffineMap, Expression, maximum


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
    """For each input dim, the digits of its index that output indices know, outermost first."""
    return tuple(_digits(index, mapping) for index in mapping.indices)


def _digits(index: Expression, mapping: AffineMap) -> tuple[Preserved, ...]:
    found: list[Preserved] = []
    for position, term in enumerate(index.terms):
        below = Expression(index.terms[position + 1 :], index.constant)
        # not where the digits below overflow into this one, and not where the digit is free
        if isinstance(term.source, int) and term.source < len(mapping.outputs) and maximum(below) < term.coefficient:
            found.append(Preserved(term.coefficient, term.source, term.divisor, term.modulus))
    return tuple(found)


def preserved(mapping: AffineMap, ranks: int) -> tuple[Preserved | None, ...]:
    """CFP Eq. 2 for P = `ranks`: b_i = floor(a / d) * d + k, 0 <= k < d, (A / d) mod P = 0.

    For each input dim, the outermost digit of its index that an output index still knows and that
    divides among the ranks; None if there is none: splitting this dim of X would need communication
    on the way to Y. The subgraph preserves X's parallelism if none is None. Input dims that P does
    not divide could not be split to begin with.
    """
    return tuple(next((p for p in digits if p.count % ranks == 0), None) for digits in surviving(mapping))
