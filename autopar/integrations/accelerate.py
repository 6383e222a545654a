"""An `Accelerator` whose processes train one parallel module: every rank reads the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import accelerate.accelerator
import torch
import torch.distributed as dist
from accelerate.scheduler import AcceleratedScheduler
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from autopar.compat.patching import patched
from autopar.compat.redistributing import full_tensor
from autopar.runtime.agreement import on_first_rank
from autopar.runtime.checkpoints import draw_from, random_states
from autopar.runtime.clip import clip_grad_norm_
from autopar.runtime.module import ParallelModule

from .checkpoints import optimizer_by_ranks


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """As Accelerate's own, for a module that `autopar.parallelize` returned.

    It behaves as on one process, since all ranks hold the same batch and the same loss: `prepare` leaves the module
    and the batches as they are (with autocast, if `mixed_precision` says so), `gather` returns what it is given,
    outputs that are split are gathered, and `accumulate` reduces gradients once a step. `save_state` and `load_state`
    work on all ranks together, on any mesh. Start it with torchrun or `accelerate launch`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self.state.num_processes != ranks:
            raise ValueError(
                f"there are {ranks} ranks, and Accelerate sees {self.state.num_processes}: start them with torchrun, "
                f"which sets RANK, LOCAL_RANK and WORLD_SIZE"
            )

    @property
    def num_processes(self) -> int:
        """Of those that read different batches."""
        return 1

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if isinstance(model, ParallelModule):
            vars(model)["_original_forward"] = model.forward  # which Accelerate would set on the model inside
            return super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """It steps once a step, whatever the number of ranks."""
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(prepared, AcceleratedScheduler):
            prepared.split_batches = True
        return prepared

    def gather(self, tensor: Any) -> Any:
        return whole(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What a loader's last batch is filled up with is cut off, as on one process."""
        with patched(accelerate.accelerator, gather_object=whole):  # objects are those of all ranks
            return super().gather_for_metrics(input_data, use_gather_object)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return whole(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t * scale, whole(tensor))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        models, optimizers = self._apart()
        try:
            folder = super().save_state(output_dir, *args, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers
        for number, model in enumerate(models):
            model.save_pretrained(Path(folder) / f"model_{number}")
        for number, optimizer in enumerate(optimizers):
            optimizer_by_ranks("save", _one(models), bare(optimizer), Path(folder) / f"optimizer_{number}")
        return folder

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = Path(input_dir) if input_dir is not None else self._newest()
        models, optimizers = self._apart()
        try:
            super().load_state(str(folder), *args, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers
        for number, model in enumerate(models):
            model.load_pretrained(folder / f"model_{number}")
        for number, optimizer in enumerate(optimizers):
            optimizer_by_ranks("load", _one(models), bare(optimizer), folder / f"optimizer_{number}")
        for model in models[:1]:  # where there are more ranks than there were, no file has states for them
            draw_from(on_first_rank(random_states, model.mesh))

    def _apart(self) -> tuple[list[Any], list[Any]]:
        """Models and optimizers, which Accelerate is not to save or load: the first rank would, with its own part."""
        held: tuple[list[Any], list[Any]] = (self._models, self._optimizers)
        self._models, self._optimizers = [], []
        return held

    def _newest(self) -> Path:
        """With automatic names, as Accelerate counts them."""
        folders = Path(self.project_dir or ".", "checkpoints").glob("checkpoint_*")
        newest = max(folders, key=lambda folder: int(folder.name.removeprefix("checkpoint_")), default=None)
        if newest is None:
            raise ValueError("load_state has no directory: give one that save_state wrote")
        return newest


def whole(values: Any) -> Any:
    """Values with split tensors gathered."""
    return tree_map_only(DTensor, full_tensor, values)


def bare(optimizer: Any) -> Any:
    """The optimizer that Accelerate's wrapper holds."""
    return getattr(optimizer, "optimizer", optimizer)


def _one(models: list[Any]) -> ParallelModule:
    if len(models) != 1 or not isinstance(models[0], ParallelModule):
        raise ValueError(f"{len(models)} models were prepared: states are saved of one parallel module")
    return models[0]
