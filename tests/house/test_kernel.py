"""The kernel stands alone: `kernel.txt` names the modules that do the mission, and they import no other ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from house import MODULES, ROOT, imports
from torch import nn

from autopar import kernel

NAMED = (ROOT / "kernel.txt").read_text().split()


def test_the_kernel_imports_nothing_else() -> None:
    beyond = {(name, imported) for name in NAMED for imported, _ in imports(name) if imported not in NAMED}
    assert not {(name, imported) for name, imported in beyond if not is_bare(imported)}


def is_bare(name: str) -> bool:
    """Whether a module is a package whose own file imports nothing of autopar's."""
    return MODULES[name].name == "__init__.py" and not list(imports(name))


def test_a_llama_trains_on_four_ranks_with_all_else_absent() -> None:
    done = subprocess.run(
        [sys.executable, "tests/support/kernel_alone.py"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[1:] == sorted(NAMED)


def test_random_numbers_are_refused() -> None:
    """Each rank would draw its own."""
    with pytest.raises(ValueError, match="draws random numbers"):
        kernel.trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), torch.zeros(4, 4))


def test_what_is_written_in_place_is_an_output() -> None:
    graph, _ = kernel.trace(nn.Sequential(nn.BatchNorm1d(4), nn.Flatten(0)), torch.zeros(8, 4))
    written = {output.target for output in graph.outputs if output.role == "mutation"}
    assert written == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
