"""What a run is seen by: tokens a second, MFU, what ranks wait for, memory; beside what the plan predicts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from autopar.planning.plan import Plan
from autopar.planning.provenance import flops_of, work_of
from autopar.planning.reading import cluster_of
from autopar.planning.texts import short_bytes, short_seconds

from .agreement import is_first
from .memory import held_bytes
from .module import ParallelModule
from .state import State
from .timing import synchronize
from .waits import Waits

logger = logging.getLogger("autopar")


class ScalarWriter(Protocol):
    """Such as a `SummaryWriter` of TensorBoard."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """What this rank waited for in a step: for collectives of a kind on a mesh axis, and what the plan predicts."""

    kind: str
    axis: str
    seconds: float
    predicted_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The mean of some steps on this rank. Items are tokens, or samples, of the global batch."""

    step: int
    """The number of the last one."""
    steps: int
    seconds: float
    """From one step to the next, without what was paused, and without captures."""
    predicted_seconds: float
    unit: str
    items_per_second: float
    utilization: float | None
    """MFU: the model's arithmetic over what all devices of the plan's cluster could do at their peak, if it has one."""
    predicted_utilization: float | None
    waited: tuple[Waited, ...]
    """The longest first."""
    bytes: int
    """Of memory that this rank holds now: on a GPU that of tensors, otherwise all of the process."""
    peak_bytes: int
    predicted_bytes: int
    """Of the tensors of a training step at their peak."""

    @property
    def exposed_seconds(self) -> float:
        return sum(each.seconds for each in self.waited)

    @property
    def predicted_exposed_seconds(self) -> float:
        return sum(each.predicted_seconds for each in self.waited)

    def scalars(self) -> dict[str, float]:
        """Everything by a name, as for TensorBoard."""
        found = {
            f"{self.unit}_per_second": self.items_per_second,
            "seconds": self.seconds, "seconds/predicted": self.predicted_seconds,
            "exposed_seconds": self.exposed_seconds, "exposed_seconds/predicted": self.predicted_exposed_seconds,
            "bytes": float(self.bytes), "peak_bytes": float(self.peak_bytes),
            "peak_bytes/predicted": float(self.predicted_bytes),
        }  # fmt: skip
        if self.utilization is not None and self.predicted_utilization is not None:
            found |= {"utilization": self.utilization, "utilization/predicted": self.predicted_utilization}
        for each in self.waited:
            found[f"exposed_seconds/{each.kind}_{each.axis}"] = each.seconds
            found[f"exposed_seconds/{each.kind}_{each.axis}/predicted"] = each.predicted_seconds
        return found

    def __str__(self) -> str:
        """With what the plan predicts in parentheses."""
        waited = ", ".join(
            f"{each.kind} on {each.axis} {short_seconds(each.seconds)} ({short_seconds(each.predicted_seconds)})"
            for each in self.waited
        )
        mfu = ""
        if self.utilization is not None and self.predicted_utilization is not None:
            mfu = f"MFU {self.utilization:.1%} ({self.predicted_utilization:.1%}), "
        return (
            f"step {self.step}: {short_seconds(self.seconds)} ({short_seconds(self.predicted_seconds)}), "
            f"{self.items_per_second:,.0f} {self.unit}/s, {mfu}waits {short_seconds(self.exposed_seconds)} "
            f"({short_seconds(self.predicted_exposed_seconds)}){': ' if waited else ''}{waited}; memory "
            f"{short_bytes(self.bytes)}, {short_bytes(self.peak_bytes)} at the peak "
            f"({short_bytes(self.predicted_bytes)} of tensors)"
        )


