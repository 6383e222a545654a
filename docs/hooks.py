"""What mkdocs does besides (`hooks` of mkdocs.yml): the README is the first page, and tables come from the code.

A page asks for a table by a line such as `<!-- generated: commands -->`, with a name of `GENERATED`. Whoever reads the
page as a file sees the sentence before that line, which says what the site shows there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import re
import runpy
import shutil
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = {"passes": ROOT / "passes", "runtime": ROOT / "runtime"}
BESIDE_README = ("CONTRIBUTING", "CHANGELOG", "SECURITY")
"""Pages of the repository's root that the site has too."""


# ------------------------------------------------------------------------------------------ what mkdocs calls


def on_startup(command: str, dirty: bool) -> None:
    """mkdocstrings looks for the folder before anything is in it, and would read another one if it were missing."""
    (ROOT / "build/docs").mkdir(parents=True, exist_ok=True)


def on_config(config: Any) -> Any:
    """The three folders of the package as one, for mkdocstrings to read; without PyTorch. Copies: links would be
    followed to folders that are not one."""
    tree, unread = ROOT / "build/docs/autopar", shutil.ignore_patterns("__pycache__")
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT / "autopar", tree, ignore=unread)
    for name, path in PACKAGE.items():
        shutil.copytree(path, tree / name, ignore=unread)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_name = f"{project['name']} {project['version']}"
    config.copyright = f"{config.site_name}, {project['license']}"
    return config


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File

    readme = landing((ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=re.sub(r'(?<=[("])docs/', "", readme)))
    for name in BESIDE_README:
        text = (ROOT / f"{name}.md").read_text()
        files.append(File.generated(config, f"{name.lower()}.md", content=re.sub(r'(?<=[("])docs/', "", text)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    markdown = re.sub(r"<picture>(.*?)</picture>", lambda f: picture(f[1]), markdown, flags=re.DOTALL)
    markdown = re.sub(r"\]\((?:\.\./)?examples/([\w.]+)\)", lambda f: f"]({shown_at(f[1])})", markdown)
    markdown = re.sub(r"\]\((?:\.\./)?README\.md", "](index.md", markdown)
    beside = rf"\]\((?:\.\./)?({'|'.join(BESIDE_README)})\.md"
    markdown = re.sub(beside, lambda f: f"]({f[1].lower()}.md", markdown)
    markdown = re.sub(r"\[(?:docs/)?([\w-]+\.md)\]\(\1(#[\w-]+)?\)", lambda f: titled(f[1], f[2] or ""), markdown)
    if page.file.src_path == "api.md":
        markdown = re.sub(r"(?m)^::: autopar\.([\w.]+)\n(?: .*\n)*", lambda f: f[0] + parameters(f[1]), markdown)
    if page.file.src_path == "equations.md":
        markdown = re.sub(r"\$([^$`\n]+)\$", lambda f: mathml(f[1]), markdown)
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: GENERATED[found[1]](markdown), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Paths of the repository, and not of the tree of `on_config`; in a table they break between their parts."""
    html = re.sub(r"build/docs/autopar/(passes|runtime)/", r"\1/", html).replace("build/docs/autopar/", "autopar/")
    return re.sub(r"<td.*?</td>", lambda cell: CODE.sub(breakable, cell[0]), html, flags=re.DOTALL)


CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")


def breakable(code: re.Match[str]) -> str:
    """Code that may go on in another line after a slash, a dot, an underscore or a comma, and nowhere else."""
    return re.sub(r"(?<=\w)([/._,=|]+)(?=\w)", r"\1<wbr>", code[0])


def landing(readme: str) -> str:
    """The README below a head with its first sentences and the three ways to go on."""
    title, about, rest = readme.split("\n\n", 2)
    ways = {"Install": "install.md", "Plan for a cluster": "cluster-plan.md", "Train on 8 GPUs": "launch.md"}
    buttons = "\n".join(
        f"[{words}]({page}){{ .md-button {'.md-button--primary' if page == 'install.md' else ''} }}"
        for words, page in ways.items()
    )
    return f'<div class="landing" markdown>\n\n{title}\n\n{about}\n\n{buttons}\n\n</div>\n\n{rest}'


def titled(page: str, anchor_: str) -> str:
    """A link that has the title of its page, or of the section of it, in the place of the name of a file."""
    file = next(path for path in (ROOT / "docs" / page, ROOT / page) if path.exists())
    titles = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```$", "", file.read_text()))
    words = next((title for title in titles if anchor_ == f"#{anchor(title)}"), titles[0])
    return f"[{words}]({page}{anchor_})"


def picture(inside: str) -> str:
    """One image for light pages and one for dark ones, as the theme knows them."""
    (dark,), (light,) = re.findall(r'srcset="(.+?)"', inside), re.findall(r'\ssrc="(.+?)"', inside)
    (words,) = re.findall(r'alt="(.+?)"', inside, flags=re.DOTALL)
    words = " ".join(words.split())
    return f"![{words}]({light}#only-light)\n![{words}]({dark}#only-dark)"


def mathml(formula: str) -> str:
    """A formula that browsers draw by themselves."""
    from latex2mathml.converter import convert

    return str(convert(formula))


def shown_at(example: str) -> str:
    """Where the site shows a file of examples/."""
    if not example.endswith(".ipynb"):
        return f"examples.md#{anchor(example)}"
    title = "".join(json.loads((ROOT / "examples" / example).read_text())["cells"][0]["source"]).splitlines()[0]
    return f"notebooks.md#{anchor(title.removeprefix('# '))}"


def anchor(title: str) -> str:
    """Of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# ------------------------------------------------------------------------------------------- parameters of the API


RESULTS = ("Plan", "Comparison", "Simulation", "Difference", "Fit")
"""Classes that functions return: nobody calls them."""


def parameters(name: str) -> str:
    """What a function or a class of `autopar` takes, as a table. Meanings are what the options of a request say of
    themselves, and the sentences of the docstring that speak of a parameter, or those of `autopar.plan` where it says
    that arguments are "as for" that."""
    import autopar

    called = (
        importlib.import_module("autopar.testing").check if name == "testing.check" else getattr(autopar, name, None)
    )
    if name in RESULTS or not (inspect.isfunction(called) or inspect.isclass(called)):
        return ""
    rows = [(f"`{n}`", f"`{kind}`", default, meaning) for n, kind, default, meaning in described_parameters(called)]
    return "\n" + table("parameter", "type", "default", "meaning", rows=iter(rows)) + "\n"


def described_parameters(called: Any) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each, from the signature, the options and the docstring."""
    import autopar
    from autopar.planning.request import ASKED

    doc = "\n\n".join(filter(None, (inspect.getdoc(called), inspect.getdoc(getattr(called, "__init__", None)))))
    shared = inspect.getdoc(autopar.plan) or "" if "as for `" in " ".join(doc.split()) else ""
    fields_ = _attribute_docs(called) if inspect.isclass(called) else {}
    if inspect.isfunction(called):
        written = inspect.signature(inspect.unwrap(called)).parameters
        fields_ = {name: _meaning(option) for name, option in ASKED.items() if name not in written}
    for name, parameter in inspect.signature(called).parameters.items():
        if name != "kwargs" or parameter.kind is not parameter.VAR_KEYWORD:
            meaning = fields_.get(name) or sentence_of(name, doc) or sentence_of(name, shared)
            yield parameter_name(parameter), _annotation(parameter.annotation), _given(parameter), meaning


def _meaning(option: Any) -> str:
    return option.help + (f" In `{option.range}`." if option.range else "")


def parameter_name(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    return stars.get(parameter.kind, "") + parameter.name


def sentence_of(name: str, doc: str) -> str:
    """The first sentence that begins with a parameter's name, or else one that has it."""
    paragraphs = [p for p in re.split(r"\n\n|\n(?=- )", doc) if not p.startswith("    ")]
    whole = [" ".join(p.split()).removeprefix("- ") for p in paragraphs]
    sentences = [s for p in whole for s in re.split(r"(?<=[.;]) (?=[A-Z`])", p)]
    mark = re.compile(rf"`{name}(?:[(=][^`]*)?`")
    having = [s for s in sentences if mark.search(s)]
    first = [s for s in having if (found := re.search(r"`.*?`", s)) and mark.match(found[0])]
    return next(iter([s for s in first if s.startswith("`")] or first or having), "").rstrip(";:")


def _annotation(hint: Any) -> str:
    if hint is inspect.Parameter.empty:
        return ""
    text = hint if isinstance(hint, str) else _type(hint)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text).replace("NoneType", "None")


def _given(parameter: inspect.Parameter) -> str:
    value = parameter.default
    if value is parameter.empty:
        return "" if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) else "required"
    plain = value is None or isinstance(value, (str, int, float, tuple))
    if plain:
        return f"`{value!r}`"
    if is_dataclass(value) and value == type(value)():  # type: ignore[misc]
        return f"`{type(value).__name__}()`"
    return ""


