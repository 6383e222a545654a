"""Runs the notebooks in examples/: `python docs/notebooks.py [NOTEBOOK ...] [--write]`.

Without `--write` it compares what cells print and show with what the notebooks hold, as docs/outputs.py does for pages:
word by word, and without what differs from run to run. With it, the outputs are rewritten. Exit status 1 if one
differs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
words = runpy.run_path(str(ROOT / "docs/outputs.py"))["words"]


def read(path: Path) -> dict[str, Any]:
    book: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return book


def executed(book: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs that its cells have when they run one after the other, in an empty folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, number, here = [], 0, os.getcwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            for cell in book["cells"]:
                if cell["cell_type"] == "code":
                    number += 1
                    cell = {**cell, "execution_count": number, "outputs": list(_outputs(cell, number, names))}
                cells.append(cell)
        finally:
            os.chdir(here)
    return {**book, "cells": cells}


def _outputs(cell: dict[str, Any], number: int, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a cell prints, and the value of the expression that it ends with."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, f"cell {number}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    if printed.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": value._repr_html_().splitlines(keepends=True), **data}
        yield {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}


def texts(book: dict[str, Any]) -> list[str]:
    """What the cells of code print and show, as text, one for each."""
    shown = ([*_shown(cell)] for cell in book["cells"] if cell["cell_type"] == "code")
    return ["".join(lines) for lines in shown]


def _shown(cell: dict[str, Any]) -> Iterator[str]:
    for output in cell["outputs"]:
        yield "".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="notebooks to run; all if none is given")
    parser.add_argument("--write", action="store_true", help="rewrite outputs")
    options = parser.parse_args()
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
    differ = 0
    for path in [path.resolve() for path in options.notebooks] or NOTEBOOKS:
        before = read(path)
        after = executed(before)
        for old, new in zip(texts(before), texts(after), strict=True):
            if words(old) != words(new):
                differ += 1
                print("".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), path.name, "now")))
        if options.write:
            path.write_text(json.dumps(after, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {len(texts(after))} cells of code")
    sys.exit(bool(differ) and not options.write)


if __name__ == "__main__":
    main()
