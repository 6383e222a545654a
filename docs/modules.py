"""Prints what each module is for: `python docs/modules.py [FOLDER ...]`, such as `python docs/modules.py passes/lower`.

That is the first sentence of the module's docstring. docs/code.md says in which order to read the folders.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ("autopar", "passes", "runtime")


def first_sentence(docstring: str) -> str:
    """Of the first paragraph; empty where it has no sentence that ends."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    found = re.match(r"(.+?[.?])(?= [A-Z`]|$)", paragraph)
    return found[1] if found else ""


def purpose(module: Path) -> str:
    return first_sentence(ast.get_docstring(ast.parse(module.read_text())) or "")


def modules(*folders: str) -> list[Path]:
    """Relative to the repository, a folder's own `__init__` first; without those of `python -m`, which only call."""
    files = {file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).rglob("*.py")}
    return sorted((f for f in files if f.name != "__main__.py"), key=lambda f: (f.parent, f.name != "__init__.py", f))


def main() -> None:
    for module in modules(*(sys.argv[1:] or PACKAGE)):
        name = f"{module.parent}/" if module.name == "__init__.py" else str(module)
        print(f"{name:<40} {purpose(ROOT / module)}")


if __name__ == "__main__":
    main()
