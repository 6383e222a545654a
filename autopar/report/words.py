"""Placements in words: "column on tp, sharded at rest on dp, gathered once"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autopar.planning.plan import ParameterPlan
from autopar.planning.provenance import DIMS
from autopar.planning.texts import grouped, listed

EXPLAINED: Mapping[str, str] = {
    "column": "column: a rank has some of the layer's outputs",
    "row": "row: a rank has some of its inputs, and the results are summed",
    "gathered": "gathered once: backward keeps what forward gathered; twice: it gathers again",
    "regather": "keep: backward keeps what forward gathered; regather: it gathers again",
    "periods": "in periods of n: of every n elements a rank has its share, instead of one block",
}
"""The words that a reader may not know."""

INPUT_DIMS = ("batch", "sequence")

_SPLIT = re.compile(r"S\((\d+)(?:%(\d+))?\)")


def split_of(text: str) -> tuple[int, int] | None:
    """The dim that a placement splits, and its period, 0 for one block a rank; None for what splits none."""
    match = _SPLIT.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def _periodic(word: str, period: int) -> str:
    return f"{word} in periods of {period}" if period else word


def parameter_words(plan: ParameterPlan, axes: Sequence[str]) -> str:
    """Where a parameter lives, and where it is used."""
    phrases = grouped((phrase, axis) for i, axis in enumerate(axes) if (phrase := _on_axis(plan, i)))
    told = [phrase.replace("{axes}", listed(on)) for phrase, on in sorted(phrases.items(), key=_order)]
    gathered = "gathered once" if plan.gather == "keep" else "gathered twice"
    if any("sharded at rest" in phrase for phrase in phrases):
        told.append(gathered)
    elif any("R" in (layout[i] for layout in plan.in_use) for i, text in enumerate(plan.at_rest) if text != "R"):
        told.append(f"{gathered} where it is read whole")
    return ", ".join(told) or "replicated"


def _order(item: tuple[str, list[str]]) -> bool:
    """What is used split comes first."""
    return "at rest" in item[0]


def _on_axis(plan: ParameterPlan, axis: int) -> str:
    """One axis in words, {axes} for its name; nothing for what is whole there."""
    at_rest, uses = plan.at_rest[axis], list(dict.fromkeys(layout[axis] for layout in plan.in_use))
    if at_rest == "R":
        split = [use for use in uses if use != "R"]
        return f"{_of(plan, split)} on {{axes}} in use (each rank stores all)" if split else ""
    if not uses or uses == [at_rest]:
        return f"{_of(plan, [at_rest])} on {{axes}}"
    if uses == ["R"]:
        return "sharded at rest on {axes}"
    others = [use for use in uses if use not in ("R", at_rest)]
    if not others:
        return f"{_of(plan, [at_rest])} on {{axes}}"
    return f"{_of(plan, others)} on {{axes}} in use ({_of(plan, [at_rest])} at rest)"


def _of(plan: ParameterPlan, texts: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(split_words(text, plan.kind, len(plan.shape)) for text in texts))


def split_words(text: str, kind: str, dims: int) -> str:
    """A placement that is no R: "column", "dim 2", "column in periods of 64"."""
    if (split := split_of(text)) is None:
        return text
    (dim, period), names = split, DIMS.get(kind, ())
    word = names[dim] if dim < len(names) else "split" if dims == 1 else f"dim {dim}"
    return _periodic(word, period)


def input_words(placements: Sequence[str], axes: Sequence[str], shape: str) -> str:
    """An input in words: "batch on dp, sequence on tp". Only what has rows of tokens has a sequence."""
    dims = shape.count(",") + 1 if "[" in shape else 0

    def split_words(dim: int, period: int) -> str:
        is_named = dim == 0 or (dim == 1 and dims == 2 and shape.startswith("int"))
        return _periodic(INPUT_DIMS[dim] if is_named else f"dim {dim}", period)

    splits = ((split_of(text), axis) for text, axis in zip(placements, axes, strict=True))
    told = grouped((split_words(*split), axis) for split, axis in splits if split)
    return ", ".join(f"{word} on {listed(on)}" for word, on in told.items()) or "replicated"


def legend(texts: Sequence[str]) -> list[str]:
    """Explanations of the words in these texts."""
    every = " ".join(texts)
    return [meaning for word, meaning in EXPLAINED.items() if re.search(rf"\b{word}\b", every)]
