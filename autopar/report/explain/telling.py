"""Choices and their consequences in words."""

from __future__ import annotations

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
    for result in rule.outputs:
        if choice.factor in result:
            return f"result dim {result.index(choice.factor)} split"
    reads = [n for n, operand in enumerate(rule.inputs) if choice.factor in operand]
    return f"summed dim split (operands {', '.join(map(str, reads))})" if reads else str(choice)


def changes(before: Account, after: Account) -> Iterator[str]:
    """The collectives that one account has more or fewer of than another."""
    old = {(c.kind, c.axis): c for c in before.collectives}
    new = {(c.kind, c.axis): c for c in after.collectives}
    for key in dict.fromkeys((*old, *new)):
        count = (new[key].count if key in new else 0) - (old[key].count if key in old else 0)
        size = (new[key].bytes if key in new else 0) - (old[key].bytes if key in old else 0)
        if count or size:
            sign = "+" if size > 0 or (size == 0 and count > 0) else "-"
            times = f"{count:+d} {key[0]}" if count else f"{'larger' if size > 0 else 'smaller'} {key[0]}"
            yield f"{times} {key[1]} ({sign}{short_bytes(abs(size))})"


def moved(before: Plan, after: Plan, but: Sequence[str]) -> Iterator[str]:
    """Parameters that live differently in another plan, and how many operators do."""
    names = [n for n, p in after.parameters.items() if n not in but and before.parameters.get(n) != p]
    yield from names[:SHOWN_MOVES]
    if len(names) > SHOWN_MOVES:
        yield f"{len(names) - SHOWN_MOVES} more parameters"


def verdict(plan: Plan, others: Sequence[Alternative]) -> Iterator[str]:
    """What decides, in a sentence or two."""
    timed = [o for o in others if o.seconds is not None and o.bytes is not None]
    if not timed:
        yield "no other choice is possible here while the rest of the plan stays"
        return
    fitting = [o for o in timed if plan.memory_limit_bytes is None or (o.bytes or 0) <= plan.memory_limit_bytes]
    quicker = [o for o in timed if (o.seconds or 0) < plan.seconds * (1 - SAME_PART)]
    for other in quicker:
        if other not in fitting:
            yield f"memory decides: {other.words} would be faster but does not fit"
            return
    if quicker:
        best = min(quicker, key=lambda o: o.seconds or 0)
        saved = plan.seconds - (best.seconds or 0)
        yield (
            f"{best.words} would make the step {short_seconds(saved)} shorter on its timeline; the search compares "
            f"plans with a part of parameters' traffic hidden, and did not come to it"
        )
        return
    same = [o for o in fitting if (o.seconds or 0) <= plan.seconds * (1 + SAME_PART)]
    if same:
        lean = sum(1 for o in same if (o.bytes or 0) < plan.bytes)
        which = "with one" if len(same) == 1 else f"with {len(same)}"
        needs = f"; {lean} of these {'saves' if lean == 1 else 'save'} memory" if lean else ", and none saves memory"
        needs = needs if len(same) > 1 else ", and it saves memory" if lean else ", and it saves no memory"
        yield f"no alternative is faster; {which} the step is the same{needs}"
        return
    if fitting:
        best = min(fitting, key=lambda o: o.seconds or 0)
        longer = short_seconds((best.seconds or 0) - plan.seconds)
        yield f"the next best, {best.words}, makes the step {longer} longer"
        return
    yield "memory decides: no alternative fits the limit"
