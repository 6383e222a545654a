"""Modes that watch a trace, hooks, and generators of random numbers."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import module as every_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .patching import patched
from .tensors import memory_of


class WritesReal(Exception):
    """An operator of a traced model writes a tensor that is neither of the traced copy nor produced by it."""

    def __init__(self, op: str, tensor: torch.Tensor) -> None:
        super().__init__(f"{op} writes a tensor that is not a buffer of the model")
        self.op, self.tensor = op, tensor


class WritesInput(Exception):
    """A traced model writes one of its inputs, of this number."""

    def __init__(self, index: int) -> None:
        super().__init__(f"the model writes input {index} in place")
        self.index = index


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of an operator writes."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]


@contextlib.contextmanager
def suspended_in_branches(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """A context that is left while Dynamo traces the branches of `torch.cond`, and entered again after it."""
    from torch._higher_order_ops import utils

    compiling = utils.setup_compilation_env
    entered = [context()]

    @contextlib.contextmanager
    def outside() -> Iterator[Any]:
        entered.pop().__exit__(None, None, None)
        try:
            with compiling() as backend:
                yield backend
        finally:
            entered.append(context())
            entered[-1].__enter__()

    entered[-1].__enter__()
    try:
        with patched(utils, "setup_compilation_env", outside):
            yield
    finally:
        entered.pop().__exit__(None, None, None)


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that looks at operators and leaves them as they are. Dynamo, which traces the branches of `torch.cond`,
    works under it as without."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


class Writes(Watching):  # type: ignore[no-untyped-call]
    """Notes the memory that operators write. Versions do not tell: writing a list of fakes leaves theirs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.memory.update(map(memory_of, written_by(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def decides_by_data(error: Exception) -> bool:
    """Whether tracing stopped where Python code asks for a value of a tensor: a branch, an index, a size."""
    # the other is what indexing by a tensor without data says
    return isinstance(error, GuardOnDataDependentSymNode) or "its data is not allocated yet" in str(error)


def leaves_numbers(error: Exception) -> bool:
    """Whether tracing stopped since a number that was read of a tensor has no concrete value."""
    return "nbacked symbol" in str(error) or "SymInt" in str(error) or "data dependent" in str(error).lower()


def hooks_gradient(tensor: torch.Tensor) -> bool:
    """Whether hooks wait for its gradient."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def hooks_gradients(module: nn.Module) -> bool:
    """Whether it has full backward hooks or full backward pre-hooks."""
    return bool(module._backward_hooks) or bool(module._backward_pre_hooks)


def hook_registries(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Where a module keeps its hooks: those of forward, and then those of backward."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def global_forward_hooks() -> dict[str, dict[int, Any]]:
    """The hooks that run before and after the forward of every module."""
    return {
        "the global forward hooks": every_module._global_forward_hooks,
        "the global forward pre-hooks": every_module._global_forward_pre_hooks,
    }


def global_backward_hooks() -> str:
    """What kind of hooks torch has for the backward of every module; empty where it has none."""
    if every_module._global_backward_pre_hooks:
        return "global full backward pre-hooks"
    return "global backward hooks" if every_module._global_backward_hooks else ""


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors are what they are, while a model is traced too."""
    stack = contextlib.ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(torch.inference_mode(False))
    return stack


class _Seeded:
    """Torch's default generator, which reports when it is seeded."""

    def __init__(self, generator: torch.Generator, seeded: Callable[[], None]) -> None:
        self._generator, self._seeded = generator, seeded

    def manual_seed(self, seed: int) -> torch.Generator:
        self._seeded()
        return self._generator.manual_seed(seed)

    def seed(self) -> int:
        self._seeded()
        return self._generator.seed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def seeding(seeded: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Within it `seeded` is called where torch's own generator is given a seed."""
    holder: Any = torch.random
    return patched(holder, "default_generator", _Seeded(holder.default_generator, seeded))


def saving(saved: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Within it `saved` is called where hooks are set on what autograd saves (not those of torch itself)."""
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    original = hooks.__enter__

    def enter(self: Any) -> None:
        if type(self) is hooks:
            saved()
        original(self)

    return patched(hooks, "__enter__", enter)


def asking_for_inference(asked: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Within it `asked` is called where Python asks whether inference mode is on (not that of torch itself)."""
    original = torch.is_inference_mode_enabled

    def ask() -> bool:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            asked()
        return original()

    return patched(torch, "is_inference_mode_enabled", ask)


def differentiating(asked: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Within it `asked` is called where Python begins to differentiate in reverse by `torch.func`: `grad`, `vjp`,
    `jacrev` and what builds on them."""
    from torch._functorch import eager_transforms

    original = eager_transforms.grad_increment_nesting

    def nest() -> contextlib.AbstractContextManager[int]:
        asked()
        return original()

    return patched(eager_transforms, "grad_increment_nesting", nest)


def _device() -> str:
    """Whether the default device holds values. Which one it is makes no difference to a graph."""
    return "meta" if torch.get_default_device().type == "meta" else "any"


SETTINGS: dict[str, Callable[[], Any]] = {
    "get_default_dtype": torch.get_default_dtype,
    "get_default_device": _device,
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "is_deterministic_algorithms_warn_only_enabled": torch.is_deterministic_algorithms_warn_only_enabled,
    "get_deterministic_debug_mode": torch.get_deterministic_debug_mode,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "is_anomaly_check_nan_enabled": torch.is_anomaly_check_nan_enabled,
    "get_float32_matmul_precision": lambda: sys.intern(torch.get_float32_matmul_precision()),
    "get_num_threads": torch.get_num_threads,
    "initial_seed": torch.initial_seed,
}
"""What torch answers for the whole process, by the name of the function that Python asks. The first two decide what
operators make without being asked."""

SETTINGS_AT_WORK = frozenset({"get_default_dtype", "get_default_device"})
