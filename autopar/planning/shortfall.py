"""Why no plan keeps a memory limit, and what would: the error that people read.

The figures of what would fit are estimates from the composition of the smallest plan, phase by phase: what scales with
the batch, with the ranks, and with the optimizer. A plan for the changed step may need less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost.memory import Moment
from autopar.cost.optimizers import OPTIMIZERS, Optimizer
from autopar.ir.layout import Split, local_meta
from autopar.ir.program import Program, ProgramInput
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space
from autopar.solve.problem import Infeasible

from .checks import RANKS_MOST
from .provenance import samples
from .steps import Estimate
from .texts import bytes_text

UPDATE = "optimizer step"
"""The phase (`cost.memory`) in which temporaries are the optimizer's."""


TIMES_MOST = 64
"""Nobody takes more times as many ranks for want of memory."""

LITTLE_PART = 0.05
"""What saves less than this part of a peak saves next to nothing."""


class DoesNotFit(Infeasible):
    """No plan keeps a memory limit. `smallest` is the assignment with the smallest peak that was reached."""

    smallest: Assignment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Of a step: `batch` and `ranks` are factors; `accumulating` holds all gradients through forward and backward, as
    micro-batches do."""

    batch: float = 1.0
    ranks: int = 1
    optimizer: Optimizer | None = None
    accumulating: bool = False


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """The exact `estimate` of the smallest plan that was reached, over the `limit`, which is the device's if
    `by_device`. Its text says what would fit."""

    space: Space
    estimate: Estimate
    limit: float
    by_device: bool
    may_offload: bool = False
    """Whether the host could hold what is kept for backward, and was not asked to."""

    def __str__(self) -> str:
        peak = self.estimate.peak
        parts = {
            "parameters": peak.parameters,
            "gradients": peak.gradients,
            f"optimizer ({self.space.optimizer.name})": peak.optimizer,
            "buffers and inputs": peak.inputs,
            "outputs": peak.outputs,
            "kept for backward": peak.activations,
            "temporaries": peak.temporaries,
        }
        composed = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
        would: list[str] = []
        would_not: list[str] = []
        for impossible, changes in self._remedies():
            if not changes:
                would_not.append(impossible)
                continue
            words, change = self._enough(changes)
            needed = self.needed(change)
            (would if needed <= self.limit else would_not).append(f"{words} (about {bytes_text(needed)})")
        advice = f" It would fit with {_either(would)}." if would else " None of the usual remedies is enough alone."
        if would_not:
            advice += f" It would not fit with {_either(would_not)}."
        if not would:
            advice += f" {self._last_resort()}"
        if self.may_offload and peak.bytes - peak.activations <= self.limit:
            advice += " The host's memory may hold what is kept for backward: allow it with offload=True."
        return (
            f"no plan fits in {self._limit()}. The smallest peak that was reached is "
            f"{bytes_text(peak.bytes, up=True)} a rank, in {peak.at}: {composed}.{advice}"
        )

    def _limit(self) -> str:
        device, limit = self.space.cluster.device, bytes_text(self.limit)
        if not self.by_device or device.memory_bytes is None:
            return f"{limit}, the memory limit that was given"
        usable = device.usable_bytes or 0.0
        memory, reserve = bytes_text(device.memory_bytes), bytes_text(device.memory_bytes - usable)
        headroom = f" and {1.0 - self.limit / usable:.0%} of headroom" if self.limit < usable else ""
        return f"{limit}, the memory of {device.name} ({memory}) less its reserve ({reserve}){headroom}"

    # ---- what would do

    def _remedies(self) -> Iterator[tuple[str, list[tuple[str, Remedy]]]]:
        """What a person would change: why that cannot be, and else the changes in words, the smallest first."""
        cluster, own, ranks = self.space.cluster, self.space.optimizer, math.prod(self.space.mesh)
        whole, devices, batches = self._batch_size, min(cluster.devices, RANKS_MOST), list(self._batches())
        factors = (2**k for k in range(1, TIMES_MOST.bit_length()))
        yield (
            f"more ranks, since {cluster.name} has no more than {devices} devices",
            [(f"{n * ranks} ranks instead of {ranks}", Remedy(ranks=n)) for n in factors if n * ranks <= devices],
        )
        yield (
            "a smaller batch, which these ranks do not divide",
            [(f"a batch of {size} instead of {whole}", Remedy(batch=size / whole)) for size in batches],
        )
        yield (
            "micro-batches, which these ranks do not divide",
            [
                (
                    f"{whole // size} micro-batches of {size} whose gradients add up",
                    Remedy(batch=size / whole, accumulating=True),
                )
                for size in batches
                if whole % size == 0
            ],
        )
        others = sorted(OPTIMIZERS.values(), key=self._states, reverse=True)
        yield (
            f"a narrower optimizer, since none keeps less than {own.name}",
            [
                (f"the optimizer {other.name} instead of {own.name}", Remedy(optimizer=other))
                for other in others
                if self._states(other) < self._states(own)
            ],
        )

    def _enough(self, changes: list[tuple[str, Remedy]]) -> tuple[str, Remedy]:
        """The first change that is enough, or else the first beyond which more of it saves next to nothing."""
        needed = [self.needed(change) for _, change in changes]
        wanted = max(self.limit, (1.0 + LITTLE_PART) * needed[-1])
        return next(change for change, size in zip(changes, needed, strict=True) if size <= wanted)

    def _last_resort(self) -> str:
        """What to do where nothing is enough alone: two at once, or else another limit or model."""
        (_, ranks), (_, batches), _, (_, optimizers) = self._remedies()
        for narrower, of in optimizers:
            for words, change in [*([self._enough(ranks)] if ranks else []), *batches]:
                if (needed := self.needed(replace(change, optimizer=of.optimizer))) <= self.limit:
                    both = " and ".join(each.partition(" instead")[0] for each in (words, narrower))
                    return f"Take {both} together (about {bytes_text(needed)})."
        least = bytes_text(self.estimate.peak.bytes, up=True)
        more = f"devices with {least} to use" if self.by_device else f"a memory limit of at least {least}"
        return f"Give {more}, or a smaller model."

    # ---- what a change leaves

    def needed(self, change: Remedy) -> float:
        """About the peak of the changed step: the largest of its phases."""
        return max(self._needed(phase, change) for phase in self._phases)

    def _needed(self, phase: Moment, change: Remedy) -> float:
        """Parameters, gradients and states that the ranks split are split further by more of them. What is computed
        from the batch scales with it, and is split further too. Gathered weights stay as they are."""
        still = self._split_part / change.ranks + 1 - self._split_part
        peak, optimizer = phase.peak(phase.phase), self.space.optimizer
        states, temporaries = float(peak.optimizer), float(peak.temporaries)
        if change.optimizer is not None:
            states = self._states(change.optimizer)
        from_batch = peak.outputs + peak.inputs * self._batch_part
        if peak.at == UPDATE:
            copies = optimizer.copies if change.optimizer is None else change.optimizer.copies
            weights = temporaries * copies / max(1, optimizer.copies) * still
        else:
            weights = phase.weight_bytes
            from_batch += temporaries + peak.activations - weights
        gradients = float(peak.gradients)
        if change.accumulating and peak.at != UPDATE:
            gradients += max(one.peak(one.phase).gradients for one in self._phases)
        resting = peak.parameters + gradients + states
        buffers = peak.inputs * (1 - self._batch_part)
        return resting * still + weights + buffers + from_batch * change.batch / change.ranks

    @cached_property
    def _phases(self) -> list[Moment]:
        return self.estimate.phases

    @cached_property
    def program(self) -> Program:
        return self.estimate.program

    def _bytes(self, given: ProgramInput) -> int:
        return local_meta(given.meta, given.layout, self.program.mesh).bytes

    @cached_property
    def _parameters(self) -> list[ProgramInput]:
        return [i for i in self.program.inputs if i.role == "parameter"]

    def _states(self, optimizer: Optimizer) -> float:
        trained = [i for i in self._parameters if i.target in self.program.trained]
        return sum(optimizer.bytes(local_meta(i.meta, i.layout, self.program.mesh)) for i in trained)

    @cached_property
    def _split_part(self) -> float:
        """Of the parameters' bytes, those that ranks split; all if there is one rank."""
        if math.prod(self.program.mesh) == 1:
            return 1.0
        split = [i for i in self._parameters if any(isinstance(placement, Split) for placement in i.layout)]
        return sum(map(self._bytes, split)) / max(1, sum(map(self._bytes, self._parameters)))

    @cached_property
    def _batch_inputs(self) -> list[ProgramInput]:
        return [i for i in self.program.inputs if i.role == "input" and i.meta.shape]

    @cached_property
    def _batch_part(self) -> float:
        """Of the bytes of buffers and inputs, those of inputs."""
        both = [i for i in self.program.inputs if i.role not in ("parameter", "tangent")]
        return sum(map(self._bytes, self._batch_inputs)) / max(1, sum(map(self._bytes, both)))

    @cached_property
    def _batch_size(self) -> int:
        """The usual first dim of the inputs."""
        return samples(i.meta.shape for i in self._batch_inputs)

    def _batches(self) -> Iterator[int]:
        """Smaller batches, the largest first: those that the ranks divide which divide this one."""
        ranks = 1
        for given in self._batch_inputs:
            axes = zip(given.layout, self.program.mesh, strict=True)
            ranks = max(ranks, math.prod(n for p, n in axes if isinstance(p, Split) and p.dim == 0))
        parts = self._batch_size // ranks
        yield from (ranks * part for part in range(parts - 1, 0, -1) if parts % part == 0)


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, or {words[-1]}"
