"""One call of a parallel module: its inputs, forward, and backward as autograd asks for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import unserializable_hook

from autopar.compat import calls
from autopar.compat.calls import backward_running, is_asked, is_observed, own_hooks, receiver
from autopar.compat.outputs import Absent, lengthened, shortened
from autopar.compat.tensors import is_real, storage_span
from autopar.compat.watching import hook_gradient, hooks_gradient, require_gradient
from autopar.extensions import Plug, Table
from autopar.ir.program import ProgramInput, ProgramOutput
from autopar.passes.capture.errors import listed
from autopar.passes.capture.source import presented

from .agreement import all_alike, digest, together
from .gathers import Gathers
from .inputs import Inputs
from .pending import Receivers, can_wait, quietly
from .shared_memory import SharedMemory, overlapping
from .state import State
from .verify import StepCheck
from .whole_gradient import storage_of, whole_gradient

Watch = Callable[[State, str, Sequence[torch.Tensor]], AbstractContextManager[list[Any]]]
"""Of "forward" or "backward" and what the pass is given: within it the pass runs, and puts its results, in the order of
the program's, into the list."""

WATCHES = Table("watch", Plug)
"""Watches over passes, by name."""


@contextmanager
def unwatched(state: State, what: str, inputs: Sequence[torch.Tensor]) -> Iterator[list[Any]]:
    yield []


def prepared_call(state: State, inputs: Inputs) -> _Call:
    """An error in the first call of any rank is raised on all of them."""
    if state.called:
        return _prepared(state, inputs)
    with together(state.mesh):
        call = _prepared(state, inputs)
        digests = {path: digest(t) for path, t in inputs.tensors.items() if not isinstance(t, DTensor)}
    all_alike(
        digests,
        state.mesh,
        "input {name} differs between ranks: a plain tensor is the global batch and must be the same on every rank. "
        "Give a DTensor if each rank has its own slice (see input_placements)",
    )
    state.called = True
    return call


def _refuse_unanswered(state: State) -> None:
    if state.lost:
        state.lost = False
        raise ValueError(
            f"backward() never ran on what an earlier call returned, and forward has gradients of "
            f"{listed(state.captured.early)} by a backward() of its own, which a program gives with those of what it "
            f"returns: run backward() on each call, or leave the inner one to the training loop"
        )


def _prepared(state: State, inputs: Inputs) -> _Call:
    _refuse_unanswered(state)
    bound = inputs.leaves
    values: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    differentiable: list[torch.Tensor] = []
    sources: list[ProgramInput] = []
    for i in state.inputs:
        if i.role == "buffer" and i.name not in state.read:
            source = local = state.nothing  # it may be the user's own, of another shape by now
        elif i.role == "input":
            source = bound[i.target]
            _refuse_input(state, i, source)
            local = state.given(i, source)
        else:
            constant = state.constants.get(i.target) if i.role == "buffer" else None
            source = state.values[i.target] if constant is None else constant
            local = state.given(i, source)
        if local.device != state.device:
            raise ValueError(_misplaced(state, i, local))
        values.append(local)
        given.append(source)
        if i.role == "input" and source.requires_grad and torch.is_grad_enabled() and i.target not in state.gradients:
            raise ValueError(
                f"input {i.target} requires a gradient, and the model was captured without: give parallelize an "
                f"example input that requires one, or detach() this one"
            )
        if source.requires_grad and i.target in state.trained:
            differentiable.append(source)
            sources.append(i)
            if i.target in state.captured.hooked:
                whole_gradient(i.target, source)
    return _Call(state=state, values=values, given=given, differentiable=tuple(differentiable), sources=tuple(sources))


def _refuse_input(state: State, i: ProgramInput, source: torch.Tensor) -> None:
    """One with a forward-mode tangent, or on another mesh; and a buffer that forward writes and is given as an input
    too, where eager sees the new values in both."""
    if calls.has_tangent(source):
        raise ValueError(
            f"input {i.target} has a tangent, and a parallel module has no forward-mode derivatives: compute them "
            f"inside of the model's forward, or take gradients by backward()"
        )
    if isinstance(source, DTensor) and source.device_mesh != state.mesh:
        raise ValueError(f"input {i.target} is a DTensor on {source.device_mesh}; the module is on {state.mesh}")
    if not state.mutations or not is_real(source):
        return
    place = storage_of(source)
    for _, o in state.mutations:
        if storage_of(state.values[o.target]) == place:
            raise ValueError(
                f"input {i.target} lies in the memory of buffer {o.target}, which forward writes: give a clone() of it"
            )


