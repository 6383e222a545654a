"""Where a chain of pieces is cut into the stages of a pipeline: an exact dynamic program."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ROUNDING = 1 + 1e-9

AS_LONG = 1.002
"""Of cuts whose longest stage is longer by no more than this, the one is taken where the least crosses."""

Span = tuple[int, int]
"""The first and the last place where a cut may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Pieces in their order: of each the `seconds` of a step, the bytes that its stage has at rest and those that it
    holds of a micro-batch in flight; and what `crosses` its beginning."""

    seconds: Sequence[float]
    rest_bytes: Sequence[float]
    held_bytes: Sequence[float]
    crosses: Sequence[float]


def cut(
    chain: Chain, in_flight: Sequence[float], limits: Sequence[float] | None = None, spans: Sequence[Span] | None = None
) -> list[int] | None:
    """The pieces with which the stages begin, but for the first: those of the shortest longest stage, and of these the
    ones where the least crosses. Stage i has `in_flight[i]` micro-batches in flight, and keeps `limits[i]`; cut i
    lies in `spans[i]`. None where no cuts keep the limit."""
    pieces, stages = len(chain.seconds), len(in_flight)
    if pieces < stages:
        return None
    seconds, rest, held = (_ranges(values) for values in (chain.seconds, chain.rest_bytes, chain.held_bytes))
    most = [math.inf] * stages if limits is None else limits
    fits = [rest + count * held <= limit * ROUNDING for count, limit in zip(in_flight, most, strict=True)]
    for stage, (low, high) in enumerate(spans or ()):
        begins = np.arange(pieces + 1)
        fits[stage + 1] = fits[stage + 1] & ((begins >= low) & (begins <= high))[:, None]
    longest = _stages([np.where(ok, seconds, math.inf) for ok in fits], np.maximum)
    if longest is None:
        return None
    taken = zip([0, *longest], [*longest, pieces], strict=True)
    most_seconds = AS_LONG * max(float(seconds[begin, end]) for begin, end in taken)
    crosses = np.append(np.asarray(chain.crosses, dtype=float), 0.0)[:, None]
    return _stages([np.where(ok & (seconds <= most_seconds), crosses, math.inf) for ok in fits], np.add)


def _ranges(values: Sequence[float]) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    """[begin, end] -> the sum of the values from one up to the other; infinite if there is none."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
    found: np.ndarray[tuple[int, int], np.dtype[np.float64]] = sums[None, :] - sums[:, None]
    found[np.tril_indices(len(sums))] = math.inf
    return found


def _stages(costs: Sequence["np.ndarray"], together: Callable[..., "np.ndarray"]) -> list[int] | None:
    """The cuts of the least cost, where a stage that begins and ends there costs so much; None if none is finite."""
    best, origins = costs[0][0], []
    for cost in costs[1:]:
        table = together(best[:, None], cost)
        origins.append(table.argmin(axis=0))
        best = table.min(axis=0)
    if math.isinf(best[-1]):
        return None
    at, cuts = len(best) - 1, list[int]()
    for origin in reversed(origins):
        at = int(origin[at])
        cuts.append(at)
    return cuts[::-1]
