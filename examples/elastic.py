"""A run that is killed and goes on with as many ranks as there are: a small language model, on the source of Python's
argparse, byte by byte.

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/elastic.py
    torchrun --standalone --nproc-per-node 3 examples/elastic.py      # after you killed it: goes on, on three ranks

Each start plans anew for the ranks that there are, reads the newest checkpoint, and goes on with the same losses:
batches are drawn by the number of the step, the whole batch on every rank, and dropout by the state of the generator,
which a checkpoint holds, and by each element's place in the whole tensor.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar

ROWS, LENGTH, BYTES = 24, 32, 256
TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))


class Model(nn.Module):
    """Predicts the next byte. Text [rows, length + 1] to the loss."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.place = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        ahead = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        hidden = self.layers(self.embed(text[:, :-1]) + self.place, mask=ahead)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


def batch(step: int) -> dict[str, torch.Tensor]:
    """The same rows on every rank, however many there are."""
    starts = torch.randint(len(TEXT) - LENGTH, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    return {"text": TEXT[starts + torch.arange(LENGTH + 1)]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small language model, on as many ranks as there are.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--folder", default="checkpoints", help="where checkpoints are, and all ranks see them")
    parser.add_argument("--dtype", default="float32", help="float32 or float64")
    parser.add_argument("--solver", default="dp", help="as of autopar.plan; auto also tries presets and pipelines")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Model().to(getattr(torch, options.dtype))
    model = autopar.parallelize(model, kwargs=batch(0), solver=options.solver)  # no mesh: it is chosen
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)

    first = autopar.load(options.folder, model, optimizer, schedule)
    on = " x ".join(map(str, model.mesh.shape))
    for step in range(first, options.steps):
        loss = model(**batch(step))
        loss.backward()
        autopar.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.12f}, {on} ranks", flush=True)
        if (step + 1) % options.every == 0:
            autopar.save(options.folder, model, optimizer, schedule, step=step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