# ------------------------------------------------------------------------------------------------- the tables


def row(*cells: object) -> str:
    """Code may have a bar as it is; in words it would begin a cell."""
    words = (re.sub(r"(`[^`]*`)|\|", lambda f: f[1] or r"\|", str(cell)).replace("\n", " ") for cell in cells)
    return f"| {' | '.join(words)} |"


def table(*head: str, rows: Iterator[tuple[object, ...]]) -> str:
    return "\n".join([row(*head), "|" + "---|" * len(head), *(row(*cells) for cells in rows)])


def commands(page: str) -> str:
    """Every command of the command line with its options, from the parser."""
    from autopar.cli import COMMANDS, command_of

    parts = []
    for name, about in COMMANDS.items():
        command = command_of(name)
        parts += [f"## {name}", *_command(f"autopar {name}", command, about.help)]
        for inner in getattr(command, "commands", {}).values():
            parts += [f"### {name} {inner.name}", *_command(f"autopar {name} {inner.name}", inner, "")]
    return "\n\n".join(parts)


def _command(spelled: str, command: Any, about: str) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and "--help" not in p.opts]
    needs = "COMMAND" if getattr(command, "commands", {}) else "[OPTIONS]" if options else ""
    yield inspect.cleandoc(command.help or about)
    yield f"```\n{' '.join([spelled, *(_shown(p) for p in arguments), needs]).rstrip()}\n```"
    if arguments or options:
        rows = ((_spelled(p), getattr(p, "help", "") or "", _default(p)) for p in (*arguments, *options))
        yield table("argument", "meaning", "default", rows=rows)


