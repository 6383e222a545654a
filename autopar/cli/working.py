"""What a person sees while the planner works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autopar.report.telling import Ticker, following

READING, DRAWING = "reading the model", "drawing"


@contextmanager
def working(doing: str = READING) -> Iterator[None]:
    """Says what the planner is doing, and how far it is."""
    with Ticker(doing, follows=True) as ticker, following(ticker.tell):
        yield
