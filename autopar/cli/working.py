"""What a person sees while the planner works."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from . import common


@contextmanager
def working() -> Iterator[None]:
    """Shows on a terminal what the planner logs."""
    console = common.notes()
    if not console.is_terminal:
        yield
        return
    logger, level = logging.getLogger("autopar"), logging.getLogger("autopar").level
    with console.status("capture") as status:
        handler = logging.Handler()
        handler.emit = lambda record: status.update(record.getMessage().splitlines()[0][:100])  # type: ignore[method-assign]
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