VALUES = {"Path": "FILE", "int": "N", "float": "NUMBER"}


def _shown(argument: Any) -> str:
    name = (argument.metavar or argument.name or "").upper()
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs == -1 else "")


def _spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_shown(parameter)}`"
    names = ", ".join((*parameter.opts, *parameter.secondary_opts))
    annotation = str(parameter.type_descriptor.annotation)
    kind = next((word for name, word in VALUES.items() if name in annotation), "TEXT")
    value = "" if parameter.is_flag else f" {parameter.metavar or kind}"
    return f"`{names}{value}`" + (", repeatable" if parameter.multiple else "")


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    shown = isinstance(value, (str, int, float, Path)) and not isinstance(value, bool) and str(value)
    return f"`{value}`" if shown else ""


def presets(page: str) -> str:
    """The solvers, presets, cost modes and optimizers that there are, from their tables."""
    from autopar.cost.optimizers import OPTIMIZERS
    from autopar.planning.costs import COSTS
    from autopar.planning.presets import PRESETS
    from autopar.solve.solvers import SOLVERS

    def names(found: Mapping[str, Any]) -> str:
        return ", ".join(f"`{name}`" for name in found)

    return "\n".join(
        [
            f"- solvers: {names(SOLVERS)}",
            f"- presets: {names(PRESETS)}",
            f"- cost modes: {names(COSTS)}",
            f"- optimizers: {names(OPTIMIZERS)}",
        ]
    )


def plan(page: str) -> str:
    """The fields of a plan's file."""
    from autopar.planning.plan import Plan

    return "\n\n".join(_described(Plan, {}))


def cluster(page: str) -> str:
    """The fields of a cluster."""
    from autopar.cluster.machine import Cluster

    return "\n\n".join(_described(Cluster, {}))


def _described(kind: type, seen: dict[type, None]) -> list[str]:
    """A dataclass as a table of its fields, and then those that its fields hold."""
    from autopar.files.typed import allowed

    seen[kind] = None
    hints, noted = typing.get_type_hints(kind), typing.get_type_hints(kind, include_extras=True)
    said = {name: text for base in reversed(kind.__mro__) for name, text in _attribute_docs(base).items()}
    noted = {name: allowed(hint) for name, hint in noted.items() if hint != hints[name]}
    rows = ((f"`{f.name}`", f"`{_type(hints[f.name])}`", said.get(f.name, noted.get(f.name, ""))) for f in fields(kind))
    parts = [f"### {kind.__name__}"]
    bases = [base for base in kind.__mro__ if is_dataclass(base)]
    parts += [text for base in bases if (text := _prose(base))] + [table("field", "type", "meaning", rows=rows)]
    for held in dict.fromkeys(inner for f in fields(kind) for inner in _inside(hints[f.name])):
        if held not in seen:
            parts += _described(held, seen)
    return parts


def _prose(kind: type) -> str:
    doc = kind.__dict__.get("__doc__") or ""
    return "" if doc.startswith(f"{kind.__name__}(") else inspect.cleandoc(doc)


def _attribute_docs(kind: type) -> dict[str, str]:
    """The strings below the fields of a class."""
    if not is_dataclass(kind):
        return {}
    (body,) = (n.body for n in ast.parse(inspect.getsource(kind)).body if isinstance(n, ast.ClassDef))
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _inside(hint: Any) -> Iterator[type]:
    if is_dataclass(hint):
        yield hint  # type: ignore[misc]
    for argument in typing.get_args(hint):
        yield from _inside(argument)


def _type(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)


def examples(page: str) -> str:
    """Every example as it stands, with its first paragraph."""
    parts = []
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in (".py", ".sh"):
            language = {".py": "python", ".sh": "bash"}[path.suffix]
            code = path.read_text().replace("\n", "\n    ").rstrip()
            parts += [f"## {path.name}", f'??? example "The code"\n    ```{language} title="examples/{path.name}"']
            parts[-1] += f"\n    {code}\n    ```"
            if language == "python" and (doc := ast.get_docstring(ast.parse(path.read_text()))):
                parts.insert(-1, _indented_code(doc))
    return "\n\n".join(parts)


