"""The kernel stands alone: `kernel.txt` names the modules that do the mission, and they import no other ones."""

from __future__ import annotations

import os
import subprocess
import sys

from test_floors import MODULES, ROOT, imports

NAMED = (ROOT / "kernel.txt").read_text().split()


def test_the_kernel_imports_nothing_else() -> None:
    beyond = {(name, imported) for name in NAMED for imported, _ in imports(name) if imported not in NAMED}
    assert not {(name, imported) for name, imported in beyond if not is_bare(imported)}


def is_bare(name: str) -> bool:
    """Whether a module is a package whose own file imports nothing of autopar's."""
    return MODULES[name].name == "__init__.py" and not list(imports(name))


def test_a_llama_trains_on_four_ranks_with_all_else_absent() -> None:
    done = subprocess.run(
        [sys.executable, "tests/kernel_alone.py"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[1:] == sorted(NAMED)
