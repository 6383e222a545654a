"""Plans measured on links slowed down as configured: `python benchmarks/lab.py [CELL ...] [--json lab.json]`.

A cell is a model, a batch and a lab (`autopar lab`: real gloo ranks in network namespaces; needs root). In each, DDP,
FSDP2 and `parallelize_module` as their documentation writes them, alone and combined on two axes, the 1F1B and
interleaved schedules of `torch.distributed.pipelining`, autopar's presets on several meshes, its plans with stages, and
the plan that autopar finds from the lab's calibrated cluster file: of those with stages and without, the shortest as
predicted. All live in the same ranks and take turns (`in_turns`); a step is forward, backward and SGD, and takes as
long as its slowest rank. Printed are medians, what the cost model predicted, the plan that is found over the best
hand-written one, the rank correlation (Spearman) of predicted and measured seconds over autopar's plans, and each
collective of the free plan without stages, measured alone before each round, beside its prediction.

Cluster files lie in `benchmarks/lab/`; a shape without one, or any with `--calibrate`, is calibrated first.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.cluster.library import named_cluster
from autopar.extras import lab

FILES = Path(__file__).parent / "lab"
TIMEOUT_SECONDS = 1500.0
CLOSE = 0.15
"""A collective's prediction is to be within this part of what is measured."""
VISIT = 3
"""Steps in a row whenever it is a plan's turn. The first is not counted: what others left in caches and in the
allocator is not met in training."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    shape: str
    nodes: int
    ranks: int
    inter: str
    intra: str
    hidden: int
    layers: int
    batch: int
    sequence: int
    experts: int = 0
    """Of each layer, two for each token; 0: no mixture."""
    family: str = "Llama"
    """Or GPT-2, or BERT."""

    def links(self) -> lab.Shape:
        return (
            lab.flat(self.ranks, self.intra)
            if self.nodes == 1
            else lab.nodes(self.nodes, self.ranks, self.inter, self.intra)
        )


SLOW = Cell(shape="2x2", nodes=2, ranks=2, inter="400mbit", intra="6gbit", hidden=256, layers=4, batch=16, sequence=128)
CELLS: Mapping[str, Cell] = {
    "small model": SLOW,
    "wide model": replace(SLOW, hidden=512, batch=4, sequence=64),
    "wider, slower": replace(SLOW, shape="2x2-slow", inter="200mbit", hidden=1024, layers=2, batch=4, sequence=32),
    "8 ranks": replace(SLOW, shape="2x4", ranks=4, hidden=512, layers=2, batch=8, sequence=32),
    "flat": replace(SLOW, shape="flat", nodes=1, ranks=4, intra="400mbit", hidden=256, layers=4, batch=16, sequence=64),
    "pairs": replace(SLOW, shape="pairs", inter="1gbit", hidden=512, layers=4, batch=8, sequence=64),
    "wide batch": replace(SLOW, hidden=256, layers=2, batch=64, sequence=64),
    "experts": replace(SLOW, hidden=256, layers=2, batch=8, sequence=64, experts=8),
    "deep": replace(SLOW, shape="2x2-stages", hidden=512, layers=8, batch=16, sequence=32),
    "shallow": replace(SLOW, shape="2x2-stages", hidden=256, layers=2, batch=64, sequence=64),
    "deep, slower": replace(SLOW, shape="2x2-slow", inter="200mbit", hidden=512, layers=8, batch=16, sequence=64),
    "two, deep": replace(SLOW, shape="2x1", ranks=1, hidden=512, layers=8, batch=16, sequence=32),
    "two, deep, slower": replace(SLOW, shape="2x1-slow", inter="200mbit", ranks=1, hidden=512, layers=8, sequence=64),
    "two, shallow": replace(SLOW, shape="2x1", ranks=1, hidden=128, layers=2, batch=64, sequence=128),
}
"""The first four are those that the project began with. Stages should win in the deep ones, and not in the shallow. On
a machine with two hardware threads two ranks have one each. Where four share them, a rank that waits makes another one
quicker, and what a pipeline idles costs nothing."""

VOCABULARY, HEADS, KEY_VALUE_HEADS = 512, 8, 4


def model_of(cell: Cell) -> Any:
    """The same weights on every rank."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    torch.manual_seed(0)
    if cell.family == "GPT-2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=cell.hidden, n_layer=cell.layers, n_head=HEADS, use_cache=False, **off
            )
        )
    if cell.family == "BERT":
        return BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=cell.hidden,
                intermediate_size=4 * cell.hidden,
                num_hidden_layers=cell.layers,
                num_attention_heads=HEADS,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": cell.hidden,
        "intermediate_size": cell.hidden * 11 // 4,
        "num_hidden_layers": cell.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "max_position_embeddings": 2048,
        "use_cache": False,
    }
    if cell.experts:
        sizes |= {"num_local_experts": cell.experts, "num_experts_per_tok": 2, "intermediate_size": cell.hidden}
        return MixtralForCausalLM(MixtralConfig(**sizes))
    return LlamaForCausalLM(LlamaConfig(**sizes))


