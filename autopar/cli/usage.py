"""What was typed wrong, in one sentence as all errors are, instead of in a box."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from autopar.extensions import nearest
from autopar.report.telling import complain

BAD_INPUT = 2

UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""Of click, or of the copy of it in newer versions of typer."""


@contextmanager
def in_one_sentence(typed: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Says what was wrong with the words that `typed` gives, and exits with status 2."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        complain(_sentence(error, typed()))
        raise typer.Exit(BAD_INPUT) from None


def _sentence(error: Any, typed: Sequence[str]) -> str:
    command = error.ctx.command_path if error.ctx is not None else "autopar"
    see = f"{command} --help lists what it takes"
    parameter = getattr(error, "param", None)
    if parameter is not None and type(error).__name__ == "MissingParameter":
        return f"{_name(parameter)} is missing: give {_described(parameter)}"
    if parameter is not None:
        value = _value(parameter.opts, typed)
        return f"{_name(parameter)} is {value!r}: {_wanted(parameter, error.message)}"
    if type(error).__name__ == "NoSuchOption":
        known = [text for each in error.ctx.command.params for text in each.opts]
        return f"{command} has no option {error.option_name!r}{nearest(error.option_name, known)}; {see}"
    return f"{error.message.rstrip('.')}; {see}"


def _name(parameter: Any) -> str:
    name: str = parameter.opts[0]
    return name if name.startswith("-") else (parameter.metavar or name.upper())


def _described(parameter: Any) -> str:
    """What it takes, as its help says it, within a sentence."""
    text = (getattr(parameter, "help", None) or "a value").rstrip(".")
    return text if text[:2].isupper() and text[1].isalpha() else text[0].lower() + text[1:]


def _value(names: Sequence[str], typed: Sequence[str]) -> str:
    """The last value that was typed after an option."""
    found = ""
    for word, following in zip(typed, [*typed[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else following
    return found


def _wanted(parameter: Any, message: str) -> str:
    """What to give instead: a number within its limits."""
    limits = getattr(parameter, "type", parameter)
    low, high = getattr(limits, "min", None), getattr(limits, "max", None)
    whole = "integer" in message or isinstance(low, int)
    if not whole and "number" not in message and low is None and high is None:
        return message
    kind = "an integer" if whole else "a number"
    if low is not None and high is not None:
        return f"give {kind} from {low} to {high}"
    return f"give {kind} of at least {low}" if low is not None else f"give {kind}"
