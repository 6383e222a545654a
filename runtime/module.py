"""The parallel module: DTensor parameters outside, the local program inside."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autopar import compat
from autopar.compat import is_real
from autopar.ir.program import Program
from autopar.passes.capture.captured import Captured

from .agree import all_equal, digest, follow_world_timeout, raise_together
from .call import ProgramStep, prepared_call
from .execute import Executable
from .guard import OWNERS, Original
from .held import State
from .placements import mismatch
from .pretrained import Filled
from .verify import Verifier
from .versions import Again, Versions


class ParallelModule(Filled, nn.Module):
    """A model that runs as `program` on `mesh`. Build it on every rank at once.

    Parameters are DTensors under the model's own names, placed at rest as the program wants them;
    each rank keeps its slice of the model's own values, in memory of its own, and the ranks check
    that they agree on them. Parameters on `meta` stay there until `materialize`. Buffers are plain
    tensors. Submodules, `config` and other attributes are reachable as on the model; the model's
    methods are not, since they would run the model and not the program.

    Plain tensors given to a call are the global batch on every rank, of which the rank takes its
    slice; a DTensor says what it holds. Replicated outputs are plain tensors, and the
    others are DTensors, or, with `whole_outputs`, are gathered. No output shares memory with a parameter, a buffer, an
    input or another output. If the model has a loss, that alone is differentiated: backward raises ValueError where a
    gradient reaches another output.

    `train()`, `eval()`, `torch.no_grad()`, `torch.autocast()` and `requires_grad_()` mean what they do on the model.
    `to(...)`, `cpu()`, `float()` and the like return the module where device and dtype stay, and raise ValueError where
    they do not.
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
        follow_world_timeout(mesh)
        raise_together(mismatch(program, mesh), mesh)
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
        state = State(captured, program, plan, mesh)
        state.whole_outputs = whole_outputs
        vars(self)["_state"] = state
        root = mirrored(state.mirrors, model)
        # the same dictionaries: the root's parameters and submodules are this module's own
        self._parameters, self._buffers, self._modules = root._parameters, root._buffers, root._modules
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        self.training = captured.training
        vars(self)["_root"] = root
        state.own(self)
        vars(self)["_modes"] = Versions(self, model, state, again)
        vars(self)["_verifier"] = verifier
        state.distribute(chain(model.named_parameters(), model.named_buffers()))
        OWNERS.claim(model, self)
        vars(self)["_original"] = Original(model, root, captured.reads)

    # -- what a person asks for

    @property
    def program(self) -> Program:
        """What each rank runs; its text is readable."""
        return _state(self).program

    @property
    def plan(self) -> Any:
        """The plan that the program was written from."""
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, `backward()` adds gradients up on each rank and reduces none. The first backward after it reduces
        the sum, in the buckets of the plan, and only then do parameters get gradients:

            for micro_batch in first_ones:
                with parallel.no_sync():
                    (parallel(**micro_batch).loss / count).backward()
            (parallel(**last_one).loss / count).backward()
            optimizer.step()

        What is added up has the size of the gradients before their reduction: under fully sharded plans, that of all
        parameters that a rank computes with. All ranks must come to it alike. `zero_grad()` of the module drops
        what waits; that of an optimizer does not.
        """
        pending = _state(self).pending
        before, pending.reduces = pending.reduces, False
        try:
            yield
        finally:
            pending.reduces = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As on the model; it also drops gradients that wait to be reduced (`no_sync`)."""
        _state(self).pending.sums.clear()
        super().zero_grad(set_to_none)

    @compat.uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["_original"].warn()
        state = vars(self)["_modes"].state(args, kwargs)
        call = prepared_call(state, args, kwargs)
        verifier: Verifier | None = vars(self)["_verifier"]
        if verifier is not None:
            call.check = verifier.begin(state, vars(self)["_modes"].modules, state.captured.bind(args, kwargs))
        if call.differentiable and torch.is_grad_enabled():
            results = ProgramStep.apply(call, *call.differentiable)  # type: ignore[no-untyped-call]
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
        """As on the model. Values may be global tensors, of which this rank takes its slice, or DTensors."""
        state = _state(self)
        sliced = dict(state_dict)
        for name, parameter in self.named_parameters(remove_duplicate=False):
            value = state_dict.get(name)
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                sliced[name] = state.part(name, value)
        return super().load_state_dict(sliced, strict=strict, assign=assign)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with values of its own, on the same mesh with the same programs."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        modes: Versions = vars(self)["_modes"]
        memo.update((id(version.guard), version.guard) for version in modes.versions)
        memo.update((id(version.pinned), version.pinned) for version in modes.versions)
        for state in (_state(self), *(version.state for version in modes.versions)):
            one_for_all = (state.mesh, state.groups, state.executable, state.program, state.plan, state.captured)
            memo.update((id(part), part) for part in (*one_for_all, vars(state).get("parts")))
        memo[id(modes.again)] = modes.again
        vars(copied).update(copy.deepcopy(vars(self), memo))
        _state(copied).shells.clear()  # those of the original
        vars(copied)["_modes"].guard_again()
        return copied

    def __copy__(self) -> ParallelModule:
        raise ValueError("a parallel module has no shallow copy: use copy.deepcopy for one with values of its own")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "a parallel module cannot be pickled, since it belongs to the process groups of its mesh: save its "
            "state_dict() with torch.distributed.checkpoint, or its full tensors with torch.save, and load "
            "them into a module that parallelize makes"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelModule:
        """`to`, `cpu`, `float` and the like. Whoever holds a module calls them; they do nothing where device and dtype
        stay."""
        _refuse_moved(self, fn)
        return self

    def _get_name(self) -> str:
        return f"ParallelModule({type(vars(self)['_root']).__name__})"

    def extra_repr(self) -> str:
        state = _state(self)
        mesh = " x ".join(f"{axis}={n}" for axis, n in zip(state.program.axes, state.program.mesh, strict=True))
        return f"mesh: {mesh}, program: {state.program.digest}"


