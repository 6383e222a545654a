"""What a parallel module holds beside its parameters: the program, its compiled form, where values live, and the seed
of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autopar.compat.distributed import dtensors_of, local_tensor
from autopar.compat.optimizing import fused_steps_on_shards
from autopar.compat.outputs import Output, absent_output, split_output, unviewed
from autopar.compat.redistributing import anomalies_of_shards, full_tensor, redistributed
from autopar.compat.stages import whole_states_in_stages
from autopar.compat.tensors import is_real, take_notes
from autopar.ir.layout import Layout, Replicate, is_chunked, is_even, local_shape, pad
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.ir.randomness import keys
from autopar.passes.capture.captured import Captured
from autopar.passes.lower.accumulate import Accumulation, accumulation

from .agree import all_alike, all_equal, coordinate_of, device_of, digest, located, raise_together, together, watched
from .compiled import ObservedSource, compile
from .execute import Executable, process_groups
from .handshake import Handshake
from .hooked import whole_gradient
from .observed import Observed
from .pending import Form, Pending
from .pipelined import Pipelined, pipeline_executable
from .placements import contiguous_stride, is_replicated, is_strided, local_slice, mismatch, placements_of, unpadded
from .places import ValuePlace, device_meshes, within_stage
from .registered import RegisteredNames
from .shared import SharedMemory
from .stretches import CompiledSource, Compiler


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


OF_ALL_PROGRAMS = ("at_rest", "whole_outputs", "holds", "registered", "mirrors", "pending", "observed")
"""What the programs of a module have in common."""


class State:
    """What the module knows beside its parameters: the program, its compiled form, and where values live."""

    def __init__(
        self,
        captured: Captured,
        program: Program,
        plan: object,
        mesh: DeviceMesh,
        handshake: Handshake | None = None,
        compiler: Compiler | None = None,
        pipelined: Pipelined | None = None,
    ) -> None:
        """Of a program; or of one in stages, as which it is `pipelined`."""
        fused_steps_on_shards()
        anomalies_of_shards()
        whole_states_in_stages()
        self.captured, self.program, self.plan, self.mesh = captured, program, plan, mesh
        self.coordinate = coordinate_of(mesh)
        self.device = device_of(mesh)
        self.nothing = torch.empty(0, device=self.device)
        self.groups = process_groups(mesh)
        self.compiler, self.pipelined = compiler, pipelined
        self.executable = self.compiled(program, together=True) if pipelined is None else self._in_stages(pipelined)
        self.inputs = tuple(i for i in program.inputs if i.role not in ("tangent", "seed"))
        nodes = program.nodes
        self.read = {*(name for node in nodes for name in node.inputs), *(o.name for o in program.outputs)}
        """Names of values that the program reads or returns."""
        self.seeds = sum(i.role == "seed" for i in program.inputs)
        order = [i.role for i in program.inputs if i.role != "tangent"]
        assert order[len(self.inputs) :] == ["seed"] * self.seeds, "seeds stand last"
        self.tangents = tuple(i for i in program.inputs if i.role == "tangent")
        self.carriers = frozenset(i.target for i in self.tangents)
        """Outputs that the program takes gradients of; `differentiable` are those that eager would."""
        self.differentiable = self.carriers | {leaf.path for leaf in captured.output_leaves if leaf.requires_grad}
        self.results = tuple(o for o in program.outputs if not o.backward)
        self.gradient_outputs = tuple(o for o in program.outputs if o.backward)
        self.gradients = {o.target: i for i, o in enumerate(self.gradient_outputs) if o.role == "gradient"}
        self.trained = trained_by(captured)
        outputs = [(i, o) for i, o in enumerate(self.results) if o.role == "output" and o.name is not None]
        self.output_indices = tuple(i for i, _ in outputs)
        self.output_paths = tuple(o.target for _, o in outputs)
        written = [(i, o) for i, o in enumerate(self.results) if o.role == "mutation"]
        self.mutations = tuple((i, o) for i, o in written if o.name is not None)
        self.updates = tuple((i, o) for i, o in enumerate(self.gradient_outputs) if o.role == "update")
        """What backward writes."""
        self.at_rest = {i.target: i.layout for i in self.inputs if i.role == "parameter"}
        self.constants = {name: t.detach().to(self.device) for name, t in captured.constants.items()}
        self.registered = RegisteredNames()
        self.mirrors: dict[int, nn.Module] = {}
        self.called = False
        self.lost = False
        """Whether gradients that forward computes by a `backward()` of its own were never given."""
        self.whole_outputs = False
        """Whether the caller gets split outputs gathered, as plain tensors."""
        self.overlapping: dict[tuple[Form, tuple[tuple[int, ...], ...]], tuple[int, ...]] = {}
        """Gradients to be copied, by the form of a backward and the strides of its tangents, once they have been looked
        at (`overlapping`)."""
        self.pending, self.observed = Pending(), Observed[State]()
        self.holds = False
        """Whether what forward gathers is held from one micro-batch to the next."""
        self.handshake = Handshake(mesh, program.digest) if handshake is None else handshake
        mutated = {o.target for _, o in self.mutations}
        held = ("buffer", "parameter")
        self.mutated = tuple(k for k, i in enumerate(self.inputs) if i.role in held and i.target in mutated)
        """Which inputs the program writes."""
        self.shared: SharedMemory | None = None
        self.local_shapes = {
            i.name: (0,) if self._is_elsewhere(i) else local_shape(i.meta.shape, i.layout, program.mesh)
            for i in program.inputs
        }
        """Of what the program is given, padding included."""
        self.wrapped: dict[str, Callable[[torch.Tensor], DTensor]] = {}
        """Target of a gradient -> what makes a DTensor of a local tensor."""

    # -- modules and values

    def own(self, root: nn.Module) -> None:
        """Find where each name of a parameter or buffer is registered, and which names are one tensor."""
        self.registered.own(root, self.captured.tied)
        self._reads()

    def _reads(self) -> None:
        self.registered.read.update(i.target for i in self.inputs if i.role != "input" and i.name in self.read)

    def with_program(self, captured: Captured, program: Program, pipelined: Pipelined | None = None) -> State:
        """The same values with another program."""
        raise_together(mismatch(program, self.mesh), self.mesh)
        all_equal(program.digest, self.mesh, "the ranks have different programs: give every rank the same versions")
        for i in program.inputs:
            assert i.role != "parameter" or i.layout == self.layout(i.target), f"{i.target} is to be moved"
        state = State(captured, program, self.plan, self.mesh, self.handshake, self.compiler, pipelined)
        for one in OF_ALL_PROGRAMS:
            setattr(state, one, getattr(self, one))
        state._reads()
        return state

    @cached_property
    def parts(self) -> Parts:
        """What runs where gradients of several micro-batches are added up."""
        parts = accumulation(self.program)
        return Parts(parts, *map(self.compiled, (parts.micro, parts.last, parts.rest)))

    def _in_stages(self, pipelined: Pipelined) -> Executable:
        """A pipeline as this rank runs it."""
        groups = (None, *self.groups[1:])

        def compiled(program: Program, coordinate: tuple[int, ...]) -> Executable:
            return ObservedSource(program, coordinate, groups, self.device, located).executable()

        return pipeline_executable(pipelined, self.coordinate, self.groups, self.device, compiled)

    def compiled(self, program: Program, *, together: bool = False) -> Executable:
        """A program as this rank runs it; `together`: all ranks ask for it at once."""
        writer: Callable[..., ObservedSource] = ObservedSource
        if self.compiler is not None:
            writer = partial(CompiledSource, compiler=self.compiler, together=together)
        return compile(program, self.groups, device=self.device, around=located, writer=writer)

    @property
    def aliases(self) -> dict[str, list[str]]:
        """Name of a value in the graph -> all names that it has, those without wrappers of modules included."""
        return self.registered.aliases

    @property
    def slots(self) -> dict[tuple[int, str], str]:
        """Where a value is registered, by the registry's identity and the key -> its name in the graph."""
        return self.registered.slots

    def value(self, name: str) -> torch.Tensor:
        return self.registered.value(name)

    def layout(self, name: str) -> Layout:
        """At rest. A parameter that the graph does not read is replicated."""
        for alias in (name, self.captured.tied.get(name, name)):
            if alias in self.at_rest:
                return self.at_rest[alias]
        return (Replicate(),) * len(self.program.mesh)

    def placements(self, value: ProgramInput | ProgramOutput) -> tuple[Placement, ...]:
        assert value.meta is not None
        return placements_of(value.layout, value.meta.shape, self.program.mesh)

    def input_placements(self, i: ProgramInput) -> tuple[Placement, ...]:
        """Those at which uneven shards, which torch would cut otherwise, are cut from the global tensor."""
        if is_chunked(i.meta.shape, i.layout, self.program.mesh):
            return self.placements(i)
        return placements_of((Replicate(),) * len(self.program.mesh), i.meta.shape, self.program.mesh)

    def place(self, name: str) -> ValuePlace:
        """Where a parameter lies at rest."""
        if self.pipelined is None:
            return self.whole_place(self.layout(name))
        number = self.pipelined.homes.get(name, self.pipelined.homes.get(self.captured.tied.get(name, name), 0))
        coordinate = (self.coordinate[1:] or (0,)) if number == self.coordinate[0] else None
        return ValuePlace(self.meshes[number], within_stage(self.layout(name)), coordinate)

    def _is_elsewhere(self, i: ProgramInput) -> bool:
        """Whether other ranks hold a parameter."""
        return i.role == "parameter" and self.place(i.target).coordinate is None

    def whole_place(self, layout: Layout) -> ValuePlace:
        """Where all ranks hold something."""
        return ValuePlace(self.mesh, layout, self.coordinate)

    @cached_property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """Those of a pipeline's devices."""
        return device_meshes(self.mesh)

    def shard(self, name: str, value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        """The parameter of this name as a DTensor, from its global value, in memory of its own."""
        place = self.place(name)
        if not is_real(value):
            local = torch.empty(place.held(tuple(value.shape)), dtype=value.dtype, device="meta")
        else:
            local = place.part(value.detach()).to(self.device)
            storage = local.untyped_storage()
            if storage.data_ptr() == value.untyped_storage().data_ptr() or storage.nbytes() > local.nbytes:
                local = local.clone(memory_format=torch.contiguous_format)
        return place.dtensor(local, value.shape).requires_grad_(requires_grad)

    def distribute(self, values: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take this rank's part of each value, and compare the global values with the other ranks'.

        One global value is in memory at a time. Nothing is changed if any rank raises.
        """
        parts: dict[str, torch.Tensor] = {}
        digests: dict[str, int] = {}
        with together(self.mesh):
            for name, value in values:
                parts[name] = self.part(name, value)
                if not isinstance(value, DTensor) and is_real(value):
                    digests[name] = digest(value)
        all_alike(
            digests,
            self.mesh,
            "the ranks have different values for '{name}': seed every rank equally before building the model, or build "
            "it on meta and call materialize(state_dict)",
        )
        for name, tensor in parts.items():
            adopt(self, name, tensor)

    def part(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a value, in memory of its own."""
        present = self.value(name)
        if isinstance(value, DTensor):
            return self._redistributed(name, value, present.requires_grad)
        if isinstance(present, nn.Parameter):
            return self.shard(name, value, present.requires_grad)
        if is_real(value):
            return value.detach().to(self.device, copy=True)
        return torch.empty_like(value, device="meta")

    def _redistributed(self, name: str, value: DTensor, requires_grad: bool) -> torch.Tensor:
        if not isinstance(self.value(name), nn.Parameter):
            return full_tensor(value).to(self.device)
        place = self.place(name)
        with torch.no_grad():
            local = self.placed(value, place).clone(memory_format=torch.contiguous_format)
        return place.dtensor(local, value.shape).requires_grad_(requires_grad)

    def placed(self, value: DTensor, place: ValuePlace) -> torch.Tensor:
        """This rank's part of a DTensor at a place, contiguous and without padding; communicates unless it is there
        already."""
        shape = tuple(value.shape)
        wanted = place.placements(shape)
        as_in_torch = is_chunked(shape, place.layout, place.sizes)
        if value.device_mesh == place.mesh and value.placements == wanted and as_in_torch:
            return local_tensor(value).contiguous()
        if value.device_mesh != place.mesh or is_strided((*value.placements, *wanted)) or not as_in_torch:
            # torch's redistribution of strided shards is not to be relied on, beside gathering them
            return place.part(full_tensor(value))
        return local_tensor(redistributed(value, place.mesh, wanted)).contiguous()

    def padded(self, local: torch.Tensor, i: ProgramInput) -> torch.Tensor:
        """What the program is given, from what a DTensor's rank holds."""
        return pad(local, self.local_shapes[i.name])

    def keys(self) -> tuple[torch.Tensor, ...]:
        """The keys of this step's random operators."""
        return keys(step_seed(self.program.axes, self.groups, self.device), self.seeds) if self.seeds else ()

    def write_back(self, results: Sequence[torch.Tensor | None], written: Sequence[tuple[int, ProgramOutput]]) -> None:
        """Write results of a pass into the buffers and parameters that they replace."""
        for index, o in written:
            value = results[index]
            assert value is not None
            held = self.value(o.target)
            if isinstance(held, DTensor):  # a parameter, of which each rank keeps its part
                value, held = self.place(o.target).part(value), local_tensor(held)
            held.copy_(value)

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
                results.append(split.full_tensor() if self.whole_outputs else split)
        return tuple(results)

    def _output(self, local: torch.Tensor, output: ProgramOutput) -> Output:
        assert output.meta is not None
        shape, layout, mesh, coordinate = output.meta.shape, output.layout, self.program.mesh, self.coordinate

        def part(whole: torch.Tensor) -> torch.Tensor:
            return unpadded(local_slice(whole, layout, mesh, coordinate), shape, layout, mesh, coordinate)

        local = unpadded(local, shape, layout, mesh, coordinate)
        form = (self.placements(output), torch.Size(shape), contiguous_stride(shape))
        return split_output(local.detach(), self.mesh, *form, part)

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
        if isinstance(gradient, DTensor):
            return self.padded(self.placed(gradient, self.whole_place(i.layout)), i)
        return local_slice(gradient, i.layout, self.program.mesh, self.coordinate)

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


def adopt(state: State, name: str, tensor: torch.Tensor) -> None:
    """Have this rank's part of a value under all names that it has."""
    is_parameter = isinstance(state.value(name), nn.Parameter)
    new = nn.Parameter(tensor, requires_grad=tensor.requires_grad) if is_parameter else tensor
    take_notes(new, state.value(name))
    state.registered.put(name, new)
    if name in state.captured.hooked and new.requires_grad:
        whole_gradient(name, new)


def _wrapping(state: State, output: ProgramOutput) -> Callable[[torch.Tensor], DTensor]:
    """What makes a DTensor of what this rank holds of a gradient: found once."""
    assert output.meta is not None
    shape, target = output.meta.shape, output.target
    place = state.place(target) if target in state.at_rest else state.whole_place(output.layout)
    placements, stride = place.placements(shape), contiguous_stride(shape)
    wrapped = dtensors_of(place.mesh, placements, torch.Size(shape), stride, output.meta.dtype)

    def trimmed(local: torch.Tensor) -> DTensor:
        return wrapped(place.unpadded(local, shape))

    return state.wrapped.setdefault(output.target, wrapped if is_even(shape, place.layout) else trimmed)