STYLES = {
    "Llama": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.o_proj", "mlp.down_proj"),
    ),
    "BERT": (
        ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
        ("attention.output.dense", "output.dense"),
    ),
}
"""Linear layers that `parallelize_module` splits by column and by row. (GPT-2's are no `nn.Linear`: it refuses
them.)"""

OUTER, INNER = "outer", "inner"


def layers_of(model: Any) -> Any:
    """A model's layers."""
    for path in ("model.layers", "transformer.h", "bert.encoder.layer"):
        if path.split(".")[0] in dict(model.named_children()):
            return model.get_submodule(path)
    raise AssertionError(type(model))


def by_hand(cell: Cell, batch: Mapping[str, Any]) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Name -> (module, what this rank calls it with). `A x B`: A across nodes, B within."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    rank, world = dist.get_rank(), dist.get_world_size()
    inner = cell.ranks if cell.nodes > 1 else 2
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    grid = init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=(OUTER, INNER))

    def part(parts: int, number: int) -> Mapping[str, Any]:
        return {key: value.chunk(parts)[number].clone() for key, value in batch.items()}

    def tensor_parallel(mesh: Any) -> Any:
        model = model_of(cell)
        column, row = STYLES[cell.family]
        styles: dict[str, Any] = dict.fromkeys(column, ColwiseParallel) | dict.fromkeys(row, RowwiseParallel)
        for layer in layers_of(model):
            parallelize_module(layer, mesh, {name: style() for name, style in styles.items()})
        return model

    def sharded(model: Any, mesh: Any) -> Any:
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    variants: dict[str, tuple[Any, Mapping[str, Any]]] = {
        "DDP": (DistributedDataParallel(model_of(cell)), part(world, rank)),
        "FSDP2": (sharded(model_of(cell), flat), part(world, rank)),
    }
    if cell.experts or cell.family not in STYLES:
        return variants
    outer_part, inner_part = part(world // inner, rank // inner), part(inner, rank % inner)
    if cell.family == "Llama":
        ranks, across, within = flat.get_group(), grid.get_group(OUTER), grid.get_group(INNER)
        if cell.layers >= world:  # a stage without a layer has nothing to train
            variants["1F1B"] = _Pipeline(cell, ranks, None, 1, batch), {}
        if inner > 1:
            variants["1F1B x DDP"] = _Pipeline(cell, across, within, 1, inner_part), {}
        if cell.layers >= 2 * world:
            variants["interleaved"] = _Pipeline(cell, ranks, None, 2, batch), {}
    if KEY_VALUE_HEADS % world == 0 or cell.family == "BERT":
        variants["TP"] = (tensor_parallel(flat), batch)
    if inner == 1:
        return variants
    # replicated parameters of data parallel ranks, as `replicate` of a two-dimensional mesh: FSDP2 without sharding
    variants["FSDP x TP"] = (sharded(tensor_parallel(grid[INNER]), grid[OUTER]), outer_part)
    variants["TP x FSDP"] = (sharded(tensor_parallel(grid[OUTER]), grid[INNER]), inner_part)
    for name, across, mine in (("DP x TP", (OUTER, INNER), outer_part), ("TP x DP", (INNER, OUTER), inner_part)):
        data, tensor = across
        variants[name] = (_Averaged(tensor_parallel(grid[tensor]), grid.get_group(data)), mine)
    return variants


class _Averaged:
    """Data parallel around a model of DTensors: gradients in one bucket, averaged after backward."""

    def __init__(self, model: Any, group: Any) -> None:
        self.model, self.group = model, group

    def parameters(self) -> Any:
        return self.model.parameters()

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def reduce(self) -> None:
        import torch.distributed as dist

        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in self.model.parameters()]
        bucket = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(bucket, group=self.group)
        bucket /= dist.get_world_size(self.group)
        for gradient, piece in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))


