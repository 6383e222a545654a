"""The parallel module: DTensor parameters outside, the local program inside."""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autopar import compat
from autopar.compat import is_real, local_tensor, make_dtensor, storage_span
from autopar.ir.layout import Layout, Partial, Replicate, describe, is_chunked, local_shape, pad, valid_shape
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.ir.randomness import keys
from autopar.passes.capture.captured import Captured
from autopar.passes.capture.known import Pinned

from .agree import all_equal, coordinate_of, device_of, digest, exchange, process_groups, raise_together
from .alike import same_values
from .execute import Executable, compile
from .guard import OWNERS, Guard, Original, report_changed
from .placements import contiguous_stride, is_gatherable, is_strided, local_slice, placements_of, unpadded
from .seeds import step_seed
from .sharing import Shared, overlapping
from .submodules import empty_submodule
from .verify import Check, Verifier
from .verify import whole as gathered

logger = logging.getLogger("autopar")

InitFunction = Callable[[str, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Mode:
    """What a captured graph depends on beside the model: which modules train, in the order of `modules()`, which
    parameters require gradients, whether gradients are wanted at all, and what `torch.autocast` casts to."""

    training: tuple[bool, ...]
    trainable: frozenset[str]
    gradients: bool
    autocast: torch.dtype | None

    def covers(self, other: Mode) -> bool:
        """Whether a graph of this mode gives what one of the other would, and maybe gradients beside, if the model does
        not ask which gradients are wanted."""
        if (self.training, self.autocast) != (other.training, other.autocast):
            return False
        return not other.gradients or (self.gradients and other.trainable <= self.trainable)

    def __str__(self) -> str:
        count = sum(self.training)
        what = "evaluation" if not count else "training" if count == len(self.training) else "partly training"
        cast = f", autocast to {self.autocast}" if self.autocast else ""
        return f"{what} {'with' if self.gradients else 'without'} gradients{cast}"


Again = Callable[[Mode, nn.Module, Sequence[Captured], Mapping[str, torch.Tensor]], tuple[Captured, Program | int]]
"""What is captured in another mode, with other attributes of the model or with other values of inputs (by path), and
its program, with the parameters where they are, or which of the steps that are known has a program that serves it.
Called on all ranks at once."""

PINNED_MOST = 8
"""Programs that are kept for a mode, by what they read of inputs; those that were called last."""


class ParallelModule(nn.Module):
    """A model that runs as `program` on `mesh`. Build it on every rank at once.

    Parameters are DTensors under the model's own names, placed at rest as the program wants them;
    each rank keeps its slice of the model's own values, in memory of its own, and the ranks check
    that they agree on them. Parameters on `meta` stay there until `materialize`. Buffers are plain
    tensors. Submodules, `config` and other attributes are reachable as on the model; the model's
    methods are not, since they would run the model and not the program.

    Plain tensors given to a call are the global batch on every rank, of which the rank takes its
    slice; a DTensor says what it holds. Outputs that every rank has whole are plain tensors, and the
    others are DTensors, or, with `whole_outputs`, are gathered. No output shares memory with a parameter, a buffer, an
    input or another output. If the model has a loss, that alone is differentiated: backward raises ValueError where a
    gradient reaches another output.

    `train()`, `eval()`, `torch.no_grad()`, `torch.autocast()` and `requires_grad_()` mean what they do on the model.
    The first call in a mode that the program was not captured in (evaluation, mostly) captures and plans a program for
    that, by `again`, with the parameters where they are; it takes as long as planning does, and all ranks must come
    to it alike.

    Raises ValueError, on every rank, if the ranks' programs or weights differ, or if mesh and program do not match.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        program: Program,
        plan: object,
        mesh: DeviceMesh,
        again: Again | None = None,
        *,
        whole_outputs: bool = False,
        verifier: Verifier | None = None,
    ) -> None:
        super().__init__()
        raise_together(_mismatch(program, mesh), mesh)
        all_equal(
            program.digest,
            mesh,
            "the ranks have different programs: give every rank the same model, inputs and plan, and the same versions",
        )
        all_equal(
            {name: digest(tensor) for name, tensor in captured.constants.items() if is_real(tensor)},
            mesh,
            "the ranks closed over different tensors (plain attributes of modules, tensors that forward or loss_fn "
            "makes of Python numbers): give every rank the same, or make them buffers",
        )
        state = _State(captured, program, plan, mesh)
        state.whole_outputs = whole_outputs
        vars(self)["_state"] = state
        root = state.mirror(model)
        # the same dictionaries: the root's parameters and submodules are this module's own
        self._parameters, self._buffers, self._modules = root._parameters, root._buffers, root._modules
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        self.training = captured.training
        vars(self)["_root"] = root
        state.own(self, model)
        vars(self)["_modes"] = _Modes(self, model, state, again)
        vars(self)["_verifier"] = verifier
        state.distribute(model, _values_of(model))
        OWNERS.claim(model, self)
        vars(self)["_original"] = Original(model, root, captured.reads)

    # -- what a person asks for

    @property
    def program(self) -> Program:
        """What each rank runs; its text is readable."""
        return _state(self).program

    @property
    def plan(self) -> Any:
        """The plan that the program was made from."""
        return _state(self).plan

    @property
    def mesh(self) -> DeviceMesh:
        return _state(self).mesh

    @property
    def executable(self) -> Executable:
        """The compiled program; `executable.source` is what runs on this rank."""
        return _state(self).executable

    @property
    def input_placements(self) -> dict[str, tuple[Placement, ...]]:
        """Path of each input ("kwargs.input_ids") -> the placements as which a DTensor need not be redistributed."""
        state = _state(self)
        return {i.target: state.input_placements(i) for i in state.program.inputs if i.role == "input"}

    def materialize(self, source: Mapping[str, torch.Tensor] | InitFunction) -> None:
        """Give values to parameters and buffers that are on `meta`, whole tensor by whole tensor, of which
        this rank keeps its slice. Make the optimizer afterwards: the parameters are new objects.

        `source` is a state_dict (whole tensors or DTensors, under the model's names; buffers that a
        state_dict does not hold may be among them), which replaces real values too; or
        `init_fn(name, tensor)`, called on every rank in the same order with one whole uninitialised
        CPU tensor, which it fills, or returns another for. Random values must be the same on all
        ranks: seed equally. Raises ValueError, on every rank, where a value is missing, has another
        shape, or differs between ranks.
        """
        state = _state(self)
        if isinstance(source, Mapping):
            state.distribute(None, _values_from(source, state))
        else:
            state.distribute(None, _values_made(source, state))

    @compat.uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["_original"].warn()
        state = vars(self)["_modes"].state(args, kwargs)
        call = state.call(args, kwargs)
        verifier: Verifier | None = vars(self)["_verifier"]
        if verifier is not None:
            call.check = verifier.begin(state, vars(self)["_modes"].modules, state.captured.bind(args, kwargs))
        if call.differentiable and torch.is_grad_enabled():
            results = _Step.apply(call, *call.differentiable)  # type: ignore[no-untyped-call]
            call.returned += map(weakref.ref, results)
        else:
            results = state.outputs(call.forward()[0])
        if call.check is not None:
            call.check.forward(dict(zip(state.output_paths, results, strict=True)), call.keys)
        return state.captured.unflatten(dict(zip(state.output_paths, results, strict=True)))

    # -- what makes it a module like the model

    def train(self, mode: bool = True) -> ParallelModule:
        """As on the model, whose class may keep parts of it as they are (a frozen BatchNorm in evaluation)."""
        root = vars(self)["_root"]
        root.train(mode)
        self.training = root.training
        return self

    def eval(self) -> ParallelModule:
        """As on the model, whose class may write its own."""
        root = vars(self)["_root"]
        root.eval()
        self.training = root.training
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            root = vars(self).get("_root")
            if root is None or name.startswith("__"):
                raise
        value = getattr(root, name)
        if inspect.ismethod(value) and value.__self__ is root:
            raise AttributeError(
                f"{type(root).__name__}.{name} is a method of the model on one device; "
                f"only the captured call runs in parallel"
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the model are set there, where its Python reads them."""
        root = vars(self).get("_root")
        own = name in vars(self) or hasattr(type(self), name) or isinstance(value, (nn.Parameter, nn.Module))
        if root is None or own:
            super().__setattr__(name, value)
        else:
            setattr(root, name, value)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As on the model. Values may be whole tensors, of which this rank takes its slice, or DTensors."""
        state = _state(self)
        sliced = dict(state_dict)
        for name, parameter in self.named_parameters(remove_duplicate=False):
            value = state_dict.get(name)
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                sliced[name] = state.part(name, value)
        return super().load_state_dict(sliced, strict=strict, assign=assign)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with values of its own, on the same mesh with the same programs."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        modes: _Modes = vars(self)["_modes"]
        memo.update((id(version.guard), version.guard) for version in modes.versions)
        memo.update((id(version.pinned), version.pinned) for version in modes.versions)
        for state in (_state(self), *(version.state for version in modes.versions)):
            one_for_all = (state.mesh, state.groups, state.executable, state.program, state.plan, state.captured)
            memo.update((id(part), part) for part in one_for_all)
        memo[id(modes.again)] = modes.again
        vars(made).update(copy.deepcopy(vars(self), memo))
        _state(made).shells.clear()  # those of the original
        vars(made)["_modes"].guard_again()
        return made

    def __copy__(self) -> ParallelModule:
        raise ValueError("a parallel module has no shallow copy: use copy.deepcopy for one with values of its own")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "a parallel module cannot be pickled, since it belongs to the process groups of its mesh: save its "
            "state_dict() with torch.distributed.checkpoint, or the whole tensors of it with torch.save, and load "
            "them into a module that parallelize makes"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelModule:
        raise ValueError(
            "a parallel module keeps its device and dtype, which are part of its program: move or cast the model "
            "before it is made parallel, and use materialize() for a model on meta"
        )

    def _get_name(self) -> str:
        return f"ParallelModule({type(vars(self)['_root']).__name__})"

    def extra_repr(self) -> str:
        state = _state(self)
        mesh = " x ".join(f"{axis}={n}" for axis, n in zip(state.program.axes, state.program.mesh, strict=True))
        return f"mesh: {mesh}, program: {state.program.digest}"


class _State:
    """What the module knows beside its parameters: the program, its compiled form, and where values live."""

    def __init__(self, captured: Captured, program: Program, plan: object, mesh: DeviceMesh) -> None:
        self.captured, self.program, self.plan, self.mesh = captured, program, plan, mesh
        self.coordinate = coordinate_of(mesh)
        self.device = device_of(mesh)
        self.groups = process_groups(mesh)
        self.executable = compile(program, self.groups, device=self.device)
        self.inputs = tuple(i for i in program.inputs if i.role not in ("tangent", "seed"))
        self.seeds = sum(i.role == "seed" for i in program.inputs)
        order = [i.role for i in program.inputs if i.role != "tangent"]
        assert order[len(self.inputs) :] == ["seed"] * self.seeds, "seeds stand last"
        self.tangents = tuple(i for i in program.inputs if i.role == "tangent")
        self.carriers = frozenset(i.target for i in self.tangents)
        """Outputs that the program takes gradients of; `differentiable` are those that eager would."""
        self.differentiable = self.carriers | {leaf.path for leaf in captured.output_leaves if leaf.requires_grad}
        self.made = tuple(o for o in program.outputs if o.role != "gradient")
        self.gradients = {o.target: i for i, o in enumerate(o for o in program.outputs if o.role == "gradient")}
        self.gradient_outputs = tuple(o for o in program.outputs if o.role == "gradient")
        self.trained = frozenset(o.target for o in self.gradient_outputs if o.name is not None)
        outputs = [(i, o) for i, o in enumerate(self.made) if o.role == "output" and o.name is not None]
        self.output_indices = tuple(i for i, _ in outputs)
        self.output_paths = tuple(o.target for _, o in outputs)
        self.mutations = tuple((i, o) for i, o in enumerate(self.made) if o.role == "mutation" and o.name is not None)
        self.at_rest = {i.target: i.layout for i in self.inputs if i.role == "parameter"}
        self.constants = {name: t.detach().to(self.device) for name, t in captured.constants.items()}
        self.owners: dict[str, tuple[dict[str, Any], str]] = {}
        self.aliases: dict[str, list[str]] = {}
        self.mirrors: dict[int, nn.Module] = {}
        self.shells: dict[str, tuple[DTensor, int]] = {}
        """Parameters as they were seen first, with what `.data = ...` replaces of them."""
        self.called = False
        self.whole_outputs = False
        """Whether the caller gets split outputs gathered, as plain tensors."""
        self.overlapping: tuple[int, ...] | None = None
        mutated = {o.target for _, o in self.mutations}
        held = ("buffer", "parameter")
        self.mutated = tuple(k for k, i in enumerate(self.inputs) if i.role in held and i.target in mutated)
        """Which inputs the program writes."""
        self.shared: Shared | None = None

    # -- modules and values

    def mirror(self, module: nn.Module) -> nn.Module:
        """A module of the same class and attributes, with tensors of its own to come."""
        if id(module) not in self.mirrors:
            made = empty_submodule(type(module))
            vars(made).update(vars(module))
            vars(made).update(
                _parameters=dict(module._parameters),
                _buffers=dict(module._buffers),
                _modules={},
                _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
            )
            self.mirrors[id(module)] = made
            made._modules.update({n: None if m is None else self.mirror(m) for n, m in module._modules.items()})
        return self.mirrors[id(module)]

    def own(self, parallel: nn.Module, model: nn.Module) -> None:
        """Find where each name of a parameter or buffer is registered, and which names are one tensor."""
        first: dict[int, str] = {}
        for prefix, module in parallel.named_modules(remove_duplicate=False):
            for registry in (module._parameters, module._buffers):
                for key, tensor in registry.items():
                    if tensor is not None:
                        name = f"{prefix}.{key}" if prefix else key
                        self.owners[name] = (registry, key)
                        canonical = first.setdefault(id(tensor), self.captured.tied.get(name, name))
                        self.aliases.setdefault(canonical, []).append(name)

    def with_program(self, captured: Captured, program: Program) -> _State:
        """The same values with another program."""
        raise_together(_mismatch(program, self.mesh), self.mesh)
        all_equal(program.digest, self.mesh, "the ranks have different programs: give every rank the same versions")
        for i in program.inputs:
            assert i.role != "parameter" or i.layout == self.layout(i.target), f"{i.target} is to be moved"
        made = _State(captured, program, self.plan, self.mesh)
        made.at_rest, made.owners, made.aliases, made.mirrors = self.at_rest, self.owners, self.aliases, self.mirrors
        made.whole_outputs, made.shells = self.whole_outputs, self.shells
        return made

    def value(self, name: str) -> torch.Tensor:
        registry, key = self.owners[name]
        tensor: torch.Tensor = registry[key]
        return tensor

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
        """Uneven shards that are not those of torch are cut from the whole."""
        if is_chunked(i.meta.shape, i.layout, self.program.mesh):
            return self.placements(i)
        return placements_of((Replicate(),) * len(self.program.mesh), i.meta.shape, self.program.mesh)

    def shard(self, name: str, whole: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        """The parameter of this name as a DTensor, from its whole value, in memory of its own."""
        layout, mesh = self.layout(name), self.program.mesh
        if not is_real(whole):
            held = valid_shape(tuple(whole.shape), layout, mesh, self.coordinate)
            local = torch.empty(held, dtype=whole.dtype, device="meta")
        else:
            padded = local_slice(whole.detach(), layout, mesh, self.coordinate)
            local = unpadded(padded, tuple(whole.shape), layout, mesh, self.coordinate).to(self.device)
            storage = local.untyped_storage()
            if storage.data_ptr() == whole.untyped_storage().data_ptr() or storage.nbytes() > local.nbytes:
                local = local.clone(memory_format=torch.contiguous_format)
        placements = placements_of(layout, tuple(whole.shape), mesh)
        stride = contiguous_stride(tuple(whole.shape))
        return make_dtensor(local, self.mesh, placements, whole.shape, stride).requires_grad_(requires_grad)

    def distribute(self, model: nn.Module | None, values: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take this rank's part of each value, and compare the whole values with the other ranks'.

        One value is held whole at a time. Nothing is changed if any rank finds something wrong.
        """
        made: dict[str, torch.Tensor] = {}
        digests: dict[str, int] = {}
        error: Exception | None = None
        try:
            for name, value in values:
                made[name] = self.part(name, value)
                if not isinstance(value, DTensor) and is_real(value):
                    digests[name] = digest(value)
        except Exception as caught:
            error = caught
        raise_together(error, self.mesh)
        everyone = exchange(digests, self.mesh)
        for name in digests:
            if any(other.get(name) != digests[name] for other in everyone):
                raise ValueError(
                    f"the ranks have different values for {name!r}: seed every rank equally before the model is made, "
                    f"or build it on meta and call materialize(state_dict)"
                )
        for name, tensor in made.items():
            is_parameter = isinstance(self.value(name), nn.Parameter)
            new = nn.Parameter(tensor, requires_grad=tensor.requires_grad) if is_parameter else tensor
            compat.take_notes(new, self.value(name))
            for alias in self.aliases[name]:
                registry, key = self.owners[alias]
                registry[key] = new
            self._refuse_replaced(name)

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
            return value.full_tensor().to(self.device)
        shape = tuple(value.shape)
        wanted = placements_of(self.layout(name), shape, self.program.mesh)
        with torch.no_grad():
            local = self._placed(value, self.layout(name)).clone(memory_format=torch.contiguous_format)
        made = make_dtensor(local, self.mesh, wanted, value.shape, contiguous_stride(shape))
        return made.requires_grad_(requires_grad)

    def _placed(self, value: DTensor, layout: Layout) -> torch.Tensor:
        """This rank's part of a DTensor in `layout`, contiguous and without padding; communicates unless it is
        there already."""
        shape = tuple(value.shape)
        wanted = placements_of(layout, shape, self.program.mesh)
        as_in_torch = is_chunked(shape, layout, self.program.mesh)
        if value.device_mesh == self.mesh and value.placements == wanted and as_in_torch:
            return local_tensor(value).contiguous()
        if value.device_mesh != self.mesh or is_strided(wanted) or not as_in_torch:
            # torch's redistribution to strided shards is not to be relied on
            part = local_slice(value.full_tensor(), layout, self.program.mesh, self.coordinate)
            return unpadded(part, shape, layout, self.program.mesh, self.coordinate)
        return local_tensor(value.redistribute(self.mesh, wanted)).contiguous()

    def _padded(self, local: torch.Tensor, i: ProgramInput) -> torch.Tensor:
        """What the program is given, from what a DTensor's rank holds."""
        return pad(local, local_shape(i.meta.shape, i.layout, self.program.mesh))

    # -- a call

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        if not self.called:
            self._first_call(args, kwargs)
        return self._prepare(args, kwargs)

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What is wrong with the first call of any rank is raised on all of them."""
        error: Exception | None = None
        digests: dict[str, int] = {}
        try:
            self._prepare(args, kwargs)
            bound = self.captured.bind(args, kwargs)
            digests = {path: digest(t) for path, t in bound.items() if not isinstance(t, DTensor)}
        except Exception as caught:
            error = caught
        raise_together(error, self.mesh)
        everyone = exchange(digests, self.mesh)
        for path, own in digests.items():
            if any(other.get(path) != own for other in everyone):
                raise ValueError(
                    f"input {path} differs between ranks: a plain tensor is the global batch and must be the same on "
                    f"every rank. Give a DTensor if each rank has its own slice (see input_placements)"
                )
        self.called = True

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        bound = self.captured.bind(args, kwargs)
        values: list[torch.Tensor] = []
        given: list[torch.Tensor] = []
        differentiable: list[torch.Tensor] = []
        sources: list[ProgramInput] = []
        for i in self.inputs:
            if i.role == "input":
                whole = bound[i.target]
                local = self._local_input(i, whole)
                self._refuse_buffer(i, whole)
            elif i.target in self.constants and i.role == "buffer":
                whole = local = self.constants[i.target]
                local = local_slice(local, i.layout, self.program.mesh, self.coordinate)
            else:
                whole = self._refuse_replaced(i.target)
                local = self._padded(local_tensor(whole), i) if isinstance(whole, DTensor) else whole.detach()
                if i.role == "buffer":
                    local = local_slice(local, i.layout, self.program.mesh, self.coordinate)
            if local.device != self.device:
                raise ValueError(self._misplaced(i, local))
            values.append(local)
            given.append(whole)
            if i.role == "input" and whole.requires_grad and torch.is_grad_enabled() and i.target not in self.gradients:
                raise ValueError(
                    f"input {i.target} requires a gradient, and the model was captured without: give parallelize an "
                    f"example input that requires one, or detach() this one"
                )
            if whole.requires_grad and i.target in self.trained:
                differentiable.append(whole)
                sources.append(i)
        return _Call(
            state=self, values=values, given=given, differentiable=tuple(differentiable), sources=tuple(sources)
        )

    def _local_input(self, i: ProgramInput, whole: torch.Tensor) -> torch.Tensor:
        if not isinstance(whole, DTensor):
            return local_slice(whole.detach(), i.layout, self.program.mesh, self.coordinate)
        if whole.device_mesh != self.mesh:
            raise ValueError(f"input {i.target} is a DTensor on {whole.device_mesh}; the module is on {self.mesh}")
        with torch.no_grad():
            return self._padded(self._placed(whole, i.layout), i)

    def _refuse_replaced(self, name: str) -> torch.Tensor:
        """The value of this name. DTensor forgets `parameter.data = ...`."""
        value = self.value(name)
        if isinstance(value, DTensor):
            known, shell = self.shells.get(name, (None, 0))
            if known is not value:
                self.shells[name] = value, compat.shell(value)
            elif shell != compat.shell(value):
                raise ValueError(
                    f"parameter {name} was given other .data, which a DTensor does not take over: write into it "
                    f"instead, with parameter.data.copy_(...) or under torch.no_grad()"
                )
        return value

    def _refuse_buffer(self, i: ProgramInput, whole: torch.Tensor) -> None:
        """Where forward writes a buffer that it is given as an input too, eager sees the new values in both."""
        if not self.mutations or not is_real(whole):
            return
        place = storage_of(whole)
        for _, o in self.mutations:
            if storage_of(self.value(o.target)) == place:
                raise ValueError(
                    f"input {i.target} lies in the memory of buffer {o.target}, which forward writes: give a clone() "
                    f"of it"
                )

    def _misplaced(self, i: ProgramInput, local: torch.Tensor) -> str:
        if local.device.type == "meta" and i.role != "input":
            return f"{i.role} {i.target} is on meta: call materialize(init_fn or state_dict) before the first step"
        return f"{i.role} {i.target} is on {local.device} and the mesh on {self.device}: move it there"

    def keys(self) -> tuple[torch.Tensor, ...]:
        """The keys of this step's random operators."""
        return keys(step_seed(self.program.axes, self.groups, self.device), self.seeds) if self.seeds else ()

    def write_back(self, made: tuple[torch.Tensor | None, ...]) -> None:
        for index, o in self.mutations:
            value = made[index]
            assert value is not None
            held = self.value(o.target)
            if isinstance(held, DTensor):  # a parameter, of which each rank keeps its part
                shape, layout, mesh = tuple(held.shape), self.layout(o.target), self.program.mesh
                part = local_slice(value, layout, mesh, self.coordinate)
                value, held = unpadded(part, shape, layout, mesh, self.coordinate), local_tensor(held)
            held.copy_(value)

    def outputs(self, made: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
        """What the caller sees of each output: whole ones as they are, split ones as DTensors, or gathered."""
        results: list[torch.Tensor] = []
        for index in self.output_indices:
            local, output = made[index], self.made[index]
            assert local is not None
            split = None if _is_whole(output.layout) else self._dtensor(local, output)
            results.append(local if split is None else split.full_tensor() if self.whole_outputs else split)
        return tuple(results)

    def _dtensor(self, local: torch.Tensor, value: ProgramInput | ProgramOutput) -> DTensor:
        assert value.meta is not None
        shape = value.meta.shape
        local = unpadded(local, shape, value.layout, self.program.mesh, self.coordinate)
        return make_dtensor(local, self.mesh, self.placements(value), torch.Size(shape), contiguous_stride(shape))

    def tangent(self, i: ProgramInput, gradient: torch.Tensor | None) -> torch.Tensor:
        """What the backward half reads, from what autograd brings."""
        if gradient is None:
            shape = local_shape(i.meta.shape, i.layout, self.program.mesh)
            return torch.zeros(shape, dtype=i.meta.dtype, device=self.device)
        if isinstance(gradient, DTensor):
            return self._padded(self._placed(gradient, i.layout), i)
        return local_slice(gradient, i.layout, self.program.mesh, self.coordinate)

    def refuse_lost(
        self, by_path: Mapping[str, torch.Tensor | None], returned: Mapping[str, weakref.ref[torch.Tensor]]
    ) -> None:
        """A gradient that the program has no place for is an error, not a loss."""
        others = [path for path in by_path if path not in self.carriers]
        for path in others:
            output = returned[path]()
            if output is not None and compat.is_observed(output):
                raise ValueError(
                    f"{path} has a hook or retain_grad(), and its gradient is not computed where {self.captured.loss} "
                    f"is differentiated: have the model return what you look for, or leave the hook out"
                )
        lost = [path for path in others if by_path[path] is not None]
        if lost:
            raise ValueError(
                f"a gradient reaches {', '.join(lost)}, and the program differentiates {self.captured.loss} alone: "
                f"pass parallelize a loss_fn= that takes the model's output and returns all of the loss, or detach() "
                f"what is not to be differentiated"
            )

    def gradient(self, i: ProgramInput, form: tuple[Placement, ...] | None, local: torch.Tensor) -> torch.Tensor:
        """The gradient of an input of the call, placed like that input (None: a plain tensor)."""
        output = self.gradient_outputs[self.gradients[i.target]]
        if form is not None:
            made = self._dtensor(local.contiguous(), output)
            return made if made.placements == form else made.redistribute(self.mesh, form)
        return local if _is_whole(output.layout) else self._dtensor(local.contiguous(), output).full_tensor()


@dataclass(kw_only=True, slots=True, eq=False)
class _Version:
    """A program, and what it is right for."""

    mode: Mode
    guard: Guard
    pinned: Pinned
    state: _State


class _Modes:
    """The program for each mode that the module is called in."""

    def __init__(self, parallel: ParallelModule, model: nn.Module, state: _State, again: Again | None) -> None:
        self.base, self.again = state, again
        # the parallel module stands for the model; submodules are its mirrors, in the same order
        self.modules = tuple(parallel.modules())
        self.parameters = tuple(
            (name, *state.owners[name]) for name in state.aliases if isinstance(state.value(name), nn.Parameter)
        )
        captured = state.captured
        trained = {o.target for o in state.gradient_outputs if o.name is not None}
        mode = Mode(
            training=tuple(m.training for m in model.modules()),
            trainable=frozenset({name for name, *_ in self.parameters} & trained | set(captured.without_gradient)),
            gradients=bool(state.tangents)
            or (torch.is_grad_enabled() and not any(p.requires_grad for p in model.parameters())),
            autocast=captured.autocast,
        )
        self.root, self.loss_fn = vars(parallel)["_root"], getattr(again, "loss_fn", None)
        self.versions: list[_Version] = [self._version(mode, captured, state)]
        self.chosen: dict[tuple[Any, ...], _Version] = {}
        self.device_type = state.device.type

    def state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _State:
        """That of the mode which the module is in now, and of these inputs."""
        gradients = torch.is_grad_enabled()
        flags: list[Any] = [compat.autocast_dtype(self.device_type), gradients, *[m.training for m in self.modules]]
        if gradients:
            flags += [registry[key].requires_grad for _, registry, key in self.parameters]
        key = tuple(flags)
        chosen = self.chosen.get(key)
        if chosen is None or not chosen.guard.holds() or (chosen.pinned and not self._reads(chosen, args, kwargs)):
            self.chosen[key] = chosen = self._found(gradients, args, kwargs)
        return chosen.state

    def guard_again(self) -> None:
        """Guard the modules that these modes are of now, and no others."""
        for version in self.versions:
            version.guard = self._guard(version.state.captured)
        self.chosen = {}

    def _guard(self, captured: Captured) -> Guard:
        return Guard(self.root, self.loss_fn, captured.reads)

    def _version(self, mode: Mode, captured: Captured, state: _State) -> _Version:
        return _Version(mode=mode, guard=self._guard(captured), pinned=captured.pinned, state=state)

    def _reads(self, version: _Version, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a program's numbers are those of these inputs, on all ranks alike."""
        error: Exception | None = None
        differs = None
        bound = self._bound(args, kwargs)
        inputs = {path: gathered(bound[path]) for path in version.pinned.slots}
        try:
            differs = version.pinned.differs(inputs)
        except Exception as caught:
            error = caught
        raise_together(error, self.base.mesh)
        all_equal(
            differs is None,
            self.base.mesh,
            f"the ranks read different {version.pinned}: a plain tensor is the global batch and must be the same on "
            f"every rank",
        )
        return differs is None

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The inputs by path; what is wrong with those of any rank is raised on all of them."""
        bound: dict[str, torch.Tensor] = {}
        error: Exception | None = None
        try:
            bound = self.base.captured.bind(args, kwargs)
        except ValueError as caught:
            error = caught
        raise_together(error, self.base.mesh)
        return bound

    def _found(self, gradients: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Version:
        wanted = (name for name, registry, key in self.parameters if gradients and registry[key].requires_grad)
        cast = compat.autocast_dtype(self.device_type)
        mode = Mode(tuple(m.training for m in self.modules), frozenset(wanted), gradients, cast)
        changed: list[str] = []
        others: list[_Version] = []
        for version in self.versions:
            if version.mode == mode or (self.again is None and version.mode.covers(mode)):
                if not version.guard.holds():
                    changed = version.guard.changed
                elif version.pinned and not self._reads(version, args, kwargs):
                    others.append(version)
                else:
                    self.versions.append(self.versions.pop(self.versions.index(version)))
                    return version
        if others:
            self._report_read(others)
        elif changed:
            report_changed(changed, possible=self.again is not None)
        if self.again is None:
            raise ValueError(
                f"the module has a program for {self.versions[0].mode}, and is called for {mode}: call train(), eval() "
                f"and requires_grad_() as when it was captured, or make it with autopar.parallelize"
            )
        states = [version.state for version in self.versions]
        inputs = self._bound(args, kwargs)
        captured, program = self.again(mode, self.root, [state.captured for state in states], inputs)
        if isinstance(program, int):
            served = [state for state in states if state.program is states[program].program]
            same = [state for state in served if same_values(state.captured, captured)]
            state = same[0] if same else self.base.with_program(captured, states[program].program)
        else:
            state = self.base.with_program(captured, program)
        made = self._version(mode, captured, state)
        self.versions.append(made)
        return made

    def _report_read(self, others: Sequence[_Version]) -> None:
        """Say that the programs of a mode read other numbers; the one that was called longest ago is dropped if there
        are too many. Raises ValueError where another cannot be had."""
        pinned = others[0].pinned
        if self.again is None:
            raise ValueError(
                f"the program is right for other {pinned}: give the inputs that it was captured with, or make the "
                f"module with autopar.parallelize, which captures again"
            )
        logger.warning(
            "the model's Python reads %s, and these differ from those of the %s: it is captured and planned again, "
            "which takes long, and %d programs are kept. What differs from batch to batch should be computed with "
            "tensors (a mask, torch.where), not read",
            pinned,
            "program" if len(others) == 1 else f"{len(others)} programs",
            PINNED_MOST,
        )
        if len(others) >= PINNED_MOST:
            dropped = others[0]
            self.versions.remove(dropped)
            self.chosen = {key: version for key, version in self.chosen.items() if version is not dropped}


@dataclass(kw_only=True, slots=True)
class _Call:
    """One call: this rank's values of the inputs, and the tensors outside that take gradients."""

    state: _State
    values: list[torch.Tensor]
    given: list[torch.Tensor]
    """What the values are parts of."""
    differentiable: tuple[torch.Tensor, ...]
    sources: tuple[ProgramInput, ...]
    returned: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """The outputs, once the caller has them."""
    keys: tuple[torch.Tensor, ...] = ()
    """Of the random operators, once they are drawn."""
    check: Check | None = None

    def forward(self) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor, ...]]:
        """Run the forward half once: values of outputs and mutations, and what is saved for backward."""
        state = self.state
        self.keys = state.keys()
        self.values += self.keys
        seen = [*self.values] if state.shared is None else []
        with compat.without_autocast(state.device.type):
            made, saved = state.executable.forward(self.values)
        if state.shared is None:
            state.shared = Shared.of(seen, state.mutated, made, saved)
        with torch.no_grad():
            made, saved = state.shared.apart(made, saved)
            state.write_back(made)
        return made, saved


class _Step(torch.autograd.Function):
    """The compiled forward and backward as one operator of autograd."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *differentiable: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = call.state
        made, saved = call.forward()
        outputs = state.outputs(made)
        ctx.mark_non_differentiable(
            *(o for o, path in zip(outputs, state.output_paths, strict=True) if path not in state.differentiable)
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        forms = (t.placements if isinstance(t, DTensor) else None for t in differentiable)
        ctx.state, ctx.sources, ctx.returned = state, tuple(zip(call.sources, forms, strict=True)), call.returned
        ctx.check = call.check
        assert state.shared is not None
        read = [(state.inputs[k], call.given[k]) for k in state.shared.kept if k < len(call.given)]
        ctx.read = [(i, whole, compat.version(whole)) for i, whole in read if isinstance(whole, DTensor)]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            results = _Step.gradients(ctx, gradients)
        if not torch.is_grad_enabled():
            return results
        # the caller asked for a graph of the gradients
        found = [index for index, value in enumerate(results) if value is not None]
        marked = _Once.apply(*(results[index].detach().requires_grad_() for index in found))  # type: ignore
        by_index = dict(zip(found, marked, strict=True))
        return tuple(by_index.get(index) for index in range(len(results)))

    @staticmethod
    def gradients(ctx: Any, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        state: _State = ctx.state
        by_path = dict(zip(state.output_paths, gradients, strict=True))
        state.refuse_lost(by_path, dict(zip(state.output_paths, ctx.returned, strict=True)))
        _refuse_written(ctx.read)
        arguments = [*ctx.saved_tensors]
        ctx.maybe_clear_saved_tensors()
        arguments += [state.tangent(i, by_path.get(i.target)) for i in state.tangents]
        # what backward drops is not kept for the look at it; tangents are, since the caller may hold other ones
        look = state.overlapping is None
        kept = [(weakref.ref(x.untyped_storage()), storage_span(x)) for x in arguments] if look else []
        held = arguments[len(arguments) - len(state.tangents) :] if look else []
        with compat.without_autocast(state.device.type):
            made = list(state.executable.backward(arguments))
        if state.overlapping is None:
            state.overlapping = overlapping(made, kept)
            held.clear()
        # an optimizer writes into gradients: no two may share memory
        for index in state.overlapping:
            value = made[index]
            assert value is not None
            made[index] = value.clone(memory_format=torch.contiguous_format)
        results: list[torch.Tensor | None] = [None]
        for (i, form), needed in zip(ctx.sources, ctx.needs_input_grad[1:], strict=True):
            local = made[state.gradients[i.target]] if needed else None
            results.append(None if local is None else state.gradient(i, form, local))
        if ctx.check is not None:
            made_for = {i.target: g for (i, _), g in zip(ctx.sources, results[1:], strict=True) if g is not None}
            ctx.check.backward({i.target: by_path.get(i.target) for i in state.tangents}, made_for)
        return tuple(results)


class _Once(torch.autograd.Function):
    """Gradients that are not differentiated again."""

    @staticmethod
    def forward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise ValueError(
            "the gradients of a parallel module cannot be differentiated again: compute a penalty on gradients inside "
            "of the model's forward or of loss_fn=, by torch.autograd.grad(..., create_graph=True)"
        )


def _refuse_written(read: Sequence[tuple[ProgramInput, torch.Tensor, int]]) -> None:
    """As autograd does for plain tensors."""
    for i, whole, version in read:
        if compat.version(whole) != version:
            raise ValueError(
                f"{i.role} {i.target} was written between forward and backward, which reads it: call optimizer.step() "
                f"and other writes after backward(), or call the module again first"
            )


def _state(module: nn.Module) -> _State:
    state: _State = vars(module)["_state"]
    return state


def _is_whole(layout: Layout) -> bool:
    return all(isinstance(placement, Replicate) for placement in layout)


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _mismatch(program: Program, mesh: DeviceMesh) -> ValueError | None:
    """What about the program does not fit the mesh or the module."""
    if tuple(mesh.shape) != program.mesh:
        return ValueError(f"the plan is for a mesh of {program.mesh}, and this mesh is {tuple(mesh.shape)}")
    for i in program.inputs:
        if i.role == "parameter" and not is_gatherable(i.layout, i.meta.shape, program.mesh):
            return _unserved("parameter", i.target, i.layout, program)
    at_rest = {i.target: i.layout for i in program.inputs if i.role == "parameter"}
    for o in program.outputs:
        if o.name is None:
            continue
        if o.role == "gradient" and (rest := at_rest.get(o.target, o.layout)) != o.layout:
            return ValueError(
                f"the gradient of {o.target} is {describe(o.layout, program.axes)} and the parameter "
                f"{describe(rest, program.axes)} at rest: they must be equal"
            )
        if o.role == "output" and o.meta is not None and not is_gatherable(o.layout, o.meta.shape, program.mesh):
            return _unserved("output", o.target, o.layout, program)
        if o.role == "mutation" and not _is_whole(o.layout):
            return ValueError(
                f"{o.target} is written as {describe(o.layout, program.axes)}: what forward writes is whole"
            )
        if any(isinstance(placement, Partial) for placement in o.layout):
            return ValueError(
                f"{o.role} {o.target} is {describe(o.layout, program.axes)}: what leaves a program is not partial"
            )
    return None


def _unserved(role: str, target: str, layout: Layout, program: Program) -> ValueError:
    return ValueError(
        f"{role} {target} is {describe(layout, program.axes)}, which a DTensor can express and cannot gather: "
        f"let only the last mesh axis that splits a dim take scattered pieces of it"
    )


def _values_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _values_from(source: Mapping[str, torch.Tensor], state: _State) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor's value in a state_dict, under any of its names."""
    missing = []
    for name, aliases in state.aliases.items():
        present = state.value(name)
        found = next((alias for alias in aliases if alias in source), None)
        if found is None:
            if present.device.type == "meta":
                missing.append(name)
            continue
        value = source[found]
        if value.shape != present.shape:
            raise ValueError(f"{found} is {list(value.shape)} in the state_dict and {list(present.shape)} in the model")
        yield name, value.to(present.dtype)
    if missing:
        raise ValueError(
            f"the state_dict lacks {', '.join(missing)}, which are on meta (buffers that the model's own state_dict "
            f"does not hold may be added to it)"
        )


def _values_made(function: InitFunction, state: _State) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor on meta, filled by `function`."""
    for name in state.aliases:
        present = state.value(name)
        if present.device.type != "meta":
            continue
        whole = torch.empty(present.shape, dtype=present.dtype)
        with torch.no_grad():
            returned = function(name, whole)
        whole = whole if returned is None else returned
        if whole.shape != present.shape:
            raise ValueError(f"init_fn made {list(whole.shape)} for {name}, which is {list(present.shape)}")
        yield name, whole.to(present.dtype)
