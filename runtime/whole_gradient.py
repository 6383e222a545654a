"""Parameters whose gradients hooks of the model see: those hooks are part of the program, which gives them the gradient
of its call."""

from __future__ import annotations

import torch

from autopar.compat.calls import backward_running
from autopar.compat.watching import gradient_hooks

from .places import local_part


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory."""
    return local_part(tensor).untyped_storage().data_ptr()


class WholeGradient:
    """A hook of a parameter, which raises ValueError at a gradient that is not that of one call alone: eager gives the
    model's hooks the sum of all parts, in any backward."""

    __torch_unserializable__ = True  # pickle would warn of it

    def __init__(self, name: str) -> None:
        self.name = name
        self.task = self.storage = -1

    def expect(self, storage: int) -> None:
        """The memory of the gradient that a call gives in the backward that runs."""
        if self.task == backward_running():
            raise ValueError(
                f"one backward() runs through two calls, and hooks wait for the gradient of {self.name}, of which a "
                f"program gives them that of one call: call backward() on what each call returns, or register the "
                f"hooks on the parallel module's parameters, after parallelize"
            )
        self.task, self.storage = backward_running(), storage

    def __call__(self, gradient: torch.Tensor) -> None:
        if (self.task, self.storage) != (backward_running(), storage_of(gradient)):
            raise ValueError(
                f"a part of the gradient of {self.name} comes from elsewhere than the module's call, such as a penalty "
                f"on its parameters, and hooks of the model wait for it, to which a program gives the call's part "
                f"alone: compute it in forward or in loss_fn=, or register the hooks on the parallel module's "
                f"parameters, after parallelize"
            )


def whole_gradient(name: str, parameter: torch.Tensor) -> WholeGradient:
    """The hook of a parameter that requires a gradient; it is registered if there is none."""
    for hook in gradient_hooks(parameter):
        if isinstance(hook, WholeGradient):
            return hook
    made = WholeGradient(name)
    parameter.register_hook(made)  # type: ignore[no-untyped-call]
    return made
