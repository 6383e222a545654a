"""What the docs say exists: messages, code, names in Python blocks, links, pages; and what prints the outputs that they
quote. `test_examples.py` runs what they say to run."""

from __future__ import annotations

import ast
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

import autopar
import autopar.ops  # which has torch know autopar's operators
import autopar.testing
from autopar.planning.request import ASKED

ROOT = Path(__file__).parents[2]
OUTPUTS = runpy.run_path(str(ROOT / "docs/outputs.py"))
NOTEBOOKS = runpy.run_path(str(ROOT / "docs/notebooks.py"))
HOOKS = runpy.run_path(str(ROOT / "docs/hooks.py"))
BESIDE_README = [ROOT / f"{name}.md" for name in HOOKS["BESIDE_README"]]
PAGES = [ROOT / "README.md", *BESIDE_README, *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


# ------------------------------------------------------------------------------------------------- messages


@cache
def said() -> tuple[str, ...]:
    """Every text of the code, with … for what is put in."""
    texts = []
    for folder in ("autopar", "passes", "runtime"):
        for file in (ROOT / folder).rglob("*.py"):
            texts += [_text(node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, TEXTS)]
    return tuple(" ".join(text.split()) for text in texts)


TEXTS = (ast.JoinedStr, ast.Constant)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return re.sub(r"%[sdr]|\{\w+\}", "…", text)


def messages() -> list[str]:
    page = text_of("troubleshooting.md").partition("## Not autopar's messages")[0]
    return re.findall(r"^### (.*)$", page, flags=re.MULTILINE)


@pytest.mark.parametrize("message", messages())
def test_a_message_is_one_of_the_code(message: str) -> None:
    parts = [part for piece in re.split(r"…", message) if (part := piece.strip(" ().,:;'"))]
    pattern = re.compile(".*".join(map(re.escape, parts)))
    assert any(pattern.search(text) for text in said())


def test_enough_messages_are_explained() -> None:
    assert len(messages()) > 40


# ------------------------------------------------------------------------------------------------- equations


def test_the_code_of_an_equation_exists() -> None:
    """And the page names every paper's equations."""
    page = text_of("equations.md")
    shown = HOOKS["sources"](page)
    assert shown.count("??? quote") > 60
    for equation in ("Eq. 2 |", "Eq. 7 |", "Eq. 10 |", "Algorithm 1 |", "Algorithm 2 |", "3.2.2 |"):
        assert f"| {equation}" in page


def test_what_does_not_exist_is_missed() -> None:
    with pytest.raises(ValueError, match="has no sawn"):
        HOOKS["sources"]("`autopar/cluster/collectives.py`: `sawn`")


# ---------------------------------------------------------------------------------------------------- blocks


def blocks(page: Path) -> Iterator[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    yield from (text for word, text in fenced if word == "python")


def resolve(name: str) -> None:
    """Raises for what does not exist. Trainers of other libraries are read and not imported: they may not be here."""
    if found := re.match(r"autopar\.integrations\.(\w+)(?:\.(\w+))?$", name):
        code = (ROOT / f"autopar/integrations/{found[1]}.py").read_text()
        assert found[2] is None or f"class {found[2]}(" in code, name
    elif not hasattr(torch.ops.autopar, name.rpartition(".")[2]):  # an operator, which graphs have
        pkgutil.resolve_name(name)


@NAMED
def test_python_blocks_compile_and_name_what_exists(page: Path) -> None:
    for block in blocks(page):
        if "..." in block:  # an outline, with parts left out
            block = re.sub(r"\(\.\.\.,", "(None,", re.sub(r"=\.\.\.", "=None", block))
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autopar"):
                for alias in node.names:
                    resolve(f"{node.module}.{alias.name}")
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "autopar":
                pkgutil.resolve_name(f"autopar.{node.attr}")


@NAMED
def test_names_of_autopar_in_a_page_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for name in sorted(set(re.findall(r"(?:::: |`)(autopar(?:\.\w+)+)", prose))):
        if not name.endswith((".toml", ".extensions.scoped")):
            resolve(name)


@NAMED
def test_commands_in_a_page_are_known(page: Path) -> None:
    """Each `autopar COMMAND` in a block of bash, and each of its options."""
    fenced = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    known = dict(re.findall(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", HOOKS["commands"](""), flags=re.DOTALL | re.MULTILINE))
    for line in "".join(fenced).replace("\\\n", " ").splitlines():
        for command, rest in re.findall(r"(?:^|(?<=\s))autopar ([a-z][\w-]+)(.*)$", line):
            words = shlex.split(rest, comments=True)
            words = words[: words.index("--")] if command == "lab" and "--" in words else words
            assert command in known, line
            for option in (word for word in words if word.startswith("--")):
                assert re.search(rf"`[^`]*{option}\b", known[command]), (line, option)


# ------------------------------------------------------------------------------------------------------ site


def test_the_site_has_every_page_and_name() -> None:
    """`tests/all.sh` builds it."""
    navigation = yaml.unsafe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = [page for part in navigation for pages in part.values() for entry in pages for page in entry.values()]
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(there | {"index.md", *(path.name.lower() for path in BESIDE_README)})
    shown = set(re.findall(r"^::: autopar\.(?:extras\.)?(\w+)$", text_of("api.md"), flags=re.MULTILINE))
    assert shown | {"CLUSTERS"} == {*autopar.__all__, "lab"}


def test_every_parameter_of_the_api_has_a_meaning() -> None:
    """A sentence of its docstring, which the site shows in a table."""
    described = HOOKS["described_parameters"]
    called = [getattr(autopar, name) for name in autopar.__all__ if name not in ("CLUSTERS", *HOOKS["RESULTS"])]
    for function in (*called, autopar.testing.check):
        for name, _, _, meaning in described(function):
            assert meaning, f"{function.__name__}: a sentence of its docstring that names `{name}`"
    rows = {name: (kind, default, meaning) for name, kind, default, meaning in described(autopar.plan)}
    assert rows["micro_batches"][:2] == ("int | Literal['auto']", "`1`") and rows["model"][:2] == ("Module", "required")
    assert rows["loss_fn"][2].startswith("`loss_fn` takes the model's output to the loss")
    assert rows["headroom"] == ("float | None", "`None`", f"{ASKED['headroom'].help} In `[0, 1)`.")
    assert "| `padding` | `Padding | None` | `None` | With `padding`," in HOOKS["parameters"]("parallelize")
    assert HOOKS["parameters"]("Plan") == ""


def test_links_have_titles_and_code_in_tables_breaks_between_its_parts() -> None:
    titled, content = HOOKS["titled"], HOOKS["on_page_content"]
    assert titled("simulator.md", "") == "[The simulator](simulator.md)"
    assert titled("design.md", "#one-graph-for-every-device").startswith("[One graph for every device](design.md#")
    cell = "<td><code>passes/codegen/operators.py</code></td>"
    assert content(cell) == "<td><code>passes/<wbr>codegen/<wbr>operators.<wbr>py</code></td>"
    assert content("<p><code>a/b</code></p>") == "<p><code>a/b</code></p>"


def test_the_examples_are_listed() -> None:
    scripts = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh", ".ipynb")}
    assert scripts == set(re.findall(r"\]\(\.\./examples/([\w.]+)\)", text_of("examples.md")))


def test_the_citation_has_the_version_and_the_project_as_author() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["authors"] == [{"name": "The autopar authors"}]
    assert f'version = "{cited["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version = {{{cited['version']}}}" in text_of("citation.md")


# ------------------------------------------------------------------------------------------------- notebooks


@pytest.mark.parametrize("path", NOTEBOOKS["NOTEBOOKS"], ids=lambda path: path.name)
def test_a_notebook_prints_what_it_holds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python docs/notebooks.py --write` writes it again."""
    monkeypatch.setenv("COLUMNS", "80")
    held = NOTEBOOKS["read"](path)
    words = OUTPUTS["words"]
    assert path.stat().st_size < 50_000 and held["nbformat"] == 4
    shown = NOTEBOOKS["texts"](held)
    assert len(shown) > 4 and any(shown)
    made = NOTEBOOKS["texts"](NOTEBOOKS["executed"](held))
    assert [words(text) for text in made] == [words(text) for text in shown]


def test_the_site_shows_the_notebooks() -> None:
    shown = HOOKS["notebooks"]("")
    for path in NOTEBOOKS["NOTEBOOKS"]:
        where = HOOKS["shown_at"](path.name).partition("#")[2]
        assert where in [HOOKS["anchor"](title) for title in re.findall(r"(?m)^## (.+)$", shown)]


# --------------------------------------------------------------------------------------------------- outputs


def test_quotes_with_lines_left_out() -> None:
    agrees, rewritten = OUTPUTS["agrees"], OUTPUTS["rewritten"]
    output = "a plan\n  step 3 ms\n  peak 4 GiB; search took 5.1 s\nend\n"
    assert agrees(output, output)
    assert agrees("a plan\n...\n  peak 4 GiB; search\n    took 2.0 s\nend\n", output)
    assert agrees("...\n  step 3 ms\n...\n", output)
    assert not agrees("a plan\n", output)
    assert not agrees("a plan\n...\n  step 2 ms\n...\n", output)
    assert not agrees("...\n  peak 4 GiB\n...\n  step 3 ms\n...\n", output)
    assert rewritten("...\n  step 2 ms\n...\nend\n", output) == "...\n  step 3 ms\n...\nend\n"
    assert rewritten("old\n", output) == output


def test_the_docs_quote_what_they_can_print() -> None:
    """Each mark is well formed, and names a command that there is."""
    found = [quote for page in PAGES for quote in OUTPUTS["quotes"](page)]
    assert len(found) > 20
    marks = sum(page.read_text().count("<!-- output,") for page in PAGES)
    tables = sum("python benchmarks/" in page.read_text() and "<!-- begin" in page.read_text() for page in PAGES)
    assert len(found) == marks + tables
    for quote in found:
        words = shlex.split(quote.command)
        assert quote.script or words[0] == "autopar" or (ROOT / words[1]).exists(), quote.shown


def test_quick_outputs_are_what_is_printed() -> None:
    """`python docs/outputs.py` compares all; it takes some minutes."""
    ran = [sys.executable, str(ROOT / "docs/outputs.py"), "--within", "10"]
    done = subprocess.run(ran, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    assert re.search(r"^\d\d quotes, 0 differ$", done.stdout, flags=re.MULTILINE)
