"""How far predictions are to be trusted: `sudo python benchmarks/trust.py [MODEL ...] [--shape 2x2] [--json
trust.json]`.

In a lab (`autopar lab`, needs root), for each model: plans of the solver and of the presets on three meshes, at least
20 that differ, each with its step as predicted by four models of cost and as measured, all in the same ranks and in
turn:

- *analytical*: the links' nominal rates, and the library's file of a machine like this;
- *calibrated*: the cluster file that `autopar calibrate` wrote for the lab's shape;
- *hybrid*: operators measured on one process alone, links from the calibrated file;
- *profiled*: segment programs, operators and collectives measured by the ranks (`docs/profiling.md`).

Printed are Spearman's rank correlation and the root of the mean squared error over the mean measured step, and both
between the odd and the even rounds of what was measured, which is how well this ground repeats itself; the plan
that is best by each model, beside the best of all measured; what `parallelize(cost="profiled")` measured to choose one
on the first mesh, by phase, in steps of the model; and that plan beside the same written by hand with DDP, FSDP2 and
`parallelize_module`.

What the ranks measured stays in a folder (`--measured`), so that another way to compose costs, or to model them, is
judged by the same measurements within a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.profile.programs import Measurement

sys.path[0] = str(Path(__file__).parent)

from lab import (  # noqa: E402
    CELLS,
    VOCABULARY,
    Cell,
    by_hand,
    calibrated,
    in_turns,
    model_of,
    spearman,
    steps_of,
    training_step,
)

from autopar.extras import lab  # noqa: E402

TIMEOUT_SECONDS = 1700.0
SIZES = {"hidden": 256, "layers": 4, "batch": 8, "sequence": 128}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "GPT-2": {"family": "GPT-2"},
    "Llama": {},
    "BERT": {"family": "BERT"},
    "Mixtral": {"experts": 4},
}
SHAPES = {"2x2": CELLS["small model"], "flat": CELLS["flat"]}
KINDS = ("analytical", "calibrated", "hybrid", "profiled")
MESHES = ({"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"tp": 4})
RUNS, WARM_UPS = 3, 1
SITTINGS = 3
"""In which each plan's segment program is measured, all plans in turn, between rounds of whole steps: so what disturbs
a machine for seconds is not in one plan alone, and what slows it for minutes is in what is predicted as it is in what
is measured."""


def cell_of(model: str, shape: str) -> Cell:
    return replace(SHAPES[shape], **{**SIZES, **MODELS[model]})


def nominal(cell: Cell) -> Any:
    """What is known of a lab without measuring: its rates, and the library's idea of a machine."""
    from autopar.cluster.library import named_cluster
    from autopar.cluster.machine import Level

    local = named_cluster("local")
    levels = tuple(
        Level(
            name=f"level {number}",
            size=links.size,
            bytes_per_second=links.bytes_per_second,
            group_bytes_per_second=links.bytes_per_second,
            latency_seconds=local.levels[-1].latency_seconds,
        )
        for number, links in enumerate(cell.links().levels)
    )
    return replace(local, name="nominal", levels=levels)


