"""Files that people give: text, JSON and TOML, whose faults are each one ValueError. `typed` reads what they hold."""

import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from .kinds import MOST as MOST

T = TypeVar("T")


@contextmanager
def reading(what: str, give: str) -> Iterator[None]:
    """A ValueError within also names the file ("cluster file x"), and says what to give instead."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}; {give}") from error


def text_of(path: str | Path) -> str:
    """The text of a file. Raises ValueError if there is none."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"cannot be read ({'Is a directory' if path.is_dir() else 'no file'})")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is no text in UTF-8 ({error.reason} at byte {error.start})") from error


def cached(name: str) -> Path:
    """A file in the user's cache directory (`XDG_CACHE_HOME`, or `~/.cache`)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "autopar" / name


def json_of(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for another text."""
    return _parsed(json.loads, "JSON", text)


def toml_of(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises ValueError for another text."""
    return _parsed(tomllib.loads, "TOML", text)


def _parsed(loads: Callable[[str], T], language: str, text: str) -> T:
    try:
        return loads(text)
    except ValueError as error:  # the language's own, and Python's for integers of thousands of digits
        raise ValueError(f"it is not {language} ({error})") from error
    except RecursionError as error:
        raise ValueError(f"its {language} is nested too deep") from error


def is_number(value: Any) -> bool:
    """An integer or a floating number that is not NaN; infinity is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # an integer beyond floating numbers
        return False


def cut(text: str) -> str:
    """A text short enough for an error."""
    return text if len(text) <= 120 else text[:117] + "..."
