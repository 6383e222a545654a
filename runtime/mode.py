"""Modes of a call: what a captured graph depends on beside the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autopar.ir.program import Program
from autopar.passes.capture.captured import Captured


@dataclass(frozen=True, slots=True)
class Mode:
    """What a captured graph depends on beside the model: which modules train, in the order of `modules()`, which
    parameters require gradients, whether gradients are wanted at all, and what `torch.autocast` casts to."""

    training: tuple[bool, ...]
    trainable: frozenset[str]
    gradients: bool
    autocast: torch.dtype | None

    def covers(self, other: Mode) -> bool:
        """Whether a graph of this mode gives what one of the other would, and maybe gradients beside, if the model does
        not ask which gradients are wanted."""
        if (self.training, self.autocast) != (other.training, other.autocast):
            return False
        return not other.gradients or (self.gradients and other.trainable <= self.trainable)

    def __str__(self) -> str:
        count = sum(self.training)
        what = "evaluation" if not count else "training" if count == len(self.training) else "partly training"
        cast = f", autocast to {self.autocast}" if self.autocast else ""
        return f"{what} {'with' if self.gradients else 'without'} gradients{cast}"


Again = Callable[[Mode, nn.Module, Sequence[Captured], Mapping[str, torch.Tensor]], tuple[Captured, Program | int]]
"""What is captured in another mode, with other attributes of the model or with other values of inputs (by path), and
its program, with the parameters where they are, or which of the steps that are known has a program that serves it.
Called on all ranks at once."""
