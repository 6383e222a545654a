"""What a module keeps for all its programs, and what it knows of each: the compiled form, what goes in and comes out,
and the seed of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autopar.compat.calls import resolved
from autopar.compat.distributed import dtensors_of, local_tensor
from autopar.compat.outputs import Output, absent_output, split_output, unviewed
from autopar.compat.redistributing import full_tensor, redistributed
from autopar.ir.layout import Replicate, is_chunked, is_even, local_shape, pad
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.ir.randomness import keys
from autopar.passes.capture.captured import Captured
from autopar.passes.lower.absent import without
from autopar.passes.lower.accumulate import Accumulation, accumulation

from .agreement import all_equal, together
from .compiled import ObservedSource, compile
from .execute import Executable, process_groups
from .failures import located, watched
from .handshake import Handshake
from .pending import BackwardForm, Pending
from .pipelined import Pipelined, pipeline_executable
from .placements import check_fits, is_replicated, local_slice
from .shared_memory import SharedMemory
from .stretches import CompiledSource, Compiler
from .values import ModuleValues
from .waits import Observed


def step_seed(axes: Sequence[str], groups: Sequence[dist.ProcessGroup | None], device: torch.device) -> torch.Tensor:
    """int64 [1] on `device`, which no host waits for: that of the mesh's first rank. `axes` are the names of the mesh
    axes, `groups` those of this rank.

    Every rank draws, so that generators that were seeded alike stay alike (people draw batches from
    them), and so that `torch.manual_seed`, `torch.get_rng_state` and `torch.set_rng_state` mean what
    they mean on one device. Ranks that were seeded differently take the first one's.
    """
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    seed = torch.full((1,), int(drawn), dtype=torch.int64, device=device)
    for axis, group in zip(axes, groups, strict=True):
        if group is not None:
            with watched("the broadcast of a step's seed,", axis, group):
                dist.broadcast(seed, group=group, group_src=0)
    return seed


@dataclass(frozen=True, slots=True)
class Parts:
    """A program in parts (`passes.lower.accumulate`), compiled."""

    of: Accumulation
    micro: Executable
    last: Executable
    rest: Executable


@dataclass(eq=False, kw_only=True)
class ModuleState:
    """What all programs of a module have in common."""

    values: ModuleValues
    plan: object
    handshake: Handshake
    compiler: Compiler | None = None
    whole_outputs: bool = False
    """Whether the caller gets split outputs gathered, as plain tensors."""
    holds: bool = False
    """Whether what forward gathers is held from one micro-batch to the next."""
    pending: Pending = field(default_factory=Pending)
    observed: Observed = field(default_factory=Observed)


class State:
    """What a module knows of a program: its compiled form, and what goes in and comes out."""

    def __init__(
        self, captured: Captured, program: Program, module: ModuleState, pipelined: Pipelined | None = None
    ) -> None:
        """Of a program; or of one in stages, as which it is `pipelined`. All ranks at once: raises ValueError, on all,
        if it does not fit the mesh, or ranks have different ones."""
        values = module.values
        with together(values.mesh):
            check_fits(program, values.mesh)
        all_equal(
            program.digest,
            values.mesh,
            "the ranks have different programs: give every rank the same model, inputs and plan, and the same versions",
        )
        self.captured, self.program, self.module, self.pipelined = captured, program, module, pipelined
        self.values, self.mesh, self.coordinate, self.device = values, values.mesh, values.coordinate, values.device
        self.groups = process_groups(self.mesh)
        self.nothing = torch.empty(0, device=self.device)
        self.lacking: dict[frozenset[str], Executable | None] = {}
        """What runs backward without some tangents."""
        self.executable = self.compiled(program, together=True) if pipelined is None else self._in_stages(pipelined)
        self.inputs = tuple(i for i in program.given if i.role != "seed")
        self.seeds = len(program.given) - len(self.inputs)
        assert program.given[: len(self.inputs)] == self.inputs, "seeds stand last"
        nodes = program.nodes
        self.read = {*(name for node in nodes for name in node.inputs), *(o.name for o in program.outputs)}
        """Names of values that the program reads or returns."""
        self.tangents = program.tangents
        self.carriers = frozenset(i.target for i in self.tangents)
        """Outputs that the program takes gradients of; `differentiable` are those that eager would."""
        self.differentiable = self.carriers | {leaf.path for leaf in captured.output_leaves if leaf.requires_grad}
        self.results = program.results
        self.gradient_outputs = program.gradients
        self.gradients = {o.target: i for i, o in enumerate(self.gradient_outputs) if o.role == "gradient"}
        self.trained = trained_by(captured)
        outputs = [(i, o) for i, o in enumerate(self.results) if o.role == "output" and o.name is not None]
        self.output_indices = tuple(i for i, _ in outputs)
        self.output_paths = tuple(o.target for _, o in outputs)
        self.splits = any(not is_replicated(o.layout) for _, o in outputs) and not self.module.whole_outputs
        """Whether the caller may gather outputs."""
        self.output_shapes = {o.target: o.meta.shape for _, o in outputs if o.meta is not None}
        written = [(i, o) for i, o in enumerate(self.results) if o.role == "mutation" and o.name is not None]
        self.mutations = tuple(written)
        self.reread = tuple((i, o) for i, o in written if o.target in captured.reread)
        """Parameters and buffers that forward writes in place, and backward reads so."""
        self.updates = tuple((i, o) for i, o in enumerate(self.gradient_outputs) if o.role == "update")
        """What backward writes."""
        self.constants = {name: resolved(t).to(self.device) for name, t in captured.constants.items()}
        self.called = False
        self.lost = False
        """Whether gradients that forward computes by a `backward()` of its own were never given."""
        self.overlapping: dict[tuple[BackwardForm, frozenset[str], tuple[tuple[int, ...], ...]], tuple[int, ...]] = {}
        """Gradients to be copied, by the form of a backward, the tangents that do not come and the strides of those
        that do, once they have been looked at (`overlapping`)."""
        mutated = {o.target for _, o in written}
        self.mutated = tuple(k for k, i in enumerate(self.inputs) if i.role != "input" and i.target in mutated)
        """Which inputs the program writes."""
        self.shared: SharedMemory | None = None
        parameters = [i for i in self.inputs if i.role == "parameter"]
        elsewhere = {i.name for i in parameters if values.place(i.target).coordinate is None}
        self.local_shapes = {
            i.name: (0,) if i.name in elsewhere else local_shape(i.meta.shape, i.layout, program.mesh)
            for i in program.inputs
        }
        """Of what the program is given, padding included."""
        self.wrapped: dict[str, Callable[[torch.Tensor], DTensor]] = {}
        """Target of a gradient -> what makes a DTensor of a local tensor."""

        values.read.update(i.target for i in self.inputs if i.role != "input" and i.name in self.read)

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        """The same program for a copy of the module."""
        copied = memo[id(self)] = State.__new__(State)
        module = copy.deepcopy(self.module, memo)
        vars(copied).update(vars(self), module=module, values=module.values)
        return copied

    def with_program(self, captured: Captured, program: Program, pipelined: Pipelined | None = None) -> State:
        """The same values with another program."""
        for i in program.inputs:
            assert i.role != "parameter" or i.layout == self.values.layout(i.target), f"{i.target} is to be moved"
        return State(captured, program, self.module, pipelined)

    def without(self, absent: frozenset[str]) -> Executable | None:
        """What runs backward where no gradients of these tangents come; None where it takes zeros instead."""
        if absent not in self.lacking:
            program = without(self.program, absent) if absent and self.pipelined is None else None
            self.lacking[absent] = None if program is None else self.compiled(program)
        return self.lacking[absent]

    @cached_property
    def parts(self) -> Parts:
        """What runs where gradients of several micro-batches are added up."""
        parts = accumulation(self.program)
        return Parts(parts, *map(self.compiled, (parts.micro, parts.last, parts.rest)))

    def _in_stages(self, pipelined: Pipelined) -> Executable:
        """A pipeline as this rank runs it."""
        groups, writer = (None, *self.groups[1:]), self._writer(together=False)

        def compiled(program: Program, coordinate: tuple[int, ...]) -> Executable:
            return writer(program, coordinate, groups, self.device, located).executable()

        return pipeline_executable(pipelined, self.coordinate, self.groups, self.device, compiled)

    def compiled(self, program: Program, *, together: bool = False) -> Executable:
        """A program as this rank runs it; `together`: all ranks ask for it at once."""
        writer = self._writer(together=together)
        return compile(program, self.groups, device=self.device, around=located, writer=writer)

    def _writer(self, *, together: bool) -> Callable[..., ObservedSource]:
        if self.module.compiler is None:
            return ObservedSource
        return partial(CompiledSource, compiler=self.module.compiler, together=together)

    def input_placements(self, i: ProgramInput) -> tuple[Placement, ...]:
        """Those at which uneven shards, which torch would cut otherwise, are cut from the global tensor."""
        is_cut_alike = is_chunked(i.meta.shape, i.layout, self.program.mesh)
        layout = i.layout if is_cut_alike else (Replicate(),) * len(self.program.mesh)
        return self.values.whole_place(layout).placements(i.meta.shape)

    def given(self, i: ProgramInput, value: torch.Tensor) -> torch.Tensor:
        """What the program is given of an input, a parameter, a buffer or a gradient, with padding."""
        if not isinstance(value, DTensor):
            return local_slice(resolved(value), i.layout, self.program.mesh, self.coordinate)
        if i.role == "parameter":
            return pad(local_tensor(value), self.local_shapes[i.name])
        with torch.no_grad():
            return pad(self.values.whole_place(i.layout).placed(value), self.local_shapes[i.name])

    def keys(self) -> tuple[torch.Tensor, ...]:
        """The keys of this step's random operators."""
        return keys(step_seed(self.program.axes, self.groups, self.device), self.seeds) if self.seeds else ()

    def write_back(self, results: Sequence[torch.Tensor | None], written: Sequence[tuple[int, ProgramOutput]]) -> None:
        """Write results of a pass into the buffers and parameters that they replace."""
        for index, o in written:
            value = results[index]
            assert value is not None
            held, value = self.held(o, value)
            held.copy_(value)

    def held(self, output: ProgramOutput, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the rank keeps of a buffer or parameter, and of a value that replaces it."""
        held = self.values[output.target]
        if isinstance(held, DTensor):  # a parameter, of which each rank keeps its part
            return local_tensor(held), self.values.place(output.target).part(value)
        return held, value

    def outputs(self, values: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
        """What the caller sees of each output: replicated ones as they are, and others as `Output`s, or gathered."""
        results: list[torch.Tensor] = []
        for index in self.output_indices:
            local, output = values[index], self.results[index]
            if local is None:
                assert output.meta is not None
                results.append(absent_output(output.target, output.meta.shape, output.meta.dtype, self.device))
            elif is_replicated(output.layout):
                results.append(unviewed(local))
            else:
                split = self._output(local, output)
                results.append(full_tensor(split) if self.module.whole_outputs else split)
        return tuple(results)

    def _output(self, local: torch.Tensor, output: ProgramOutput) -> Output:
        assert output.meta is not None
        place, shape = self.values.whole_place(output.layout), output.meta.shape
        handshake = self.module.handshake
        begin = partial(handshake.gathers, f"{output.target} of call {handshake.calls}")
        return split_output(place.unpadded(local, shape).detach(), *place.form(shape), place.part, begin)

    @cached_property
    def asked_by(self) -> Mapping[str, frozenset[str]]:
        """The outputs of whose gradients each gradient is computed."""
        graph = self.captured.graph
        of = {i.name: frozenset({i.target}) for i in graph.inputs if i.role == "tangent"}
        for node in graph.nodes:
            found = frozenset().union(*(of[name] for name in node.inputs if name in of))
            if found:
                of.update(dict.fromkeys(node.outputs, found))
        gradients = [o for o in graph.outputs if o.role == "gradient"]
        return {o.target: of.get(o.name or "", frozenset()) for o in gradients}

    def unasked(self, given: Collection[str]) -> Collection[str]:
        """What gets no gradient, as in eager, where the outputs that are given one do not depend on it."""
        if self.carriers <= set(given):
            return ()
        return [name for name, paths in self.asked_by.items() if paths and paths.isdisjoint(given)]

    def tangent(self, i: ProgramInput, gradient: torch.Tensor | None) -> torch.Tensor:
        """What the backward half reads, from what autograd brings."""
        if gradient is None:
            return torch.zeros(self.local_shapes[i.name], dtype=i.meta.dtype, device=self.device)
        return self.given(i, gradient)

    def gradient(self, name: str, form: tuple[Placement, ...] | None, local: torch.Tensor) -> torch.Tensor:
        """The gradient of an input of the call, placed like that input (None: a plain tensor)."""
        if form is None and is_replicated(self.gradient_outputs[self.gradients[name]].layout):
            return local
        gradient = self.split_gradient(name, local)
        if form is None:
            return full_tensor(gradient)
        return gradient if gradient.placements == form else redistributed(gradient, self.mesh, form)

    def split_gradient(self, name: str, local: torch.Tensor) -> DTensor:
        """The gradient of an input or parameter, as the program places it."""
        wrapped = self.wrapped.get(name) or _wrapping(self, self.gradient_outputs[self.gradients[name]])
        return wrapped(local.contiguous())


def trained_by(captured: Captured) -> frozenset[str]:
    """What gets a gradient in a step. The program that serves it may compute others beside."""
    return frozenset(o.target for o in captured.graph.outputs if o.role == "gradient" and o.name is not None)


def _wrapping(state: State, output: ProgramOutput) -> Callable[[torch.Tensor], DTensor]:
    """What makes a DTensor of what this rank holds of a gradient: found once."""
    assert output.meta is not None
    shape, target = output.meta.shape, output.target
    values = state.values
    place = values.place(target) if target in values.at_rest else values.whole_place(output.layout)
    wrapped = dtensors_of(*place.form(shape), output.meta.dtype)

    def trimmed(local: torch.Tensor) -> DTensor:
        return wrapped(place.unpadded(local, shape))

    return state.wrapped.setdefault(output.target, wrapped if is_even(shape, place.layout) else trimmed)
