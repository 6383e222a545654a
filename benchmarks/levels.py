"""What block level loses against operator level: `python benchmarks/levels.py [--quick] [--json FILE]`.

Models of three layers on meta, on one mesh axis. For each level: variables, options and the largest
table of the dynamic program, with repeated layers counted once, seconds to group and to solve, the optimum,
and what it loses in percent. A problem too wide for the dynamic program is solved by the integer
program. Presolve is the operator level without the options that others can always replace.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.api import Planner
from autopar.passes.blocks import blocks
from autopar.passes.group import Grouped, block_groups, group
from autopar.passes.problem import ProblemBuilder
from autopar.problem import Problem, Solution, evaluate
from autopar.search import axis_choices, joint, unique_sites
from autopar.solve import TooWide, solve
from autopar.solve.pricing import Library

LEVELS = ("operator", "presolve", "block", "cfp")
MESHES: tuple[dict[str, int], ...] = ({"tp": 8}, {"tp": 4})
CLUSTERS = ("dgx-h100", "local")
LAYERS = 3

Arguments = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def tokens(batch: int, length: int) -> dict[str, Any]:
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def llama() -> Arguments:
    """The shape of Llama-3-8B."""
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
    """GPT-2 with heads and vocabulary that divide among 8 ranks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout: dict[str, Any] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = GPT2Config(vocab_size=50304, n_layer=LAYERS, n_head=16, use_cache=False, **dropout)
    return GPT2LMHeadModel(config), (), tokens(16, 1024)


def bert() -> Arguments:
    """BERT large, with a vocabulary that divides among 8 ranks."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=30528,
        hidden_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        intermediate_size=4096,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config), (), tokens(16, 512)


def mlp() -> Arguments:
    """Three linear layers, as wide as the batch is long."""
    model = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return model, (torch.zeros(4096, 4096),), {}


MODELS: Mapping[str, Callable[[], Arguments]] = {"llama": llama, "gpt2": gpt2, "bert": bert, "mlp": mlp}


def planner(model: str, mesh: Mapping[str, int], cluster: str) -> Planner:
    with torch.device("meta"):
        module, args, kwargs = MODELS[model]()
    loss_fn = (lambda output: output.square().mean()) if model == "mlp" else None
    return Planner(module, mesh, args, kwargs, loss_fn=loss_fn, cluster=cluster)


def operator_level(made: Planner) -> Problem:
    """The whole space of a mesh of one axis."""
    space = made.space
    axes = range(len(space.mesh))
    allowed = {
        name: joint(space, site, [axis_choices(space, site, axis) for axis in axes], None)
        for name, site in unique_sites(space).items()
    }
    return ProblemBuilder(space).build(allowed)[0]


def at_level(made: Planner, problem: Problem, level: str) -> Grouped:
    if level == "operator" or level == "presolve":
        return group(problem, ())
    found = blocks(made.space.graph, max(made.space.mesh), merge=False)
    groups = [
        block_groups(made.space, region, found, "cfp" if level == "cfp" else "block") for region in made.space.regions()
    ]
    return group(problem, groups[0], groups[1:])


def solved(problem: Problem) -> tuple[Solution, int | None]:
    """The optimum, and the entries of the largest table of the dynamic program, None where it is too wide."""
    try:
        largest = Library().largest(problem)
    except TooWide:
        return solve(problem, "ilp"), None
    return solve(problem, "dp"), largest


def variables(problem: Problem) -> int:
    return len(problem.variables) + sum(variables(repeat.body) for repeat in problem.repeats)


def measure(model: str, mesh: Mapping[str, int], cluster: str) -> list[dict[str, Any]]:
    """One row a level."""
    made = planner(model, mesh, cluster)
    original = operator_level(made)
    rows: list[dict[str, Any]] = []
    for level in LEVELS:
        started = time.perf_counter()
        grouped = None if level == "operator" else at_level(made, original, level)
        group_seconds = time.perf_counter() - started
        problem = original if grouped is None else grouped.problem
        solution, largest = solved(problem)
        choice = solution.choice if grouped is None else grouped.expand(solution.choice)
        optimum = evaluate(original, choice).objective
        best = rows[0]["optimum_seconds"] if rows else optimum
        rows.append(
            {
                "model": model,
                "mesh": dict(mesh),
                "cluster": cluster,
                "level": level,
                "variables": variables(problem),
                "options": problem.option_count,
                "largest_table": largest,
                "solver": solution.solver,
                "group_seconds": group_seconds,
                "solve_seconds": solution.seconds_to_solve,
                "optimum_seconds": optimum,
                "loss_percent": 100 * (optimum / best - 1),
                "divided": [] if grouped is None else list(grouped.divided),
            }
        )
    return rows


def print_row(row: Mapping[str, Any]) -> None:
    mesh = ",".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    table = "too wide" if row["largest_table"] is None else f"{row['largest_table']:,}"
    print(
        f"{row['model']:6} {mesh:6} {row['cluster']:9} {row['level']:9}{row['variables']:10,}{row['options']:9,}"
        f"{table:>12} {row['solver']:>4}{row['group_seconds']:9.2f}{row['solve_seconds']:9.2f}"
        f"{row['optimum_seconds'] * 1e3:16,.3f}{round(row['loss_percent'], 4) + 0.0:9.4f}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one mesh and one cluster")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--json", type=Path, default=Path("levels.json"))
    options = parser.parse_args(arguments)
    meshes, clusters = (MESHES[:1], CLUSTERS[:1]) if options.quick else (MESHES, CLUSTERS)
    print(
        f"{'model':6} {'mesh':6} {'cluster':9} {'level':9}{'variables':>10}{'options':>9}{'table':>12} {'':4}"
        f"{'group s':>9}{'solve s':>9}{'optimum ms':>16}{'loss %':>9}"
    )
    rows = []
    for model in options.models:
        for mesh in meshes:
            for cluster in clusters:
                for row in measure(model, mesh, cluster):
                    print_row(row)
                    rows.append(row)
    options.json.write_text(json.dumps({"torch": torch.__version__, "python": platform.python_version(), "rows": rows}))


if __name__ == "__main__":
    main()
