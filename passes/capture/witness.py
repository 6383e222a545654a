"""What a model's Python does besides calling operators, seen while the model is traced.

    Look before --trace, attributes observed--> Look after --_settled--> nothing kept, or CaptureError by name

A graph holds operators alone. State that Python keeps from one call for the next, numbers that it draws and hooks that
it sets would be frozen in it or lost. So the state that Python can reach (`state`) is looked at before and after the
trace. Where it is as it was, the graph is the step. Where it is not, the step is run twice more on fakes (`repeat`): if
the second run computes what the first did and leaves what the first left, each call writes the same and none reads what
another wrote, and the graph is the step too. Otherwise what was kept is refused by name. In any case all is put back as
it was before.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from autopar import compat

from .asked import ASKING, DIFFERENTIATING, SAVING, SEEDING, Functions, refusing
from .captured import CaptureError
from .looks import Drawn, Look, Reads, Same, is_library, listed
from .repeat import Numbering
from .state import look

logger = logging.getLogger(__name__)


class WitnessedStep(Protocol):
    """What is looked at while it runs: the model as a module of flat tensors. `outcomes.last` is what it gave."""

    @property
    def outcomes(self) -> Any: ...
    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def buffers(self) -> Iterator[torch.Tensor]: ...


class Witness:
    """Sees one model, a copy that capture may trace, and its loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.modules = dict(model.named_modules())
        self.roots: dict[str, Any] = {} if loss_fn is None else {"loss_fn": loss_fn}
        self.roots |= compat.global_forward_hooks()
        self.paths = {id(module): path for path, module in self.modules.items()}
        self.notes = [
            (module._parameters, key, notes)
            for module in self.modules.values()
            for key, tensor in module._parameters.items()
            if tensor is not None and (notes := compat.notes_of(tensor))
        ]
        self.before: Look | None = None
        self.after: Look | None = None
        self.repeating = False
        self.read: set[tuple[str, str]] = set()
        self.fields: dict[type, set[str]] = {}
        self.valued: set[int] = set()  # storages of tensors whose numbers became Python's

    @property
    def reads(self) -> Reads:
        return Reads(
            modules=frozenset(self.read),
            fields={cls: frozenset(names) for cls, names in self.fields.items()},
            values=frozenset(p for p, tensor in self.seen.tensors if compat.memory_of(tensor) in self.valued),
        )

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Around all Python of a step."""
        for parameters, key, notes in self.notes:
            # export traces with other tensors in the place of parameters
            vars(parameters[key]).update(notes)
        if self.repeating:
            yield
            self.after = self._look()
            return
        self.before, tensors = self._look(), self._tensors()
        kept = [p for p, fact in self.before.facts.items() if fact == Same(torch.is_inference_mode_enabled)]
        if kept:  # called by another name than that in torch, which is watched
            raise CaptureError(ASKING.format(line=f" as {kept[0]}"))
        try:
            with (
                self._observed(self.before.classes),
                Functions(self.valued),
                compat.saving(refusing(SAVING)),
                compat.seeding(refusing(SEEDING)),
                compat.asking_for_inference(refusing(ASKING)),
                compat.differentiating(refusing(DIFFERENTIATING)),
            ):
                yield
            _check_tensors(tensors, self._tensors())
            self.after = self._look()
        finally:
            self.before.restore()

    def settle(self, step: WitnessedStep, inputs: Sequence[torch.Tensor]) -> None:
        """Raises CaptureError where a call keeps something for the next. Warns of what each call writes and nobody in
        the model reads: with a program it keeps the value that it had."""
        before, after = self.before, self.after
        assert before is not None and after is not None
        changed = before.differs(after)
        drawn = [path for path in changed if isinstance(after.facts.get(path), Drawn)]
        if drawn:
            raise CaptureError(
                f"forward draws from {listed(drawn)}: each call would draw what the first one drew. Draw "
                f"with torch's own operators (torch.rand, torch.randint, dropout), or draw outside and pass it in"
            )
        asks = sorted(before.names & _ASKS)
        if not changed and not asks:
            return
        kept = self._kept(step, inputs)
        if kept:
            raise CaptureError(
                f"forward keeps {listed(kept)} from one call for the next: a program would keep what the first call "
                f"saw. Register a tensor as a buffer (register_buffer) and write it with copy_(), pass it in as an "
                f"input and return it as an output, or leave it out of forward"
            )
        if not changed:
            return
        shown = [path for path in changed if _is_shown(path, self.modules)]
        (logger.warning if shown else logger.info)(
            "forward writes %s, which no later call reads: the parallel module does not write it (return it as an "
            "output to see it)",
            listed(shown or changed),
        )

    @contextlib.contextmanager
    def differentiating(self) -> Iterator[None]:
        """Around the backward passes that a model writes. Raises CaptureError where one keeps something."""
        before = self._look()
        try:
            yield
            changed = before.differs(self._look())
        finally:
            before.restore()
        if changed:
            raise CaptureError(
                f"the backward of an autograd function keeps {listed(changed)} from one call for the next: a program "
                f"would keep what the first call saw. Compute it from ctx and the gradient, with tensors"
            )

    @property
    def seen(self) -> Look:
        """What Python could reach before the trace."""
        assert self.before is not None
        return self.before

    def written(self, tensor: torch.Tensor) -> str:
        """Why a tensor that Python holds cannot be written in place."""
        storage = compat.memory_of(tensor)
        paths = [path for path, held in self.seen.tensors if compat.memory_of(held) == storage]
        name = paths[0] if paths else f"a tensor {list(tensor.shape)} that is not the model's"
        return (
            f"forward writes {name} in place, which is no buffer of the model: capture changes nothing, and a program "
            f"writes buffers alone. Make it a buffer (register_buffer, persistent=False if no checkpoint is to hold it)"
        )

    def _look(self) -> Look:
        return look(self.modules, self.roots)

    def _kept(self, step: WitnessedStep, inputs: Sequence[torch.Tensor]) -> list[str]:
        """What two steps in a row differ in."""
        assert self.before is not None
        names = {f"input {i}": tensor for i, tensor in enumerate(inputs)}
        names |= {**dict(step.named_parameters()), **dict(step.named_buffers())}
        numbering = Numbering(names)
        buffers = list(step.buffers())
        self.repeating = True
        try:
            with compat.as_exported(), numbering:
                first = [numbering.key(t) for t in (*step(*inputs), *buffers)]
                outcome, left = step.outcomes.last, self.after
                assert left is not None
                keys = {id(t): numbering.key(t) for _, t in left.tensors}
                numbering.again()
                second = [numbering.key(t) for t in (*step(*inputs), *buffers)]
                assert self.after is not None
                moved = left.differs(
                    self.after,
                    lambda a, b: _is_tensor(a) and _is_tensor(b) and numbering.same(a.value, b.value, keys),
                )
                same = first == second and outcome == step.outcomes.last
        finally:
            self.repeating = False
            self.before.restore()
        if moved:
            return moved
        if same:
            return []
        read = {id(tensor) for tensor in numbering.read.values()}
        by_tensor = [path for path, tensor in left.tensors if id(tensor) in read]
        asks = sorted(self.before.names & _ASKS)
        return by_tensor or self.before.differs(left) or [f"something that changes by itself ({listed(asks)})"]

    def _tensors(self) -> dict[str, tuple[Any, ...]]:
        """Which memory each parameter and buffer has, and whether it requires a gradient."""
        with compat.without_modes():
            return {
                f"{path}.{key}" if path else key: (
                    kind,
                    compat.storage_span(tensor),
                    tensor.requires_grad,
                    {key: value for key, value in vars(tensor).items() if not compat.is_torchs(key)},
                )
                for path, module in self.modules.items()
                for kind in ("_parameters", "_buffers")
                for key, tensor in vars(module)[kind].items()
                if tensor is not None
            }

    @contextlib.contextmanager
    def _observed(self, classes: set[type]) -> Iterator[None]:
        """Take note of the attributes that are read, of modules and of the objects of these classes."""
        paths, read, fields = self.paths, self.read, self.fields

        def of_module(module: nn.Module, name: str) -> Any:
            if name != "__dict__" or not is_library(sys._getframe(1).f_code.co_filename):
                path = paths.get(id(module))
                if path is not None:
                    read.add((path, name))
            return object.__getattribute__(module, name)

        @contextlib.contextmanager
        def observing() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                stack.enter_context(compat.patched(nn.Module, "__getattribute__", of_module))
                for cls in classes:
                    if not issubclass(cls, (nn.Module, type)):
                        noted = fields.setdefault(cls, set())
                        try:
                            stack.enter_context(compat.patched(cls, "__getattribute__", _noting(cls, noted)))
                        except TypeError:
                            noted.add("__dict__")  # a class that cannot be watched: all of its attributes count
                yield

        with compat.suspended_in_branches(observing):
            yield


def _noting(cls: Any, noted: set[str]) -> Callable[[Any, str], Any]:
    getattribute = cls.__getattribute__

    def read(value: Any, name: str) -> Any:
        if type(value) is cls:
            noted.add(name)
        return getattribute(value, name)

    return read


def _check_tensors(before: Mapping[str, tuple[Any, ...]], after: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises CaptureError where forward does to parameters and buffers what no operator does."""
    for name in {**before, **after}:
        if name not in before or name not in after:
            raise CaptureError(
                f"forward {'removes' if name in before else 'registers'} {name}: register parameters and buffers in "
                f"the constructor, and write them in forward"
            )
        (kind, span, gradient, attributes), (_, now, gradient_now, attributes_now) = before[name], after[name]
        if kind == "_parameters" and span != now:
            raise CaptureError(f"forward gives parameter {name} other memory (.data = ...): do so outside of forward")
        if gradient != gradient_now and kind == "_parameters":
            raise CaptureError(f"forward calls requires_grad_() on parameter {name}: do so outside of forward")
        changed = [
            key for key in {**attributes, **attributes_now} if attributes.get(key) is not attributes_now.get(key)
        ]
        if changed:
            raise CaptureError(
                f"forward keeps {name}.{changed[0]}, an attribute of a {kind[1:-1]}, from one call for the next: a "
                f"program would keep what the first call saw"
            )


