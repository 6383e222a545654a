"""What people add from outside: the pages that say how, run as written; names that are refused; installed packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.extensions import EXTRAS, TABLES, scoped
from autopar.ir.program import Program
from autopar.passes.flow import LOWERINGS, STEPS, Flow
from autopar.passes.lower.lowering import Target, always, where_quicker
from autopar.passes.lower.regions import Refused
from autopar.planning.costs import COSTS
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.solve.dp import solve_dp
from autopar.solve.problem import Problem, Solution
from autopar.solve.schedules import gpipe
from autopar.solve.solvers import SOLVERS

PAGE = Path(__file__).parents[2] / "docs/extending.md"
SECTIONS = {
    section.partition("\n")[0]: "\n".join(
        re.findall(r"^```python\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
    )
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
}
"""Title -> all blocks of Python in the section, one after the other."""
SECTIONS = {title: code for title, code in SECTIONS.items() if "register_" in code}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def test_there_is_a_section_for_each_call() -> None:
    calls = {name for name in autopar.__all__ if name.startswith("register_")}
    assert {call for code in SECTIONS.values() for call in re.findall(r"autopar\.(register_\w+)", code)} == calls
    kinds = {table.kind for table in TABLES}
    assert len(SECTIONS) == len(calls) == len(kinds - (EXTRAS.keys() - {"rule"})) == 7


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_runs_as_written(title: str) -> None:
    with scoped():
        exec(compile(SECTIONS[title], f"extending.md, {title}", "exec"), {"__name__": "extending"})


# --------------------------------------------------------------------------------------------- what is refused

ROWS: dict[str, tuple[Callable[..., None], Any, str]] = {
    "preset": (autopar.register_preset, autopar.Preset(name="mine"), "ddp"),
    "solver": (autopar.register_solver, autopar.Solver(name="mine", run=solve_dp), "dp"),
    "cost": (autopar.register_cost, autopar.CostMode(name="mine", meaning="as serial"), "serial"),
    "cluster": (autopar.register_cluster, replace(autopar.CLUSTERS["local"], name="mine"), "dgx-h100"),
    "lowering": (
        autopar.register_lowering,
        autopar.Lowering(name="mine", applies="", writes="", costs="", adopt=where_quicker(lambda program: program)),
        "bucket",
    ),
    "schedule": (autopar.register_schedule, autopar.Scheduler(name="mine", run=gpipe), "1f1b"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_names_that_are_taken_and_rows_that_are_none_are_refused(kind: str) -> None:
    register, row, own = ROWS[kind]
    with scoped():
        register(row)
        register(row)
        changed = replace(row, **{"solver": {"exact": True}, "preset": {"policies": ("regather",)}}.get(kind, {}))
        changed = changed if changed != row else replace(row, **_other(kind))
        with pytest.raises(ValueError, match=f"{kind} 'mine' is registered already, as .*: .* or pass replace=True"):
            register(changed)
        register(changed, replace=True)
        with pytest.raises(ValueError, match=f"there is a {kind} '{own}' already, which cannot be replaced"):
            register(replace(row, name=own), replace=True)
        for name in ("", "two words", None):
            with pytest.raises(ValueError, match=f"{kind} has the name {name!r}"):
                register(replace(row, name=name))
        with pytest.raises(ValueError, match=f"{kind} 5 is a int: give a {type(row).__name__}"):
            register(5)


def _other(kind: str) -> dict[str, Any]:
    others = {"cost": {"meaning": "other"}, "cluster": {"source": "other"}, "lowering": {"costs": "other"}}
    return {**others, "schedule": {"chunks": 2}}[kind]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: autopar.register_solver(autopar.Solver(name="a", run=5)), "solver 'a': run is 5: give a function"),  # type: ignore[arg-type]
        (lambda: autopar.Solver(name="a", run=solve_dp, takes=("time",)), "takes time: give some of bounded, meter"),
        (lambda: autopar.register_preset(autopar.Preset(name="a", data=5)), "data is 5: give a function"),  # type: ignore[arg-type]
        (lambda: autopar.Preset(name="a", policies=("drop",)), "policies are"),
        (lambda: autopar.register_cost(autopar.CostMode(name="a", meaning="", space=5)), "space is 5: give a function"),  # type: ignore[arg-type]
        (
            lambda: autopar.CostMode(name="a", meaning="", space=lambda space: space, by_timeline=True),
            "more than one of space, by_timeline and plan",
        ),
        (
            lambda: autopar.register_lowering(
                autopar.Lowering(name="a", applies="", writes="", costs="", adopt=5)  # type: ignore[arg-type]
            ),
            "adopt is 5",
        ),
        (
            lambda: autopar.Lowering(
                name="a", applies="", writes="", costs="", adopt=where_quicker(lambda p: p), taken="never",  # type: ignore[arg-type]
            ),
            "taken 'never': write one of first, where quicker, last",
        ),
        (lambda: autopar.register_cluster(replace(autopar.CLUSTERS["local"], name="a.toml")), "path of a file"),
        (lambda: autopar.register_cluster("nowhere.toml"), "cannot be read"),
    ],
)  # fmt: skip
def test_rows_of_the_wrong_form_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_solvers_and_presets_share_no_name() -> None:
    with scoped():
        autopar.register_solver(autopar.Solver(name="mine", run=solve_dp))
        with pytest.raises(ValueError, match="there is a solver 'mine' already"):
            autopar.register_preset(autopar.Preset(name="mine"))
        with pytest.raises(ValueError, match="there is a preset 'fsdp' already"):
            autopar.register_solver(autopar.Solver(name="fsdp", run=solve_dp))


def test_a_solver_that_returns_no_solution_is_named() -> None:
    with scoped():
        autopar.register_solver(autopar.Solver(name="lazy", run=lambda problem, bytes_limit: None))  # type: ignore[arg-type, return-value]
        with pytest.raises(ValueError, match="solver 'lazy' returned a NoneType"):
            autopar.plan(model(), {"a": 2}, (torch.zeros(8, 16),), loss_fn=torch.mean, solver="lazy")


# ------------------------------------------------------------------------------------------- where names are taken


def test_messages_list_what_was_registered_and_scopes_end() -> None:
    given: dict[str, Any] = {"args": (torch.zeros(8, 16),), "loss_fn": torch.mean}
    with scoped():
        for register, row, _ in ROWS.values():
            register(replace(row, name=f"my_{type(row).__name__}"))
        for wrong in ("solver", "cost", "cluster"):
            with pytest.raises(ValueError, match=f"unknown {wrong} '?none'?.* my_"):
                autopar.plan(model(), {"a": 2}, **given, **{wrong: "none"})
    for table in (SOLVERS, PRESETS, COSTS, LOWERINGS, autopar.CLUSTERS):
        assert not [name for name in table if name.startswith("my_")]


def test_what_a_planner_found_out_before_a_registration_is_not_used_after_it() -> None:
    planner = Planner(model(), {"a": 2}, (torch.zeros(8, 16),), loss_fn=torch.mean)
    ddp = planner.plan(solver="ddp")
    before = planner.program(ddp)

    def marked(program: Program) -> Program:
        first, *rest = program.forward
        return replace(program, forward=(replace(first, module="marked"), *rest))

    with scoped():
        autopar.register_lowering(
            autopar.Lowering(
                name="mark", applies="programs", writes="a mark", costs="nothing", taken="last",
                adopt=always(marked),
            )
        )  # fmt: skip
        assert planner.program(ddp).forward[0].module == "marked"
        autopar.register_preset(autopar.Preset(name="mine"))
        whole = planner.plan(solver="mine")
        autopar.register_preset(autopar.Preset(name="mine", data=PRESETS["fsdp"].data), replace=True)
        assert planner.plan(solver="mine").parameters != whole.parameters
    assert planner.program(ddp) == before


def test_steps_and_lowerings_are_timed_and_logged_in_their_order(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="autopar"):
        planner = Planner(model(), {"a": 2}, (torch.zeros(8, 16),), loss_fn=torch.mean)
        planner.program(planner.plan(solver="megatron"))
    names = [
        step.name for step in STEPS if step.name not in ("problem", "solve", "checkpoints")
    ]  # made many times, or where asked for
    said = [message.partition(":")[0] for message in caplog.messages]
    assert list(dict.fromkeys(name for name in said if name in (*names, "bucket"))) == [*names, "bucket"]
    assert all(re.search(r", \d+\.\d\d s$", message) for message in caplog.messages if message.split(":")[0] in names)
    assert set(names) <= set(planner.seconds)
    flow = Flow()
    flow.timed("search", sorted, [2, 1])
    assert list(flow) == ["search"]


def test_what_a_lowering_refuses_is_left_as_it_is() -> None:
    def refuse(program: Any) -> Any:
        raise Refused("nothing can be done")

    planner = Planner(model(), {"a": 2}, (torch.zeros(8, 16),), loss_fn=torch.mean)
    program = planner.program(planner.plan(solver="ddp"))
    assert where_quicker(refuse)(program, Target(cluster=planner.cluster)) is None


# ------------------------------------------------------------------------------------------- installed packages

PACKAGE = """
import autopar  # which must not call `register` while this is imported

