"""The house: no module imports itself by way of others, and no import hides in a function. That a folder imports only
from those below it is among the contracts of `pyproject.toml`, which import-linter holds in `tests/all.sh`."""

from __future__ import annotations

import ast

import networkx as nx
from house import FLOORS, MODULES, ROOT, imports, tree_of

FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = nx.DiGraph((name, other) for name in MODULES for other, _ in imports(name) if other != name)
    circles = [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]
    assert not circles


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