def notebooks(page: str) -> str:
    """Every notebook of examples/ with what its cells printed and showed, below its title."""
    parts = []
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                parts.append(re.sub(r"(?m)^#", "##", source))
                continue
            parts.append(f"```python\n{source}\n```")
            for output in cell["outputs"]:
                data = output.get("data", {"text/plain": output.get("text", "")})
                html, text = ("".join(data.get(kind, "")).strip() for kind in ("text/html", "text/plain"))
                parts.append(html or f"```\n{text}\n```")
    return "\n\n".join(parts)


def _indented_code(doc: str) -> str:
    """A docstring whose indented lines are commands."""
    return re.sub(r"(?m)^((?: {4}.*\n?)+)", lambda f: f"```bash\n{inspect.cleandoc(f[1])}\n```\n", doc)


def modules(page: str) -> str:
    """Every module of the package with the first sentence of its docstring, folder by folder."""
    listed = runpy.run_path(str(ROOT / "docs/modules.py"))
    parts, folder = [], None
    for module in listed["modules"](*listed["PACKAGE"]):
        if module.parent != folder:
            folder = module.parent
            parts += ["", f"## {folder}/", "", row("module", "what it is for"), "|---|---|"]
        parts.append(row(f"`{module.name}`", listed["purpose"](ROOT / module)))
    return "\n".join(parts)


def sources(page: str) -> str:
    """The code that a page names as `FILE`: `NAME`, once each, folded."""
    named = dict.fromkeys(re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", page))
    parts = []
    for file, names in named:
        for name in re.findall(r"`([\w.]+)`", names):
            code = source(ROOT / file, name).replace("\n", "\n    ")
            parts.append(f'??? quote "{file}: {name}"\n    ```python\n    {code}\n    ```')
    return "\n\n".join(dict.fromkeys(parts))


def source(file: Path, name: str) -> str:
    """The text of a function, a class, a method or a constant of a module."""
    text = file.read_text()
    nodes: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((node for node in nodes if part in _names(node)), None)
        if found is None:
            raise ValueError(f"{file} has no {name}")
        nodes = getattr(found, "body", [])
    assert found is not None
    decorators = getattr(found, "decorator_list", [])
    first = min([found.lineno, *(d.lineno for d in decorators)])
    return inspect.cleandoc("\n" + "\n".join(text.splitlines()[first - 1 : found.end_lineno]))


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


GENERATED: Mapping[str, Callable[[str], str]] = {
    made.__name__: made for made in (commands, presets, plan, cluster, examples, notebooks, modules, sources)
}
"""What a page may ask for, by name. Each gets the text of the page."""
