"""Where an operator of a recorded step is called: in which module, for which of autograd's nodes, in which region that
the model's author marked with `torch.utils.checkpoint`."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook, _checkpoint_without_reentrant_generator

from .dispatch import Again
from .patching import patched


class Whereabouts:
    """What runs while a step is recorded. `modules` are the paths of the modules that are called, the innermost last;
    `node` is the sequence number of autograd's node that runs, None between two of them; `regions` are the numbers of
    the checkpoints around, the outermost first; `again` says that one of them runs its function again, and how.
    `modes` are those that see the functions which Python calls, in backward too. `leaves` are the identities of
    those to whose `.grad` a backward within a backward adds."""

    def __init__(self) -> None:
        self.modules: list[str] = [""]
        self.node: int | None = None
        self.engines = 0
        self.regions: tuple[int, ...] = ()
        self.again: Again | None = None
        self.modes: Sequence[TorchFunctionMode] = ()
        self.leaves: set[int] = set()
        self._followed: dict[int, Any] = {}
        self._numbers: dict[tuple[tuple[int, ...], int], int] = {}
        self._within: Counter[Any] = Counter()  # how many checkpoints were entered within those around, in each run
        self._runs = 0

    @staticmethod
    def number() -> int:
        """The sequence number of the node that autograd made last."""
        return int(_SEQUENCE_NUMBER()) - 1

    @property
    def checkpoints(self) -> int:
        """How many calls of checkpoints there were."""
        return len(self._numbers)

    def region(self) -> contextlib.AbstractContextManager[None]:
        """Within it lies one more region: each call of a checkpoint is one of its own, and the same one once what is
        around it runs again."""
        around = self.regions, self.again
        number = self._numbers.setdefault((self.regions, self._within[around]), len(self._numbers))
        self._within[around] += 1
        return patched(self, regions=(*self.regions, number))

    def rerunning(self, function: Any, *, draws_alike: bool, is_differentiated: bool) -> Callable[..., Any]:
        """The function of the checkpoint around, as it runs again."""
        regions = self.regions

        def again(*args: Any) -> Any:
            self._runs += 1
            run = Again(run=self._runs, draws_alike=draws_alike, is_differentiated=is_differentiated)
            with patched(self, again=run, regions=regions):
                return function(*args)

        return again

    def run_engine(self, roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Autograd's engine, whose nodes say when they run."""
        self._follow(roots)
        if self.engines and kwargs.get("accumulate_grad"):
            self.leaves.update(id(node.variable) for node in _nodes(roots, {}) if hasattr(node, "variable"))
        active = [*map(id, function_modes())]
        with contextlib.ExitStack() as stack:
            stack.enter_context(patched(self, node=None, engines=self.engines + 1))
            stack.enter_context(torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False))
            for mode in self.modes:  # none of those is that saw the call of backward itself
                if id(mode) not in active:
                    stack.enter_context(mode)
            return _RUN_ENGINE(roots, *args, **kwargs)

    def _follow(self, roots: Sequence[Any]) -> None:
        for node in _nodes(roots, self._followed):
            number = node._sequence_nr()
            node.register_prehook(lambda _, number=number: setattr(self, "node", number))
            node.register_hook(lambda *_: setattr(self, "node", None))


def _nodes(roots: Sequence[Any], seen: dict[int, Any]) -> Iterator[Any]:
    """Autograd's nodes from which tensors come, other than those that were seen."""
    waiting = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        yield node
        waiting += [following for following, _ in node.next_functions]


def function_modes() -> list[TorchFunctionMode]:
    """Our own modes that are active, the innermost last."""
    active: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in active if type(mode).__module__.startswith("autopar.")]


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
        patched(nn.Module, __call__=called),
        patched(torch.autograd, _engine_run_backward=where.run_engine),
        _followed_checkpoints(where),
    ):
        yield where


@contextlib.contextmanager
def _followed_checkpoints(where: Whereabouts) -> Iterator[None]:
    """Checkpoints say when their functions run, and run again."""
    forward: Any = CheckpointFunction.forward

    def reentrant(ctx: Any, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        with where.region():
            again = where.rerunning(function, draws_alike=preserve_rng_state, is_differentiated=True)
            result = forward(ctx, function, preserve_rng_state, *args)
        ctx.run_function = again
        return result

    class Hook(_checkpoint_hook):
        def __init__(self, frame: Any) -> None:
            function = frame.recompute_fn
            cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
            alike = bool(cells["preserve_rng_state"].cell_contents)
            self.region = where.region()
            self.region.__enter__()
            frame.recompute_fn = where.rerunning(function, draws_alike=alike, is_differentiated=False)
            super().__init__(frame)

        def __exit__(self, *raised: Any) -> Any:
            self.region.__exit__(None, None, None)
            return super().__exit__(*raised)

    begun: list[Any] = []
    generator: Any = _checkpoint_without_reentrant_generator

    def begin(*args: Any, **kwargs: Any) -> Any:
        begun.append(generator(*args, **kwargs))
        return begun[-1]

    try:
        with (
            patched(CheckpointFunction, forward=staticmethod(reentrant)),
            patched(torch.utils.checkpoint, _checkpoint_hook=Hook, _checkpoint_without_reentrant_generator=begin),
        ):
            yield
    finally:
        for one in reversed(begun):  # torch leaves the modes of one active whose function raises
            one.close()
