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

_NOT_CAST = """
    _addmm_activation _grid_sampler_2d_cpu_fallback _lu_with_info _native_multi_head_attention adaptive_avg_pool3d
    adaptive_max_pool3d avg_pool3d cat cholesky cholesky_inverse cholesky_solve conv1d.padding conv2d.padding
    conv3d.padding cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor fake_quantize_per_tensor_affine fft_fft fft_fft2
    fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2
    fft_rfftn fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler_2d grid_sampler_3d index_copy inverse
    linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals
    linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
    linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_qr
    linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve max_pool3d max_unpool2d
    max_unpool3d mkldnn_rnn_layer multilabel_margin_loss_forward nanquantile nanquantile.scalar orgqr ormqr pinverse
    polar qr quantile quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    replication_pad3d stack stft stft.center svd trace triangular_solve view_as_complex
    """
"""Operators of the CPU's list, and not of CUDA's."""

Cast = Callable[[Any, torch.dtype, tuple[Any, ...], dict[str, Any]], Any]
"""From an operator, the lower precision and a call's arguments to its result."""


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
    """Within it autocast on the CPU is that of a device: what is active now, and regions that a model enters."""
    if device_type == "cpu":
        yield
        return
    dtype = autocast_dtype(device_type)
    with torch.library._scoped_library("aten", "IMPL") as library, contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that are replaced, on purpose
            for op, kernel in _kernels():
                library.impl(op, kernel, _KEY.name, allow_override=True)
        stack.enter_context(_regions_here(device_type))
        stack.enter_context(torch.autocast("cpu", dtype=dtype, enabled=dtype is not None))
        yield


@contextlib.contextmanager
def _regions_here(kind: str) -> Iterator[None]:
    """Regions for a device are for the CPU, and so are questions whether one is active."""
    original, default = torch.autocast.__init__, torch.get_autocast_dtype(kind)

    def here(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == kind and dtype is None:
            dtype = default
        original(self, "cpu" if device_type == kind else device_type, dtype, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(torch.autocast, "__init__", here))
        for name in _ASKED:
            stack.enter_context(patched(torch, name, _asked_here(getattr(torch, name), kind)))
        yield


_ASKED = "is_autocast_enabled", "get_autocast_dtype"


def _asked_here(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """A question about autocast on a device, put to the CPU's. Without an argument torch asks of CUDA."""

    def asked(device_type: str = "cuda") -> Any:
        return function("cpu" if device_type == kind else device_type)

    return asked


_KEY = torch._C.DispatchKey.AutocastCPU


def _as(dtype: torch.dtype, values: Any) -> Any:
    """Floating tensors among arguments in another dtype, but for float64, which autocast leaves."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return pytree.tree_map_only(torch.Tensor, cast, values)


def _lower(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _as(dtype, (args, kwargs))
    return op(*args, **kwargs)


def _in_float(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _as(torch.float32, (args, kwargs))
    return op(*args, **kwargs)


def _to_float(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    first = args[0]
    if given.get("dtype") is None and first.is_floating_point() and first.dtype != torch.float64:
        given["dtype"] = torch.float32
    return op(**given)


def _in_widest(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    wide = any(x.dtype == torch.float32 for x in tensors)
    args, kwargs = _as(torch.float32 if wide else dtype, (args, kwargs))
    return op(*args, **kwargs)


_CASTS: Mapping[Cast, str] = {_lower: _LOWER, _in_float: _FLOAT, _to_float: _FLOAT_RESULT, _in_widest: _WIDEST}


def _kernels() -> Iterator[tuple[str, Any]]:
    """What the CPU's autocast is to do for each operator whose cast differs on CUDA."""
    for name in _NOT_CAST.split():
        if _is_cast(name, "AutocastCPU"):
            yield name, torch.library.fallthrough_kernel
    for cast, names in _CASTS.items():
        for name in names.split():
            if not _is_cast(name, "AutocastCUDA"):
                continue
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            yield name, _kernel(op, cast)


def _is_cast(name: str, key: str) -> bool:
    """Whether this torch has it in the list of a device, which need not be here. In 2.11 `rms_norm` is in none."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def _kernel(op: Any, cast: Cast) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            return cast(op, torch.get_autocast_dtype("cpu"), args, kwargs)

    return kernel