class Piece(nn.Module):
    """Some layers of a Llama, the first with the embedding, the last with the head."""

    def __init__(self, model: Any, number: int, count: int) -> None:
        super().__init__()
        layers = model.model.layers
        begin, end = (len(layers) * i // count for i in (number, number + 1))
        self.layers, self.rotary = layers[begin:end], model.model.rotary_emb
        self.embedding = model.model.embed_tokens if number == 0 else None
        self.norm, self.head = (model.model.norm, model.lm_head) if number == count - 1 else (None, None)

    def forward(self, x: Any, places: Any = None) -> Any:
        """`places` are where tokens stand in their sequence, [1, sequence]; they begin at 0 if not given."""
        if self.embedding is not None:
            x = self.embedding(x)
        positions = torch.arange(x.shape[1])[None] if places is None else places
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary, position_ids=positions)
        return x if self.head is None else self.head(self.norm(x))


class _Pipeline:
    """A schedule of `torch.distributed.pipelining` on the ranks of a group, with so many stages on each; replicas of a
    stage are in DDP."""

    def __init__(self, cell: Cell, group: Any, data: Any, stages: int, batch: Mapping[str, Any]) -> None:
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
        from torch.nn.parallel import DistributedDataParallel

        self.ids, self.labels = batch["input_ids"], batch["labels"]
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        count, micro_batches = size * stages, min(2 * size, len(self.ids))
        self.first, self.last = rank == 0, rank == size - 1
        pieces: list[Any] = [Piece(model_of(cell), rank + size * i, count) for i in range(stages)]
        if data is not None:
            pieces = [DistributedDataParallel(piece, process_group=data) for piece in pieces]
        parts = [
            PipelineStage(piece, rank + size * i, count, torch.device("cpu"), group=group)
            for i, piece in enumerate(pieces)
        ]
        self.modules = pieces
        self.schedule: Any = (
            Schedule1F1B(parts[0], micro_batches, loss_fn=_next_tokens)
            if stages == 1
            else ScheduleInterleaved1F1B(parts, micro_batches, loss_fn=_next_tokens)
        )

    def parameters(self) -> Any:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def step(self) -> None:
        """Forward and backward of all micro-batches."""
        inputs, target = (self.ids,) if self.first else (), {"target": self.labels} if self.last else {}
        self.schedule.step(*inputs, **target)


