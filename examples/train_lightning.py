"""Lightning trains a parallel module with its own strategy: `torchrun --nproc-per-node 4 examples/train_lightning.py`.

`ModelParallelStrategy` makes the mesh, saves and loads by `torch.distributed.checkpoint`, and leaves the module as it
is; autopar's own of that name also reduces gradients once a step where they are accumulated. What Lightning would do
for data parallelism is switched off: every rank reads the global batches.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.integrations.lightning import ModelParallelStrategy

FEATURES, CLASSES, BATCH = 16, 5, 8


class Classifier(lightning.LightningModule):
    """`configure_model` is where Lightning has a mesh, and so where the module is made parallel."""

    def __init__(self, solver: str = "auto") -> None:
        super().__init__()
        self.solver = solver
        self.network: Any = None

    def configure_model(self) -> None:
        if self.network is None:
            torch.manual_seed(0)
            network = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
            if self.device_mesh is not None:
                example = torch.zeros(BATCH, FEATURES)
                with self.trainer.precision_plugin.forward_context():  # autocast, if the trainer uses it
                    self.network = autopar.parallelize(network, self.device_mesh, (example,), solver=self.solver)
            else:
                self.network = network

    def loss(self, batch: Any) -> torch.Tensor:
        features, labels = batch
        logits = self.network(features)
        if isinstance(logits, torch.distributed.tensor.DTensor):
            logits = logits.full_tensor()
        return nn.functional.cross_entropy(logits, labels)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("validation", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(batches: int) -> DataLoader[Any]:
    """The last batch is smaller than the others."""
    features = torch.randn(batches * BATCH - 3, FEATURES, generator=torch.Generator().manual_seed(batches))
    return DataLoader(TensorDataset(features, features[:, :CLASSES].argmax(dim=1)), batch_size=BATCH)


def trainer(folder: Path, ranks: int, epochs: int, precision: Any = "32-true") -> lightning.Trainer:
    parallel: dict[str, Any] = {
        "strategy": ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks),
        "devices": ranks,
        "use_distributed_sampler": False,  # every rank reads the global batches
    }
    where = parallel if ranks > 1 else {"devices": 1}
    return lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, accumulate_grad_batches=4, gradient_clip_val=0.5, default_root_dir=folder,
        precision=precision, logger=False, enable_progress_bar=False, enable_model_summary=False, **where,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("lightning"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--precision", default="32-true", help="bf16-mixed for autocast")
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    model = Classifier()
    run = trainer(options.folder, int(os.environ.get("WORLD_SIZE", "1")), options.epochs, options.precision)
    run.fit(model, loader(8), loader(2), ckpt_path=options.resume)
    if run.is_global_zero:
        print({name: round(float(value), 4) for name, value in run.callback_metrics.items()})


if __name__ == "__main__":
    main()
