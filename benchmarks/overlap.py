"""What each way of hiding communication gains, on and off: `python benchmarks/overlap.py [FAMILY ...] [--hidden N]`.

In the lab (two nodes of two ranks at 400 Mbit/s and 6 Gbit/s; needs root), GPT-2 and Llama under several plans, each
as programs of equal value: *plain* waits for each collective where it starts, *buckets* joins the collectives of
parameters and gradients and starts them early (`lower/bucket.py`), *overlap* starts the others early, too
(`lower/overlap.py`), *prefetch* starts gathers further ahead (`lower/prefetch.py`), *slices* and *chunks* run
products and stretches in parts (`lower/slice.py`, `lower/chunk.py`), each alone on top of overlap, and *all* is what
`autopar.parallelize` runs. A lowering that changes nothing of a plan is not measured again ("="). All live in the same
ranks and take turns (`lab.in_turns`); a step is forward and backward and takes as long as its slowest rank. Printed are
medians, and what the timeline of each program says; a gain is the part of the plain step that is saved, the median over
rounds.

With them run, of each plan, its operators alone (every collective answered at once by what the rank has itself) and its
collectives alone (all started, then all waited for): no order of the program makes the step shorter than the longer of
the two. And the model with DDP and with FSDP2, as their documentation writes them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent)

from lab import SLOW, VOCABULARY, Cell, by_hand, calibrated, in_turns, model_of, steps_of  # noqa: E402

from autopar.extras import lab  # noqa: E402

TIMEOUT_SECONDS = 900.0
CLOSE = 0.1
"""A gain's prediction is to be within so much of the one measured."""

PLANS: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("ddp", {"dp": 2, "tp": 2}),
    ("fsdp", {"dp": 2, "tp": 2}),
    ("megatron", {"dp": 2, "tp": 2}),
    ("megatron", {"tp": 4}),
    ("megatron_sp", {"tp": 2, "dp": 2}),
    ("dp", {"dp": 2, "tp": 2}),
)
HAND = {"ddp": "DDP", "fsdp": "FSDP2"}
"""Presets, and what they are compared with."""


def programs(planner: Any, plan: Any) -> dict[str, Any]:
    """A plan's program under each lowering."""
    from autopar.cost.streams import alone_seconds
    from autopar.passes.codegen.program import codegen
    from autopar.passes.flow import LOWERINGS
    from autopar.passes.lower.bucket import bucket
    from autopar.passes.lower.lowering import Target
    from autopar.passes.lower.overlap import overlap

    sizes, cluster = planner.space.redistributor.bucket_bytes, planner.cluster
    target = Target(cluster=cluster, axis_bytes=sizes, limit_bytes=plan.bucket_bytes)
    plain = codegen(planner.space, planner.assignment(plan))
    joined = bucket(plain, sizes, limit_bytes=plan.bucket_bytes)
    early = overlap(joined, alone_seconds(joined, cluster))
    return {
        "plain": plain,
        "buckets": joined,
        "overlap": early,
        "prefetch": LOWERINGS["bucket"].on(plain, target),
        "slices": LOWERINGS["slice"].on(early, target),
        "chunks": LOWERINGS["chunk"].on(early, target),
        "all": planner.program(plan),
    }