def _next_tokens(logits: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def ours(
    cell: Cell, batch: Mapping[str, Any], file: str
) -> tuple[dict[str, tuple[Any, Mapping[str, Any], dict[str, float]]], dict[str, str]]:
    """Name -> (module, what to call it with, predicted seconds: with nothing overlapping, and by its timeline). And
    name -> an earlier one, where both have one program: measured as two, noise would have an order."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    world = dist.get_world_size()
    inner = cell.ranks if cell.nodes > 1 else 2
    grid, swapped = {"dp": world // inner, "tp": inner}, {"tp": world // inner, "dp": inner}
    staged = [{"pp": world}, {"pp": world // inner, "dp": inner}, {"pp": world // inner, "tp": inner}]
    if inner == 1:
        grid, swapped, staged = {"dp": world}, {"tp": world}, staged[:1]
    meshes = {
        str(mesh): init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        for mesh in (grid, swapped, {"tp": world}, *staged)
    }
    modules, same = {}, {}
    programs: dict[tuple[str, str], str] = {}
    for name, mesh, solver in (
        ("free", grid, "dp"),
        ("ddp", grid, "ddp"),
        ("fsdp", grid, "fsdp"),
        *((name, grid, name) for name in ("megatron", "megatron_sp", "atp") if inner > 1),
        ("megatron, swapped", swapped, "megatron"),
        ("megatron, one axis", {"tp": world}, "megatron"),
        *(("stages " + " x ".join(f"{axis} {size}" for axis, size in mesh.items()), mesh, "dp") for mesh in staged),
    ):
        if "pp" in mesh and cell.experts:
            continue  # balancing needs the whole batch
        module = autopar.parallelize(
            model_of(cell), meshes[str(mesh)], kwargs=batch, solver=solver, cluster=file, optimizer="sgd"
        )
        plan = module.plan
        twin = programs.setdefault((str(mesh), module.program.digest), name)
        if twin == name:
            modules[name] = (module, batch, {"apart": plan.account.seconds, "overlapped": plan.seconds})
        else:
            same[name] = twin
    return modules, same


def in_turns(
    steps: Mapping[str, Callable[[], object]], rounds: int, between: Callable[[int], None] = lambda number: None
) -> dict[str, list[float]]:
    """On one rank: seconds of a step of each, by round. In each round they take turns in another order, `VISIT` steps
    each; before it `between` is called with its number."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        between(number)
        for name in random.Random(number).sample(sorted(steps), len(steps)):
            dist.barrier()
            steps[name]()
            began = time.perf_counter()
            for _ in range(VISIT - 1):
                steps[name]()
            seconds[name].append((time.perf_counter() - began) / (VISIT - 1))
    return seconds


def training_step(module: Any, batch: Mapping[str, Any]) -> Callable[[], None]:
    """Forward, backward and SGD."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        if isinstance(module, _Pipeline):
            module.step()
        else:
            module(**batch).loss.backward()
        if isinstance(module, _Averaged):
            module.reduce()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(cell_fields: dict[str, Any], file: str, rounds: int) -> dict[str, Any]:
    """On one rank: seconds of every step of every plan, and what was predicted."""
    from autopar.runtime.measure.collectives import collectives_seconds

    cell = Cell(**cell_fields)
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCABULARY, (cell.batch, cell.sequence), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    mine, same = ours(cell, batch, file)
    predicted = {name: seconds for name, (_, _, seconds) in mine.items()}
    variants = {**by_hand(cell, batch), **{name: (module, inputs) for name, (module, inputs, _) in mine.items()}}
    free = mine["free"][0]
    cases = list(cases_of(free))
    alone: list[dict[Any, float]] = []

    def between(number: int) -> None:
        alone.append(collectives_seconds(cases, free.mesh))

    seconds = in_turns({name: training_step(*given) for name, given in variants.items()}, rounds, between)
    return {
        "seconds": seconds,
        "predicted": predicted,
        "by_hand": [name for name in variants if name not in mine],
        "same": same,
        "collectives": collectives(free, file, alone),
    }


def cases_of(module: Any) -> dict[Any, int]:
    """Each kind, axis and size of a program's collectives, and how many there are."""
    from autopar.cluster.measurements import Case

    counts = Counter(module.program.collectives())
    return {Case(kind=kind, axis=axis, bytes=size): n for (kind, axis, size), n in counts.items()}


def collectives(module: Any, file: str, sittings: list[dict[Any, float]]) -> list[dict[str, Any]]:
    """Of each kind, axis and size how many, predicted seconds of one, and the median of what sittings measured."""
    from autopar.cluster.collectives import collective_seconds

    links = dict(zip(module.mesh.mesh_dim_names, named_cluster(file).links(tuple(module.mesh.shape)), strict=True))
    cases = cases_of(module)
    measured = {case: statistics.median(sitting[case] for sitting in sittings) for case in cases}
    return [
        {
            "kind": case.kind,
            "axis": case.axis,
            "bytes": case.bytes,
            "count": n,
            "predicted": collective_seconds(case.kind, case.bytes, links[case.axis]),
            "measured": measured[case],
            "sittings": [sitting[case] for sitting in sittings],
        }
        for case, n in sorted(cases.items(), key=lambda item: -item[1] * measured[item[0]])
    ]


def spearman(first: list[float], second: list[float]) -> float:
    """The correlation of ranks."""
    places = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*places)


