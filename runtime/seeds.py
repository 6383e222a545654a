"""The seed of a step: drawn from torch's default generator, and the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def step_seed(groups: Sequence[dist.ProcessGroup | None], device: torch.device) -> torch.Tensor:
    """int64 [1] on `device`, which no host waits for: that of the mesh's first rank.

    Every rank draws, so that generators that were seeded alike stay alike (people draw batches from
    them), and so that `torch.manual_seed`, `torch.get_rng_state` and `torch.set_rng_state` mean what
    they mean on one device. Ranks that were seeded differently are told the first one's.
    """
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    seed = torch.full((1,), int(drawn), dtype=torch.int64, device=device)
    for group in groups:
        if group is not None:
            dist.broadcast(seed, group=group, group_src=0)
    return seed
