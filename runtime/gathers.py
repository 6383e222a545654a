"""Parameters that are gathered once a step: what the first micro-batch gathers, the others read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.compat import calls
from autopar.passes.lower.hold import held

from .execute import Executable
from .state import State


class Gathers:
    """What the forward of one program has gathered since parameters were written last."""

    def __init__(self, state: State) -> None:
        parts = held(state.program)
        self.count = len(parts.names)
        self.cold, self.warm = map(state.compiled, (parts.cold, parts.warm))
        self.parameters = [k for k, i in enumerate(state.inputs) if i.role == "parameter"]
        self.values: list[torch.Tensor] = []
        self.versions: list[int] = []

    def forward(
        self, plain: Executable, given: Sequence[torch.Tensor], values: list[torch.Tensor], *, waits: bool
    ) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor, ...]]:
        """The forward half with what is held, if parameters are as they were then. If not, the `plain` one, or, where a
        reduction `waits` for further micro-batches, one that holds what it gathers. `given` are this call's values of
        the program's inputs as the module has them."""
        if not self.count:
            return plain.forward(values)
        versions = calls.versions([given[k] for k in self.parameters])
        if self.values and versions == self.versions:
            return self.warm.forward([*values, *self.values])
        self.values = []
        if not waits:
            return plain.forward(values)
        results, saved = self.cold.forward(values)
        self.values, self.versions = list(saved[-self.count :]), versions
        return results, saved[: -self.count]

    def drop(self) -> None:
        self.values = []
