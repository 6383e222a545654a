"""The profiler: a segment program as its ranks run it, instruction by instruction.

What runs is what training runs, the compiled program with its collectives under way, and a clock read after each
instruction. On one device alone there are no peers: local tensors of the right shapes stand in for what
collectives bring, and only the times of the device's own operators count.
"""

import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.cluster.measurements import Case
from autopar.ir import randomness
from autopar.ir.graph import Node
from autopar.ir.layout import Shape, local_shape
from autopar.ir.program import Program, ProgramInput
from autopar.profile.programs import LEAST_RUNS, Measurement, Order

from .agreement import coordinate_of, device_of, exchange, on_first_rank, shared_axes
from .execute import Executable, Groups, SourceWriter, process_groups
from .failures import located
from .measure.collectives import collectives_seconds
from .memory import peak_bytes
from .placements import local_slice, unpadded
from .places import ValuePlace
from .timing import Axes, largest, mark, seconds_between, slowest, synchronize

COLLECTIVE_ROUNDS = 5
OPTIMIZERS: Mapping[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-6),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-6),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9),
}
"""Those of `optimizers` that torch has."""


def machine_name(device: torch.device, ranks: int) -> str:
    """What the seconds of an operator depend on beside the operator: device, processor, how many ranks share the host,
    threads and versions."""
    unit = str(torch.cuda.get_device_name(device)) if device.type == "cuda" else _processor()
    threads = torch.get_num_threads()
    shared = f"{ranks} rank{'s' if ranks > 1 else ''} a host, {threads} thread{'s' if threads > 1 else ''}"
    return f"{unit}, {shared}, torch {torch.__version__}"


def _ranks_of_host(mesh: DeviceMesh) -> int:
    """How many ranks of the mesh share the machine of its first one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    everyone = exchange(boot.read_text() if boot.exists() else platform.node(), mesh)
    return everyone.count(everyone[0])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return f"{value.strip()} x {os.cpu_count()}"
    return f"{platform.processor() or platform.machine()} x {os.cpu_count()}"


# --- what a program is given


def _values(
    program: Program, real: Mapping[str, torch.Tensor], coordinate: Shape, device: torch.device
) -> dict[str, torch.Tensor]:
    """This rank's inputs of the program, by value name: those in `real`, which have values, and others filled in:
    weights with small random numbers, integers with 0."""
    generator = torch.Generator().manual_seed(0)
    seeds = sum(i.role == "seed" for i in program.inputs)
    drawn = randomness.keys(torch.tensor(0), seeds) if seeds else ()
    values: dict[str, torch.Tensor] = {}
    for i in program.inputs:
        value = real.get(i.target) if i.role in ("input", "buffer") else None
        value = drawn[int(i.target)] if i.role == "seed" else value
        if value is not None and tuple(value.shape) == i.meta.shape:
            local = local_slice(value, i.layout, program.mesh, coordinate)
        else:
            local = _filled(i, program.mesh, generator)
        values[i.name] = local.to(device)
    return values


def _filled(i: ProgramInput, mesh: Shape, generator: torch.Generator) -> torch.Tensor:
    shape, dtype = local_shape(i.meta.shape, i.layout, mesh), i.meta.dtype
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    if i.role == "tangent" or (i.role == "parameter" and len(shape) < 2):
        return torch.ones(shape, dtype=dtype)
    scale = 0.02 if i.role == "parameter" else 1.0
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


# --- one program, timed


class _Stamps:
    """Times after instructions."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def stamp(self) -> None:
        self.marks.append(mark(self.device))

    def begin(self) -> None:
        self.marks.clear()
        self.stamp()

    def seconds(self) -> list[float]:
        """Between each mark and the one before it."""
        synchronize(self.device)
        return [seconds_between(before, after) for before, after in itertools.pairwise(self.marks)]


class _Timed(SourceWriter):
    """The source with a stamp after each instruction."""

    def __init__(
        self, stamps: _Stamps, program: Program, coordinate: Shape, groups: Groups, device: torch.device
    ) -> None:
        super().__init__(program, coordinate, tuple(groups), device, located)
        self.stamps = stamps

    def call(self, instruction: Node, in_place: bool) -> str:
        return f"{super().call(instruction, in_place)}; {self.bind('stamp', self.stamps.stamp)}()"


