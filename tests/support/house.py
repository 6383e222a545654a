"""The modules of autopar, what each imports, and the floors that their folders have."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"autopar": ROOT / "autopar", "autopar.passes": ROOT / "passes", "autopar.runtime": ROOT / "runtime"}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
FLOORS = tuple(tuple(layer.split(" | ")) for layer in reversed(CONTRACTS[0]["layers"]))
"""Lowest first."""


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = file
    return found


MODULES = modules()


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(name: str) -> Iterator[tuple[str, ast.AST]]:
    """The modules of autopar that a module imports, each with its statement."""
    file = MODULES[name]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                if inner in MODULES or source in MODULES:
                    yield (inner if inner in MODULES else source), node
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names if alias.name in MODULES)
