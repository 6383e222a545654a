"""The memory of this rank: what a training step takes, the most bytes of tensors that are alive at once, and what the
process holds."""

import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.compat.dispatch import Watching

from .places import local_part
from .timing import synchronize


class Alive(Watching):  # type: ignore[no-untyped-call]
    """Bytes of tensors that are alive while it is entered, and the most that there were: of those `held` from before,
    and of all that operators make. Each storage counts once, whatever views there are of it.

    What a kernel allocates inside and frees again is not seen.
    """

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak_bytes = 0
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in held:
            self._see(tensor)

    def _see(self, tensor: torch.Tensor) -> None:
        storage = local_part(tensor).untyped_storage()
        if storage in self._counted or storage.device.type == "meta":
            return
        self._counted.add(storage)
        size = storage.nbytes()
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # what it does to the local tensors is seen
        results = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(results):
            if isinstance(value, torch.Tensor):
                self._see(value)
        return results


def peak_bytes(step: Callable[[], object], held: Iterable[torch.Tensor], device: torch.device) -> int:
    """The most bytes alive on this rank's device while `step` runs, `held` (what lives before it) included. On a GPU
    it is what the allocator counts: all tensors, and what kernels take."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return int(torch.cuda.max_memory_allocated(device))
    alive = Alive(held)
    with alive:
        step()
    return alive.peak_bytes


def held_bytes(device: torch.device) -> tuple[int, int]:
    """Now, and at the most since the process began (or since PyTorch was told to forget): of a GPU's tensors, or of
    this process."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device)), int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    text = status.read_text() if status.exists() else ""
    now, most = (re.search(rf"{name}:\s+(\d+) kB", text) for name in ("VmRSS", "VmHWM"))
    return (1024 * int(now[1]) if now else 0), (1024 * int(most[1]) if most else 0)


def step_bytes(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor],
) -> int:
    """The peak of a training step: forward, backward of `loss(output)`, optimizer. One step is taken before, in which
    the optimizer makes its states. Outputs are held through the step, and no gradients before it."""

    def step() -> None:
        output = module(*args, **kwargs)
        loss(output).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    optimizer.zero_grad()
    step()
    parameters = list(module.parameters())
    states = pytree.tree_leaves([optimizer.state[p] for p in parameters if p in optimizer.state])
    leaves = [*parameters, *module.buffers(), *states, *pytree.tree_leaves((args, dict(kwargs)))]
    return peak_bytes(step, (x for x in leaves if isinstance(x, torch.Tensor)), parameters[0].device)
