"""What answers a question, and how it is shown: in a terminal, in a notebook, and to programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType

from .hypertext import fragment
from .rendering import renderables, rendered
from .sections import Section


class Document:
    """A frozen dataclass that prints as its sections."""

    def sections(self) -> Iterator[Section]:
        """What people read."""
        raise NotImplementedError

    def text(self, width: int | None = 80) -> str:
        """The sections in at most so many columns; None: those of the terminal."""
        return rendered(self.sections(), width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from renderables(self.sections(), options.max_width)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return fragment(self.sections())

    def to_json(self) -> dict[str, Any]:
        """The fields, as plain dicts, lists, numbers and texts."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]
