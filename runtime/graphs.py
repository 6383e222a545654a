"""Halves of a program as CUDA graphs: one launch in the place of hundreds.

A graph reads and writes the same memory in each replay. Parameters are read where they are; everything else that a call
is given is copied to where the graph reads it, and what a call gets is a copy of what the graph wrote, but for what
forward keeps for backward: that stays in the graphs' memory, and for as long as somebody holds it, such as a call
whose backward has not run, forward runs without a graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.compat.calls import memory_users
from autopar.compat.tensors import memory_of

WARM = 2
"""Calls before a half is recorded: kernels are tuned, and memory is looked at, in the first."""

Tensors = Sequence[torch.Tensor | None]


@dataclass(eq=False)
class Recorded:
    """A half, which is recorded after some calls. `stays` says which of its arguments are read where they are, and
    `split` makes of what it returns what is copied for the caller and what stays in the graph's memory."""

    half: Callable[[list[torch.Tensor]], Any]
    stays: Sequence[bool]
    split: Callable[[Any], tuple[Tensors, Tensors]]
    join: Callable[[Tensors, Tensors], Any]
    pool: Any
    calls: int = 0
    graph: Any = None
    given: list[torch.Tensor] = field(default_factory=list)
    copied: Tensors = ()
    kept: Tensors = ()
    users: tuple[int, ...] = ()
    """Of the memory of each value that is kept, how many hold it if no call does."""

    def __call__(self, arguments: list[torch.Tensor]) -> Any:
        if self.calls < WARM:
            self.calls += 1
            return self.half(arguments)
        if self.graph is None:
            self._record(arguments)
        is_there = all(
            not stays or x.data_ptr() == there.data_ptr()
            for x, there, stays in zip(arguments, self.given, self.stays, strict=True)
        )
        if self.graph is False or not is_there or self._users() != self.users:
            return self.half(arguments)
        for x, there, stays in zip(arguments, self.given, self.stays, strict=True):
            if not stays:
                there.copy_(x)
        arguments.clear()
        self.graph.replay()
        copies = [x if x is None else x.clone() for x in self.copied]
        return self.join(copies, [x if x is None else x.detach() for x in self.kept])

    def _users(self) -> tuple[int, ...]:
        fixed = {memory_of(x) for x, stays in zip(self.given, self.stays, strict=True) if stays}
        return tuple(memory_users(x) for x in self.kept if x is not None and memory_of(x) not in fixed)

    def _record(self, arguments: list[torch.Tensor]) -> None:
        self.given = [x if stays else x.clone() for x, stays in zip(arguments, self.stays, strict=True)]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                self.copied, self.kept = self.split(self.half([*self.given]))
        except RuntimeError as error:
            self.graph = False
            warnings.warn(
                f"a program runs without CUDA graphs, since it cannot be recorded: {error}".splitlines()[0],
                stacklevel=2,
            )
            return
        self.graph, self.users = graph, self._users()


def recorded(
    forward: Callable[[list[torch.Tensor]], Any],
    backward: Callable[[list[torch.Tensor]], Any],
    roles: Sequence[str],
    saved: int,
    tangents: int,
) -> tuple[Recorded, Recorded]:
    """Both halves of a program, whose inputs have these `roles`, and which keeps so many values for backward."""
    pool = torch.cuda.graph_pool_handle()
    first = Recorded(
        half=forward,
        stays=[role == "parameter" for role in roles if role != "tangent"],
        split=lambda made: made,
        join=lambda results, kept: (tuple(results), tuple(kept)),
        pool=pool,
    )
    second = Recorded(
        half=backward,
        stays=[True] * saved + [False] * tangents,
        split=lambda gradients: (gradients, ()),
        join=lambda gradients, _: tuple(gradients),
        pool=pool,
    )
    return first, second
