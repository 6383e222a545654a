"""The house: a folder imports only from those below it, no module imports itself by way of others, and no import hides
in a function."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent
FOLDERS = {"autopar": ROOT / "autopar", "autopar.passes": ROOT / "passes", "autopar.runtime": ROOT / "runtime"}
FLOORS = (
    ("compat", "extensions"),
    ("files",),
    ("ir",),
    ("ops", "cluster", "solve"),
    ("cost",),
    ("passes",),
    ("profile",),
    ("planning",),
    ("report",),
    ("runtime", "lab"),
    ("api", "kernel"),
    ("testing",),
    ("integrations",),
    ("cli",),
    ("", "__main__"),
)
"""Lowest first. The package itself stands above all: it names what people import."""


FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


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


def folder(name: str) -> str:
    return [*name.split("."), ""][1]


def test_every_folder_has_a_floor() -> None:
    assert {folder(name) for name in MODULES} == set(FLOOR)


def test_imports_do_not_climb() -> None:
    climbing = [
        f"{name} imports {other}"
        for name in sorted(MODULES)
        for other, _ in imports(name)
        if folder(other) != folder(name) and FLOOR[folder(other)] >= FLOOR[folder(name)]
    ]
    assert not climbing


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = nx.DiGraph((name, other) for name in MODULES for other, _ in imports(name) if other != name)
    circles = [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]
    assert not circles


def test_a_plan_is_a_record_that_knows_no_viewer_and_no_search() -> None:
    """By what it imports, directly or not; viewers are found by name, in one function."""
    known, new = set(), {"autopar.planning.plan"}
    while new:
        known |= new
        new = {other for name in new for other, _ in imports(name)} - known
    assert not [name for name in known if folder(name) in ("report", "cli")]
    inside = {name.removeprefix("autopar.planning.") for name in known if folder(name) == "planning"}
    values = {"account", "provenance", "request", "timing", "training"}
    assert inside == {"plan", "saved", "texts", *values, "constraints", "progress"}
    plan = (ROOT / "autopar" / "planning" / "plan.py").read_text()
    assert not re.search(r"(?m)^(import|from) rich", plan) and plan.count("import_module(") == 1


def test_no_import_hides_in_a_function() -> None:
    hidden = []
    for name, file in MODULES.items():
        tree = tree_of(file)
        inner = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for node in ast.walk(function)
        }
        hidden += [f"{name} imports {other}" for other, node in imports(name) if id(node) in inner]
    assert not hidden


def test_the_root_holds_what_people_import() -> None:
    assert {path.name for path in (ROOT / "autopar").iterdir() if path.is_file()} == {
        "__init__.py", "__main__.py", "api.py", "kernel.py", "py.typed",
    }  # fmt: skip


def test_every_folder_is_a_package() -> None:
    """`setup.py` finds those that are."""
    folders = {file.parent for file in MODULES.values()}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]
