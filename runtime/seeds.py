"""The seed of a step: drawn from torch's default generator, and the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .failures import watched


def step_seed(axes: Sequence[str], groups: Sequence[dist.ProcessGroup | None], device: torch.device) -> torch.Tensor:
    """int64 [1] on `device`, which no host waits for: that of the mesh's first rank. `axes` are the names of the mesh
    axes, `groups` those of this rank.

    Every rank draws, so that generators that were seeded alike stay alike (people draw batches from
    them), and so that `torch.manual_seed`, `torch.get_rng_state` and `torch.set_rng_state` mean what
    they mean on one device. Ranks that were seeded differently are told the first one's.
    """
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    seed = torch.full((1,), int(drawn), dtype=torch.int64, device=device)
    for axis, group in zip(axes, groups, strict=True):
        if group is not None:
            with watched("the broadcast of a step's seed,", axis, group):
                dist.broadcast(seed, group=group, group_src=0)
    return seed
