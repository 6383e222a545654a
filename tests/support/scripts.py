"""Scripts that plans are exported to, run on gloo ranks as their users would run them: steps beside one process, the
bytes of their collectives, and the peak of a rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.memory import Alive
from autopar.runtime.places import local_part

Batch = dict[str, torch.Tensor]
Task = Callable[[], tuple[nn.Module, Callable[[int], Batch]]]
"""Makes a model, always the same one, and the batch of each step."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The largest difference of a loss and of a parameter from one process; of a step, the bytes of collectives (of
    each the larger of a rank's operand and result), and the peak."""

    loss: float
    parameter: float
    sent_bytes: int
    peak_bytes: int


class Sent(TorchDispatchMode):
    """Adds up the bytes of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")) and not ("wait" in name or "wrap_tensor" in name):
            tensors = [x for x in pytree.tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            self.bytes += max((x.numel() * x.element_size() for x in tensors), default=0)
        return result


class Resized(Alive):
    """Counts storages as long as they are: FSDP empties and fills the same ones."""

    def _see(self, tensor: torch.Tensor) -> None:
        storage = local_part(tensor).untyped_storage()
        if storage.device.type != "meta":
            self._counted.add(storage)
        self.bytes = sum(each.nbytes() for each in self._counted)
        self.peak_bytes = max(self.peak_bytes, self.bytes)


def trained(script: str, task: Task, steps: int = 5, rate: float = 1e-3) -> Ran:
    """On each rank: the model of a task, split by the script, beside the whole one."""
    warnings.simplefilter("ignore")
    model, batch = task()
    whole = copy.deepcopy(model)
    names: dict[str, Any] = {}
    exec(script, names)
    if "make_mesh" in names:
        mesh = names["make_mesh"]("cpu")
        model = names["parallelize"](model, mesh)
        rows = lambda tensor: names["rows"](tensor, mesh)  # noqa: E731
    else:
        model, sizes = names["parallelize"](model), names["SIZES"]
        parts = sizes["dp_replicate_size"] * sizes["fsdp_size"]
        rows = lambda tensor: tensor.chunk(parts)[dist.get_rank() // sizes["tp_size"]]  # noqa: E731
    optimizers = [torch.optim.AdamW(each.parameters(), lr=rate, eps=1e-4) for each in (model, whole)]
    worst = 0.0
    for step in range(steps):
        mine = {name: rows(tensor) for name, tensor in batch(step).items()}
        states = [x for s in optimizers[0].state.values() for x in s.values() if isinstance(x, torch.Tensor)]
        sent, alive = Sent(), Resized([*model.parameters(), *model.buffers(), *mine.values(), *states])
        with alive, sent:
            loss = model(**mine)["loss"]
            loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        expected = whole(**batch(step))["loss"]
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        worst = max(worst, abs(float(mean) / dist.get_world_size() - float(expected.detach())))
    mine = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in model.state_dict().items()}
    other = max(float((mine[n] - x).abs().max()) for n, x in whole.state_dict().items() if x.is_floating_point())
    return Ran(loss=worst, parameter=other, sent_bytes=sent.bytes, peak_bytes=alive.peak_bytes)