def _state(module: nn.Module) -> State:
    state: State = vars(module)["_state"]
    return state


def _call(cls: type[nn.Module], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A submodule called by itself: `parallel.lm_head(h)`. Its parameters are DTensors, and a plain tensor beside one
    is an error deep in torch. So it gathers them, and every rank runs all of it, on inputs that are equal on all:
    right, differentiable, and no faster than on one device."""
    split = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
    if not split:  # called by a submodule that has gathered them, or there are none
        return super(cls, module).__call__(*args, **kwargs)  # type: ignore[misc]
    meta = [name for name, p in split.items() if p.device.type == "meta"]
    if meta:
        raise ValueError(f"parameter {meta[0]} is on meta: call materialize(init_fn or state_dict) first")
    args, kwargs = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), (args, kwargs))
    gathered = {name: p.full_tensor() for name, p in split.items()}
    return torch.func.functional_call(module, gathered, args, kwargs)


def _refuse_moved(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raises ValueError if `fn`, tried on tensors like those of the module, gives other tensors, or shares them."""
    held = {(t.dtype, t.device, t.dim()): name for name, t in chain(module.named_parameters(), module.named_buffers())}
    for (dtype, device, dims), name in held.items():
        like = torch.empty((2,) * dims, dtype=dtype, device=device)
        was_shared = like.untyped_storage().is_shared()
        cause: Exception | None = None
        try:
            stays = fn(like) is like and like.untyped_storage().is_shared() == was_shared
        except Exception as error:  # of torch, such as: no CUDA here
            stays, cause = False, error
        if not stays:
            raise ValueError(
                f"a parallel module keeps its device and dtype ({name}: {dtype} on {device}), which are part of its "
                f"program: move or cast the model before parallelize, and use materialize() for a model on meta"
            ) from cause


@cache
def _callable_alone(kind: type[Any]) -> type[Any]:
    """A class that passes for this one, whose calls gather the parameters, and which keeps its device and dtype."""

    class Submodule(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return _call(Submodule, self, args, kwargs)

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            _refuse_moved(self, fn)
            return self

    Submodule.__name__, Submodule.__qualname__ = kind.__name__, kind.__qualname__
    Submodule.__module__, Submodule.__doc__ = kind.__module__, kind.__doc__
    return Submodule


def mirrored(mirrors: dict[int, nn.Module], module: nn.Module) -> nn.Module:
    """A module of the same class and attributes, with tensors of its own to come."""
    if id(module) not in mirrors:
        mirror: nn.Module = object.__new__(_callable_alone(type(module)))  # type: ignore[arg-type]
        vars(mirror).update(vars(module))
        vars(mirror).update(
            _parameters=dict(module._parameters),
            _buffers=dict(module._buffers),
            _modules={},
            _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
        )
        mirrors[id(module)] = mirror
        mirror._modules.update({n: None if m is None else mirrored(mirrors, m) for n, m in module._modules.items()})
    return mirrors[id(module)]