def batch_of(cell: Cell) -> dict[str, Any]:
    import torch

    ids = torch.randint(0, VOCABULARY, (cell.batch, cell.sequence), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def plans_of(planner: Any) -> dict[str, Any]:
    """Plans that differ, of the solver under several prices and of every preset."""
    from autopar.planning.presets import PRESETS

    plans: dict[str, Any] = {}
    for name, options in (
        ("free", {}),
        ("volume", {"cost": "volume"}),
        *((preset, {"solver": preset}) for preset in PRESETS),
    ):
        try:
            plans[name] = planner.plan(**options)
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return plans


def predictions(cell: Cell, file: str, measured: Mapping[str, Any], folder: Path) -> dict[str, dict[str, float]]:
    """Seconds of each plan by each model of cost, in this one process: from what the ranks kept in `folder`, and for
    hybrid costs from what this process measures alone (once: it is kept there, too)."""
    import torch

    from autopar.planning.plan import Plan
    from autopar.planning.planner import Planner
    from autopar.planning.repriced import repriced
    from autopar.profile.database import Profiles
    from autopar.profile.programs import Costs, Order, structure
    from autopar.runtime.profiler import bench_alone

    torch.set_num_threads(1)
    first = Planner(model_of(cell), MESHES[0], (), batch_of(cell), cluster=file, optimizer="sgd")
    bench, rough = bench_alone("cpu", first.example_values, "sgd"), nominal(cell)

    def costs(file: str, machine: str, *, with_links: bool) -> Costs:
        profiles = Profiles(str(folder / file))
        return Costs(profiles=profiles, machine=machine, cluster=first.cluster, with_links=with_links)

    here = costs("alone.sqlite", bench.machine, with_links=False)
    there = costs("ranks.sqlite", measured["machine"], with_links=True)
    plans = {key: Plan.from_json(data) for key, data in measured["plans"].items()}
    planners = {tuple(mesh.items()): (first.on(mesh, rough), first.on(mesh, file)) for mesh in MESHES}
    for plan in plans.values():
        on = planners[tuple(plan.mesh.items())][1]
        segment = on.writer.segment_program(on.assignment(plan), plan.bucket_bytes)
        if here.row(structure(segment), segment.mesh) is None:
            measurement = bench.measured(Order(program=segment, runs=RUNS, warm_ups=WARM_UPS))
            here.keep(
                segment, measurement, "sgd", on.moved_bytes(segment), dict(model="", mesh="", label="", fingerprint="")
            )
    predicted = {}
    for mesh, (nominally, on) in planners.items():
        models = dict(zip(KINDS, (nominally, on, on.profiled(here), on.profiled(there)), strict=True))
        for key, plan in plans.items():
            if tuple(plan.mesh.items()) == mesh:
                predicted[key] = {kind: repriced(model, plan).seconds for kind, model in models.items()}
    return predicted


def measure(cell_fields: dict[str, Any], file: str, rounds: int, path: str) -> dict[str, Any]:
    """On one rank: steps of every plan, and what was predicted."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.planning.planner import Planner
    from autopar.planning.request import Request
    from autopar.profile.database import Profiles
    from autopar.profile.programs import Costs, Order, structure
    from autopar.runtime.agreement import on_first_rank
    from autopar.runtime.module import ParallelModule
    from autopar.runtime.profiled import profiled
    from autopar.runtime.profiler import bench_of

    cell = Cell(**cell_fields)
    torch.set_num_threads(1)
    batch = batch_of(cell)
    meshes = [(mesh, init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))) for mesh in MESHES]
    first = Planner(model_of(cell), MESHES[0], (), batch, cluster=file, optimizer="sgd", profiles=path)

    # what a user's one call does, on an empty database
    began = time.perf_counter()
    chosen, search = profiled(first, meshes[0][1], Request())
    took = time.perf_counter() - began

    plans: dict[str, tuple[Any, Any, Any]] = {"chosen on dp 2 x tp 2": (first, meshes[0][1], chosen)}
    seen: set[str] = {structure(first.writer.segment_program(first.assignment(chosen), chosen.bucket_bytes))}
    for mesh, device_mesh in meshes:
        planner = first.on(mesh, file)
        planned = on_first_rank(lambda planner=planner: plans_of(planner), device_mesh)
        for name, plan in planned.items():
            segment = planner.writer.segment_program(planner.assignment(plan), plan.bucket_bytes)
            if structure(segment) not in seen:
                seen.add(structure(segment))
                key = f"{name} on {' x '.join(f'{axis} {size}' for axis, size in mesh.items())}"
                plans[key] = planner, device_mesh, plan
    machine = bench_of(meshes[0][1], first.example_values, "sgd").machine
    programs = {
        key: planner.writer.segment_program(planner.assignment(plan), plan.bucket_bytes)
        for key, (planner, _, plan) in plans.items()
    }
    sittings: dict[str, list[Measurement]] = {key: [] for key in plans}

    def sit(number: int) -> None:
        """Measures each plan's segment program once more, and keeps what all sittings found by now."""
        for key in random.Random(number).sample(sorted(plans), len(plans)):
            planner, device_mesh, plan = plans[key]
            costs = Costs(profiles=Profiles(path), machine=machine, cluster=planner.cluster, with_links=True)
            cases = () if number else on_first_rank(partial(costs.unmeasured, programs[key]), device_mesh)
            order = Order(program=programs[key], cases=cases, runs=RUNS, warm_ups=WARM_UPS)
            sittings[key].append(bench_of(device_mesh, first.example_values, "sgd").measured(order))
            if dist.get_rank() == 0:
                measurement = _together(sittings[key])
                about = dict(model=plan.model, mesh=str(plan.mesh), label=plan.solver, fingerprint="")
                costs.keep(programs[key], measurement, "sgd", planner.moved_bytes(programs[key]), about)

    variants: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    for key, (planner, device_mesh, plan) in plans.items():
        variants[key] = ParallelModule(model_of(cell), first.captured, planner.program(plan), plan, device_mesh), batch
    hand = by_hand(cell, batch)
    variants |= hand

    def between(number: int) -> None:
        if number % math.ceil(rounds / SITTINGS) == 0:
            sit(number)

    seconds = in_turns({name: training_step(*given) for name, given in variants.items()}, rounds, between)
    return {
        "seconds": seconds,
        "by_hand": list(hand),
        "plans": {key: plan.to_json() for key, (_, _, plan) in plans.items()} if dist.get_rank() == 0 else {},
        "machine": machine,
        "search": {**asdict(search), "seconds": took, "text": str(search)},
    }


def _together(sittings: Sequence[Measurement]) -> Measurement:
    """All runs of a program as if they had been one after the other; collectives were measured in the first sitting."""

    def means(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
        return tuple(map(statistics.fmean, zip(*rows, strict=True)))

    return replace(
        sittings[0],
        steps=tuple(seconds for sitting in sittings for seconds in sitting.steps),
        durations=means(sitting.durations for sitting in sittings),
        spreads=means(sitting.spreads for sitting in sittings),
    )


def error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The root of the mean squared error, over the mean measured step."""
    mean = statistics.fmean(measured)
    return math.sqrt(statistics.fmean((p - m) ** 2 for p, m in zip(predicted, measured, strict=True))) / mean


def report(
    name: str, cell: Cell, ranks: list[dict[str, Any]], predicted: dict[str, dict[str, float]]
) -> dict[str, Any]:
    hand = ranks[0]["by_hand"]
    steps = steps_of(ranks)
    medians = {plan: statistics.median(times) for plan, times in steps.items()}
    ours = sorted(predicted, key=lambda plan: medians[plan])
    print(f"\n{name}: hidden {cell.hidden}, {cell.layers} layers, {cell.batch} x {cell.sequence}, {cell.links()}")
    print(f"{'plan':<34} {'measured ms':>12} " + " ".join(f"{kind:>11}" for kind in KINDS))
    for plan in ours:
        print(f"{plan:<34} {medians[plan] * 1e3:12.0f} " + " ".join(f"{predicted[plan][k] * 1e3:11.0f}" for k in KINDS))
    measured = [medians[plan] for plan in ours]
    rows: dict[str, Any] = {}
    best = ours[0]
    print(f"{len(ours)} plans; best measured: {best}, {medians[best] * 1e3:.0f} ms")
    for kind in KINDS:
        estimated = [predicted[plan][kind] for plan in ours]
        scale = sum(p * m for p, m in zip(estimated, measured, strict=True)) / sum(p * p for p in estimated)
        choice = min(ours, key=lambda plan: predicted[plan][kind])
        rows[kind] = {
            "spearman": spearman(estimated, measured),
            "error": error(estimated, measured),
            "scaled": error([scale * p for p in estimated], measured),
            "choice": choice,
            "over_best": medians[choice] / medians[best],
        }
        r = rows[kind]
        print(
            f"  {kind:<11} Spearman {r['spearman']:.3f}, RMSE / mean {r['error']:.3f} ({r['scaled']:.3f} with the "
            f"best scale), "
            f"chooses {choice}: {r['over_best']:.3f} of the best"
        )
    odd, even = ([statistics.median(steps[plan][first::2]) for plan in ours] for first in (0, 1))
    repeated = {"spearman": spearman(odd, even), "error": error(odd, even)}
    print(
        f"  odd rounds of the same steps against even ones: Spearman {repeated['spearman']:.3f}, RMSE / mean "
        f"{repeated['error']:.3f}"
    )
    chosen = medians["chosen on dp 2 x tp 2"]
    hand_best = min(hand, key=lambda plan: medians[plan])
    ratio = statistics.median(a / b for a, b in zip(steps["chosen on dp 2 x tp 2"], steps[hand_best], strict=True))
    print(
        "by hand: " + ", ".join(f"{plan} {medians[plan] * 1e3:.0f}" for plan in sorted(hand, key=lambda p: medians[p]))
    )
    print(f"chosen / best by hand ({hand_best}): {ratio:.2f}")
    same = min(medians[plan] for plan in ours if plan.endswith("on dp 2 x tp 2"))
    print(f"chosen / best of its mesh: {chosen / same:.3f}, of all {chosen / medians[best]:.3f}")
    search = ranks[0]["search"]
    print(f"choosing: {search['text']}")
    print(
        f"  {search['seconds']:.0f} s in all, {search['seconds'] / chosen:.0f} steps; measuring alone "
        f"{search['phases']['measure'] / chosen:.0f} steps",
        flush=True,
    )
    return {
        "cell": asdict(cell),
        "steps": steps,
        "predicted": predicted,
        "models": rows,
        "repeated": repeated,
        "ratio": ratio,
        "chosen_over_best_of_mesh": chosen / same,
        "search": search,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all without one")
    parser.add_argument("--shape", choices=SHAPES, default="2x2")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--calibrate", action="store_true", help="measure the shape anew first")
    parser.add_argument("--json", type=Path, default=Path("trust.json"))
    parser.add_argument(
        "--measured",
        type=Path,
        default=Path("build/trust"),
        help="folder of what the ranks measured, by model and shape; what is there is not measured again",
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.models) - set(MODELS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(MODELS)}")
    results = {}
    for number, name in enumerate(options.models or MODELS):
        cell = cell_of(name, options.shape)
        file = calibrated(cell, options.calibrate and number == 0)
        folder = options.measured / f"{name} {options.shape}"
        kept = folder / "ranks.json"
        if not kept.exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "ranks.sqlite").unlink(missing_ok=True)  # of a run that did not end
            arguments = (asdict(cell), file, options.rounds, str(folder / "ranks.sqlite"))
            ranks = lab.run(cell.links(), measure, *arguments, timeout_seconds=TIMEOUT_SECONDS)
            kept.write_text(json.dumps(ranks))
        ranks = json.loads(kept.read_text())
        results[f"{name} {options.shape}"] = report(name, cell, ranks, predictions(cell, file, ranks[0], folder))
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
