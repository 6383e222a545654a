"""Fakes that are made quickly, with the dtypes that graphs have."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from .fakes import fake_mode
from .tensors import contiguous_strides, memory_of, norm_dtype, statistics_dtype

MOST_OPERATORS = 1 << 16
"""Calls of operators whose results are cached."""


class _Kernels(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fakes whose norms give the same dtypes on every device, those of `autopar.ops.kernels`. torch's give others for
    statistics of bfloat16 and float16 on a CPU, beside wider weights, and for running statistics in these dtypes.
    Grouped products are there in every dtype, as they are on real tensors."""

    made: ClassVar[dict[Any, _FakeResults | None]] = {}
    """What operators make of operands that lie in memory alike, and nothing else decides; None for others. Cached for
    the process: a model is captured again in another mode, for other inputs, or by ranks that are forked."""
    dtypes: ClassVar[dict[Any, torch.dtype]] = {}
    """Of what pointwise operators make of contiguous operands of any one shape."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cache_enabled = False  # `made` is quicker, and to look into both takes a fifth of a capture
        self._fresh: dict[torch.device, Any] = {}

    def fake(self, bare: torch.Tensor, device: torch.device) -> FakeTensor:
        """A fake on a device of a tensor on `meta`, as torch makes it, in a quarter of the time."""
        if device not in self._fresh:
            self._fresh[device] = dict(vars(FakeTensor(self, bare, device)))
        made: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._fresh[device])
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is not compiled, and to say so takes longer than what is known takes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = _lies((func, args, tuple(kwargs.items())), torch.get_default_dtype())
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        made = self.made.get(key)
        if made is not None:
            return made.again(self, args)
        pointwise = _pointwise(func, args, kwargs)
        result: Any = self._view(func, args, kwargs)
        if result is None and pointwise is not None and pointwise.key in self.dtypes:
            bare = torch.empty(pointwise.shape, dtype=self.dtypes[pointwise.key], device="meta")
            result = self.fake(bare, pointwise.device)
        if result is None:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        if key not in self.made:
            if len(self.made) >= MOST_OPERATORS:
                self.made.clear()
            made = self.made[key] = _FakeResults.of(func, args, result)
            if made is not None and pointwise is not None and pointwise.is_made(made):
                self.dtypes[pointwise.key] = result.dtype
        return result

    def _view(self, func: Any, args: Any, kwargs: Any) -> FakeTensor | None:
        """The result of an operator that makes one view, in a tenth of the time that fakes take; None of others."""
        if not _makes_one_view(func):
            return None
        viewed, *others = args
        if not isinstance(viewed, FakeTensor) or any(isinstance(x, torch.Tensor) for x in (*others, *kwargs.values())):
            return None
        bare = torch.empty(0, dtype=viewed.dtype, device="meta")
        bare.set_(viewed.untyped_storage(), viewed.storage_offset(), viewed.shape, viewed.stride())
        made = func(bare, *others, **kwargs)
        if not isinstance(made, torch.Tensor) or made.is_complex():
            return None
        return self.fake(made, viewed.fake_device)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            made = {"dtype": args[0].dtype, "device": args[0].device}
            return super().dispatch(torch.ops.aten.empty.memory_format, types, (_grouped_shape(*args),), made)
        results = super().dispatch(func, types, args, kwargs)
        if not isinstance(results, tuple):
            return results
        wanted = _norm_dtypes(str(func), args)
        return tuple(
            result
            if dtype is None or result is None or result.dtype == dtype
            else super(_Kernels, self).dispatch(torch.ops.aten._to_copy.default, types, (result,), {"dtype": dtype})
            for result, dtype in itertools.zip_longest(results, wanted[: len(results)])
        )


@cache
def _makes_one_view(func: Any) -> bool:
    """Not one that may copy, which torch takes apart."""
    return func.namespace == "aten" and func.is_view and len(func._schema.returns) == 1 and not func._can_decompose()


def _lies(*values: Any) -> tuple[Any, ...] | None:
    """Arguments as far as they decide what an operator makes: how tensors lie, and all else by value and type. None
    where more may decide."""
    key: list[Any] = []
    for x in values:
        kind = type(x)
        if kind in _PLAIN:  # most there are
            key.append((kind, x))
        elif isinstance(x, FakeTensor):
            if not _is_bare(x):
                return None
            key.append((x.shape, x.stride(), x.storage_offset(), x.dtype, x.requires_grad, x.fake_device))
        elif isinstance(x, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return None
        elif isinstance(x, (tuple, list)):
            inner = _lies(*x)
            if inner is None:
                return None
            key.append(inner)
        else:
            key.append((kind, x))
    try:
        hash(made := tuple(key))
    except TypeError:
        return None
    return made


_PLAIN = {int, bool, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def _is_bare(x: FakeTensor) -> bool:
    """Whether it is no more than shape, stride and dtype."""
    return not (x.constant is not None or x.is_complex() or x.is_neg() or x._is_zerotensor())


@dataclass(frozen=True, slots=True)
class _Pointwise:
    """A pointwise operator on contiguous tensors of one shape, and on scalars: it makes one like them, of a dtype that
    does not depend on the shape."""

    key: tuple[Any, ...]
    shape: tuple[int, ...]
    device: torch.device

    def is_made(self, results: _FakeResults) -> bool:
        fresh = self.shape, contiguous_strides(self.shape), None
        return results.several is None and results.lies[0] is not None and results.lies[0][:3] == fresh


def _pointwise(func: Any, args: Any, kwargs: Any) -> _Pointwise | None:
    """None for calls of other operators, or with operands that lie in other ways."""
    if torch.Tag.pointwise not in func.tags or func.namespace != "aten" or func._schema.is_mutable:
        return None
    tensors = [x for x in args if isinstance(x, FakeTensor)]
    shapes = {tuple(x.shape) for x in tensors if x.dim()}
    if len(shapes) != 1 or len({x.fake_device for x in tensors}) != 1:
        return None
    (shape,) = shapes
    strides = contiguous_strides(shape)
    key: list[Any] = [func, torch.get_default_dtype()]
    for x in (*args, *kwargs.items()):
        if isinstance(x, FakeTensor):
            if x.dim() and x.stride() != strides:
                return None
            key.append((x.dtype, x.dim() > 0))
        elif isinstance(x, (list, torch.Tensor)):
            return None
        else:
            key.append((type(x), x))
    return _Pointwise(tuple(key), shape, tensors[0].fake_device)


@dataclass(frozen=True, slots=True)
class _FakeResults:
    """How the results of an operator lie: fresh tensors, or views of its first operand where an offset is given."""

    several: type | None
    lies: tuple[tuple[Any, Any, int | None, torch.dtype, torch.device] | None, ...]

    @staticmethod
    def of(func: Any, args: Any, result: Any) -> _FakeResults | None:
        """None where a result is one of the operands, or is more than shape, stride and dtype."""
        unknown = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
        if func.namespace != "aten" or func._schema.is_mutable or any(tag in func.tags for tag in unknown):
            return None
        several = type(result) if isinstance(result, (tuple, list)) else None
        given = {memory_of(x) for x in args if isinstance(x, torch.Tensor)}
        lies: list[tuple[Any, Any, int | None, torch.dtype, torch.device] | None] = []
        for x in result if several else (result,):
            if x is None:
                lies.append(None)
                continue
            if type(x) is not FakeTensor or not _is_bare(x):
                return None
            viewed = memory_of(x) in given
            if any(x is other for other in args) or (viewed and memory_of(x) != memory_of(args[0])):
                return None
            if not viewed and x.storage_offset():
                return None
            offset = int(x.storage_offset()) if viewed else None
            lies.append((tuple(x.shape), x.stride(), offset, x.dtype, x.fake_device))
        return _FakeResults(several, tuple(lies))

    def again(self, mode: _Kernels, args: Any) -> Any:
        fakes: list[FakeTensor | None] = []
        for lies in self.lies:
            if lies is None:
                fakes.append(None)
                continue
            shape, stride, offset, dtype, device = lies
            if offset is None:
                bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                bare = torch.empty(0, dtype=dtype, device="meta")
                bare.set_(args[0].untyped_storage(), offset, shape, stride)
            fakes.append(mode.fake(bare, device))
        return fakes[0] if self.several is None else self.several(fakes)


def _grouped_shape(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None = None, *_: Any) -> list[int]:
    """The shape of products of groups: of rows with a matrix each, or of the columns and rows of each group."""
    groups = [ends.shape[0]] if ends is not None and a.dim() == b.dim() == 2 else []
    batch = [a.shape[0]] if a.dim() == b.dim() == 3 else []
    return [*groups, *batch, a.shape[-2], b.shape[-1]]


def _norm_dtypes(op: str, args: Any) -> list[torch.dtype | None]:
    """The dtypes of a norm's results, None where the fakes are right."""
    if op == "aten.native_layer_norm.default":
        return [None, *[statistics_dtype(args[0])] * 2]
    if op == "aten.native_group_norm.default":
        return [None, *[norm_dtype(args[0], args[1])] * 2]
    if op.startswith(("aten.native_batch_norm.", "aten._native_batch_norm_legit")) and "no_training" not in op:
        running = args[3:5] if isinstance(args[3], torch.Tensor) else (None, None)
        return [None, *[statistics_dtype(args[0])] * 2, *(None if r is None else r.dtype for r in running)]
    if op == "aten.native_group_norm_backward.default":
        return [args[1].dtype, *[norm_dtype(args[1], args[4])] * 2]
    return []


def quick_fakes() -> FakeTensorMode:
    """A fresh mode, as `fake_mode` makes it."""
    return fake_mode(_Kernels)
