"""Autocast, as a device that need not be here casts.

`torch.autocast("cuda")` casts operands that are on CUDA, by another list of operators than the CPU's. A step is traced
on the CPU. So while one for CUDA is traced, its regions are those of the CPU, and operators cast there as CUDA's list
says. A test compares each with what torch does to fakes on CUDA.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .patching import patched

_LOWER = """
    _convolution convolution addmv addr mv einsum chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell
    """
"""Operators of CUDA's list, and not of the CPU's, that compute in the lower precision."""

_FLOAT = """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d acos asin cosh cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm
    layer_norm linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log log10 log1p log2 logsumexp
    native_layer_norm norm.Scalar norm.ScalarOpt_dim nuclear_norm nuclear_norm.dim pdist pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh softplus tan upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """
"""In float32."""

_FLOAT_RESULT = "cumprod cumsum log_softmax.int softmax.int sum sum.dim_IntList"
"""With a float32 result, unless the call names another dtype."""

_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
"""In the widest dtype of the operands."""


Cast = Callable[[Any, torch.dtype, tuple[Any, ...], dict[str, Any]], Any]
"""From an operator, the lower precision and a call's arguments to those that the operator gets."""


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What an active autocast context casts to: that of the device, or, where such a device is not here and torch
    disables its contexts, that of the CPU."""
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        device_type = "cpu"
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def cast_by_autocast(*values: Any) -> tuple[Any, ...]:
    """Tensors of the CPU, or None, as an operator gets them that computes in the lower precision."""
    return _as(torch.get_autocast_dtype("cpu"), values) if torch.is_autocast_enabled("cpu") else values


@contextlib.contextmanager
def autocast_of(device_type: str) -> Iterator[None]:
    """Within it autocast on the CPU is that of a device: what is active now, regions that a model enters, and what it
    is told when it asks. Without an argument torch asks of CUDA."""
    if device_type == "cpu":
        yield
        return
    dtype, default = autocast_dtype(device_type), torch.get_autocast_dtype(device_type)
    begin: Any = torch.autocast.__init__

    def here(kind: str) -> str:
        return "cpu" if kind == device_type else kind

    def begin_here(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        is_moved = here(device_type) != device_type
        begin(self, here(device_type), default if is_moved and dtype is None else dtype, *args, **kwargs)

    def asked(question: Callable[[str], Any]) -> Callable[..., Any]:
        return lambda device_type="cuda": question(here(device_type))

    with torch.library._scoped_library("aten", "IMPL") as library, contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that are replaced, on purpose
            for op, kernel in _kernels():
                library.impl(op, kernel, _KEY.name, allow_override=True)
        stack.enter_context(patched(torch.autocast, __init__=begin_here))
        questions = torch.is_autocast_enabled, torch.get_autocast_dtype
        stack.enter_context(patched(torch, **{question.__name__: asked(question) for question in questions}))
        stack.enter_context(torch.autocast("cpu", dtype=dtype, enabled=dtype is not None))
        yield


_KEY = torch._C.DispatchKey.AutocastCPU


def _as(dtype: torch.dtype, values: Any) -> Any:
    """Floating tensors among arguments in another dtype, but for float64, which autocast leaves."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return pytree.tree_map_only(torch.Tensor, cast, values)


def _to_float(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    first = args[0]
    if given.get("dtype") is None and first.is_floating_point() and first.dtype != torch.float64:
        given["dtype"] = torch.float32
    return (), given


def _widest(dtype: torch.dtype, arguments: Any) -> torch.dtype:
    wide = any(isinstance(x, torch.Tensor) and x.dtype == torch.float32 for x in pytree.tree_leaves(arguments))
    return torch.float32 if wide else dtype


def _to(pick: Callable[[torch.dtype, Any], torch.dtype]) -> Cast:
    """The arguments in a dtype that the lower precision and they themselves decide."""
    return lambda op, dtype, args, kwargs: _as(pick(dtype, (args, kwargs)), (args, kwargs))


_CASTS: Mapping[Cast, str] = {
    _to(lambda dtype, _: dtype): _LOWER,
    _to(lambda *_: torch.float32): _FLOAT,
    _to(_widest): _WIDEST,
    _to_float: _FLOAT_RESULT,
}


def _kernels() -> Iterator[tuple[str, Any]]:
    """What the CPU's autocast is to do for each operator whose cast differs on CUDA, by this torch's own lists, which
    it has of devices that are not here."""
    listed = (torch._C._dispatch_get_registrations_for_dispatch_key(key) for key in ("AutocastCPU", "AutocastCUDA"))
    of_cpu, of_cuda = ({op.removeprefix("aten::") for op in ops if op.startswith("aten::")} for ops in listed)
    yield from ((name, torch.library.fallthrough_kernel) for name in of_cpu - of_cuda)
    for cast, names in _CASTS.items():
        for name in of_cuda.intersection(names.split()):
            packet, _, overload = name.partition(".")
            yield name, _kernel(getattr(getattr(torch.ops.aten, packet), overload or "default"), cast)


def _kernel(op: Any, cast: Cast) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            args, kwargs = cast(op, torch.get_autocast_dtype("cpu"), args, kwargs)
            return op(*args, **kwargs)

    return kernel
