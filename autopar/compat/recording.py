"""Where an operator of a recorded step is called: in which module, for which of autograd's nodes, in which region that
the model's author marked with `torch.utils.checkpoint`."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from .patching import patched

NO_NUMBER = 1 << 63
"""From here on are the sequence numbers of nodes that have none, such as those that accumulate into a leaf."""


class Whereabouts:
    """What runs while a step is recorded. `modules` are the paths of the modules that are called, the innermost last;
    `node` is the sequence number of autograd's node that runs, None between two of them; `regions` are the numbers of
    the checkpoints around, the outermost first, and `checkpoints` counts those that were entered."""

    def __init__(self) -> None:
        self.modules: list[str] = [""]
        self.node: int | None = None
        self.engines = 0
        self.regions: tuple[int, ...] = ()
        self.checkpoints = 0
        self._followed: dict[int, Any] = {}

    @property
    def accumulates(self) -> bool:
        """Whether autograd runs and none of its nodes does: it then adds up the gradients of a tensor's consumers."""
        return bool(self.engines) and self.node is None

    @staticmethod
    def number() -> int:
        """The sequence number of the node that autograd made last."""
        return int(_SEQUENCE_NUMBER()) - 1

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Within it lies one more region; each call of a checkpoint is one of its own."""
        outside = self.regions
        self.regions = (*outside, self.checkpoints)
        self.checkpoints += 1
        try:
            yield
        finally:
            self.regions = outside

    def run_engine(self, roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Autograd's engine, whose nodes say when they run."""
        self._follow(roots)
        outside, self.node = self.node, None
        self.engines += 1
        try:
            with torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False):
                return _RUN_ENGINE(roots, *args, **kwargs)
        finally:
            self.engines -= 1
            self.node = outside

    def _follow(self, roots: Sequence[Any]) -> None:
        waiting = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in self._followed:
                continue
            self._followed[id(node)] = node
            number = node._sequence_nr()
            node.register_prehook(lambda _, number=number: setattr(self, "node", number))
            node.register_hook(lambda *_: setattr(self, "node", None))
            waiting += [following for following, _ in node.next_functions]


_SEQUENCE_NUMBER: Any = torch._C._autograd._get_sequence_nr
_RUN_ENGINE: Any = torch.autograd.graph._engine_run_backward


@contextlib.contextmanager
def followed(paths: Mapping[int, str]) -> Iterator[Whereabouts]:
    """While a step runs, the whereabouts of its operators. `paths` are those of the modules, by identity."""
    where = Whereabouts()
    call: Any = nn.Module.__call__
    thread = threading.get_ident()

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(self))
        if path is None:
            return call(self, *args, **kwargs)
        if threading.get_ident() != thread:
            raise ValueError(
                f"forward calls {path} in a thread of its own, and a step is recorded in one: call modules one after "
                f"another"
            )
        where.modules.append(path)
        try:
            return call(self, *args, **kwargs)
        finally:
            where.modules.pop()

    with (
        patched(nn.Module, "__call__", called),
        patched(torch.autograd, "_engine_run_backward", where.run_engine),
        _plain_checkpoints(where),
    ):
        yield where


@contextlib.contextmanager
def _plain_checkpoints(where: Whereabouts) -> Iterator[None]:
    """A checkpoint runs its function twice for memory's sake: here it runs once, within a region. Where no argument of
    a reentrant one requires a gradient, the results have none, as those of the original."""

    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        wanted = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()), where.region():
            return function(*args)

    with (
        patched(CheckpointFunction, "apply", staticmethod(apply)),
        patched(torch.utils.checkpoint, "_checkpoint_hook", lambda frame: where.region()),
    ):
        yield
