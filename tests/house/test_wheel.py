"""The wheel: what is in it works from an empty folder, without the repository."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SOURCES = ("autopar", "passes", "runtime", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
BESIDE = ("benchmarks", "docs", "examples", "tests", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md")

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


def copied(names: tuple[str, ...], to: Path) -> Path:
    """What git would hand on: a copy without caches."""
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to)
    return to


def built(kind: str, source: Path, out: Path) -> Path:
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=120)
    (made,) = out.glob("autopar-*")
    return made


def names_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", copied(SOURCES, tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel"))


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    names = names_in(wheel)
    folders = {ROOT / "autopar": "autopar", ROOT / "passes": "autopar/passes", ROOT / "runtime": "autopar/runtime"}
    there = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for folder, package in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == there


def test_a_source_distribution_has_what_a_wheel_and_the_tests_need(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "wheel").mkdir()
    packed = built("sdist", copied((*SOURCES, *BESIDE), tmp_path / "source"), tmp_path / "packed")
    shutil.unpack_archive(packed, tmp_path, filter="data")
    (source,) = (path for path in tmp_path.glob("autopar-*") if path.is_dir())
    for folder in ("benchmarks", "docs", "examples", "tests"):
        of = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts}
        assert {path for path in of if (ROOT / path).is_file()} <= {p.relative_to(source) for p in source.rglob("*")}
    assert names_in(built("wheel", source, tmp_path / "wheel")) == names_in(wheel)


def test_its_metadata_are_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith("dist-info/METADATA"))
        about = message_from_string(content.read(name).decode())
        assert any(name.endswith("licenses/LICENSE") for name in content.namelist())
    assert (about["License-Expression"], about["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert about["Description-Content-Type"] == "text/markdown" and "# autopar" in str(about.get_payload())
    assert "Typing :: Typed" in about.get_all("Classifier", []) and "autopar/py.typed" in names_in(wheel)
    assert {"hf", "trainers", "figure", "dev", "docs"} == set(about.get_all("Provides-Extra", []))


def test_it_installs_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith("entry_points.txt"))
        scripts = configparser.ConfigParser()
        scripts.read_string(content.read(name).decode())
    assert dict(scripts["console_scripts"]) == {"autopar": "autopar.cli:main"}


def test_the_dockerfile_copies_what_there_is_and_what_the_wheel_needs() -> None:
    lines = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text()).replace("\\\n", " ").splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name in (name for names in copies for name in names):
        assert (ROOT / name).exists() and f"!{name}" in ignored, name
    of_the_wheel = {name for names in copies[: [*map(len, copies)].index(1) + 3] for name in names}
    assert {*SOURCES} <= of_the_wheel
    for line in lines:
        if line.startswith("RUN "):
            subprocess.run(["bash", "-n", "-c", line.removeprefix("RUN ")], check=True)


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
    assert done.stdout.splitlines()[:2] == [str(site / "autopar/__init__.py"), "autopar 0.2.0"]
    assert "dgx-h100" in done.stdout and "0.weight: parameter" in done.stdout
    page = (empty / "plan.html").read_text()
    assert all((ROOT / "autopar/report/html" / name).read_text() in page for name in ("page.js", "page.css"))
