"""Calls of PyTorch's that wait for all ranks, and say so when these do not come."""

import functools
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

_CALLS: dict[Any, dict[str, str]] = {
    DTensor: {
        "full_tensor": "full_tensor() of a DTensor",
        "redistribute": "redistribute() of a DTensor, of which full state dicts are made,",
    },
    _DistWrapper: dict.fromkeys(
        ("broadcast_object", "gather_object", "all_gather_object", "scatter_object"), "torch.distributed.checkpoint"
    ),
}
"""Methods that wait, and what people called, in words."""


@cache
def name_waits(named: Callable[[str, RuntimeError], RuntimeError]) -> None:
    """From now on these calls raise what `named` makes of what a backend raised, and of their name in words."""
    for owner, methods in _CALLS.items():
        for method, words in methods.items():
            setattr(owner, method, _naming(getattr(owner, method), words, named))


def _naming(method: Any, words: str, named: Callable[[str, RuntimeError], RuntimeError]) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            # what people called is the outermost
            cause = error.__cause__ if isinstance(error.__cause__, RuntimeError) else error
            other = named(words, cause)
            if other is cause:
                raise
            raise other from cause

    return call
