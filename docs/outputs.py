"""Runs what the docs quote, and compares: `python docs/outputs.py [PAGE ...] [--write] [--within SECONDS]`.

A quoted output follows a mark, which says what prints it and about how many seconds that takes on two idle cores:

    <!-- output, 15 s: autopar plan hf:LlamaConfig ... --out plan.json && autopar show plan.json -->

or `<!-- output, 5 s: the block above -->` for the Python block before it. Commands run in an empty folder that has
`examples/`, `benchmarks/` and `tests/`; marks that begin alike share it, and what both begin with runs once. Of several
commands the last one's output is quoted. A line `...` in a quote stands for lines left out. Texts are compared word by
word, and without what differs from run to run (`VOLATILE`).

With `--write`, quotes that differ are rewritten in place: read the difference before you commit it. Exit status 1 if
one differs.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

MARK = re.compile(r"<!-- output, (?P<seconds>\d+) s: (?P<command>.+?) -->\n+```\w*\n(?P<text>.*?)^```$", re.M | re.S)
WRITTEN = r"<!-- begin(?:, (?P<seconds>\d+) s)?: (?P<command>python benchmarks/\w+\.py) --write -->"
TABLE = re.compile(rf"{WRITTEN}\n(?P<text>.*?)^<!-- end -->", re.M | re.S)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
ABOVE = "the block above"
LEFT_OUT = "..."
TABLE_SECONDS = 10

VOLATILE = (
    r"(?<=search took )\d+\.\d s",  # how long the machine took to plan
    r"\d[\d.]* m?s(?= \d+\.\d%)",  # the same, in a table of plans
    r"captured, planned and compiled in \d+\.\d s",
    r"(?<=differ by )\d\.\de-\d\d",  # rounding: processors add up in other orders
)


@dataclass(frozen=True, kw_only=True)
class Quote:
    """A quoted output: `span` is where its text stands in the page. `script` is the Python block before the mark."""

    page: Path
    command: str
    seconds: int
    text: str
    span: tuple[int, int]
    script: str = ""

    @property
    def line(self) -> int:
        return self.page.read_text()[: self.span[0]].count("\n")

    @property
    def shown(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.command}"


def quotes(page: Path) -> Iterator[Quote]:
    text = page.read_text()
    for found in MARK.finditer(text):
        command = " ".join(found["command"].split())
        before = [block[1] for block in BLOCK.finditer(text[: found.start()])]
        if command == ABOVE and not before:
            raise ValueError(f"{page}: nothing stands above a mark that quotes {ABOVE}")
        yield Quote(
            page=page,
            command=command,
            seconds=int(found["seconds"]),
            text=found["text"],
            span=found.span("text"),
            script=before[-1] if command == ABOVE else "",
        )
    for found in TABLE.finditer(text):
        seconds = int(found["seconds"] or TABLE_SECONDS)
        yield Quote(page=page, command=found["command"], seconds=seconds, text=found["text"], span=found.span("text"))


@dataclass
class Runs:
    """What ran in this process: folders by the first command of a mark, outputs by all commands up to one."""

    place: Path
    folders: dict[str, Path] = field(default_factory=dict)
    outputs: dict[tuple[str, ...], str] = field(default_factory=dict)

    def output(self, quote: Quote) -> str:
        commands = ("python script.py",) if quote.script else tuple(quote.command.split(" && "))
        folder = self._folder(commands[0] if not quote.script else quote.script)
        if quote.script:
            (folder / "script.py").write_text(quote.script)
            return _printed(commands[0], folder)
        for number in range(1, len(commands) + 1):
            if commands[:number] not in self.outputs:
                self.outputs[commands[:number]] = _printed(commands[number - 1], folder)
        return self.outputs[commands]

    def _folder(self, first: str) -> Path:
        if first not in self.folders:
            folder = self.folders[first] = self.place / str(len(self.folders))
            folder.mkdir()
            for name in ("examples", "benchmarks", "tests"):
                (folder / name).symlink_to(ROOT / name)
        return self.folders[first]


def _printed(command: str, folder: Path) -> str:
    """What a command prints on a page of 80 columns. Commands that show an error are quoted with it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    width = {"COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    shell = ["bash", "-c", command]
    ran = subprocess.run(shell, cwd=folder, env={**os.environ, "PATH": path, **width}, capture_output=True, text=True)
    if ran.returncode and "error: " not in ran.stderr:
        raise RuntimeError(f"{command}\n{ran.stderr}")
    error = ran.stderr.find("error: ") if ran.returncode else -1
    said = ran.stderr[error:] if error >= 0 else ran.stdout
    return "\n".join(line.rstrip() for line in said.splitlines()).strip("\n") + "\n"


def words(text: str) -> str:
    """A text with single spaces, without what differs from run to run."""
    text = " ".join(text.split())
    for pattern in VOLATILE:
        text = re.sub(pattern, "#", text)
    return text


def segments(text: str) -> list[list[str]]:
    """The lines of a quote between those that stand for lines left out; empty where it begins or ends with one."""
    found: list[list[str]] = [[]]
    for line in text.rstrip("\n").splitlines():
        if line.strip() == LEFT_OUT:
            found.append([])
        else:
            found[-1].append(line)
    return found


def agrees(quoted: str, output: str) -> bool:
    """Whether a quote is what was printed, but for what it leaves out."""
    parts, rest = [words("\n".join(lines)) for lines in segments(quoted)], f"{words(output)} "
    if not rest.startswith(parts[0]) or not rest.rstrip().endswith(parts[-1]):
        return False
    for number, part in enumerate(parts):
        if part:
            at = rest.rindex(part) if number == len(parts) - 1 else rest.find(part)
            if at < 0:
                return False
            rest = rest[at + len(part) :]
    return len(parts) > 1 or not rest.strip()


def rewritten(quoted: str, output: str) -> str:
    """The quote with the lines of the output that are most like its own, as many as it has."""
    parts, lines = segments(quoted), output.rstrip("\n").splitlines()
    if len(parts) == 1:
        return output
    made, at = [], 0
    for number, part in enumerate(parts):
        if number == len(parts) - 1 and part:
            at = max(at, len(lines) - len(part))
        elif number and part:
            places = range(at, len(lines) - len(part) + 1)
            at = max(places, key=lambda k: (_likeness(part, lines[k : k + len(part)]), -k), default=at)
        made.append("".join(f"{line}\n" for line in lines[at : at + len(part)]))
        at += len(part)
    return f"{LEFT_OUT}\n".join(made)


def _likeness(one: list[str], other: list[str]) -> float:
    shapes = [[re.sub(r"[\d.█▒▓░▞]+", "#", " ".join(line.split())) for line in lines] for lines in (one, other)]
    pairs = zip(*shapes, strict=True)
    return sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="pages to look at; all if none is given")
    parser.add_argument("--write", action="store_true", help="rewrite the quotes that differ")
    parser.add_argument("--within", type=int, metavar="SECONDS", help="only what takes at most so many seconds")
    options = parser.parse_args()
    pages = [page.resolve() for page in options.pages] or PAGES
    wanted = [quote for page in pages for quote in quotes(page)]
    wanted = [quote for quote in wanted if options.within is None or quote.seconds <= options.within]
    differ = 0
    with tempfile.TemporaryDirectory() as place:
        runs = Runs(Path(place))
        for quote in wanted:
            started = time.perf_counter()
            output = runs.output(quote)
            equal = agrees(quote.text, output)
            differ += not equal
            seconds = time.perf_counter() - started
            print(f"{'equal' if equal else 'DIFFERS'}, {seconds:.0f} s: {quote.shown}", flush=True)
            if not equal:
                new = rewritten(quote.text, output)
                print("".join(difflib.unified_diff(quote.text.splitlines(True), new.splitlines(True), "docs", "now")))
                if options.write:
                    page = quote.page.read_text()
                    same = (q for q in quotes(quote.page) if (q.command, q.text) == (quote.command, quote.text))
                    first, last = next(same).span  # those before it may be longer now
                    quote.page.write_text(page[:first] + new + page[last:])
    print(f"{len(wanted)} quotes, {differ} differ")
    sys.exit(bool(differ) and not options.write)


if __name__ == "__main__":
    main()
