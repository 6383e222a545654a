"""What a model's Python does besides calling operators, seen while the model is traced.

    Ledger before --first recording--> Ledger after --second recording--> Ledger later
        --Witness.settle--> nothing kept, or CaptureError by name

A graph holds operators alone. State that Python keeps from one call for the next, numbers that it draws and hooks that
it sets would be frozen in it or lost. So the step is recorded twice, and the state that Python can reach (`state`) is
looked at before, between and after. If the second recording computes what the first did (`repeat` compares) and leaves
what the first left, each call writes the same and none reads what another wrote: the graph is the step. Otherwise
`Witness.settle` refuses what was kept, by name. In any case all is put back as it was before.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.compat.patching import patched
from autopar.compat.tensors import memory_of, notes_of, storage_span, unmodified
from autopar.compat.watching import HOOKS, asking_for_inference, gradient_hooks, seeding
from autopar.ir.rewrite import distinct
from autopar.ir.tree import joined

from .errors import CaptureError, listed
from .ledger import Drawn, Ledger, Reads, Same
from .refusals import ASKING, SEEDING, refuse, without_files
from .repeat import RepeatedStep
from .source import codes_of, is_library, names_of
from .state import look

logger = logging.getLogger(__name__)


class Witness:
    """Sees one model, a copy that capture may trace, and its loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.modules = dict(model.named_modules())
        self.loss_fn = loss_fn
        self.paths = {id(module): path for path, module in self.modules.items()}
        self.looks: list[Ledger] = []
        """What Python could reach before the first step, after it, and after the second."""
        codes = (code for module in model.modules() for code in codes_of(module.forward, module))
        loss = codes_of(loss_fn) if loss_fn is not None else ()
        self.identities = any(names_of(code) & {"is", "id"} for code in (*codes, *loss))
        """Whether forward may see which inputs are one object."""
        self.read: dict[str | type, set[str]] = {}
        self.rewritten: set[str] = set()
        """Attributes that forward set after it had read them."""
        self.valued: set[int] = set()  # storages of tensors whose numbers became Python's

    @property
    def reads(self) -> Reads:
        return Reads(
            names={owner: frozenset(names) for owner, names in self.read.items()},
            values=frozenset(p for p, tensor in self.seen.tensors if memory_of(tensor) in self.valued),
            identities=self.identities,
            mentioned=frozenset(self.seen.names),
        )

    @contextlib.contextmanager
    def watching(self) -> Iterator[bool]:
        """Around all Python of the first step. Gives whether that may see which inputs are one object."""
        before, tensors = self._look(), self._tensors()
        self.looks = [before]
        kept = [p for p, token in before.tokens.items() if token == Same(torch.is_inference_mode_enabled)]
        if kept:  # called by another name than that in torch, which is watched
            refuse(ASKING, line=f" as {kept[0]}")
        with (
            self._observed(before.classes),
            seeding(partial(refuse, SEEDING)),
            asking_for_inference(partial(refuse, ASKING)),
            without_files(),
        ):
            yield self.identities
        _check_tensors(tensors, self._tensors())
        self.looks.append(after := self._look())
        drawn = [path for path in before.differs(after) if isinstance(after.tokens.get(path), Drawn)]
        if drawn:
            raise CaptureError(
                f"forward draws from {listed(drawn)}: each call would draw what the first one drew. Draw "
                f"with torch's own operators (torch.rand, torch.randint, dropout), or draw outside and pass it in"
            )

    @contextlib.contextmanager
    def again(self) -> Iterator[bool]:
        """Around all Python of the second step."""
        yield self.identities
        self.looks.append(self._look())

    def settle(self, steps: RepeatedStep) -> None:
        """Raises CaptureError where a step keeps something for the next: where it computes something else when it runs
        again, or leaves something else in Python; and where it reads what nothing sees into. Warns of what each call
        writes and nobody in the model reads: with a program it keeps the value that it had."""
        look(self.modules, self.loss_fn, self.reads)
        before, after, later = self.looks
        moved = after.differs(later, lambda a, b: _is_same_tensor(a, b, steps))
        read = [path for path, tensor in after.tensors if steps.first.name(tensor) in steps.read]
        parting = steps.parting
        if moved or parting:
            kept = moved or read or before.differs(after)
            if not kept:
                asks = sorted(before.names & _ASKS)
                kept = [f"something that changes by itself ({listed(asks)})" if asks else "something"]
            hooks = [path for path in kept if path.rpartition(".")[2] in HOOKS]
            if hooks:
                raise CaptureError(
                    f"forward registers hooks ({listed(hooks)}) in each call, and they pile up, in eager too: register "
                    f"them in the constructor, or remove() each within forward"
                )
            raise CaptureError(
                f"forward keeps {listed(kept)} from one call for the next: a program would keep what the first call "
                f"saw{f' ({parting})' if parting else ''}. Register a tensor as a buffer (register_buffer) and write "
                f"it with copy_(), pass it in as an input and return it as an output, or leave it out of forward"
            )
        changed = before.differs(after)
        owners = [(path, names) for path, names in self.read.items() if isinstance(path, str)]
        read_too = {joined(path, name) for path, names in owners for name in names}
        crossing = [path for path in changed if path in read_too] if self.rewritten.intersection(changed) else []
        if crossing:
            logger.warning(
                "forward reads %s before it writes there: a program does neither, and what calls with inputs of one "
                "form leave there does not reach those of another (a table for the longest input so far is made anew "
                "for each length). Make it in the constructor, for the longest input that there may be",
                listed(crossing),
            )
        changed = [path for path in changed if path not in crossing]
        if changed:
            shown = [path for path in changed if _is_shown(path, self.modules)]
            (logger.warning if shown else logger.info)(
                "forward writes %s, which no later call reads: the parallel module does not write it (return it as an "
                "output to see it)",
                listed(shown or changed),
            )

    def restore(self) -> None:
        """Puts back what Python could reach."""
        if self.looks:
            self.looks[0].restore()

    @property
    def seen(self) -> Ledger:
        """What Python could reach before the trace."""
        return self.looks[0]

    @property
    def left(self) -> list[torch.Tensor]:
        """The tensors that the last step left in Python."""
        return [tensor for _, tensor in self.looks[-1].tensors]

    def paths_of(self, constants: Mapping[str, torch.Tensor], taken: set[str]) -> dict[str, str]:
        """Where the model holds constants, by name, or other paths that are not taken."""
        held, paths = self._held(), dict[str, str]()
        for name, tensor in constants.items():
            paths[name] = distinct(held.get(memory_of(tensor), name), {*taken, *paths.values()})
        return paths

    def name_of(self, tensor: torch.Tensor) -> str:
        """Where Python holds a tensor."""
        return self._held().get(memory_of(tensor), f"a tensor {[*tensor.shape]} that is not the model's")

    def _held(self) -> dict[int, str]:
        """Where Python holds what is on a memory."""
        return {memory_of(tensor): path for path, tensor in reversed(self.seen.tensors)}

    def _look(self) -> Ledger:
        return look(self.modules, self.loss_fn)

    def _tensors(self) -> dict[str, tuple[Any, ...]]:
        """Of each parameter and buffer: which it is, whether it requires a gradient, what people noted on it, and how
        many hooks wait for its gradient."""
        with unmodified():
            return {
                joined(path, key): (kind, tensor.requires_grad, notes_of(tensor), len(gradient_hooks(tensor)))
                for path, module in self.modules[""].named_modules()
                for kind in ("_parameters", "_buffers")
                for key, tensor in vars(module)[kind].items()
                if tensor is not None
            }

    @contextlib.contextmanager
    def _observed(self, classes: set[type]) -> Iterator[None]:
        """Take note of the attributes that are read, of modules and of the objects of these classes."""
        paths, read = self.paths, self.read
        setattribute = nn.Module.__setattr__

        def to_module(module: nn.Module, name: str, value: Any) -> None:
            path = paths.get(id(module))
            if path is not None and name in read.get(path, ()):
                self.rewritten.add(joined(path, name))
            setattribute(module, name, value)

        def of_module(module: nn.Module, name: str) -> Any:
            path = paths.get(id(module))
            if path is not None and (name != "__dict__" or not is_library(sys._getframe(1).f_code.co_filename)):
                read.setdefault(path, set()).add(name)
            return object.__getattribute__(module, name)

        with contextlib.ExitStack() as stack:
            stack.enter_context(patched(nn.Module, __getattribute__=of_module, __setattr__=to_module))
            for cls in classes:
                if not issubclass(cls, (nn.Module, type)):
                    noted = read.setdefault(cls, set())
                    try:
                        stack.enter_context(patched(cls, __getattribute__=_noting(cls, noted)))
                    except TypeError:
                        noted.add("__dict__")  # a class that cannot be watched: all of its attributes count
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
                f"forward {'removes' if name in before else 'registers'} {name}: register modules, parameters and "
                f"buffers in the constructor, and write them in forward"
            )
        (kind, gradient, attributes, hooks), (_, gradient_now, attributes_now, hooks_now) = before[name], after[name]
        if gradient != gradient_now and kind == "_parameters":
            raise CaptureError(f"forward calls requires_grad_() on parameter {name}: do so outside of forward")
        if hooks != hooks_now:
            raise CaptureError(
                f"forward registers a hook on {name} in each call, and they pile up, in eager too: register it in the "
                f"constructor, or remove() it within forward"
            )
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