class _Alone(_Timed):
    """The same without peers: what a collective would bring is filled with the device's own values."""

    def collective(self, kind: str, instruction: Node, in_place: bool) -> str:
        x, ranks = self.value(instruction.args[0]), self.program.mesh[instruction.args[-1]]
        sizes = f", {self.value(instruction.args[1])}" if kind == "exchange" else f", {ranks}"
        return f"{self.bind(f'alone_{kind}', _STAND_INS[kind])}({x}{sizes})"


class _Done:
    def wait(self) -> None:
        """There is nothing to wait for."""


_STAND_INS: Mapping[str, Callable[..., Any]] = {
    "all_reduce": lambda x, ranks: (x.clone(), _Done()),
    "all_gather": lambda x, ranks: (x.repeat(ranks, *[1] * (x.dim() - 1)), _Done()),
    "reduce_scatter": lambda x, ranks: (x[: x.shape[0] // ranks].clone(), _Done()),
    "all_to_all": lambda x, ranks: (x.clone(), _Done()),
    "shift": lambda x, ranks: (x.clone(), _Done()),
    "exchange": lambda x, sizes: (x.new_zeros((int(sizes[1].sum()), *x.shape[1:])), _Done()),
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where programs are measured: a mesh of ranks, or (`mesh` None) one device alone."""

    device: torch.device
    machine: str
    real: Mapping[str, torch.Tensor]
    optimizer: str
    mesh: DeviceMesh | None = None

    def measured(self, order: Order) -> Measurement:
        """One program; the same result on every rank."""
        program = order.program
        groups = process_groups(self.mesh) if self.mesh is not None else (None,) * len(program.mesh)
        coordinate = coordinate_of(self.mesh) if self.mesh is not None else (0,) * len(program.mesh)
        stamps = _Stamps(self.device)
        writer = _Timed if self.mesh is not None else _Alone
        began = time.perf_counter()
        executable = writer(stamps, program, coordinate, groups, self.device).executable()
        compiled = time.perf_counter() - began
        values = _values(program, self.real, coordinate, self.device)
        steps, parts = self._runs(order, executable, stamps, values)
        times = torch.tensor(parts, dtype=torch.float64)
        mine = torch.stack([times.mean(0), (times - times.mean(0)).abs().mean(0)])
        everyone = [mine] if self.mesh is None else exchange(mine, self.mesh)
        durations, spreads = torch.stack(everyone).mean(0).tolist()
        return Measurement(
            steps=tuple(steps),
            durations=tuple(durations),
            spreads=tuple(spreads),
            ranks=len(everyone),
            abandoned=len(steps) < order.runs,
            collectives={} if self.mesh is None else self._collectives(order.cases),
            optimizer_seconds=self._optimizer_seconds(program, values, coordinate),
            peak_bytes=self._peak(executable, values),
            compile_seconds=compiled,
        )

    def _runs(
        self, order: Order, executable: Executable, stamps: _Stamps, values: Mapping[str, torch.Tensor]
    ) -> tuple[list[float], list[list[float]]]:
        """Seconds of each run on its slowest rank, and of its instructions here. Stops where `order.limit_seconds` say
        that the program cannot win."""
        steps: list[float] = []
        parts: list[list[float]] = []
        first = order.warm_ups
        for _ in range(order.warm_ups + order.runs):
            largest(0.0, self.device, self.axes)  # all begin together
            stamps.begin()
            _step(executable, values)
            seconds = stamps.seconds()
            steps.append(largest(math.fsum(seconds), self.device, self.axes))
            parts.append(seconds)
            if len(steps) > LEAST_RUNS and min(steps[1:]) > order.limit_seconds:
                first = 1
                break
        return steps[first:], parts[first:]

    @property
    def axes(self) -> Axes:
        return () if self.mesh is None else shared_axes(self.mesh)

    def _collectives(self, cases: Sequence[Case[int]]) -> dict[Case[int], float]:
        assert self.mesh is not None and self.mesh.mesh_dim_names is not None
        names = self.mesh.mesh_dim_names
        wanted = {Case(kind=c.kind, axis=names[c.axis], bytes=c.bytes): c for c in cases}
        if not wanted:
            return {}
        seconds = collectives_seconds(list(wanted), self.mesh, rounds=COLLECTIVE_ROUNDS)
        return {case: seconds[key] for key, case in wanted.items()}

    def _optimizer_seconds(self, program: Program, values: Mapping[str, torch.Tensor], coordinate: Shape) -> float:
        """Of a step over the trained parameters, as the module has them. 0 for an optimizer that torch has not."""
        make = OPTIMIZERS.get(self.optimizer)
        parameters = []
        for i in program.inputs:
            if i.role == "parameter" and i.target in program.trained:
                local = unpadded(values[i.name], i.meta.shape, i.layout, program.mesh, coordinate).clone()
                if self.mesh is not None:
                    local = ValuePlace(self.mesh, i.layout, coordinate).dtensor(local, i.meta.shape)
                parameters.append(local.requires_grad_())
        if make is None or not parameters:
            return 0.0
        optimizer = make(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return statistics.median([slowest(optimizer.step, self.device, self.axes) for _ in range(4)][1:])

    def _peak(self, executable: Executable, values: Mapping[str, torch.Tensor]) -> int:
        largest(0.0, self.device, self.axes)
        return peak_bytes(lambda: _step(executable, values), values.values(), self.device)


def _step(executable: Executable, values: Mapping[str, torch.Tensor]) -> Any:
    program = executable.program
    _, saved = executable.forward([values[i.name] for i in program.given])
    arguments = [*saved, *(values[i.name] for i in program.tangents)]
    del saved
    return executable.backward(arguments)


# --- on all ranks


def bench_of(mesh: DeviceMesh, real: Mapping[str, torch.Tensor], optimizer: str) -> Bench:
    """The ranks of a mesh, each with its device. To be called by all of them."""
    device = device_of(mesh)
    machine = machine_name(device, _ranks_of_host(mesh))
    return Bench(device=device, machine=machine, real=real, optimizer=optimizer, mesh=mesh)


def bench_alone(device_type: str, real: Mapping[str, torch.Tensor], optimizer: str) -> Bench:
    """This process and its device, without peers."""
    device = torch.device(device_type if torch.cuda.is_available() else "cpu")
    return Bench(device=device, machine=machine_name(device, 1), real=real, optimizer=optimizer)


def lead(bench: Bench, search: Callable[[Callable[[Order], Measurement]], Any]) -> Any:
    """`search(measure)` on the first rank of the mesh, while the others measure what it orders; its result, or the
    error that it raised, on all."""
    mesh = bench.mesh
    assert mesh is not None
    if any(coordinate_of(mesh)):
        while True:
            heard: Any = on_first_rank(lambda: None, mesh)
            if not isinstance(heard, Order):
                return heard
            bench.measured(heard)

    def measure(order: Order) -> Measurement:
        on_first_rank(lambda: order, mesh)
        return bench.measured(order)

    try:
        result = search(measure)
    except ValueError as error:
        return on_first_rank(partial(_raised, error), mesh)
    return on_first_rank(lambda: result, mesh)


def _raised(error: Exception) -> None:
    raise error


@contextmanager
def ranks_here(mesh_shape: Mapping[str, int], device_type: str) -> Iterator[DeviceMesh | None]:
    """The mesh of the ranks that the environment describes, as torchrun and the lab do; None where it describes none.
    Raises ValueError, on every rank, where the mesh has not as many."""
    if "RANK" not in os.environ:
        yield None
        return
    world = int(os.environ["WORLD_SIZE"])
    if math.prod(mesh_shape.values()) != world:
        shown = ",".join(f"{axis}={size}" for axis, size in mesh_shape.items())
        raise ValueError(f"mesh {shown} does not have the {world} ranks that run: give axes whose product is {world}")
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device_type, tuple(mesh_shape.values()), mesh_dim_names=tuple(mesh_shape))
    try:
        yield mesh
    finally:
        dist.destroy_process_group()