def _misplaced(state: State, i: ProgramInput, local: torch.Tensor) -> str:
    if local.device.type == "meta" and i.role != "input":
        return f"{i.role} {i.target} is on meta: call materialize(init_fn or state_dict) before the first step"
    return f"{i.role} {i.target} is on {local.device} and the mesh on {state.device}: move it there"


@dataclass(kw_only=True, slots=True)
class _Call:
    """One call: this rank's values of the inputs, and the tensors outside that take gradients."""

    state: State
    values: list[torch.Tensor]
    given: list[torch.Tensor]
    """What the values are parts of."""
    differentiable: tuple[torch.Tensor, ...]
    sources: tuple[ProgramInput, ...]
    cut: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Path of an output -> the sizes of dims along which the caller gets its beginning alone."""
    returned: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """The outputs, once the caller has them."""
    forms: tuple[tuple[Placement, ...] | None, ...] = ()
    """How what takes gradients was placed; None for a plain tensor."""
    read: tuple[int, ...] = ()
    """Which inputs backward reads in the memory that they have, of which `given` are what is kept."""
    rewritten: tuple[tuple[ProgramOutput, torch.Tensor], ...] = ()
    """What this call wrote of `State.reread`."""
    versions: tuple[Sequence[int], Sequence[int]] = ((), ())
    """Of these, and of what backward writes."""
    unasked: Collection[str] = ()
    """What gets no gradient from the backward that runs."""
    is_open: bool = False
    """Whether backward is still to come. A call that nobody differentiates loses what its forward computes by a
    `backward()` of its own: the next one says so."""
    keys: tuple[torch.Tensor, ...] = ()
    """Of the random operators, once they are drawn."""
    check: StepCheck | None = None
    watch: Watch = unwatched

    def outputs(self, values: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
        """What the caller sees."""
        found = dict(zip(self.state.output_paths, self.state.outputs(values), strict=True))
        for path, sizes in self.cut.items():
            for dim, size in sizes.items():
                found[path] = shortened(found[path], dim, size)
        return tuple(found.values())

    def gives(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Remember what the caller has now."""
        self.returned += map(weakref.ref, outputs.values())
        if inner := self.state.captured.inner:
            tensors = {path: weakref.ref(x) for path, x in outputs.items() if not isinstance(x, Absent)}
            _Wanted(inner, tensors).watch()

    def __del__(self) -> None:
        if self.is_open and self.state.captured.early:
            self.state.lost = True

    def awaits_backward(self) -> None:
        """Keep what backward needs, and nothing else."""
        state = self.state
        assert state.shared is not None
        kept = (k for k in state.shared.kept if k < len(self.given) and isinstance(self.given[k], DTensor))
        self.read, self.is_open = tuple(kept), True
        self.forms = tuple(t.placements if isinstance(t, DTensor) else None for t in self.differentiable)
        self.given, self.values, self.differentiable = [self.given[k] for k in self.read], [], ()
        self.versions = self.versions_now()

    def versions_now(self) -> tuple[Sequence[int], Sequence[int]]:
        values = self.state.values
        return calls.versions(self.given), calls.versions(values[output.target] for _, output in self.state.updates)

    def forward(self) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor, ...]]:
        """Run the forward half once: values of outputs and mutations, and what is saved for backward."""
        state = self.state
        self.keys = state.keys()
        self.values += self.keys
        seen = [*self.values] if state.shared is None else []
        with self.watch(state, "forward", self.values) as made, quietly(state):
            results, saved = self._run()
            made += results
        if state.shared is None:
            state.shared = SharedMemory.of(seen, state.mutated, results, saved)
        with torch.no_grad():
            results, saved = state.shared.apart(results, saved)
            state.write_back(results, state.mutations)
        self.rewritten = tuple((o, value) for index, o in state.reread if (value := results[index]) is not None)
        return results, saved

    def _run(self) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor, ...]]:
        state, pending = self.state, self.state.module.pending
        if not state.module.holds or self.watch is not unwatched or self.check is not None:
            return state.executable.forward(self.values)
        gathers: Gathers = pending.gathers.get(state) or pending.gathers.setdefault(state, Gathers(state))
        return gathers.forward(state.executable, self.given, self.values, waits=not pending.reduces)


