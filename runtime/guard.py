"""What Python read while a model was captured, compared at each call with what it is now.

A program holds the values that attributes, closures and globals had when it was captured. At a call a guard checks in
microseconds whether each of them is still the same object, and containers hold the same ones. Where not, it looks at
values, as capture did, and says by name which differ: the module then needs another program.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autopar.compat.calls import by_tensor
from autopar.passes.capture.errors import listed
from autopar.passes.capture.ledger import ABSENT, Drawn, Ledger, Reads
from autopar.passes.capture.state import REGISTERED, look

logger = logging.getLogger("autopar")


class Guard:
    """Holds while what `reads` says was read of `model` and of `loss_fn` is as it was when the guard was built."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, reads: Reads) -> None:
        self.modules, self.loss_fn, self.reads = dict(model.named_modules()), loss_fn, reads
        self.changed: list[str] = []
        """What differed when it was last seen not to hold."""
        self.seen = self._look()

    def holds(self) -> bool:
        """Whether all is as it was. Raises ValueError for what no program could serve."""
        if self.seen.holds():
            return True
        now = self._look()
        for path, token in now.tokens.items():
            if token is REGISTERED and self.seen.tokens.get(path, ABSENT) is ABSENT:
                raise ValueError(
                    f"{path} was registered after parallelize, and forward looks for it: register it first, and "
                    f"parallelize the model then"
                )
        # generators go on outside of the model: capture saw that forward does not use them
        self.changed = self.seen.differs(now, lambda a, b: isinstance(a, Drawn) and isinstance(b, Drawn))
        if not self.changed:
            self.seen = now
        return not self.changed

    def _look(self) -> Ledger:
        return look(self.modules, self.loss_fn, self.reads)


def report_changed(paths: Sequence[str], *, possible: bool) -> None:
    """Say what differs from what the module's programs hold. Raises ValueError where another cannot be had."""
    if not possible:
        raise ValueError(
            f"{listed(paths)} changed since the model was captured, and the program holds what it was: set it before, "
            f"or make the module with autopar.parallelize, which captures again"
        )
    logger.warning(
        "%s changed since the model was captured: it is captured and planned again. What changes often should be an "
        "input or a buffer",
        listed(paths),
    )


class Original:
    """The model that was given to parallelize. No program sees what is set on it afterwards: a warning says so once for
    each attribute that forward read, and for the modules and buffers that each module has. It keeps nothing of the
    model's alive but what these attributes hold."""

    def __init__(self, model: nn.Module, mirror: nn.Module, reads: Reads) -> None:
        mirrors = dict(mirror.named_modules())
        names = {path: tuple(sorted(reads.names.get(path, ()))) for path in mirrors}
        self.watched = [
            _Watched(weakref.ref(module), mirrors[path], path, names[path], *_state(module, names[path]))
            for path, module in model.named_modules()
        ]

    def warn(self) -> None:
        """Of what differs from what it was, and from what the parallel module has."""
        gone = False
        for i, watched in enumerate(self.watched):
            module = watched.module()
            if module is None:
                gone = True
                continue
            values, held = _state(module, watched.names)
            if held == watched.held and all(map(is_, values, watched.values)):
                continue
            mirror, outer = vars(watched.mirror), f"{watched.path}." if watched.path else ""
            for name, then, now in zip(watched.names, watched.values, values, strict=True):
                if not (_is_same(now, then) or _is_same(now, mirror.get(name))):
                    _warn_of(outer + name, f"set to {now!r}" if isinstance(now, CONSTANTS) else "changed")
            for name in {**watched.held, **held}:
                if watched.held.get(name) != held.get(name):
                    _warn_of(outer + name, "added or replaced" if name in held else "removed")
            self.watched[i] = watched._replace(values=values, held=held)
        if gone:
            self.watched = [watched for watched in self.watched if watched.module() is not None]


class _Watched(NamedTuple):
    """A module of the original, the attributes that forward read and their values, and what is registered with it, by
    identity."""

    module: weakref.ref[nn.Module]
    mirror: nn.Module
    path: str
    names: tuple[str, ...]
    values: list[Any]
    held: dict[str, int]


def _state(module: nn.Module, names: Sequence[str]) -> tuple[list[Any], dict[str, int]]:
    fields = vars(module)
    modules, buffers = fields["_modules"], fields["_buffers"]
    held = {name: id(value) for name, value in {**modules, **buffers}.items()} if modules or buffers else {}
    return [*map(fields.get, names)], held


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, CONSTANTS) and isinstance(b, CONSTANTS) and a == b)


def _warn_of(path: str, what: str) -> None:
    logger.warning(
        "%s of the model was %s after parallelize, which the parallel module does not see: it is a copy. Set it there",
        path,
        what,
    )


CONSTANTS = (type(None), bool, int, float, complex, str)


class Owners:
    """Which parallel module a parameter of a model went into."""

    def __init__(self) -> None:
        self.owners = by_tensor()
        self.stepping: RemovableHandle | None = None
        self.warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def claim(self, model: nn.Module, parallel: nn.Module) -> None:
        """Raises ValueError if a parameter of the model went into a living parallel module of another model: each of
        the two would train a copy of its own."""
        claimed = []
        for name, parameter in model.named_parameters():
            living = [owner for owner in self.owners.get(parameter, ()) if owner[1]() is not None]
            for first, _, other in living:
                if (owned := first()) is not model:
                    kind = "model that is gone" if owned is None else type(owned).__name__
                    raise ValueError(
                        f"parameter {name} is {other} of a {kind} that is parallel already: each of the two would "
                        f"train a copy of its own. Put both models in one module, and parallelize that"
                    )
            claimed.append((parameter, [*living, (weakref.ref(model), weakref.ref(parallel), name)]))
        for parameter, owners in claimed:
            self.owners[parameter] = owners
        if self.stepping is None:
            self.stepping = register_optimizer_step_pre_hook(self._warn_of_stale)

    def _warn_of_stale(self, optimizer: Optimizer, *_: object) -> None:
        """Of an optimizer of the model that was given to parallelize, where it steps and nothing has a gradient."""
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        first = next(parameters, None)
        if first is None or first not in self.owners or optimizer in self.warned:
            return
        living = any(owner() is not None for _, owner, _ in self.owners[first])
        if living and all(p in self.owners and p.grad is None for p in (first, *parameters)):
            self.warned.add(optimizer)
            logger.warning(
                "%s steps parameters of the model as it was given to parallelize, which have no gradients: the "
                "parallel module has parameters of its own. Make the optimizer of these, after parallelize",
                type(optimizer).__name__,
            )


OWNERS = Owners()
"""One table for all models of the process. It keeps nothing alive."""
