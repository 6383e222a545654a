"""States of optimizers, saved by all ranks together and loaded on any mesh, by `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path

import torch

from autopar.runtime.checkpoints import by_ranks, of_optimizer
from autopar.runtime.module import ParallelModule


def optimizer_by_ranks(what: str, module: ParallelModule, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Have all ranks at once "save" an optimizer's states to a folder, or "load" them, on the mesh and with the plan
    that they were saved on, or others. Trainers that have the first rank save lose the other ranks' parts."""
    by_ranks(what, module, {"optimizer": of_optimizer(module, optimizer)}, folder)
