"""Numbers that are not finite: which instruction of a pass made the first NaN or infinity, and on which rank.

A pass is watched instruction by instruction, and raises at its end, on all ranks, if any of its results is not finite.
What is not finite on the way alone does not count: masks are made of infinities, and the padding of uneven shards may
hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from autopar.extensions import Plug
from autopar.ir.graph import Node
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.passes.capture.errors import listed
from autopar.runtime.agreement import exchange
from autopar.runtime.call import WATCHES
from autopar.runtime.compiled import watched_by
from autopar.runtime.failures import place_of
from autopar.runtime.state import State


class Watch:
    """Watches one pass of a program on this rank."""

    def __init__(self, program: Program) -> None:
        self.program, self.number = program, 0
        self.first: dict[str, tuple[int, str]] = {}
        """NaN and infinity -> the number of the instruction that made it first, and what it is."""

    def given(self, inputs: Sequence[ProgramInput], values: Sequence[torch.Tensor]) -> None:
        """Look at what the pass begins with."""
        for i, value in zip(inputs, values, strict=False):
            self._note([value], f"{i.role} {i.target}, as it was given")

    def __call__(self, instruction: Node, values: tuple[Any, ...]) -> None:
        self.number += 1
        # a collective's result is there when it has been waited for
        if instruction.collective is None:
            self._note(values, place_of(instruction, self.program))

    def _note(self, values: Sequence[Any], what: str) -> None:
        for value in values:
            for kind in kinds_of(value) - self.first.keys():
                self.first[kind] = self.number, what


def kinds_of(value: Any) -> set[str]:
    """Which of "NaN" and "infinity" are among the numbers of a tensor."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return set()
    has = {"NaN": value.isnan(), "infinity": value.isinf()}
    return {kind for kind, elements in has.items() if elements.any()}


@contextmanager
def finite(state: State, what: str, inputs: Sequence[torch.Tensor]) -> Iterator[list[Any]]:
    """Within it a pass runs, and puts its results, in the order of the program's, into the list. Raises
    FloatingPointError on all ranks, at its end, if any is not finite."""
    results: list[Any] = []
    watch = Watch(state.program)
    watch.given(state.inputs if what == "forward" else (), inputs)
    with watched_by(watch):
        yield results
    _raise_together(state, watch, what, results)


def _raise_together(state: State, watch: Watch, what: str, results: Sequence[torch.Tensor | None]) -> None:
    outputs = state.results if what == "forward" else state.gradient_outputs
    wrong = [o for o, local in zip(outputs, results, strict=False) if local is not None and _kinds(state, o, local)]
    names = [f"{'gradient of ' if o.role == 'gradient' else ''}{o.target}" for o in wrong]
    everyone = exchange((dist.get_rank() if dist.is_initialized() else 0, names, watch.first), state.mesh)
    bad = next((names for _, names, _ in everyone if names), None)
    if bad is None:
        return
    told = []
    for kind in ("NaN", "infinity"):
        seen = sorted((first[kind], rank) for rank, _, first in everyone if kind in first)
        if seen:
            (_, place), rank = seen[0]
            told.append(f"the first {kind} came on rank {rank}, {place}")
    raise FloatingPointError(
        f"in the {what} pass of call {state.module.handshake.calls}, {listed(bad, 3)} "
        f"{'is' if len(bad) == 1 else 'are'} not finite: {'; '.join(told)}"
    )


def _kinds(state: State, output: ProgramOutput, local: torch.Tensor) -> set[str]:
    """Of a result, without padding."""
    if output.meta is None:
        return kinds_of(local)
    return kinds_of(state.values.whole_place(output.layout).unpadded(local, output.meta.shape))


WATCHES.know(Plug("finite", finite))
