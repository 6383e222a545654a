"""What a person sees while the planner works."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from autopar.report.telling import Ticker

READING, SEARCHING = "reading the model", "searching"

STEPS_OF_READING = ("capture:", "seeds:", "routing:", "masks:")
"""How lines of the log begin before anything is searched (`autopar.passes.FLOW`)."""


@contextmanager
def working(doing: str = READING) -> Iterator[None]:
    """Says what the planner is doing, from what it logs."""
    logger = logging.getLogger("autopar")
    level = logger.level
    with Ticker(doing) as ticker:

        def emit(record: logging.LogRecord) -> None:
            message = record.getMessage()
            if record.levelno == logging.INFO and doing == READING and not message.startswith(STEPS_OF_READING):
                ticker.tell(SEARCHING)

        handler = logging.Handler()
        handler.emit = emit  # type: ignore[method-assign]
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
