"""Tensors as torch keeps them: fakes, values, memory, and what people note on them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.backends.cuda import SDPAParams
from torch.utils._python_dispatch import _disable_current_modes


def is_profiling() -> bool:
    """Whether a `torch.profiler` records in this process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return torch._C._functorch.maybe_current_level() is not None


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether a transform of `torch.func` differentiates by it, which functions of `torch.library` have no form for."""
    return bool(torch._C._functorch.is_gradtrackingtensor(tensor))


class _Kernels(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fakes whose norms give the same dtypes on every device, those of `autopar.ops.kernels`. torch's give others for
    statistics of bfloat16 and float16 on a CPU, beside wider weights, and for running statistics in these dtypes.
    Grouped products are there in every dtype, as they are on real tensors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.made: dict[Any, _Made | None] = {}
        """What operators make of operands that lie in memory alike, and nothing else decides; None for others."""
        self._fresh: dict[str, Any] = {}

    def fake(self, bare: torch.Tensor) -> FakeTensor:
        """A fake of a tensor on `meta`, as torch makes it, in a quarter of the time."""
        if not self._fresh:
            self._fresh = dict(vars(FakeTensor(self, bare, _CPU)))
        made: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._fresh)
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is not compiled, and to say so takes longer than what is known takes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = _lies((func, args, tuple(kwargs.items())), torch.get_default_dtype())
        made = self.made.get(key) if key is not None else None
        if made is not None:
            return made.again(self, args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if key is not None and key not in self.made:
            self.made[key] = _Made.of(func, args, result)
        return result

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


def _lies(*values: Any) -> tuple[Any, ...] | None:
    """Arguments as far as they decide what an operator makes: how tensors lie, and all else by value and type. None
    where more may decide."""
    key: list[Any] = []
    for x in values:
        if isinstance(x, FakeTensor):
            if x.constant is not None or x.is_complex() or x.is_neg() or x._is_zerotensor():
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
            key.append((type(x), x))
    try:
        hash(made := tuple(key))
    except TypeError:
        return None
    return made


@dataclass(frozen=True, slots=True)
class _Made:
    """How the results of an operator lie: fresh tensors, or views of its first operand where an offset is given."""

    several: type | None
    lies: tuple[tuple[Any, Any, int | None, torch.dtype] | None, ...]

    @staticmethod
    def of(func: Any, args: Any, result: Any) -> _Made | None:
        """None where a result is one of the operands, or is more than shape, stride and dtype."""
        unknown = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
        if func.namespace != "aten" or func._schema.is_mutable or any(tag in func.tags for tag in unknown):
            return None
        several = type(result) if isinstance(result, (tuple, list)) else None
        given = {memory_of(x) for x in args if isinstance(x, torch.Tensor)}
        lies: list[tuple[Any, Any, int | None, torch.dtype] | None] = []
        for x in result if several else (result,):
            if x is None:
                lies.append(None)
                continue
            bare = type(x) is FakeTensor and x.constant is None and not x._is_zerotensor()
            if not bare or x.is_complex() or x.is_neg():
                return None
            viewed = memory_of(x) in given
            if any(x is other for other in args) or (viewed and memory_of(x) != memory_of(args[0])):
                return None
            if x.fake_device != _CPU or (not viewed and x.storage_offset()):
                return None
            lies.append((tuple(x.shape), x.stride(), int(x.storage_offset()) if viewed else None, x.dtype))
        return _Made(several, tuple(lies))

    def again(self, mode: _Kernels, args: Any) -> Any:
        fakes: list[FakeTensor | None] = []
        for lies in self.lies:
            if lies is None:
                fakes.append(None)
                continue
            shape, stride, offset, dtype = lies
            if offset is None:
                bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                bare = torch.empty(0, dtype=dtype, device="meta")
                bare.set_(args[0].untyped_storage(), offset, shape, stride)
            fakes.append(mode.fake(bare))
        return fakes[0] if self.several is None else self.several(fakes)


_CPU = torch.device("cpu")


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


def statistics_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of mean and deviation of a layer or batch norm's input."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def norm_dtype(x: torch.Tensor, weight: torch.Tensor | None) -> torch.dtype:
    """The dtype of what CPU kernels of norms keep beside their output."""
    return x.dtype if weight is None or weight.dtype.itemsize < x.dtype.itemsize else weight.dtype


_ATEN = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
"""Kernels last as long as what registers them."""


def meta_kernels() -> None:
    """Shapes of gradients of random numbers, which torch has for real devices alone."""
    for op in ("_standard_gamma_grad", "_dirichlet_grad"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "Meta"):
            _ATEN.impl(op, lambda first, *_: torch.empty_like(first), "Meta")  # type: ignore[no-untyped-call]
    norm: Any = torch.ops.aten.linalg_vector_norm.default
    if norm(torch.empty(2, 1, device="meta"), 2, (-1,)).dim() > 1:  # PyTorch 2.11 keeps such dims of size 1

        def kept_or_not(x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
            return torch.amax(x.abs(), [*range(x.dim())] if dim is None else dim, keepdim).to(dtype or x.abs().dtype)

        _ATEN.impl("linalg_vector_norm", kept_or_not, "Meta", allow_override=True)  # type: ignore[no-untyped-call]


VALUES_MOST = 1 << 16


def value_of(tensor: torch.Tensor) -> bytes | None:
    """What a small real tensor holds; None for others."""
    if not is_real(tensor) or tensor.numel() > VALUES_MOST:
        return None
    with unmodified():
        return repr(tensor.tolist()).encode()


def fake_mode() -> FakeTensorMode:
    """A fresh mode under which tensors have shapes and no data. Real tensors that a model closes
    over are let in (and become constants of the graph)."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return _Kernels(allow_non_fake_inputs=True, shape_env=ShapeEnv(), export=True)


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


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is under `torch.compile`: Dynamo would follow it into planning."""
    reason = "a parallel module is compiled already: what it runs is its program"
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each has been written in place. A DTensor counts writes that its local tensor does not."""
    return [tensor._version for tensor in tensors]


