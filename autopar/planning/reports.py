"""Warnings of what a model is captured without, and what has been said once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from autopar.passes.capture.captured import Captured
from autopar.passes.capture.errors import listed
from autopar.passes.space.space import Space

from .provenance import input_metas, samples
from .texts import pattern, starred

logger = logging.getLogger("autopar")


class Once(logging.Filter):
    """Within `said()`, a warning of autopar's loggers that it has let pass before does not pass again: a model is
    captured many times, and what it lacks stays. A warning `about` some things passes where one of them is new."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[object] = set()

    @contextmanager
    def said(self) -> Iterator[None]:
        below = [
            each
            for name, each in logging.root.manager.loggerDict.items()
            if name.startswith(f"{logger.name}.") and isinstance(each, logging.Logger)
        ]
        for each in (logger, *below):
            each.addFilter(self)
        try:
            yield
        finally:
            for each in (logger, *below):
                each.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        about: frozenset[object] = getattr(record, "about", frozenset({record.getMessage()}))
        is_new = not about <= self.known
        self.known |= about
        return is_new


def about(what: str, things: Iterable[str]) -> dict[str, object]:
    """`extra=` of a warning, for `Once`."""
    return {"about": frozenset((what, thing) for thing in things)}


def report_captured(captured: Captured) -> None:
    """Warns of parameters that do not train, and of numbers that the model's Python reads off inputs."""
    if names := captured.without_gradient:
        logger.warning(
            "no gradient reaches %s, on which nothing that is differentiated depends (trainable: %d)",
            listed(names, 10),
            len(names),
            extra=about("no gradient", names),
        )
    if captured.pinned:
        logger.warning(
            "the model's Python reads %s: a program is right for inputs of which it reads the same, and "
            "parallelize captures and plans again for others",
            captured.pinned,
        )


def report_rows(captured: Captured, devices: int) -> None:
    """Warns of a batch that is no match for the devices on which meshes are searched, before the search."""
    shapes = [meta.shape for meta in input_metas(captured).values() if meta.shape]
    if shapes and (rows := samples(shapes)) < devices:
        logger.warning(
            "the batch has %s rows, and the search is over meshes of %s devices, of which %s or more share a row: give "
            "a number of devices, or a larger batch",
            *(f"{number:,}" for number in (rows, devices, -(-devices // rows))),
        )


def report_without_rule(space: Space) -> None:
    if space.without_rule:
        modules = space.without_rule_in
        ops = "; ".join(
            f"{count} x {op} in {', '.join(path or 'the model' for path in _paths(modules[op]))}"
            for op, count in space.without_rule.items()
        )
        logger.warning(
            "replicated, since the op has no rule: %s (what it multiplies is not in the predicted step)",
            ops,
            extra=about("no rule", space.without_rule),
        )


def _paths(modules: Sequence[str]) -> tuple[str, ...]:
    """Paths of modules, each once; where some differ in numbers alone, one with "*" for these."""
    alike: dict[str, list[str]] = {}
    for path in modules:
        alike.setdefault(starred(path), []).append(path)
    return tuple(map(pattern, alike.values()))
