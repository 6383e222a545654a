"""The wheel: what is in it works from an empty folder, without the repository."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SOURCES = ("autopar", "passes", "runtime", "pyproject.toml", "README.md", "LICENSE")

MINE = """
import torch

def build(batch):
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Flatten(0)), (torch.zeros(batch, 8),), torch.mean
"""

COMMANDS = """
import sys

import autopar
from autopar.cli import app

print(autopar.__file__)
for line in (
    "--version",
    "plan mine:build --mesh dp=2,tp=2 --cluster dgx-h100 --out plan.json",
    "show plan.json --full",
    "explain plan.json 0.weight",
    "report plan.json -o plan.html",
    "clusters",
):
    try:
        app(line.split(), prog_name="autopar")
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"{line}: exit status {ended.code}")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git would hand on: a copy without caches."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = out.glob("autopar-*.whl")
    return built


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    folders = {ROOT / "autopar": "autopar", ROOT / "passes": "autopar/passes", ROOT / "runtime": "autopar/runtime"}
    there = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for folder, package in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == there


def test_it_installs_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith("entry_points.txt"))
        scripts = configparser.ConfigParser()
        scripts.read_string(content.read(name).decode())
    assert dict(scripts["console_scripts"]) == {"autopar": "autopar.cli:main"}


def test_it_works_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """The command line, with clusters and the report's page, which are no Python."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    (empty / "mine.py").write_text(MINE)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [str(site / "autopar/__init__.py"), "autopar 0.1.0"]
    assert "dgx-h100" in done.stdout and "0.weight: parameter" in done.stdout
    page = (empty / "plan.html").read_text()
    assert all((ROOT / "autopar/report/html" / name).read_text() in page for name in ("page.js", "page.css"))
