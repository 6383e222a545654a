"""Tensors as torch keeps them: fakes, values, memory, and what people note on them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return torch._C._functorch.maybe_current_level() is not None


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether a transform of `torch.func` differentiates by it, which functions of `torch.library` have no form for."""
    return any(map(torch._C._functorch.is_gradtrackingtensor, _wrapped(tensor)))


def _wrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, and what transforms of `torch.func` wrap one in another, from the innermost transform out."""
    yield tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        yield tensor


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """What a transform of `torch.func` wraps; the tensor itself, if none does."""
    *_, plain = _wrapped(tensor)
    return plain


def statistics_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of mean and deviation of a layer or batch norm's input."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def norm_dtype(x: torch.Tensor, weight: torch.Tensor | None) -> torch.dtype:
    """The dtype of what CPU kernels of norms keep beside their output."""
    return x.dtype if weight is None or weight.dtype.itemsize < x.dtype.itemsize else weight.dtype


@lru_cache(maxsize=1 << 12)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch makes one."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


VALUES_MOST = 1 << 16


def value_of(tensor: torch.Tensor) -> bytes | None:
    """What a small real tensor holds; None for others."""
    if not is_real(tensor) or tensor.numel() > VALUES_MOST:
        return None
    with unmodified():
        return repr(tensor.tolist()).encode()


@contextlib.contextmanager
def unmodified() -> Iterator[None]:
    """Within it tensors are what they are, and operators run as they are, whatever modes are active."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False):
        yield


def unseen() -> contextlib.AbstractContextManager[None]:
    """Within it no mode of functions sees a call."""
    return torch._C.DisableTorchFunction()


def stand_in(kind: type[Any]) -> Any:
    """An empty tensor of a subclass, whatever modes are active: fakes are of no class but their own."""
    with unmodified():
        return torch.empty(0).as_subclass(kind)


def like(
    source: torch.Tensor, requires_grad: bool, *, dtype: torch.dtype | None = None, device: Any = None
) -> torch.Tensor:
    """An empty tensor of the same shape and strides, a leaf of autograd, and a parameter if that is one."""
    made = torch.empty_strided(source.shape, source.stride(), dtype=dtype or source.dtype, device=device)
    return nn.Parameter(made, requires_grad) if isinstance(source, nn.Parameter) else made.requires_grad_(requires_grad)


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def is_real(tensor: torch.Tensor) -> bool:
    """Whether it has values."""
    return not is_fake(tensor) and tensor.device.type != "meta"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a strided tensor without a subclass of behaviour: real, meta or fake."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(tensor, nn.Buffer) or is_fake(tensor)
    return plain and tensor.layout is torch.strided and not tensor.is_quantized


def storage_span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(identity of the storage, first byte, byte after the last one) of a strided tensor."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    first = int(tensor.storage_offset())
    return tensor.untyped_storage()._cdata, first * tensor.itemsize, (first + int(extent)) * tensor.itemsize


def memory_of(tensor: torch.Tensor) -> int:
    """Identity of the storage. That of a DTensor is its outer tensor's, which holds nothing: another one after
    `dtensor.data = ...`, of which the local tensor learns nothing."""
    return int(tensor.untyped_storage()._cdata)


def take_notes(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Give a tensor the attributes that people set on another (a scale, a group), which forward may read."""
    vars(tensor).update({name: value for name, value in notes_of(source).items() if name not in vars(tensor)})


def notes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Attributes that people set on a tensor."""
    own = vars(_bare_fake()) if is_fake(tensor) else {}
    return {name: value for name, value in vars(tensor).items() if name not in own and not is_torchs(name)}


RECORDED = "_autopar_recorded"
"""The attribute of a fake in which recorders keep its names."""


def is_torchs(name: str) -> bool:
    """Whether torch itself, or a recorder, sets such an attribute on fakes."""
    return name == RECORDED or name.endswith(("_memo", "_memo_vc", "_memo_epoch")) or name.startswith("_dynamo_")


@cache
def _bare_fake() -> torch.Tensor:
    with FakeTensorMode():
        return nn.Parameter(torch.empty(()))