def register():
    autopar.register_preset(autopar.Preset(name="zero2", data=autopar.planning.presets.sharded_data))
    autopar.register_cluster(autopar.Cluster(**{**vars_of(autopar.CLUSTERS["local"]), "name": "laptop"}))

def vars_of(cluster):
    return {name: getattr(cluster, name) for name in cluster.__dataclass_fields__}
"""


def installed(folder: Path, text: str) -> dict[str, str]:
    """The environment in which a package with an entry point is installed."""
    (folder / "mylib.py").write_text(text)
    facts = folder / "mylib-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mylib\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[autopar.extensions]\nmylib = mylib:register\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), *sys.path))}


def test_the_command_line_finds_what_an_installed_package_registers(tmp_path: Path) -> None:
    arguments = "plan tower:build --batch 4 --mesh a=2 --solver zero2 --cluster laptop"
    command = [sys.executable, "-c", "import mylib, autopar.cli; autopar.cli.main()", *arguments.split()]
    made = subprocess.run(command, env=installed(tmp_path, PACKAGE), capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "on a=2 of laptop" in made.stdout and "zero2, as asked" in made.stdout


def test_a_package_that_fails_is_named(tmp_path: Path) -> None:
    text = "def register():\n    raise RuntimeError('no GPU')\n"
    command = [sys.executable, "-c", "import autopar; autopar.CLUSTERS['local']"]
    made = subprocess.run(command, env=installed(tmp_path, text), capture_output=True, text=True)
    wanted = (
        "ValueError: the extension mylib = mylib:register of mylib fails: RuntimeError('no GPU'): correct or uninstall"
    )
    assert wanted in made.stderr


# ---- what a package's code gives is checked, and errors name it


def plan_of(**options: Any) -> autopar.Plan:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        x = torch.zeros(512, 256)
    return autopar.plan(model, {"a": 2}, (x,), loss_fn=torch.mean, cluster="dgx-h100", **options)


def solver(run: Callable[..., Any]) -> Callable[[], object]:
    """A plan by what a function makes of dynamic programming's solution."""

    def planned() -> object:
        def solved(problem: Problem, *, bytes_limit: float | None = None) -> Any:
            return run(solve_dp(problem, bytes_limit=bytes_limit))

        autopar.register_solver(autopar.Solver(name="theirs", run=solved))
        return plan_of(solver="theirs", cost="serial")

    return planned


