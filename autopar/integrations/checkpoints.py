"""States of optimizers, saved by all ranks together and loaded on any mesh, by `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path

import torch

from autopar.runtime.checkpoints import by_ranks, of_optimizer
from autopar.runtime.module import ParallelModule


def save_optimizer(module: ParallelModule, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """All ranks at once. Trainers that have the first rank save lose the other ranks' parts."""
    by_ranks("save", module, {"optimizer": of_optimizer(module, optimizer)}, Path(folder))


def load_optimizer(module: ParallelModule, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """All ranks at once, on the mesh and with the plan that they were saved on, or others."""
    by_ranks("load", module, {"optimizer": of_optimizer(module, optimizer)}, Path(folder))
