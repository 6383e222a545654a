"""Process groups of ranks that `torchrun` starts again."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous


def init_process_group(backend: str | None = None, *, timeout: timedelta | None = None, **options: Any) -> None:
    """`torch.distributed.init_process_group` of ranks that `torchrun` started, and may start again, as many or others.

    All attempts of `torchrun` share one store, in which PyTorch's own function finds the addresses of the attempt
    before, and hangs. Here each attempt has a part of the store of its own (a `PrefixStore`), whose name the first rank
    gives. `backend`, `timeout` and other `options` are those of PyTorch's function.

    Raises ValueError without the environment of `torchrun`, and for the options that it decides.
    """
    if taken := sorted(options.keys() & {"store", "init_method", "rank", "world_size"}):
        raise ValueError(f"{', '.join(taken)} cannot be given: torchrun's environment says them")
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"the environment lacks {', '.join(missing)}: start the script with torchrun, or call "
            f"torch.distributed.init_process_group"
        )
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout or default_pg_timeout)))
    store = dist.distributed_c10d.PrefixStore(f"attempt_{_attempt(store, rank, world_size)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, **options)


def _attempt(store: Any, rank: int, world_size: int) -> str:
    """A name on which the ranks of an attempt agree, whatever those of others left in the store. (How often ranks were
    started again, each agent of torchrun counts for itself.) Each rank asks under a name of its own, which it leaves
    where the first rank looks. That one answers all that it finds there until everyone has heard."""
    own = uuid.uuid4().hex
    if rank:
        store.set(f"asks/{rank}", own)
        name: str = store.get(f"answer/{own}").decode()
        store.add(f"heard/{name}", 1)
        return name
    while store.add(f"heard/{own}", 0) < world_size - 1:
        for other in range(1, world_size):
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", own)
        time.sleep(0.01)
    return own


def mesh_of_ranks(shape: Mapping[str, int] | None = None) -> DeviceMesh:
    """The mesh of this shape, one axis if it has none, of all ranks that there are: of GPUs, if they speak by NCCL.
    Where there is no process group yet, it makes one (`init_process_group`)."""
    if not dist.is_initialized():
        init_process_group()
    shape = shape or {"ranks": dist.get_world_size()}
    return init_device_mesh(
        "cuda" if "nccl" in dist.get_backend_config() else "cpu", tuple(shape.values()), mesh_dim_names=tuple(shape)
    )
