"""What block level loses against operator level: `python benchmarks/levels.py [--tiny] [--json FILE] [--docs]`.

Models of two layers on meta, on one mesh axis and, where operator level can be solved, on two. For each
level: variables, options and the largest table of the dynamic program (repeated layers counted once), seconds to
group and to solve, the optimum, and what it loses in percent: without a limit, under one half way between the
fastest plan and the smallest, and at four prices of memory. Without a limit the dynamic program solves (message
passing where that is too wide), under a limit the integer program; gaps say how far that is proved. With `--tiny`
instead the models of the tests. With `--docs` the table of `docs/levels.md`. What a file has of other models and
meshes stays in it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import marked
import torch
from grouping.grouped import Grouped
from grouping.level import at_level, operator_level
from torch import nn

from autopar.planning.planner import Planner
from autopar.solve.ilp import solve_ilp
from autopar.solve.pricing import Library, priced_at
from autopar.solve.problem import Problem, Score, Solution, evaluate
from autopar.solve.solvers import TooWide, solve

ROOT = Path(__file__).parent.parent
LEVELS = ("operator", "block", "cfp")
CLUSTERS = ("dgx-h100", "a100-pcie", "local")
ONE_AXIS: tuple[dict[str, int], ...] = ({"tp": 8}, {"tp": 4})
TWO_AXES = {"dp": 2, "tp": 4}
ON_TWO_AXES = ("gpt2", "mlp")
"""Models whose operator level is solved on two axes. With `--axes 2` Llama's takes 14 GB, and of T5 and Mixtral one
tensor's table is too large."""
TINY_MESH = {"tp": 4}
LAYERS = 2
PRICES = (0.02, 0.2, 2.0, 20.0)
"""Of memory, times the seconds of the fastest plan over its bytes."""
GAP = 1e-9
"""To which the integer program proves its optimum under a limit."""
SMALLEST = 1e3
"""The price at which a plan counts as the smallest."""

Arguments = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Row = dict[str, Any]


def tokens(batch: int, length: int) -> dict[str, Any]:
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def llama() -> Arguments:
    """The widths of Llama-3-8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16), (), tokens(16, 8192)


def gpt2() -> Arguments:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout: dict[str, Any] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, use_cache=False, **dropout)), (), tokens(16, 1024)


def mixtral() -> Arguments:
    """The widths of Mixtral 8x7B."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(num_hidden_layers=LAYERS, use_cache=False, output_router_logits=True)
    return MixtralForCausalLM(config).to(torch.bfloat16), (), tokens(16, 4096)


def t5() -> Arguments:
    """The widths of T5-large."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=LAYERS,
        num_heads=16,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), (), tokens(16, 512)


def mlp() -> Arguments:
    """Three linear layers, as wide as the batch is long."""
    model = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return model, (torch.zeros(4096, 4096),), {}


MODELS: Mapping[str, Callable[[], Arguments]] = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "t5": t5, "mlp": mlp}


def planner(model: str) -> Planner:
    with torch.device("meta"):
        module, args, kwargs = MODELS[model]()
    loss_fn = (lambda output: output.square().mean()) if model == "mlp" else None
    return Planner(module, {"a": 1}, args, kwargs, loss_fn=loss_fn)


def tiny() -> Mapping[str, Callable[[], Planner]]:
    """The models of the tests."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    import models
    import zoo

    def planned(case: Any) -> Planner:
        return Planner(case.model, {"a": 1}, case.args, case.kwargs, loss_fn=case.loss_fn)

    return {
        **{name: lambda name=name: planned(models.case(name)) for name in models.CASES},  # type: ignore[misc]
        **{f"zoo {name}": lambda name=name: planned(zoo.case(name)) for name in zoo.ZOO},  # type: ignore[misc]
    }


def largest_table(problem: Problem) -> int | None:
    """Entries of the largest table of the dynamic program, None where it is too wide."""
    try:
        return Library().largest(problem)
    except TooWide:
        return None


