"""A Llama trains on four ranks, as one process does, with every module of autopar refused but those of `kernel.txt`.

    python tests/support/kernel_alone.py

`test_kernel.py` runs it in a process of its own, since those of tests have imported the rest. The ranks are forked from
that one.
"""

from __future__ import annotations

import copy
import importlib.abc
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMED = (Path(__file__).parents[2] / "kernel.txt").read_text().split()
FACES = {name.rpartition(".")[0] for name in NAMED} | {"autopar", "autopar.passes", "autopar.runtime"}
"""The packages in which they lie, whose own files import nothing of autopar's."""


class Absent(importlib.abc.MetaPathFinder):
    """All of autopar beside the kernel."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name.partition(".")[0] == "autopar" and name not in NAMED and name not in FACES:
            raise ModuleNotFoundError(f"{name} is not in kernel.txt")


sys.meta_path.insert(0, Absent())

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from autopar import kernel  # noqa: E402
from autopar.cluster.machine import Cluster, Device, Level  # noqa: E402
from autopar.ir.layout import REPLICATE, shard  # noqa: E402
from autopar.ir.program import Program  # noqa: E402

MESHES = ({"tp": 4}, {"dp": 2, "tp": 2})
RATE, STEPS = 0.5, 3

CLUSTER = Cluster(
    name="four",
    device=Device(
        name="slow", flops_per_second={"float32": 1e11}, memory_bytes_per_second=1e10, seconds_per_op=1e-6
    ),
    levels=(
        Level(name="bus", size=4, bytes_per_second=1e10, group_bytes_per_second=1e10, latency_seconds=1e-6),
    ),
)  # fmt: skip


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (STEPS, 2, 16))]


def planned(mesh: dict[str, int]) -> tuple[Program, kernel.Tensors]:
    graph, constants = kernel.trace(llama(), **batches()[0])
    space = kernel.space_of(graph, mesh, CLUSTER)
    return kernel.codegen(space, kernel.search(space)), constants


def train(mesh: dict[str, int], program: Program, constants: kernel.Tensors) -> None:
    """On this rank; asserts that each step's loss and gradients, and the parameters after it, are one process's."""
    alone = llama()
    devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    ranks = kernel.Ranks(program, copy.deepcopy(alone), constants, devices)
    layouts = {i.target: i.layout for i in program.inputs}
    for batch in batches():
        loss = alone(**batch).loss
        loss.backward()
        outputs, gradients = ranks.step(**batch)
        torch.testing.assert_close(outputs["output.loss"], loss.detach(), rtol=1e-5, atol=1e-6)
        for name, parameter in alone.named_parameters():
            whole = parameter.grad
            assert whole is not None
            torch.testing.assert_close(
                gradients[name], shard(whole, layouts[name], program.mesh, ranks.coordinate), rtol=1e-4, atol=1e-6
            )
            with torch.no_grad():
                parameter -= RATE * whole
                ranks.held[name] -= RATE * gradients[name]
            parameter.grad = None


def run(rank: int, store: str) -> None:
    """The first rank plans for all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    for mesh in MESHES:
        plan: list[Any] = [planned(mesh) if rank == 0 else None]
        dist.broadcast_object_list(plan)
        program, constants = plan[0]
        train(mesh, program, constants)
        if rank == 0:
            kinds = [kind for kind, _, _ in program.collectives()]
            print(f"{mesh}: {len(program.forward) + len(program.backward)} instructions, {len(kinds)} collectives")
            assert any(set(i.layout) != {REPLICATE} for i in program.inputs if i.role == "parameter")
    dist.destroy_process_group()
    if rank == 0:
        imported = sorted(name for name in sys.modules if name.startswith("autopar") and name not in FACES)
        print("imported:", *imported, flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")  # before autograd has threads, which do not fork
        processes = [context.Process(target=run, args=(rank, f"{folder}/store")) for rank in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(250)
        failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
        for process in processes:
            process.kill()
    sys.exit(f"ranks {failed} failed" if failed else 0)
