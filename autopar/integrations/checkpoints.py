"""States of optimizers, saved by all ranks together and loaded on any mesh, by `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from autopar.runtime.checkpoints import by_ranks
from autopar.runtime.module import ParallelModule


def save_optimizer(module: ParallelModule, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """All ranks at once. Trainers that have the first rank save lose the other ranks' parts."""
    by_ranks("save", module, {"optimizer": get_optimizer_state_dict(module, optimizer)}, Path(folder))


def load_optimizer(module: ParallelModule, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """All ranks at once, on the mesh and with the plan that they were saved on, or others."""
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(module, optimizer)}
    by_ranks("load", module, state, Path(folder))
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