def other_option(found: Solution) -> Solution:
    return replace(found, choice=replace(found.choice, options=(99, *found.choice.options[1:])))


def fewer_options(found: Solution) -> Solution:
    return replace(found, choice=replace(found.choice, options=found.choice.options[1:]))


def lowering(write: Callable[[Program], Program], taken: Any = "last") -> Callable[[], object]:
    def planned() -> object:
        adopt = always(write)
        autopar.register_lowering(
            autopar.Lowering(name="theirs", applies="-", writes="-", costs="-", adopt=adopt, taken=taken)
        )
        return plan_of(solver="ddp")

    return planned


def without_first(program: Program) -> Program:
    return replace(program, forward=program.forward[1:])


def renamed(program: Program) -> Program:
    first, *rest = program.forward
    return replace(program, forward=(first, replace(first, outputs=("theirs",)), *rest))


def unsaved(program: Program) -> Program:
    return replace(program, saved=program.saved[1:])


def cost(space: Callable[[Any], Any]) -> Callable[[], object]:
    def planned() -> object:
        autopar.register_cost(autopar.CostMode(name="theirs", meaning="theirs", space=space))
        return plan_of(cost="theirs")

    return planned


@pytest.mark.parametrize(
    ("planned", "message"),
    [
        (solver(lambda found: 5), "solver 'theirs' returned a int: it is to return a Solution"),
        (solver(lambda found: replace(found, lower_bound=99.0)), "solver 'theirs' gives a lower bound of 99 s, and"),
        (solver(other_option), r"solver 'theirs' chose option 99 of \w+, which has \d"),
        (solver(fewer_options), r"solver 'theirs' chose \d+ options, and .*: the problem has \d+ variables"),
        (lowering(without_first), r"lowering 'theirs' wrote a program in which \S+ reads \w+, which nothing makes"),
        (lowering(renamed), r"lowering 'theirs' made theirs by \S+, and the program's metas do not have it"),
        (lowering(unsaved), r"lowering 'theirs' wrote a program in which \S+ reads \w+, .* or save it for backward"),
        (lowering(lambda program: None), "<lambda>, which a lowering writes with, returned a NoneType: give a Program"),  # type: ignore[arg-type, return-value]
        (cost(lambda space: None), "cost 'theirs': its space function returned a NoneType: give a Space"),
    ],
)
def test_what_a_package_gives_is_checked(planned: Callable[[], object], message: str) -> None:
    with scoped(), pytest.raises(ValueError, match=message):
        planned()


