"""Choices and their consequences in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.ir.layout import period_of
from autopar.passes.space.choices import AxisChoice, SiteChoice
from autopar.passes.space.parsing import parse_choice
from autopar.passes.space.sites import Site
from autopar.passes.space.space import Space
from autopar.planning.account import Account
from autopar.planning.description import texts
from autopar.planning.plan import Plan
from autopar.planning.texts import grouped, listed, short_bytes, short_seconds

from .answer import SAME_PART, Alternative

SHOWN_MOVES = 6
"""Parameters that a plan moves, which are named; the others are counted."""


def choice_words(space: Space, site: Site, choice: SiteChoice) -> str:
    """ "S(0) on dp, R on tp, keep" for what is stored; of an operator, what it splits."""
    if site.kind == "op":
        parts = list(_operator_parts(space, site, choice))
    else:
        parts = list(placement_texts(space, site, str(choice)))
    told = grouped((part, axis) for part, axis, ranks in zip(parts, space.axes, space.mesh, strict=True) if ranks > 1)
    words = [f"{part} on {listed(axes)}" for part, axes in told.items()]
    return ", ".join([*words, *([choice.policy] if choice.policy and _is_split(choice) else [])])


def _is_split(choice: SiteChoice) -> bool:
    return any(on_axis.splits for on_axis in choice.axes)


def placement_texts(space: Space, site: Site, choice: str) -> tuple[str, ...]:
    """Placements on each axis as a plan's tables have them: R, S(0), S(0%64)."""
    option = space.option(site, parse_choice(choice))
    assert option is not None and site.meta is not None
    return texts(option.makes[0], site.meta.shape, space.mesh)


def _operator_parts(space: Space, site: Site, choice: SiteChoice) -> Iterator[str]:
    """What an operator does on each axis, with the period where that is not one block a rank."""
    owned: dict[int, int] = {}
    for on_axis, ranks in zip(choice.axes, space.mesh, strict=True):
        words = _operator_words(site, on_axis)
        if on_axis.splits and site.rule is not None:
            cut = owned.get(on_axis.factor, 1)
            owned[on_axis.factor] = cut * ranks
            size = site.rule.factors[on_axis.factor].size
            if on_axis.period not in (period_of(size, ranks), period_of(-(-size // cut), ranks)):
                words += f" in periods of {on_axis.period}"
        yield words


def _operator_words(site: Site, choice: AxisChoice) -> str:
    """What an operator does on one axis: "result dim 0 split", "partial sums", "replicated"."""
    if choice.kind == "R":
        return "replicated"
    if choice.kind == "P":
        return "on partial sums"
    if choice.kind == "X":
        return "rows with their experts"
    rule = site.rule
    if rule is None:
        return str(choice)
    if rule.factors[choice.factor].of:
        return "split in a ring"
    for result in rule.outputs:
        if choice.factor in result:
            return f"result dim {result.index(choice.factor)} split"
    reads = [n for n, operand in enumerate(rule.inputs) if choice.factor in operand]
    return f"summed dim split (operands {', '.join(map(str, reads))})" if reads else str(choice)


def changes(before: Account, after: Account) -> Iterator[str]:
    """The collectives that one account has more or fewer of than another."""
    old, new = ({(c.kind, c.axis): (c.count, c.bytes) for c in one.collectives} for one in (before, after))
    for kind, axis in dict.fromkeys((*old, *new)):
        was, now = (one.get((kind, axis), (0, 0)) for one in (old, new))
        count, size = now[0] - was[0], now[1] - was[1]
        if count or size:
            sign = "+" if size > 0 or (size == 0 and count > 0) else "-"
            times = f"{count:+d} {kind}" if count else f"{'larger' if size > 0 else 'smaller'} {kind}"
            yield f"{times} {axis} ({sign}{short_bytes(abs(size))})"


def moved(before: Plan, after: Plan, but: Sequence[str]) -> Iterator[str]:
    """Parameters that live differently in another plan, and how many operators do."""
    names = [n for n, p in after.parameters.items() if n not in but and before.parameters.get(n) != p]
    yield from names[:SHOWN_MOVES]
    if len(names) > SHOWN_MOVES:
        yield f"{len(names) - SHOWN_MOVES} more parameters"


def verdict(plan: Plan, others: Sequence[Alternative]) -> Iterator[str]:
    """What decides, in a sentence or two."""
    timed = [(o.seconds, o.bytes, o.words) for o in others if o.seconds is not None and o.bytes is not None]
    limit = math.inf if plan.memory_limit_bytes is None else plan.memory_limit_bytes
    fitting = [one for one in timed if one[1] <= limit]
    quicker = [one for one in timed if one[0] < plan.seconds * (1 - SAME_PART)]
    same = [size for seconds, size, _ in fitting if seconds <= plan.seconds * (1 + SAME_PART)]
    if not timed:
        yield "no other choice is possible here while the rest of the plan stays"
    elif too_large := [words for _, size, words in quicker if size > limit]:
        yield f"memory decides: {too_large[0]} would be faster but does not fit"
    elif quicker:
        seconds, _, words = min(quicker, key=lambda one: one[0])
        saved = plan.seconds - seconds
        yield (
            f"{words} would make the step {short_seconds(saved)} shorter on its timeline; the search compares "
            f"plans with a part of parameters' traffic hidden, and did not come to it"
        )
    elif same:
        lean = sum(size < plan.bytes for size in same)
        which = "with one" if len(same) == 1 else f"with {len(same)}"
        needs = f"; {lean} of these {'saves' if lean == 1 else 'save'} memory" if lean else ", and none saves memory"
        needs = needs if len(same) > 1 else ", and it saves memory" if lean else ", and it saves no memory"
        yield f"no alternative is faster; {which} the step is the same{needs}"
    elif fitting:
        seconds, _, words = min(fitting, key=lambda one: one[0])
        yield f"the next best, {words}, makes the step {short_seconds(seconds - plan.seconds)} longer"
    else:
        yield "memory decides: no alternative fits the limit"