def check_memory(constants: Mapping[str, torch.Tensor], seen: Ledger, model: nn.Module) -> None:
    """Raises CaptureError where a constant of the graph views a parameter or buffer, with which it would not change."""
    held = [(name, *storage_span(t)) for name, t in (*model.named_parameters(), *model.named_buffers())]
    for name, tensor in constants.items():
        storage, begin, end = storage_span(tensor)
        shared = [other for other, memory, first, last in held if memory == storage and first < end and begin < last]
        if shared:
            paths = [path for path, other in seen.tensors if storage_span(other) == (storage, begin, end)]
            raise CaptureError(
                f"{paths[0] if paths else name} is on the memory of {shared[0]}, and would not change with it: a "
                f"program keeps parameters and buffers in memory of their own. Take it of {shared[0]} in forward "
                f"({shared[0]}.detach()), or give it memory of its own (clone())"
            )


def _is_shown(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether somebody may look for what stands there: a public attribute of a module."""
    owner, _, name = path.split("[")[0].rpartition(".")
    return owner in modules and not name.startswith("_")


def _is_same_tensor(a: Any, b: Any, steps: RepeatedStep) -> bool:
    """Whether what stands for a tensor after each of two steps is computed alike."""
    tensors = [token.value for token in (a, b) if isinstance(token, Same) and isinstance(token.value, torch.Tensor)]
    return len(tensors) == 2 and steps.same(*tensors)