class ProgramStep(torch.autograd.Function):
    """The compiled forward and backward as one operator of autograd."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *differentiable: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = call.state
        results, saved = call.forward()
        outputs = call.outputs(results)
        ctx.mark_non_differentiable(
            *(o for o, path in zip(outputs, state.output_paths, strict=True) if path not in state.differentiable)
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        call.awaits_backward()
        # what is computed is not kept alive: it may be written with what is computed of it
        ctx.call, ctx.sources = call, [x if x.is_leaf else weakref.ref(x) for x in differentiable]
        return outputs

    @staticmethod
    @presented()
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        state = call.state
        handshake = state.module.handshake
        carriers = state.carriers if state.pipelined is None else frozenset()
        given = [path for path, g in zip(state.output_paths, gradients, strict=True) if g is not None]
        if state.splits or len(carriers) > 1:
            handshake.differentiates(sorted(carriers.difference(given)))
        if len(carriers) > 1:  # ranks run the same backward, or none
            handshake.settle()
        handshake.backwards += 1
        handshake.reductions += state.module.pending.reduces
        creates_graph = torch.is_grad_enabled()
        call.unasked = state.unasked(given)
        with torch.no_grad(), handshake.running("backward pass"):
            results = ProgramStep.gradients(ctx, gradients, None if creates_graph else _receivers(ctx))
            handshake.settle()
        for i, (node, _), gradient in zip(call.sources, ctx.next_functions, results[1:], strict=True):
            if i.target in state.captured.hooked and gradient is not None:
                whole_gradient(i.target, node.variable).expect(storage_of(gradient))
        if not torch.is_grad_enabled():
            if not calls.keeps_graph():
                ctx.sources = ()
            return results
        # the caller asked for a graph of the gradients
        present = [index for index, value in enumerate(results) if value is not None]
        once = (value.detach().requires_grad_() for value in results if value is not None)
        sources = [x() if isinstance(x, weakref.ref) else x for x in ctx.sources]
        if any(x is None for x in sources):
            raise ValueError(
                "gradients that can be differentiated again (create_graph) are asked for, and an input of the module, "
                "of which they are computed, is gone: keep it until then"
            )
        computed_of = (*sources, *(g for g in gradients if g is not None))
        marked = _Once.apply(len(present), *once, *computed_of)  # type: ignore[no-untyped-call]
        by_index = dict(zip(present, marked, strict=True))
        return tuple(by_index.get(index) for index in range(len(results)))

    @staticmethod
    def gradients(
        ctx: Any, gradients: tuple[torch.Tensor | None, ...], receivers: Receivers | None
    ) -> tuple[torch.Tensor | None, ...]:
        """`receivers` are the parameters whose gradients may wait."""
        call: _Call = ctx.call
        state = call.state
        _refuse_second(call, ctx.next_functions)
        _refuse_unanswered(state)
        pairs = zip(state.output_paths, gradients, strict=True)
        by_path = {path: None if g is None else lengthened(g, state.output_shapes[path]) for path, g in pairs}
        returned = dict(zip(state.output_paths, call.returned, strict=True))
        _refuse_lost(state, by_path, returned)
        _refuse_written(call)
        arguments = [*ctx.saved_tensors]
        ctx.maybe_clear_saved_tensors()
        given = len(arguments)
        pending = state.module.pending
        form, unreduced = pending.form(state, receivers)
        waiting: Receivers = {} if receivers is None or form == "step" else receivers
        executable, absent = state.executable, frozenset[str]()
        if form != "step":
            executable = state.parts.micro if form == "micro" else state.parts.last
        elif call.check is None:
            absent = frozenset(i.name for i in state.tangents if by_path.get(i.target) is None)
            if (lacking := state.without(absent)) is None:
                absent = frozenset()
            else:
                executable = lacking
        arguments += [state.tangent(i, by_path.get(i.target)) for i in state.tangents if i.name not in absent]
        # what backward drops is not kept for the look at it; tangents are, since the caller may hold other ones
        seen = form, absent, tuple(x.stride() for x in arguments[given:])
        look = seen not in state.overlapping
        kept = [(weakref.ref(x.untyped_storage()), storage_span(x)) for x in arguments] if look else []
        held = arguments[given:] if look else []
        if unreduced is not None:
            arguments += unreduced.sums
        state.module.observed.passed(state)
        with call.watch(state, "backward", arguments) as made, quietly(state):
            computed = list(executable.backward(arguments))
            made += computed
        if look:
            state.overlapping[seen] = overlapping(computed, kept)
            held.clear()
        state.write_back(computed, state.updates)
        # an optimizer writes into gradients: no two may share memory
        for index in state.overlapping[seen]:
            value = computed[index]
            assert value is not None
            computed[index] = value.clone(memory_format=torch.contiguous_format)
        if form == "micro":
            pending.leave(state, waiting, computed[len(state.gradient_outputs) :])
        else:
            if unreduced is not None:
                unreduced.take({name: computed[state.gradients[name]] for name in waiting})
            pending.settle(state.values.tensors())
        results: list[torch.Tensor | None] = [None]
        for i, form_of, needed in zip(call.sources, call.forms, ctx.needs_input_grad[1:], strict=True):
            is_given = needed and i.target not in waiting and i.target not in call.unasked
            local = computed[state.gradients[i.target]] if is_given else None
            results.append(None if local is None else state.gradient(i.target, form_of, local))
        if call.check is not None:
            by_target = {i.target: g for i, g in zip(call.sources, results[1:], strict=True) if g is not None}
            call.check.backward({i.target: by_path.get(i.target) for i in state.tangents}, by_target)
        return tuple(results)


def _receivers(ctx: Any) -> Receivers | None:
    """The parameters whose gradients a backward may leave unreduced, or, of a backward that reduces, give together with
    those that earlier ones left; None where it may do neither: nobody asks for it, something else than `.grad` takes a
    gradient, or a hook wants to see it now. All ranks come to the same."""
    call: _Call = ctx.call
    module = call.state.module
    pending, handshake = module.pending, module.handshake
    if (pending.reduces and not pending.waits) or call.check is not None or call.state.pipelined is not None:
        return None
    handshake.settle()
    if not handshake.defers:
        return None
    found: dict[str, DTensor] = {}
    for i, needed, (node, _) in zip(call.sources, ctx.needs_input_grad[1:], ctx.next_functions, strict=True):
        if needed and i.role == "parameter" and i.target not in call.unasked:
            runs, parameter = receiver(node)
            if not runs:
                continue
            if parameter is None or not can_wait(parameter, i.meta.dtype):
                return None
            if hooks_gradient(parameter):
                raise ValueError(
                    f"parameter {i.target} was given a hook between forward and backward within no_sync(), where "
                    f"gradients wait: register it before the call"
                )
            found[i.target] = parameter
    return found


class _Once(torch.autograd.Function):
    """Gradients that are not differentiated again, by what they are computed of least of all."""

    @staticmethod
    def forward(ctx: Any, count: int, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients[:count]

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise ValueError(
            "the gradients of a parallel module cannot be differentiated again: compute a penalty on gradients inside "
            "of the model's forward or of loss_fn=, by torch.autograd.grad(..., create_graph=True)"
        )


def _refuse_written(call: _Call) -> None:
    """As autograd does for plain tensors."""
    state, (given, updated) = call.state, call.versions_now()
    for k, now, version in zip(call.read, given, call.versions[0], strict=True):
        if now != version:
            raise ValueError(
                f"{state.inputs[k].role} {state.inputs[k].target} was written between forward and backward, which "
                f"reads it: call optimizer.step() and other writes after backward(), or call the module again first"
            )
    for output, value in call.rewritten:
        if not torch.equal(*state.held(output, value)):
            raise ValueError(
                f"{output.target}, which forward writes and backward reads, was written again since the call: run "
                f"backward() on each call before the next one, or write it outside of forward"
            )
    if updated != call.versions[1]:
        raise ValueError(
            f"{listed([output.target for _, output in state.updates])}, which backward() writes, changed since the "
            f"call: a program reads it as it was then. Run backward() on each call before the next one"
        )


def _refuse_second(call: _Call, next_functions: Sequence[tuple[Any, int]]) -> None:
    """Each backward of a step would add once more what its forward does once, and start from the same buffers; and
    `.grad` alone is where forward's own gradients go."""
    state, ran, call.is_open = call.state, not call.is_open, False
    once = [*state.captured.early, *(output.target for _, output in state.updates)]
    if ran and once:
        raise ValueError(
            f"backward() runs a second time on one call, whose program gives {listed(once)} what forward's own "
            f"backward() or a function's backward leaves there: call the module again"
        )
    for i, (node, _) in zip(call.sources, next_functions, strict=True):
        if i.target not in (*state.captured.early, *state.captured.late):
            continue
        parameter = receiver(node)[1]
        if parameter is not None and hooks_gradient(parameter) and i.target not in state.captured.hooked:
            raise ValueError(
                f"parameter {i.target} was given a hook, which eager calls for what forward, or a function's backward, "
                f"computes by a backward() of its own, and again for the rest: a program has their sum alone. Register "
                f"it before the model is parallelized, or take it away"
            )
        if parameter is None:
            raise ValueError(
                f"something else than .grad takes the gradient of {i.target}, to which a program adds what forward, or "
                f"a function's backward, computes by a backward() of its own: call backward() on what the module "
                f"returned"
            )


