"""Modes that watch a trace, hooks, and generators of random numbers."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import module as every_module
from torch.utils import _pytree as pytree

from .patching import patched
from .tensors import unmodified


def property_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator gives that asks for a property of a tensor. Its device is asked for most, and at once known."""
    if func is DEVICE and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return func(*args, **kwargs)


DEVICE = torch.ops.prim.device.default
"""The operator that gives a tensor's device."""


def sizes_by_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether how much an operator makes depends on the values that it is given: of an index, on those of masks."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def raised_by(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    longest: int = sys.maxsize,
    dtype: torch.dtype | None = None,
) -> Exception | None:
    """What an operator raises of real tensors like these, in the words of eager; None if nothing. With dims of
    `longest` at most, and one floating dtype, if that is given."""

    def real(x: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=dtype if dtype and x.is_floating_point() else x.dtype)
        like = zero.expand([min(size, longest) for size in x.shape])
        return like if like.numel() > _REAL_MOST else like.contiguous()

    with unmodified():
        try:
            func(*pytree.tree_map_only(torch.Tensor, real, args), **pytree.tree_map_only(torch.Tensor, real, kwargs))
        except Exception as error:  # of any class: it is the caller's
            return error.with_traceback(None)
    return None


_REAL_MOST = 1 << 24
"""Larger ones are one element, seen everywhere."""


def raised_by_product(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """What eager raises of a product of several dtypes, which fakes let pass."""
    dtypes = {x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()}
    if len(dtypes) < 2 or raised_by(func, args, kwargs, longest=4, dtype=torch.float32) is not None:
        return None
    return raised_by(func, args, kwargs, longest=4)


def cause_of(error: Exception) -> str:
    """Why a trace stopped: "decides" where Python code asks for a value of a tensor (a branch, an index, a size),
    "sizes" where a number that was read of a tensor has no concrete value, "unknown" where torch has no fake of an
    operator, "sparse" where a tensor has no storage; "" for all else."""
    said = str(error).lower()
    causes = (cause for cause, kinds, words in _CAUSES if isinstance(error, kinds) or any(map(said.count, words)))
    return next(causes, "")


_CAUSES: Sequence[tuple[str, tuple[type, ...], tuple[str, ...]]] = (
    # the words are what indexing by a tensor without data says
    (
        "decides",
        (GuardOnDataDependentSymNode, DataDependentOutputException),
        ("its data is not allocated yet",),
    ),
    ("sizes", (), ("nbacked symbol", "symint", "data dependent")),
    ("unknown", (UnsupportedOperatorException, DynamicOutputShapeException), ()),
    ("sparse", (), ("storage of sparse",)),
)
"""Causes of errors: their classes, and words that they say."""


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """The hooks that wait for its gradient."""
    return [*(tensor._backward_hooks or {}).values()]


def hook_gradient(tensor: torch.Tensor, hooks: Iterable[Callable[[torch.Tensor], Any]]) -> None:
    """Have hooks wait for a tensor's gradient, if it requires one. An output that is not gathered yet stays so."""
    with torch._C.DisableTorchFunctionSubclass():
        for hook in hooks if tensor.requires_grad else ():
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def require_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which requires a gradient from now on. An output that is not gathered yet stays so."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad_()


def hooks_gradient(tensor: torch.Tensor) -> bool:
    """Whether hooks wait for its gradient, or for that to be accumulated."""
    return bool(gradient_hooks(tensor)) or is_stepped_in_backward(tensor)


def is_stepped_in_backward(tensor: torch.Tensor) -> bool:
    """Whether hooks wait until its gradient is accumulated, as optimizers do that step during backward."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes in which a module keeps its hooks."""


def global_hooks() -> dict[str, dict[int, Any]]:
    """The hooks that run around the forward and the backward of every module."""
    return {
        "the global forward hooks": every_module._global_forward_hooks,
        "the global forward pre-hooks": every_module._global_forward_pre_hooks,
        "the global backward hooks": every_module._global_backward_hooks,
        "the global backward pre-hooks": every_module._global_backward_pre_hooks,
    }


def _is_torchs_own(frame: FrameType | None) -> bool:
    """Whether `torch.utils.checkpoint` sets a state of random numbers, which is that with which forward had run, or
    Dynamo looks at torch's functions to know them by name."""
    while frame is not None and frame.f_globals.get("__name__") in ("torch.random", "contextlib"):
        frame = frame.f_back
    name = None if frame is None else frame.f_globals.get("__name__")
    return name in ("torch.utils.checkpoint", "torch._dynamo.trace_rules")


@contextlib.contextmanager
def seeding(seeded: Callable[[], None]) -> Iterator[None]:
    """Within it `seeded` is called where torch's own generator is given a seed, or a state."""
    generator = torch.default_generator

    class Watched(torch.Generator):
        """The generator, to whoever asks it for a method."""

        def __getattribute__(self, name: str) -> Any:
            if name in ("manual_seed", "seed", "set_state") and not _is_torchs_own(sys._getframe(1)):
                seeded()
            return getattr(generator, name)

    watched = Watched()
    with patched(torch.random, default_generator=watched), patched(torch, default_generator=watched):
        yield


def asking_for_inference(asked: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Within it `asked` is called where Python asks whether inference mode is on (not that of torch itself)."""
    original = torch.is_inference_mode_enabled

    def ask() -> bool:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            asked()
        return original()

    return patched(torch, is_inference_mode_enabled=ask)


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

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"})
"""The namespaces of operators that communicate."""

SETTINGS_AT_WORK = frozenset({"get_default_dtype", "get_default_device"})
