"""Gradients that wait to be reduced: what backward passes within `no_sync()` leave.

In eager PyTorch, `.grad` is there after each backward: people read it, set it to None, add to it, and optimizers step
with it. So it is here: after a backward that reduces nothing, `.grad` is a DTensor that is reduced when somebody reads
it, on all ranks at once. The next backward that does reduce, reduces what has been added up together with its own, and
nobody need read it before. What nobody holds any more is gone, with the memory that it took.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch.distributed.tensor import DTensor

from autopar.compat.distributed import local_tensor
from autopar.compat.lazy import computation_of, later, postpone
from autopar.compat.neutral import without_autocast

from .compiled import clocked_by


class PendingState(Protocol):
    """What a program's state has for gradients that wait (`state.State`)."""

    @property
    def device(self) -> torch.device: ...
    @property
    def module(self) -> Any: ...
    @property
    def parts(self) -> Any: ...
    def split_gradient(self, name: str, value: torch.Tensor) -> Any: ...


BackwardForm = Literal["step", "micro", "last"]
"""Of a backward: the program's own, one that leaves gradients unreduced, or one that adds such to its own."""


@contextmanager
def quietly(state: PendingState) -> Iterator[None]:
    """How a half of a program runs: it casts by itself, and its waits are timed if somebody asks."""
    with without_autocast(state.device.type), clocked_by(state.module.observed.clock):
        yield


class Unreduced:
    """The sum of what backward passes of one program leave, and the gradients that are to come of it."""

    def __init__(self, state: PendingState, names: frozenset[str]) -> None:
        self.state, self.names = state, names
        self.sums: list[torch.Tensor] = []
        """Of what enters the program's tail."""
        self.reduced: dict[str, torch.Tensor] | None = None
        self.claims: WeakValueDictionary[str, GradientClaim] = WeakValueDictionary()

    def add(self, values: Sequence[torch.Tensor | None]) -> None:
        """Add up what a backward leaves. The first values become the sums."""
        mine = [value for value in values if value is not None]
        self.sums = self.sums or mine
        for total, value in zip(self.sums, mine, strict=True):
            if total is not value:
                total += value

    def reduce(self) -> dict[str, torch.Tensor]:
        """What this rank holds of each gradient. All ranks at once, the first time."""
        if self.reduced is None:
            state = self.state
            state.module.pending.drop_gathers()
            sums, self.sums = self.sums, []
            with torch.no_grad(), quietly(state):
                computed = state.parts.rest.backward(sums)
            outputs = (o.target for o in state.parts.of.rest.outputs)
            self.take({name: _own(x) for name, x in zip(outputs, computed, strict=True) if name in self.names})
        assert self.reduced is not None
        return self.reduced

    def take(self, computed: Mapping[str, torch.Tensor | None]) -> None:
        """Have gradients as a program gives them."""
        self.sums, self.reduced = [], {}
        for name, value in computed.items():
            assert value is not None
            self.reduced[name] = local_tensor(self.state.split_gradient(name, value))


def _own(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.clone(memory_format=torch.contiguous_format)


@dataclass(eq=False)
class GradientClaim:
    """A gradient's claim to what comes of the sum."""

    unreduced: Unreduced
    name: str

    def value(self) -> torch.Tensor:
        return self.unreduced.reduce().pop(self.name)


@dataclass(eq=False)
class Sum:
    """What a gradient will be that is not reduced yet."""

    claims: list[GradientClaim]

    def __call__(self, held: torch.Tensor | None) -> torch.Tensor:
        for claim in self.claims:
            held = claim.value() if held is None else held.add_(claim.value())  # into the same memory, as autograd does
        assert held is not None
        return held


@dataclass(eq=False)
class Pending:
    """What all programs of a module share of micro-batches."""

    reduces: bool = True
    """Whether a backward reduces now: not within `no_sync()`."""
    asks: bool = False
    """Whether calls ask if gradients may wait: from the first `no_sync()` on."""
    waits: bool = False
    """Whether backward passes have left gradients since one reduced."""
    unreduced: WeakValueDictionary[PendingState, Unreduced] = field(default_factory=WeakValueDictionary)
    """Program -> what its last backward passes left. The gradients keep it alive."""
    gathers: dict[PendingState, Any] = field(default_factory=dict)
    """Program -> what its forward has gathered in this step (`gathers.Gathers`), if that is held."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Pending:
        return Pending(reduces=self.reduces, asks=self.asks)

    def form(self, state: PendingState, receivers: Receivers | None) -> tuple[BackwardForm, Unreduced | None]:
        """That of a backward whose gradients these parameters take (None if somebody else does, or wants them now), and
        what earlier ones left, which it reduces together with its own."""
        if receivers is None:
            return "step", None
        if not self.reduces:
            return "micro", None
        unreduced = self.left(state, receivers)
        return ("step" if unreduced is None else "last"), unreduced

    def left(self, state: PendingState, receivers: Receivers) -> Unreduced | None:
        """What earlier backward passes left, if these parameters still have all of it in `.grad`."""
        unreduced = self.unreduced.get(state)
        if unreduced is None or unreduced.reduced is not None or unreduced.names != receivers.keys():
            return None
        for name, parameter in receivers.items():
            claim, waiting = unreduced.claims.get(name), computation_of(parameter.grad)
            if not isinstance(waiting, Sum) or claim not in waiting.claims:
                return None
        return unreduced

    def leave(self, state: PendingState, receivers: Receivers, values: Sequence[torch.Tensor | None]) -> None:
        """Add what a backward leaves to what the last ones left, or begin anew where somebody dropped or read that."""
        unreduced = self.left(state, receivers)
        if unreduced is None:
            unreduced = self.unreduced[state] = Unreduced(state, frozenset(receivers))
            for name, parameter in receivers.items():
                claim = unreduced.claims[name] = GradientClaim(unreduced, name)
                _have(parameter, claim)
        unreduced.add(values)
        self.waits = True

    def settle(self, parameters: Iterable[torch.Tensor]) -> None:
        """Reduce what waits in `.grad` of these, in their order, which is that of all ranks."""
        self.drop_gathers()
        if self.waits:
            for parameter in parameters:
                if computation_of(parameter.grad) is not None:
                    local_tensor(parameter.grad)  # type: ignore[arg-type]
            self.waits = False

    def drop_gathers(self) -> None:
        """Before parameters are written, which makes what was gathered of them old."""
        for gathers in self.gathers.values():
            gathers.drop()


Receivers = Mapping[str, DTensor]
"""Name -> the parameter to whose `.grad` a backward adds."""


def _have(parameter: DTensor, claim: GradientClaim) -> None:
    gradient = parameter.grad
    waiting = computation_of(gradient)
    if gradient is None:
        form = (parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
        parameter.grad = later(*form, local_tensor(parameter), Sum([claim]))
    elif isinstance(waiting, Sum):
        waiting.claims.append(claim)
    else:
        postpone(gradient, Sum([claim]))  # type: ignore[arg-type]


def can_wait(parameter: torch.Tensor, dtype: torch.dtype) -> TypeGuard[DTensor]:
    """Whether a gradient of this dtype may wait in the parameter's `.grad`."""
    gradient = parameter.grad
    if not isinstance(parameter, DTensor) or parameter.dtype != dtype:
        return False
    if gradient is None or computation_of(gradient) is not None:
        return True
    return type(gradient) is DTensor and gradient.placements == parameter.placements and not gradient.requires_grad
