"""A strategy of Lightning that accumulates gradients of a parallel module, and reduces them once a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import strategies

from autopar.runtime.module import ParallelModule


class ModelParallelStrategy(strategies.ModelParallelStrategy):
    """As Lightning's own, for a `LightningModule` that holds what `autopar.parallelize` returned: with
    `accumulate_grad_batches`, gradients of micro-batches are added up on each rank, and the last one's backward reduces
    the sum. Lightning's own has every micro-batch reduce its gradients.

    Give the `Trainer` `use_distributed_sampler=False`: every rank reads the global batches.
    """

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        model: Any = self.model
        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, ParallelModule):
                    stack.enter_context(module.no_sync())
            yield