def operators_alone(program: Any) -> Any:
    """The program with each collective answered at once: by copies of what the rank has, or a part of it."""
    from autopar.ir.graph import Ref

    def answered(i: Any) -> Any:
        if i.op == "collective.wait":
            return replace(i, op="aten.view.default", args=(i.args[0], program.metas[i.inputs[0]].shape))
        if not i.collective:
            return i
        given, wanted = (program.metas[name].shape for name in (i.inputs[0], i.outputs[0]))
        if given == wanted:
            return replace(i, op="aten.view.default", args=(Ref(i.inputs[0]), wanted))
        if i.collective == "all_gather":
            return replace(
                i, op="aten.repeat.default", args=(Ref(i.inputs[0]), (wanted[0] // given[0], *[1] * (len(given) - 1)))
            )
        assert i.collective == "reduce_scatter", i
        return replace(i, op="aten.slice.Tensor", args=(Ref(i.inputs[0]), 0, 0, wanted[0]))

    forward, backward = (tuple(map(answered, half)) for half in (program.forward, program.backward))
    return replace(program, forward=forward, backward=backward)


def collectives_alone(program: Any, mesh: Any) -> Callable[[], None]:
    """A call that starts the program's collectives in order, and then waits for all."""
    import torch

    from autopar.runtime import collectives

    calls: dict[str, Callable[[Any, Any], Any]] = {
        "all_reduce": lambda x, group: collectives.all_reduce_in_place(x, "sum", group),
        "reduce_scatter": lambda x, group: collectives.reduce_scatter(x, "sum", group),
        "all_gather": collectives.all_gather,
        "all_to_all": collectives.all_to_all,
        "shift": lambda x, group: collectives.shift(x, 1, group),
    }
    started = [i for i in (*program.forward, *program.backward) if i.collective]
    metas = [program.metas[i.inputs[0]] for i in started]
    operands = [torch.zeros(meta.shape, dtype=meta.dtype) for meta in metas]
    groups = [mesh.get_group(program.axes[i.args[-1]]) for i in started]

    def run() -> None:
        pending = [calls[i.collective](*rest) for i, *rest in zip(started, operands, groups, strict=True)]
        for each in pending:
            collectives.wait(each)

    return run


def measure(cell_fields: dict[str, Any], file: str, rounds: int) -> dict[str, Any]:
    """On one rank: seconds of every step of every program, and what was predicted."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.cost.streams import timeline
    from autopar.cost.timeline import COMPUTE
    from autopar.planning.planner import Planner
    from autopar.runtime.module import ParallelModule

    torch.set_num_threads(1)
    cell = Cell(**cell_fields)
    ids = torch.randint(0, VOCABULARY, (cell.batch, cell.sequence), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    first = Planner(model_of(cell), dict(PLANS[0][1]), (), batch, cluster=file, optimizer="sgd")
    losses: dict[str, float] = {}
    runs: dict[str, Callable[[], None]] = {}
    predicted: dict[str, dict[str, float]] = {}
    same: dict[str, str] = {}

    def step(key: str, module: Any, given: Mapping[str, Any]) -> Callable[[], None]:
        def run() -> None:
            loss = module(**given).loss
            loss.backward()
            losses[key] = loss.item()
            module.zero_grad()

        return run

    for solver, mesh in PLANS:
        planner = first.on(mesh, file)
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        plan = planner.plan(solver=solver)
        name = (
            f"{'free' if solver == 'dp' else solver} on {' x '.join(f'{axis} {size}' for axis, size in mesh.items())}"
        )
        first_of: dict[str, str] = {}
        for lowering, program in programs(planner, plan).items():
            key = f"{name}|{lowering}"
            same[key] = first_of.setdefault(program.digest, key)
            if same[key] == key:
                module = ParallelModule(model_of(cell), planner.captured, program, plan, device_mesh)
                runs[key] = step(key, module, batch)
            simulated = timeline(program, planner.cluster)
            busy = {stream: simulated.busy_seconds(stream) for stream in (COMPUTE, *simulated.axes)}
            predicted[key] = {"seconds": simulated.seconds, "bound": max(busy.values())}
        local = ParallelModule(model_of(cell), planner.captured, operators_alone(program), plan, device_mesh)
        runs[f"{name}|operators"] = step(f"{name}|operators", local, batch)
        runs[f"{name}|collectives"] = collectives_alone(program, device_mesh)
    for name, (module, given) in by_hand(cell, batch).items():
        if name in HAND.values():
            runs[name] = step(name, module, given)
    seconds = in_turns(runs, rounds)
    return {"seconds": seconds, "predicted": predicted, "losses": losses, "same": same}


def report(cell: Cell, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    predicted, same, losses = (ranks[0][key] for key in ("predicted", "same", "losses"))
    steps = steps_of(ranks)
    medians = {key: statistics.median(times) for key, times in steps.items()}
    print(
        f"\n{cell.family}, {cell.batch} x {cell.sequence}, hidden {cell.hidden}, {cell.layers} layers, {cell.links()}"
    )
    print(f"{'plan':<24} {'program':<9} {'measured ms':>12} {'predicted ms':>13} {'gain':>6} {'predicted':>10}")
    rows, bounds = [], []
    for key, simulated in predicted.items():
        plan, lowering = key.split("|")
        base = f"{plan}|plain"
        gain = statistics.median(1 - a / b for a, b in zip(steps[same[key]], steps[base], strict=True))
        foretold = 1 - simulated["seconds"] / predicted[base]["seconds"]
        median = medians[same[key]]
        rows.append(
            {"plan": plan, "program": lowering, "measured": median, **simulated, "gain": gain, "foretold": foretold}
        )
        figures = f"{median * 1e3:12.0f} {simulated['seconds'] * 1e3:13.0f} {gain:6.0%} {foretold:10.0%}"
        if same[key] != key:
            figures = f"{'= ' + same[key].split('|')[1]:>12}"
        print(f"{plan:<24} {lowering:<9} {figures}", flush=True)
        if lowering == "all":
            parts = {part: medians[f"{plan}|{part}"] for part in ("operators", "collectives")}
            bounds.append({"plan": plan, "step": median, **parts, "over": median / max(parts.values())})
            bounds[-1]["simulated"] = simulated["seconds"] / simulated["bound"]
    print(f"{'plan':<24} {'step ms':>9} {'operators':>10} {'collectives':>12} {'step / longer':>14} {'predicted':>10}")
    for b in bounds:
        print(
            f"{b['plan']:<24} {b['step'] * 1e3:9.0f} {b['operators'] * 1e3:10.0f} {b['collectives'] * 1e3:12.0f} "
            f"{b['over']:14.2f} {b['simulated']:10.2f}"
        )
    ratios = {}
    for preset, hand in HAND.items():
        for key in (key for key in predicted if key.startswith(f"{preset} ") and key.endswith("|all")):
            pairs = zip(steps[same[key]], steps[hand], strict=True)
            ratios[key] = statistics.median(a / b for a, b in pairs)
            print(f"{key.split('|')[0]} / {hand} ({medians[hand] * 1e3:.0f} ms): {ratios[key]:.2f}")
    measured = [row for row in rows if same[f"{row['plan']}|{row['program']}"] == f"{row['plan']}|{row['program']}"]
    off = [abs(row["gain"] - row["foretold"]) for row in measured if row["program"] != "plain"]
    right = sum(o <= CLOSE for o in off)
    print(f"gains predicted within {CLOSE * 100:.0f} points: {right} of {len(off)}, the worst is off by {max(off):.0%}")
    values = [loss for key, loss in losses.items() if key in predicted]
    print(f"losses of all programs differ by {max(values) - min(values):.1e} at most")
    return {"cell": asdict(cell), "rows": rows, "bounds": bounds, "by_hand": ratios, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("families", nargs="*", default=["GPT-2", "Llama"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", type=Path, default=Path("overlap.json"))
    options = parser.parse_args()
    results = {}
    for family in options.families:
        cell = replace(SLOW, family=family, hidden=options.hidden)
        arguments = (asdict(cell), calibrated(cell, False), options.rounds)
        ranks = lab.run(cell.links(), measure, *arguments, timeout_seconds=TIMEOUT_SECONDS)
        results[family] = report(cell, ranks)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
