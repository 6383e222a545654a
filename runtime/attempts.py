"""Process groups of ranks that `torchrun` starts again."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous


def init_process_group(backend: str | None = None, *, timeout: timedelta | None = None, **options: Any) -> None:
    """`torch.distributed.init_process_group` of ranks that `torchrun --max-restarts` started.

    All attempts of `torchrun` share one store, in which PyTorch's own function finds the addresses of the attempt
    before, and hangs. Here each attempt has a part of the store of its own (a `PrefixStore`). `backend`, `timeout`
    and other `options` are those of PyTorch's function.

    Raises ValueError without the environment of `torchrun`, and for the options that it decides.
    """
    if taken := sorted(options.keys() & {"store", "init_method", "rank", "world_size"}):
        raise ValueError(f"{', '.join(taken)} cannot be given: torchrun's environment says them")
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"the environment lacks {', '.join(missing)}: start the script with torchrun, or call "
            f"torch.distributed.init_process_group"
        )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout or default_pg_timeout)))
    store = dist.distributed_c10d.PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, **options)
