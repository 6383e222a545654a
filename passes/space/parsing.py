"""Choices read from text."""

import re

from .choices import KEEP, NO_POLICY, PASSES_PARTIAL, REGATHER, REPLICATED, AxisChoice, SiteChoice

_WORD = re.compile(r"R|P(?P<set>\d*)|(?P<kind>[SX])(?P<factor>\d+)%(?P<period>\d+)")


def parse_choice(text: str) -> SiteChoice:
    """The inverse of `str`. Raises ValueError for text that is none."""
    words = text.split()
    policy = next((policy for policy in (KEEP, REGATHER) if policy in words[-1:]), NO_POLICY[0])
    return SiteChoice(tuple(map(_parsed, words[:-1] if policy else words)), policy)


def _parsed(word: str) -> AxisChoice:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(
            f"{word!r} is no choice: expected R, S<dim>%<period>, X<dim>%<period>, P<set>, keep or regather"
        )
    if match["factor"]:
        return AxisChoice("S" if match["kind"] == "S" else "X", int(match["factor"]), int(match["period"]))
    if word == "R":
        return REPLICATED
    return AxisChoice("P", int(match["set"])) if match["set"] else PASSES_PARTIAL