def optimum(problem: Problem, price: float) -> Solution:
    """With memory paid for in seconds; as an integer program where message passing finds nothing."""
    weighed = priced_at(problem, price)
    try:
        return solve(weighed, "dp")
    except TooWide:
        return solve(weighed, "ilp")


def variables(problem: Problem) -> int:
    return len(problem.variables) + sum(variables(repeat.body) for repeat in problem.repeats)


def measure(model: str, planner: Planner, cluster: str, levels: Sequence[str], with_limits: bool) -> list[Row]:
    """One row a level, without a limit and with one."""
    original = operator_level(planner.space)
    fastest = optimum(original, 0.0).score
    rows = _levels(planner, levels, original, None, [0.0], fastest)
    if with_limits:
        original = operator_level(planner.space, 1.0)
        unit = fastest.seconds / fastest.bytes
        smallest = evaluate(original, optimum(original, SMALLEST * unit).choice)
        limit = (fastest.bytes + smallest.bytes) / 2
        rows += _levels(planner, levels, original, limit, [unit * price for price in PRICES], fastest)
    return [{"model": model, "mesh": dict(planner.mesh), "cluster": cluster, **row} for row in rows]


def _levels(
    planner: Planner,
    levels: Sequence[str],
    original: Problem,
    limit: float | None,
    prices: Sequence[float],
    fastest: Score,
) -> list[Row]:
    rows: list[Row] = []
    for level in levels:
        started = time.perf_counter()
        grouped = at_level(planner.space, original, level, limited=limit is not None)
        group_seconds = time.perf_counter() - started
        problem = original if grouped is None else grouped.problem

        def objective(solution: Solution, price: float = 0.0, grouped: Grouped | None = grouped) -> float:
            score = evaluate(original, solution.choice if grouped is None else grouped.expand(solution.choice))
            return score.objective + price * score.bytes

        at_prices = [optimum(problem, price) for price in prices]
        began = time.perf_counter()
        solution = at_prices[0] if limit is None else solve_ilp(problem, bytes_limit=limit, limited_gap=GAP)
        took = solution.seconds_to_solve or time.perf_counter() - began
        best = objective(solution)
        priced_optima = [objective(s, price) for s, price in zip(at_prices, prices, strict=True)]
        first = rows[0] if rows else None
        rows.append(
            {
                "level": level,
                "bytes_limit": limit,
                "fastest_bytes": fastest.bytes,
                "variables": variables(problem),
                "options": problem.option_count,
                "largest_table": largest_table(problem),
                "solver": solution.solver or "ilp",
                "gap": max(solution.gap, *(s.gap for s in at_prices)),
                "group_seconds": group_seconds,
                "solve_seconds": took,
                "optimum_seconds": best,
                "loss_percent": _lost(best, best if first is None else first["optimum_seconds"]),
                "priced_optima": priced_optima,
                "priced_loss_percent": max(
                    map(_lost, priced_optima, priced_optima if first is None else first["priced_optima"])
                ),
                "divided": [] if grouped is None else list(grouped.divided),
            }
        )
    return rows


def _lost(seconds: float, best: float) -> float:
    """In percent; below the rounding of sums nothing."""
    loss = seconds / best - 1
    return 0.0 if abs(loss) < 1e-9 else 100 * loss


def mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def table_text(entries: int | None) -> str:
    return "too wide" if entries is None else f"{entries:,}"


HEADER = (
    f"{'model':22} {'mesh':9} {'cluster':9} {'limit':5} {'level':9}{'variables':>10}{'options':>8}{'table':>11} {'':4}"
    f"{'group s':>8}{'solve s':>8}{'optimum ms':>15}{'loss %':>8}{'priced %':>9}{'gap':>9}"
)


