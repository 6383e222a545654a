"""The parts of torch's `flex_attention` and `varlen_attn` that others take the place of, none of which is public."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, util
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from .patching import patched

IDENTITY: Any = flex._identity
"""The function that changes no score."""

_MAKERS = "_create_sparse_block_from_block_mask", "_create_empty_block_mask"

VARLEN = "torch.nn.attention.varlen"


def noted(kv_num_blocks: torch.Tensor) -> tuple[Any, ...]:
    """The block mask that torch made with this tensor in it, if it hides what its mask function says alone."""
    made: tuple[Any, ...] = vars(kv_num_blocks).get("shown", ())
    return made


def _shown(make: Callable[..., flex.BlockMask]) -> Callable[..., flex.BlockMask]:
    def made(*args: Any, **kwargs: Any) -> flex.BlockMask:
        mask = make(*args, **kwargs)
        vars(mask.kv_num_blocks)["shown"] = mask.as_tuple()
        return mask

    return made


def flex_is(kernel: Callable[..., Any], options: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Within it `flex_attention` calls these in the place of its kernel and of what chooses one."""
    parts = {
        "flex_attention_hop": kernel,
        "setup_compilation_env": contextlib.nullcontext,
        "_apply_kernel_options": options,
        "_validate_device": lambda *_: None,  # eager has no backward on a CPU
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    made = {name: _shown(getattr(flex, name)) for name in _MAKERS if hasattr(flex, name)}
    # of a version of torch that lacks one, calls are torch's own, and a block mask is refused
    return patched(flex, **{name: part for name, part in parts.items() if hasattr(flex, name)}, **made)


@contextlib.contextmanager
def varlen_is(kernel: Callable[..., Any], statistics: Callable[[], Any]) -> Iterator[None]:
    """Within it `varlen_attn` calls this in the place of its kernel, and `statistics` where it returns those too."""
    if util.find_spec(VARLEN) is None:
        yield
        return

    def called(*args: Any) -> Any:
        if sys._getframe(1).f_locals.get("return_aux"):
            statistics()
        return kernel(*args)

    ops = SimpleNamespace(torch_attn=SimpleNamespace(_varlen_attn=called))
    with patched(import_module(VARLEN), torch=SimpleNamespace(ops=ops)):
        yield
