"""A plan's file before it is a plan, which is read without PyTorch: whatever is wrong with it is said at once."""

import re
from pathlib import Path
from typing import Any

from autopar.files import json_of, reading, text_of

FORMAT = 2


def saved(path: str | Path) -> dict[str, Any]:
    """The JSON that `Plan.save` wrote. Raises ValueError if the file is none of its kind."""
    if not isinstance(path, (str, Path)):
        raise ValueError(f"{path!r} is no path of a plan: give that of a file that Plan.save wrote")
    with reading(f"{path} is no plan", "give the path of a file that Plan.save wrote"):
        data = json_of(text_of(path))
    return of_format(data, str(path))


def may_be_plan(path: Path) -> bool:
    """Whether a file may be a plan, maybe an edited one, by how it begins; an empty file may."""
    with path.open("rb") as file:
        return re.match(rb'\s*(\Z|\{\s*"(format|account)")', file.read(1000)) is not None


def is_plan(text: str) -> bool:
    """Whether a text is the path of a file that may be a plan."""
    path = Path(text)
    return path.is_file() and may_be_plan(path)


def of_format(data: Any, source: str) -> dict[str, Any]:
    """What JSON holds, if it is a plan's; `source` names it in errors."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        given = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{source} is no plan of format {FORMAT} (found {given!r}): make it with Plan.save")
    return data