def print_row(row: Row) -> None:
    limit = "" if row["bytes_limit"] is None else "half"
    print(
        f"{row['model']:22} {mesh_text(row['mesh']):9} {row['cluster']:9} {limit:5} {row['level']:9}"
        f"{row['variables']:10,}{row['options']:8,}{table_text(row['largest_table']):>11} {row['solver']:>4}"
        f"{row['group_seconds']:8.2f}{row['solve_seconds']:8.2f}{row['optimum_seconds'] * 1e3:15,.4f}"
        f"{row['loss_percent']:8.4f}{row['priced_loss_percent']:9.4f}{row['gap']:9.1e}",
        flush=True,
    )


def table(rows: Iterable[Row]) -> str:
    """One line a model, mesh and level: the largest of all clusters."""
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["model"], mesh_text(row["mesh"]), row["level"]), []).append(row)
    lines = [
        "| model | mesh | level | variables | options | largest table | group s | solve s | loss % | at a price % "
        "| under a limit % |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, mesh, level), same in cells.items():
        free = [row for row in same if row["bytes_limit"] is None]
        limited = [row for row in same if row["bytes_limit"] is not None]
        tables = [row["largest_table"] for row in free]
        widest = table_text(None if None in tables else max(tables))
        seconds = [max(row[key] for row in free) for key in ("group_seconds", "solve_seconds")]
        losses = [max(row["loss_percent"] for row in free)]
        losses += [max((row[key] for row in limited), default=None) for key in ("priced_loss_percent", "loss_percent")]
        lost = ["–" if loss is None else "0" if loss == 0 else f"{loss:.4f}" for loss in losses]
        lines.append(
            f"| {model} | {mesh} | {level} | {max(row['variables'] for row in free)} "
            f"| {max(row['options'] for row in free):,} | {widest} | {seconds[0]:.1f} | {seconds[1]:.1f} "
            f"| {lost[0]} | {lost[1]} | {lost[2]} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the models of the tests, on one axis of 4")
    parser.add_argument("--quick", action="store_true", help="one mesh and one cluster")
    parser.add_argument("--models", nargs="+", help="these models only")
    parser.add_argument("--levels", nargs="+", default=LEVELS, choices=LEVELS, help="these levels only, operator first")
    parser.add_argument("--axes", type=int, choices=(1, 2), help="meshes of that many axes only")
    parser.add_argument("--json", type=Path, default=Path("levels.json"))
    parser.add_argument("--docs", action="store_true", help="write the table of docs/levels.md")
    options = parser.parse_args(arguments)
    every = tiny() if options.tiny else {name: lambda name=name: planner(name) for name in MODELS}  # type: ignore[misc]
    print(HEADER)
    earlier: list[Row] = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    rows: list[Row] = []
    for model in options.models or every:
        base = every[model]()
        meshes = [TINY_MESH] if options.tiny else list(ONE_AXIS)
        if model in ON_TWO_AXES or options.axes == 2:
            meshes.append(TWO_AXES)
        if options.axes is not None:
            meshes = [mesh for mesh in meshes if len(mesh) == options.axes]
        for mesh in meshes[: 1 if options.quick else None]:
            for cluster in CLUSTERS[: 1 if options.quick else None]:
                with_limits = len(mesh) == 1 or model == "mlp"
                for row in measure(model, base.on(mesh, cluster), cluster, options.levels, with_limits):
                    print_row(row)
                    rows.append(row)
    measured = {(row["model"], mesh_text(row["mesh"])) for row in rows}
    rows += [row for row in earlier if (row["model"], mesh_text(row["mesh"])) not in measured]
    rows.sort(key=lambda row: (row["model"], mesh_text(row["mesh"])))
    data = {"torch": torch.__version__, "python": platform.python_version(), "rows": rows}
    options.json.write_text(json.dumps(data, indent=1))
    if options.docs:
        marked.write("levels.md", "levels", table(rows))


if __name__ == "__main__":
    main()
