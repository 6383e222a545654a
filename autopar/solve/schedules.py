"""Schedules of pipelines by name: functions from devices and micro-batches to a `Schedule`.

F, I and W are the seconds of a stage's forward, gradient of inputs and gradient of weights for a micro-batch, B both
gradients; p devices, m micro-batches, v stages (chunks) a device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain as joined

from autopar.extensions import Table
from autopar.ir.schedule import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, Edge, Schedule, chain, played


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What one micro-batch takes on a stage, and what the stage holds of it."""

    forward_seconds: float
    inputs_seconds: float
    weights_seconds: float
    whole_seconds: float | None = None
    """Of a backward in one piece; that of its two parts if None."""
    held_bytes: float = 0.0
    """From the start of the forward until the gradient of inputs is there."""
    kept_bytes: float = 0.0
    """From then on until that of weights is."""
    rest_bytes: float = 0.0
    """At all times, whatever the micro-batches: parameters, gradients, states of the optimizer."""

    def seconds(self, kind: str) -> float:
        parts = {FORWARD: self.forward_seconds, INPUTS: self.inputs_seconds, WEIGHTS: self.weights_seconds}
        whole = self.inputs_seconds + self.weights_seconds if self.whole_seconds is None else self.whole_seconds
        return whole if kind == BACKWARD else parts[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """What the stages of a program cost. `transfers` are the seconds that a value is on its way between two stages on
    different devices; by default each stage needs the one before, at once. Where links are shared, the values that a
    device sends to another travel one after the other."""

    stages: tuple[StageCost, ...]
    transfers: Mapping[Edge, float] | None = None
    shared_links: bool = False

    @property
    def seconds(self) -> dict[str, tuple[float, ...]]:
        return {kind: tuple(stage.seconds(kind) for stage in self.stages) for kind in "FBIW"}

    @property
    def edges(self) -> Mapping[Edge, float]:
        return chain(len(self.stages)) if self.transfers is None else self.transfers

    def played(self, schedule: Schedule) -> tuple[list[list[float]], list[list[float]]]:
        """When each action of each device starts and ends. Raises ValueError for costs of other stages, and where
        devices wait for each other."""
        if len(self.stages) != schedule.stages:
            raise ValueError(f"{schedule.name} has {schedule.stages} stages, and costs are those of {len(self.stages)}")
        return played(schedule, self.seconds, self.edges, shared=self.shared_links)

    def peaks(self, schedule: Schedule) -> list[tuple[float, int]]:
        """The most bytes of each device, and the position of the first action that reaches them."""
        peaks = []
        for device, order in enumerate(schedule.orders):
            now = sum(cost.rest_bytes for cost, d in zip(self.stages, schedule.devices, strict=True) if d == device)
            peak = (now, 0)
            for at, action in enumerate(order):
                now += self.change(action)
                if now > peak[0]:
                    peak = (now, at)
            peaks.append(peak)
        return peaks

    def change(self, action: Action) -> float:
        """How many bytes more a device holds: from the start of a forward, from the end of a backward on."""
        cost = self.stages[action.stage]
        held, kept = cost.held_bytes, cost.kept_bytes
        return {FORWARD: held, INPUTS: kept - held, WEIGHTS: -kept, BACKWARD: -held}.get(action.kind, 0.0)


Unit = tuple[str, int]
"""A kind and a chunk; micro-batches are counted up per unit."""


def _numbered(units: Iterable[Unit], stages: tuple[int, ...], micro_batches: int) -> tuple[Action, ...]:
    """Units of a device's chunks, each with the next micro-batch of its kind; without those beyond the last."""
    counts: dict[Unit, int] = {}
    order = []
    for kind, chunk in units:
        unit = (INPUTS if kind == BACKWARD else kind, chunk)
        count = counts[unit] = counts.get(unit, -1) + 1
        if kind == BACKWARD:
            counts[WEIGHTS, chunk] = count
        if count < micro_batches:
            order.append(Action(stages[chunk], kind, count))
    return tuple(order)


def zigzag(devices: int, chunks: int) -> tuple[int, ...]:
    """The device of each stage: there and back again, so that the last stage of a pass and the first of the next are on
    one device. Of two chunks it is the V of the zero-bubble papers."""
    return tuple(joined.from_iterable((range(devices), range(devices)[::-1])[c % 2] for c in range(chunks)))


def _schedule(
    name: str, devices: tuple[int, ...], micro_batches: int, units: Callable[[int], Iterable[Unit]]
) -> Schedule:
    held: dict[int, tuple[int, ...]] = {}
    for stage, device in enumerate(devices):
        held[device] = (*held.get(device, ()), stage)
    orders = tuple(_numbered(units(device), held[device], micro_batches) for device in range(len(held)))
    return Schedule(name=name, micro_batches=micro_batches, devices=devices, orders=orders)


def gpipe(devices: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965). A device idles (p-1)(F+B) and holds what
    all m micro-batches keep for backward."""
    units = [(FORWARD, 0)] * micro_batches + [(BACKWARD, 0)] * micro_batches
    return _schedule("gpipe", tuple(range(devices)), micro_batches, lambda device: units)


def _staggered(warm: int, lag: int, micro_batches: int, backward: str = INPUTS) -> Iterator[Unit]:
    """`warm` forwards, then a backward and a forward in turn; gradients of weights `lag` micro-batches later."""
    yield from [(FORWARD, 0)] * warm
    for count in range(micro_batches):
        yield backward, 0
        if backward == INPUTS and count >= lag:
            yield WEIGHTS, 0
        yield FORWARD, 0
    yield from [(WEIGHTS, 0)] * (lag if backward == INPUTS else 0)


def one_f_one_b(devices: int, micro_batches: int) -> Schedule:
    """Each backward as soon as it can be (PipeDream-Flush, arXiv 2006.09503; Megatron-LM's 1F1B). A device idles
    (p-1)(F+B), stage i of 0.. holds p-i micro-batches."""
    return _schedule(
        "1f1b", tuple(range(devices)), micro_batches, lambda i: _staggered(devices - i, 0, micro_batches, BACKWARD)
    )


def zb_h1(devices: int, micro_batches: int) -> Schedule:
    """1F1B whose gradients of weights come later the later the stage (Qi et al. 2023, arXiv 2401.10241, section 2). A
    device idles (p-1)(F+I-W); stage i of 0.. holds p-i micro-batches, and i more between I and W."""
    return _schedule("zb-h1", tuple(range(devices)), micro_batches, lambda i: _staggered(devices - i, i, micro_batches))


def zb_h2(devices: int, micro_batches: int) -> Schedule:
    """ZB-H1 with twice the micro-batches in flight (arXiv 2401.10241, section 2). A device idles (p-1)(F+I-2W), or not
    at all where F = I = W and its own first and last action are what counts; stage i of 0.. holds 2(p-i)-1
    micro-batches, and 2i more between I and W."""
    return _schedule(
        "zb-h2",
        tuple(range(devices)),
        micro_batches,
        lambda i: _staggered(2 * (devices - i) - 1, 2 * i, micro_batches),
    )


def interleaved(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B on v stages a device, p apart (Narayanan et al. 2021, arXiv 2104.04473). Micro-batches pass in groups of p
    through one chunk after the other. A device idles (p-1)(F+B)/v, where F and B are those of all its chunks.

    Where p does not divide m, groups are as even as can be and none is smaller than p; if m < p, all are one group.
    Larger groups hold more micro-batches. Where Megatron-LM and torch have an order it is theirs."""
    rounds = max(1, micro_batches // devices)
    groups = [(micro_batches + k) // rounds for k in range(rounds)][::-1]
    forwards = [(FORWARD, chunk) for group in groups for chunk in range(chunks) for _ in range(group)]
    backwards = [(BACKWARD, chunk) for group in groups for chunk in reversed(range(chunks)) for _ in range(group)]

    def units(device: int) -> Iterator[Unit]:
        warm = min(len(forwards), (chunks - 1) * groups[0] + 2 * (devices - 1 - device))
        yield from forwards[:warm]
        for forward, backward in zip(forwards[warm:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards) - warm :]

    return _schedule("interleaved", tuple(range(devices)) * chunks, micro_batches, units)


def zb_v(devices: int, micro_batches: int) -> Schedule:
    """Zero bubble on two stages a device, there and back (arXiv 2401.10241, section 6; 2405.15362). No device idles
    between its first and its last action if F = I = W and m >= 2p-1; each holds what p micro-batches keep."""

    def units(i: int) -> Iterator[Unit]:
        back, forth = [(INPUTS, 1), (WEIGHTS, 1)], [(INPUTS, 0), (WEIGHTS, 0)]
        count = max(micro_batches, 2 * devices - 1)
        yield from [(FORWARD, 0)] * (2 * (devices - i) - 1)
        yield from [(FORWARD, 1), (FORWARD, 0)] * i
        yield from [(FORWARD, 1), *back] * (devices - i)
        yield from [(FORWARD, 0), *forth, (FORWARD, 1), *back] * (count - 2 * devices + i + 1)
        yield from [*forth, (FORWARD, 1), *back] * (devices - 1 - i)
        yield from [(INPUTS, 0), (INPUTS, 1)] * i
        yield from forth * (devices - i)
        yield from [(WEIGHTS, 1)] * i + [(WEIGHTS, 0)] * i

    return _schedule("zb-v", zigzag(devices, 2), micro_batches, units)


def dual_pipe_v(devices: int, micro_batches: int) -> Schedule:
    """Each forward beside the backward of another micro-batch, on the stages of ZB-V (DeepSeek-V3, arXiv 2412.19437,
    cut in half; github.com/deepseek-ai/DualPipe). Meant for devices that run the two at once; here one follows the
    other. Each device holds what p micro-batches keep, and the forward that runs."""

    def units(i: int) -> Iterator[Unit]:
        behind, count = devices - 1 - i, max(micro_batches, 2 * devices)
        yield from [(FORWARD, 0)] * (2 * behind)
        yield from [(FORWARD, 0), (FORWARD, 1)] * (i + 1)
        yield from [(INPUTS, 1), (WEIGHTS, 1), (FORWARD, 1)] * behind
        yield from [(FORWARD, 0), (BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0)] * (count - 2 * devices + i + 1)
        yield from [(BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0)] * behind
        last = [1, 0] * (i + 1)
        yield from ((BACKWARD, chunk) for chunk in last[: i + 1])
        yield from ((INPUTS, chunk) for chunk in last[i + 1 :])
        for number, chunk in enumerate(last[i + 1 :] + [0] * behind):
            yield WEIGHTS, chunk
            if number < behind:
                yield INPUTS, 0

    return _schedule("dualpipe-v", zigzag(devices, 2), micro_batches, units)
