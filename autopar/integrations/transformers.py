"""A `Trainer` that trains a parallel module."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.trainer
from transformers.trainer_pt_utils import safe_globals
from transformers.utils.generic import can_return_loss, find_labels

from autopar.compat.patching import patched
from autopar.runtime.checkpoints import draw_from
from autopar.runtime.module import ParallelModule
from autopar.runtime.sharded_optimizers import ELEMENTWISE, on_shards

from .accelerate import Accelerator, bare
from .checkpoints import optimizer_by_ranks

OPTIMIZER, SCHEDULER = "optimizer", "scheduler.pt"
COUNT = "num_items_in_batch"


class Trainer(transformers.Trainer):
    """As that of transformers, with `model` from `autopar.parallelize`, started with torchrun.

    All ranks read the same batches: `per_device_train_batch_size` is the size of the global micro-batch, as on one
    device. Give `parallelize` an example with `num_items_in_batch` (a float32 scalar) beside the batch to have the loss
    of an accumulated batch divided by its tokens, as Trainer does on one device; without it, each micro-batch counts
    alike. Make the `TrainingArguments` before you call `parallelize`: models read what they set up. Checkpoints are
    directories of Hugging Face, with the optimizer's state written by all ranks, and training resumes on any mesh.
    """

    def __init__(self, model: Any, args: transformers.TrainingArguments | None = None, **kwargs: Any) -> None:
        if not isinstance(model, ParallelModule):
            raise ValueError(f"model is a {type(model).__name__}: give what autopar.parallelize returns")
        super().__init__(model, args, **kwargs)
        self._parallel = model
        alone = type(vars(model)["_root"])
        self.model_accepts_loss_kwargs = f"kwargs.{COUNT}" in model.input_placements
        given = self.args.label_names
        self.label_names = find_labels(alone) if given is None else given  # type: ignore[no-untyped-call]
        self.can_return_loss = can_return_loss(alone)  # type: ignore[no-untyped-call]
        columns = inspect.signature(alone.forward).parameters
        self._signature_columns: Any = [*columns, "label", "label_ids", *self.label_names]

    def create_accelerator_and_postprocess(self) -> None:
        with patched(transformers.trainer, Accelerator=Accelerator):
            super().create_accelerator_and_postprocess()
        self.args.average_tokens_across_devices = False  # all ranks count the same ones

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """It is on its mesh."""

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.model_accepts_loss_kwargs and num_items_in_batch is None:  # evaluation: the batch's own
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(torch.float32)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def store_flos(self) -> None:
        """All ranks count the same ones."""
        self.state.total_flos += self.current_flos
        self.current_flos = 0

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        """autopar's norm is that of all meshes. transformers would put one together of those of the meshes."""
        return False

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """One of torch's own steps on what each rank holds."""
        kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        return (on_shards(kind) if kind in ELEMENTWISE else kind), options

    # -- checkpoints

    @property
    def _schedule(self) -> Any:
        return self.lr_scheduler

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        self._parallel.save_pretrained(folder)
        if self.args.should_save:
            processing: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, Path(folder, "training_args.bin"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._parallel.load_pretrained(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._parallel.load_pretrained(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer_by_ranks("save", self._parallel, bare(self.optimizer), Path(output_dir, OPTIMIZER))
        if self.args.should_save:
            torch.save(self._schedule.state_dict(), Path(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and Path(checkpoint, OPTIMIZER).is_dir():
            optimizer_by_ranks("load", self._parallel, bare(self.optimizer), Path(checkpoint, OPTIMIZER))
            self._schedule.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """That of the first rank: all draw alike, also where there are more ranks than there were."""
        names = ("rng_state_0.pth", "rng_state.pth")
        file = next((Path(checkpoint, n) for n in names if Path(checkpoint, n).is_file()), None) if checkpoint else None
        if file is not None:
            with safe_globals():  # type: ignore[no-untyped-call]
                state = torch.load(file, weights_only=True)
            draw_from((state["python"], state["numpy"], state["cpu"]))