def receiver(node: Any) -> tuple[bool, torch.Tensor | None]:
    """Whether the backward that runs hands a gradient to this node of its graph, and the tensor to whose `.grad` the
    node adds it. None: another operator takes it, or the caller of `autograd.grad`."""
    try:
        runs = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf in autograd.grad
        return True, None
    return runs, getattr(node, "variable", None)


def backward_running() -> int:
    """The number of the backward that runs, each of which has its own; -1 outside."""
    return int(torch._C._current_graph_task_id())


def is_observed(tensor: torch.Tensor) -> bool:
    """Whether somebody wants to see its gradient: by a hook, or by `retain_grad()`."""
    return bool(tensor._backward_hooks) or bool(tensor.retains_grad and not tensor.is_leaf)


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


def by_tensor() -> MutableMapping[torch.Tensor, Any]:
    """A dictionary of tensors, by identity, that keeps none of them alive."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


meta_kernels()


def attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> str:
    """The fused kernel of attention that torch would choose where gradients will be asked for, by dtype, shape and
    mask, by what the machine has, and by what the user allows (`torch.nn.attention.sdpa_kernel`); "composed" for
    none."""
    with torch.enable_grad():
        asked = query.detach().requires_grad_()
        grouped = query.shape[1] != key.shape[1]
        choice = torch._fused_sdp_choice(asked, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
        if not choice and grouped:
            # the efficient kernel takes a head of keys for each of queries, and is given them so: views tell torch
            keys, values = (x[:, :1].expand(-1, query.shape[1], -1, -1) for x in (key, value))
            given = SDPAParams(asked, keys, values, mask, 0.0, causal, False)
            return "efficient" if torch.backends.cuda.can_use_efficient_attention(given) else "composed"
    return {1: "flash", 2: "efficient", 3: "cudnn"}.get(choice, "composed")
