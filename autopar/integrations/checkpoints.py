"""States of optimizers, saved by all ranks together and loaded on any mesh, by `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.runtime.module import ParallelModule
from autopar.runtime.placements import is_strided


def save_optimizer(module: ParallelModule, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """All ranks at once. Trainers that have the first rank save lose the other ranks' parts."""
    _check(module)
    save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=str(folder))


def load_optimizer(module: ParallelModule, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """All ranks at once, on the mesh and with the plan that they were saved on, or others."""
    _check(module)
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(module, optimizer)}
    load(state, checkpoint_id=str(folder))
    set_optimizer_state_dict(module, optimizer, state["optimizer"])


def _check(module: ParallelModule) -> None:
    """`torch.distributed.checkpoint` takes what a rank holds for one box."""
    for name, parameter in module.named_parameters():
        placements = getattr(parameter, "placements", ())
        if is_strided(placements):
            raise ValueError(
                f"{name} is {placements} at rest, scattered pieces that torch.distributed.checkpoint does "
                f"not save: give parallelize(..., constraints={{{name!r}: ...}}) another placement"
            )
