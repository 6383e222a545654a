"""Files that people give: text and JSON, of which whatever is wrong is one ValueError. `typed` reads it."""

import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MOST = 2**63 - 1
"""The largest integer that files may hold."""


def text_of(path: str | Path, what: str, give: str) -> str:
    """The text of a file. `what` names it in errors ("cluster file x"), and `give` says what to give instead."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{what}: cannot be read ({'Is a directory' if path.is_dir() else 'no file'}); {give}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{what}: cannot be read ({error.strerror}); {give}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: is no text in UTF-8 ({error.reason} at byte {error.start}); {give}") from error


def json_of(text: str, what: str, give: str) -> Any:
    """The value of a JSON text; errors as for `text_of`."""
    return _parsed(json.loads, "JSON", text, what, give)


def toml_of(text: str, what: str, give: str) -> dict[str, Any]:
    """The table of a TOML text; errors as for `text_of`."""
    return _parsed(tomllib.loads, "TOML", text, what, give)


def _parsed(loads: Callable[[str], T], language: str, text: str, what: str, give: str) -> T:
    try:
        return loads(text)
    except ValueError as error:  # the language's own, and Python's for integers of thousands of digits
        raise ValueError(f"{what}: it is not {language} ({error}); {give}") from error
    except RecursionError as error:
        raise ValueError(f"{what}: its {language} is nested too deep; {give}") from error


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
