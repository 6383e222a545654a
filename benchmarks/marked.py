"""Tables in docs that a command writes: what stands between `<!-- NAME -->` and the next `<!-- end -->`."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def write(file: str, name: str, text: str) -> None:
    """Puts `text` in the place of what stands there, in a file of `docs`.

    Raises ValueError for a file that has no such place.
    """
    path = DOCS / file
    page, begin, end = path.read_text(), f"<!-- {name} -->\n", "<!-- end -->"
    before, marker, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (marker and closed):
        raise ValueError(f"{path} has no lines {begin.strip()} and, after it, {end}: write them where the table goes")
    path.write_text(f"{before}{begin}{text}\n{end}{after}")