def _refuse_lost(
    state: State, by_path: Mapping[str, torch.Tensor | None], returned: Mapping[str, weakref.ref[torch.Tensor]]
) -> None:
    """A gradient that the program has no place for is an error, not a loss."""
    others, watched = [path for path in by_path if path not in state.carriers], _watched(state.captured.inner)
    for path in others:
        output = returned[path]()
        if output is not None and is_observed(output, own=path in watched):
            raise ValueError(
                f"{path} has a hook or retain_grad(), and its gradient is not computed where {state.captured.loss} "
                f"is differentiated: have the model return what you look for, or leave the hook out"
            )
    lost = [path for path in others if by_path[path] is not None]
    if lost:
        raise ValueError(
            f"a gradient reaches {', '.join(lost)}, and the program differentiates {state.captured.loss} alone: "
            f"pass parallelize a loss_fn= that takes the model's output and returns all of the loss, or detach() "
            f"what is not to be differentiated"
        )


def _watched(inner: Mapping[str, Collection[str]]) -> Collection[str]:
    """Outputs that others are computed of, and these."""
    return {*inner, *chain(*inner.values())}


@dataclass
class _Wanted:
    """Watches over outputs of which others are computed: a hook, `retain_grad()` and `torch.autograd.grad` get what
    comes from outside of the program alone, where eager has what comes through it too."""

    inner: Mapping[str, Collection[str]]
    outputs: Mapping[str, weakref.ref[torch.Tensor]]
    hooks: dict[str, Mapping[int, Any]] = field(default_factory=dict)
    """On each of these, this one among them."""
    backward: int = -1
    """The number of the backward that runs."""
    wanted: dict[str, str] = field(default_factory=dict)
    """Of these it gives the gradients: to whom."""
    reached: set[str] = field(default_factory=set)
    """A gradient comes to these."""

    def watch(self) -> None:
        watched = _watched(self.inner)
        for path, output in self.outputs.items():
            if path in watched and (tensor := output()) is not None:
                hook = unserializable_hook(partial(self._reach, path))  # type: ignore[no-untyped-call]
                hook_gradient(tensor, [hook])  # of which `torch.save` does not warn
                self.hooks[path] = own_hooks(tensor)

    def _reach(self, path: str, gradient: torch.Tensor | None) -> None:
        """A gradient, or word that none comes."""
        if self.backward != backward_running():
            self.backward, self.wanted, self.reached = backward_running(), {}, set()
            self._look()
        if gradient is not None:
            self.reached.add(path)
        for wanted, taker in self.wanted.items():
            if through := sorted(self.reached.intersection(self.inner[wanted])):
                raise ValueError(
                    f"{wanted} {taker}, and part of its gradient comes from {listed(through)}, within the program: "
                    f"register the hook in forward, have the model return what you look for (by torch.autograd.grad), "
                    f"or leave it out"
                )

    def _look(self) -> None:
        there = {path: tensor for path, output in self.outputs.items() if (tensor := output()) is not None}
        for path in there.keys() & self.inner.keys():
            if len(self.hooks[path]) > 1 or there[path].retains_grad:
                self.wanted[path] = "has a hook or retain_grad()"
            elif is_asked(there[path]):
                self.wanted[path] = "is given to torch.autograd.grad"


def refuse_gradients(state: State, results: Sequence[torch.Tensor]) -> None:
    """Of a program without gradients: what forward enables them for within raises where one is asked for."""
    if torch.is_grad_enabled() or state.carriers:
        return
    for path, result in zip(state.output_paths, results, strict=True):
        if path in state.differentiable:
            hook_gradient(require_gradient(result), [partial(_refuse_gradient, path)])


def _refuse_gradient(path: str, _: torch.Tensor) -> None:
    raise ValueError(
        f"a gradient of {path} is asked for, which was computed where gradients are disabled and forward enables them "
        f"itself: call the module without torch.no_grad(), or detach() what it returns"
    )