def calibrated(cell: Cell, again: bool) -> str:
    """The path of the shape's cluster file."""
    file = FILES / f"{cell.shape}.toml"
    if again or not file.exists():
        command = [sys.executable, "-m", "autopar.cli", "calibrate", "--out", str(file)]
        if lab.launch(cell.links(), command):
            raise SystemExit(f"calibrating {cell.shape} failed")
    named_cluster(str(file))
    return str(file)


def steps_of(ranks: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Of each plan, what each of its steps took on its slowest rank, from what ranks measured."""
    return {
        plan: [max(times) for times in zip(*(rank["seconds"][plan] for rank in ranks), strict=True)]
        for plan in ranks[0]["seconds"]
    }


def report(name: str, cell: Cell, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints a cell's table; returns it."""
    predicted, hand, same = (ranks[0][key] for key in ("predicted", "by_hand", "same"))
    steps = steps_of(ranks)
    medians = {plan: statistics.median(times) for plan, times in steps.items()}
    best = min(hand, key=lambda plan: medians[plan])
    searched = (plan for plan in predicted if plan == "free" or plan.startswith("stages"))
    found = min(searched, key=lambda plan: predicted[plan]["overlapped"])
    ratio = statistics.median(a / b for a, b in zip(steps[found], steps[best], strict=True))
    order = spearman([p["overlapped"] for p in predicted.values()], [medians[plan] for plan in predicted])
    print(f"\n{name}: hidden {cell.hidden}, {cell.layers} layers, {cell.batch} x {cell.sequence}, {cell.links()}")
    print(f"{'plan':<20} {'measured ms':>12} {'predicted ms':>13} {'without overlap':>16}")
    for plan in sorted(medians, key=lambda plan: medians[plan]):
        figures = "{overlapped:13.0f} {apart:16.0f}" if plan in predicted else ""
        figures = figures.format(**{name: seconds * 1e3 for name, seconds in predicted.get(plan, {}).items()})
        alike = " = ".join([plan, *(name for name, other in same.items() if other == plan)])
        print(f"{alike:<20} {medians[plan] * 1e3:12.0f} {figures}")
    print(f"found ({found}) / best by hand ({best}): {ratio:.2f}; order of predictions (Spearman): {order:.2f}")
    rows = ranks[0]["collectives"]
    print(f"{'collective of the free plan':<40} {'count':>5} {'predicted ms':>13} {'measured ms':>12} {'off':>5}")
    for row in rows:
        what = f"{row['kind']} of {row['bytes']:,} bytes, {row['axis']}"
        off = row["predicted"] / row["measured"] - 1
        figures = f"{row['predicted'] * 1e3:13.2f} {row['measured'] * 1e3:12.2f} {off:+5.0%}"
        print(f"{what:<40} {row['count']:>5} {figures}")
    total, right = (
        sum(row["count"] * row["measured"] for row in rows if abs(row["predicted"] / row["measured"] - 1) <= within)
        for within in (math.inf, CLOSE)
    )
    if rows:
        print(f"within {CLOSE:.0%}: {right / total:.0%} of the seconds that the plan's collectives take", flush=True)
    return {
        "cell": asdict(cell),
        "steps": steps,
        "predicted": predicted,
        "same": same,
        "found": found,
        "ratio": ratio,
        "spearman": order,
        "collectives": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cells", nargs="*", help=f"of {', '.join(CELLS)}; all without one")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each plan; a step varies by a fifth")
    parser.add_argument("--calibrate", action="store_true", help="measure every shape anew first")
    parser.add_argument("--json", type=Path, default=Path("lab.json"))
    options = parser.parse_args()
    if unknown := sorted(set(options.cells) - set(CELLS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(CELLS)}")
    results = {}
    fresh: set[str] = set()
    for name in options.cells or CELLS:
        cell = CELLS[name]
        file = calibrated(cell, options.calibrate and cell.shape not in fresh)
        fresh.add(cell.shape)
        arguments = (asdict(cell), file, options.rounds)
        results[name] = report(name, cell, lab.run(cell.links(), measure, *arguments, timeout_seconds=TIMEOUT_SECONDS))
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