def test_an_error_in_a_lowering_names_it() -> None:
    def fails(program: Program) -> Program:
        raise KeyError("theirs to mend")

    with scoped(), pytest.raises(KeyError) as raised:
        lowering(fails)()
    assert raised.value.__notes__ == ["in lowering 'theirs', which is registered"]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: autopar.Solver(name="theirs", run=lambda problem: None),
            r"solver 'theirs' runs a function that is not run\(problem, \*, bytes_limit=None\)",
        ),
        (
            lambda: autopar.Solver(name="theirs", run=lambda problem, *, bytes_limit: None, takes=("meter",)),
            r"is not run\(problem, \*, bytes_limit=None, meter=None\)",
        ),
        (
            lambda: autopar.Lowering(name="theirs", applies="", writes="", costs="", adopt=lambda program: None),
            r"lowering 'theirs' has an adopt that does not take a program and a target: give where_quicker\(write\)",
        ),
        (
            lambda: autopar.register_rule("aten::trace", "m m -> 1", linear=[0]),  # type: ignore[list-item]
            r"linear of aten.trace.default is \[0\]: give lists",
        ),
    ],
)
def test_functions_of_the_wrong_form_are_refused(made: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def test_a_plan_says_which_solver_and_cost_of_a_package_found_it() -> None:
    with scoped():
        autopar.register_solver(autopar.Solver(name="theirs", run=solve_dp))
        autopar.register_cost(autopar.CostMode(name="dear", meaning="dear", space=lambda space: space))
        assert "found by the search, with solver theirs, by cost dear" in " ".join(
            str(plan_of(solver="theirs", cost="dear")).split()
        )


def test_what_a_block_registers_ends_with_it_wherever_tables_are_first_read() -> None:
    """A table that is made within it, too; and a process that imports autopar alone has `autopar.extensions`."""
    code = (
        "import autopar\n"
        "with autopar.extensions.scoped():\n"
        "    autopar.register_solver(autopar.Solver(name='theirs', run=lambda problem, *, bytes_limit=None: None))\n"
        "from autopar.solve.solvers import SOLVERS\n"
        "from autopar.planning.costs import COSTS\n"
        "import autopar.api\n"
        "print('theirs' in SOLVERS, 'hybrid' in COSTS, 'profiled' in COSTS.own)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]


def test_a_report_says_what_a_rule_is_priced_by() -> None:
    a, b = torch.randn(12, 12), torch.randn(12, 12)
    assert str(autopar.check_rule("aten::mm", a, b)).endswith(f"priced by {2 * 12**3} flops")
    assert str(autopar.check_rule("aten::relu", a)).endswith("by the bytes that it reads and writes, and no flops")
