"""A loop of one's own: a plain module whose forward returns the loss, a loader that gives each rank its own part of a
batch, accumulated micro-batches, clipping, a schedule, evaluation, and a checkpoint from which training goes on.

    torchrun --standalone --nproc-per-node 4 examples/own_loop.py
    python examples/own_loop.py                                      # the same loop on one process, in plain PyTorch

Both print the same losses. Lines with `parallel` are those that a loop for one device does not have.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import autopar

MICRO_BATCHES, ROWS, LENGTH, WORDS = 2, 8, 8, 16


class Reverser(nn.Module):
    """Learns to write a sequence of words backwards. Words and labels [batch, length] to the loss."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.place = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embed(words) + self.place))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sentences(count: int, seed: int) -> Dataset[tuple[torch.Tensor, ...]]:
    words = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words, words.flip(1))


def loader(data: Dataset[Any], parallel: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Batches by name. `ROWS` is the size of the global micro-batch, of which a rank reads its part."""
    parts = parallel.data_size if parallel else 1
    sampler = DistributedSampler(data, parts, parallel.data_rank, shuffle=False) if parallel else None
    for words, labels in DataLoader(data, batch_size=ROWS // parts, sampler=sampler):
        batch = {"words": words, "labels": labels}
        yield parallel.shard_batch(batch) if parallel else batch


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, data: Dataset[Any], parallel: Any) -> None:
    model.train()
    for number, batch in enumerate(loader(data, parallel), start=1):
        last = number % MICRO_BATCHES == 0
        with parallel.no_sync() if parallel and not last else contextlib.nullcontext():
            (model(**batch) / MICRO_BATCHES).backward()
        if last:
            clip = autopar.clip_grad_norm_ if parallel else nn.utils.clip_grad_norm_
            clip(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def evaluate(model: nn.Module, data: Dataset[Any], parallel: Any) -> float:
    model.eval()
    with torch.no_grad():
        losses = [model(**batch).item() for batch in loader(data, parallel)]
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with a loop of one's own, on ranks or on one process.")
    parser.add_argument("--sentences", type=int, default=2048, help="a multiple of 16")
    parser.add_argument("--epochs", type=int, default=4, help="at least 2")
    parser.add_argument("--solver", default="dp", help="dp, ilp, or a preset: ddp, fsdp, megatron, megatron_sp")
    options = parser.parse_args()
    torch.set_num_threads(1)
    training, validation = sentences(options.sentences, 1), sentences(64, 2)

    def made() -> tuple[Any, torch.optim.Optimizer, Any, Any]:
        """A model with its optimizer and schedule, as at the start of a run."""
        torch.manual_seed(0)
        model: Any = Reverser()
        parallel = None
        if "RANK" in os.environ:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            example = {"words": torch.zeros(ROWS, LENGTH, dtype=torch.long)}
            example["labels"] = example["words"]
            parallel = model = autopar.parallelize(model, mesh, kwargs=example, solver=options.solver)
        make = parallel.optimizer if parallel else lambda kind, **how: kind(model.parameters(), **how)
        optimizer = make(torch.optim.AdamW, lr=3e-3)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.997), parallel

    model, optimizer, schedule, parallel = made()
    first = parallel is None or dist.get_rank() == 0
    for epoch in range(options.epochs):
        if epoch == options.epochs // 2:  # as if the run had been killed here
            with shared_folder() as folder:
                state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
                dcp.save(state, checkpoint_id=folder)
                last = schedule.state_dict()
                model, optimizer, schedule, parallel = made()
                state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
                dcp.load(state, checkpoint_id=folder)
                model.load_state_dict(state["model"])
                set_optimizer_state_dict(model, optimizer, state["optimizer"])
                schedule.load_state_dict(last)
            if first:
                print("saved, made anew, and loaded")
        train(model, optimizer, schedule, training, parallel)
        loss = evaluate(model, validation, parallel)
        if first:
            rate = schedule.get_last_lr()[0]
            print(f"epoch {epoch}: validation loss {loss:.5f}, learning rate {rate:.6f}", flush=True)
    if parallel:
        dist.destroy_process_group()


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A folder of the first rank's, which all ranks see; it goes when all are done."""
    if not dist.is_initialized():
        with tempfile.TemporaryDirectory() as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


if __name__ == "__main__":
    main()