_ASKS = frozenset(
    {
        *("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "process_time", "now", "utcnow", "today"),
        *("urandom", "getrandbits", "token_bytes", "token_hex", "randbits", "uuid1", "uuid4", "SystemRandom"),
        *("Random", "RandomState", "default_rng", "SeedSequence", "globals"),
    }
)
"""Names of what changes by itself: where code mentions one, a second run decides."""


def check_hooks(model: nn.Module) -> None:
    """Raises CaptureError where hooks on gradients would be lost: those of modules and of their parameters."""
    hooked = [path or type(model).__name__ for path, module in model.named_modules() if compat.hooks_gradients(module)]
    if hooked:
        raise CaptureError(
            f"{listed(hooked)} {'has' if len(hooked) == 1 else 'have'} backward hooks, which a program would not run: "
            f"register them on the parallel module itself, or on its parameters"
        )
    parameters = [name for name, p in model.named_parameters() if compat.hooks_gradient(p)]
    if parameters:
        raise CaptureError(
            f"{listed(parameters)} {'has a hook' if len(parameters) == 1 else 'have hooks'} on the gradient, and the "
            f"parallel module has parameters of its own: register it on those, after parallelize"
        )
    everywhere = compat.global_backward_hooks()
    if everywhere:
        raise CaptureError(f"torch has {everywhere} for all modules, which a program would not run: remove them")


def check_memory(constants: Mapping[str, torch.Tensor], seen: Look, model: nn.Module) -> None:
    """Raises CaptureError where a constant of the graph views a parameter or buffer, with which it would not change."""
    held = [(name, *compat.storage_span(t)) for name, t in (*model.named_parameters(), *model.named_buffers())]
    for name, tensor in constants.items():
        storage, begin, end = compat.storage_span(tensor)
        shared = [other for other, memory, first, last in held if memory == storage and first < end and begin < last]
        if shared:
            paths = [path for path, other in seen.tensors if compat.storage_span(other) == (storage, begin, end)]
            raise CaptureError(
                f"{paths[0] if paths else name} is on the memory of {shared[0]}, and would not change with it: a "
                f"program keeps parameters and buffers in memory of their own. Take it of {shared[0]} in forward "
                f"({shared[0]}.detach()), or give it memory of its own (clone())"
            )


def check_constants(constants: Mapping[str, torch.Tensor], seen: Look) -> None:
    """Raises CaptureError where a constant of the graph is to be trained: no parameter of the model, and yet it
    requires a gradient."""
    trained = {compat.memory_of(t): path for path, t in reversed(seen.tensors) if t.requires_grad}
    paths = [trained[s] for t in constants.values() if (s := compat.memory_of(t)) in trained]
    if paths:
        raise CaptureError(
            f"{listed(paths)} {'requires' if len(paths) == 1 else 'require'} a gradient and "
            f"{'is no parameter' if len(paths) == 1 else 'are no parameters'} of the model: it would not train. "
            f"Make it one (an nn.Parameter attribute, nn.ParameterList, nn.ParameterDict; a loss with parameters is a "
            f"module of the model), or detach() it"
        )


def _is_shown(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether somebody may look for what stands there: a public attribute of a module."""
    owner, _, name = path.split("[")[0].rpartition(".")
    return owner in modules and not name.startswith("_")


def _is_tensor(token: Any) -> bool:
    return isinstance(token, Same) and isinstance(token.value, torch.Tensor)