class Metrics:
    """What the training steps of a parallel module take, beside what its plan predicts:

        metrics = autopar.Metrics(model, every=50)
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            metrics.step()

    `module` is what `autopar.parallelize` returned. Each `every` steps, `step()` returns what they took
    (`Measured`) and reports it: to the log (`autopar`, level INFO, on the first rank), or `to` a function that takes
    it, or `to` a writer of TensorBoard. The first step, which captures and warms up, is left out. Evaluation between
    steps belongs in `with metrics.paused():`.

    Each rank measures itself; nothing is sent, and no device is synchronized, so that on a GPU a host that is ahead of
    its device has what was done up to then. With `synchronize`, each report waits for the device. All micro-batches of
    a step count, as well as smaller last batches, by the programs that ran. MFU is in terms of the plan's cluster: give
    `parallelize` yours. `close()` ends it. Raises ValueError for what cannot be measured.
    """

    def __init__(
        self,
        module: ParallelModule,
        *,
        every: int = 10,
        to: Callable[[Measured], object] | ScalarWriter | None = None,
        synchronize: bool = False,
    ) -> None:
        if not isinstance(module, ParallelModule):
            raise ValueError(f"module is a {type(module).__name__}: give what autopar.parallelize returns")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every is {every!r}: give a number of steps, at least 1")
        if not (to is None or callable(to) or hasattr(to, "add_scalar")):
            raise ValueError(f"to is {to!r}: give a function, a writer with add_scalar, or None for the log")
        self.state: State = vars(module)["_state"]
        self.observed = self.state.module.observed
        if self.observed.clock is not None:
            raise ValueError("the module has Metrics: close() them first")
        self.plan: Plan = module.plan
        self.every, self.to, self.synchronize = every, to, synchronize
        self.is_first = is_first(self.state.mesh)
        self.peak_of = cluster_of(self.plan).device.peak_flops
        self.work: WeakKeyDictionary[State, _Work] = WeakKeyDictionary()
        self.waits = Waits(self.state.device)
        self.observed.clock = self.waits
        self.steps = self.counted = 0
        self.began = self.left_out = 0.0

    def step(self) -> Measured | None:
        """After each step of the optimizer."""
        self.steps += 1
        if self.steps == 1:
            self._begin()
            return None
        self.counted += 1
        if self.steps % self.every:
            return None
        measured = self._measured()
        self._begin()
        if self.to is None:
            if self.is_first:
                logger.info("%s", measured)
        elif callable(self.to):
            self.to(measured)
        else:
            for name, value in measured.scalars().items():
                self.to.add_scalar(f"autopar/{name}", value, measured.step)
        return measured

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens within it does not count: an evaluation, a checkpoint."""
        began, captured = time.perf_counter(), self.observed.capture_seconds
        self.observed.clock = None
        try:
            yield
        finally:
            self.observed.clock = self.waits
            self.observed.capture_seconds = captured  # within what is left out
            self.left_out += time.perf_counter() - began

    def close(self) -> None:
        self.observed.clock = None
        self.observed.backwards.clear()

    def _now(self) -> float:
        if self.synchronize:
            synchronize(self.state.device)
        return time.perf_counter()

    def _begin(self) -> None:
        self.observed.backwards.clear()
        self.observed.capture_seconds = 0.0
        self.waits.taken()
        self.counted, self.left_out, self.began = 0, 0.0, self._now()

    def _measured(self) -> Measured:
        observed, plan = self.observed, self.plan
        elapsed = self._now() - self.began - self.left_out - observed.capture_seconds
        items = ideal = 0.0
        for state, count in observed.backwards.items():
            work = self._work_of(state)
            items += count * work.items
            ideal += count * work.ideal_seconds
        now, most = held_bytes(self.state.device)
        return Measured(
            step=self.steps,
            steps=self.counted,
            seconds=elapsed / self.counted,
            predicted_seconds=plan.seconds,
            unit=self._work_of(self.state).unit,
            items_per_second=items / elapsed,
            utilization=None if plan.utilization is None else ideal / elapsed,
            predicted_utilization=plan.utilization,
            waited=self._waited(self.waits.taken()),
            bytes=now,
            peak_bytes=most,
            predicted_bytes=int(plan.bytes),
        )

    def _waited(self, seconds: Mapping[tuple[str, str], float]) -> tuple[Waited, ...]:
        rows = () if self.plan.timing is None else self.plan.timing.communication
        predicted = {(row.kind, row.axis): row.exposed_seconds for row in rows}
        found = (
            Waited(
                kind=kind,
                axis=axis,
                seconds=seconds.get((kind, axis), 0.0) / self.counted,
                predicted_seconds=predicted.get((kind, axis), 0.0),
            )
            for kind, axis in {**predicted, **seconds}
        )
        return tuple(sorted(found, key=lambda each: (-each.seconds, each.kind, each.axis)))

    def _work_of(self, state: State) -> _Work:
        if state not in self.work:
            unit, items = work_of(state.captured)
            flops = flops_of(state.captured.graph)
            ideal = sum(count / self.peak_of(dtype) for dtype, count in flops.items()) / self.plan.ranks
            self.work[state] = _Work(unit=unit, items=items, ideal_seconds=ideal)
        return self.work[state]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Of one forward and backward."""

    unit: str
    items: int
    ideal_seconds: float
