"""Parts of torch that run in another way while a step is recorded: the same results, in operators of every device."""

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops import utils
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.bias import CausalBias
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .patching import patched
from .tensors import is_transformed, stand_in, storage_span


def _to_dlpack(tensor: torch.Tensor) -> Any:
    """`torch.to_dlpack`, which modes see."""
    return tensor.__dlpack__()


def _settled(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """`module.to(dtype)` in forward does nothing where the module is so already (the router of Switch Transformers);
    by itself it swaps every parameter of fakes."""
    with torch.no_grad():
        for name, tensor in (*self.named_parameters(recurse=recurse), *self.named_buffers(recurse=recurse)):
            converted = fn(tensor)
            if converted is not tensor and storage_span(converted) != storage_span(tensor):
                was, now = (f"{t.dtype} on {t.device}" for t in (tensor, converted))
                raise ValueError(
                    f"forward converts {name} of a {type(self).__name__} from {was} to {now}, which a program does "
                    f"not write: convert the module before, outside of forward"
                )
    return self


_NORM_FORWARD = _BatchNorm.forward


def _averaged(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """`BatchNorm(momentum=None)` keeps the plain average of what it has seen, whose factor is a number that it reads
    off a buffer. Here that is arithmetic on the buffer."""
    count, mean, var = self.num_batches_tracked, self.running_mean, self.running_var
    if self.momentum is not None or not self.training or count is None or mean is None or var is None:
        return _NORM_FORWARD(self, input)
    self._check_input_dim(input)  # type: ignore[no-untyped-call]
    now_mean, now_var = mean.clone(), var.clone()
    try:
        return nn.functional.batch_norm(input, now_mean, now_var, self.weight, self.bias, True, 1.0, self.eps)
    finally:  # a checkpoint that runs again stops once it has what was saved
        with torch.no_grad():
            count.add_(1)
            for running, now in ((mean, now_mean), (var, now_var)):
                share = 1.0 / count.to(running.dtype)
                running.copy_((1.0 - share) * running + share * now)


def _without_inference(self: Any) -> None:
    """`torch.inference_mode()` computes as `torch.no_grad()`: fakes cannot be the tensors that it makes."""
    self._inference_mode_context = torch.set_grad_enabled(not self.mode)


def _refused() -> None:
    """What torch has of control flow on data, beside `torch.cond`, is refused: it would compile its parts."""
    frames = (frame.f_code for frame, _ in traceback.walk_stack(None) if frame.f_code.co_filename != utils.__file__)
    name = next(code.co_name for code in frames if "_higher_order_ops" in code.co_filename)
    raise ValueError(
        f"the model has control flow that depends on data, torch's {name}, which one graph cannot hold: write the "
        f"loop out in Python, or as operators on all of its steps"
    )


class _ReadAgain(torch.autograd.Function):
    """What backward keeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ctx.saved_tensors  # noqa: B018, which hooks look at
        return gradient


def watched() -> contextlib.AbstractContextManager[Any]:
    """Within it what operators save may not be written before backward reads it: they stand in for one that reads
    something else then."""
    is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return contextlib.nullcontext() if is_hooked else saved_tensors_hooks(_itself, _itself)


def read_again(x: torch.Tensor) -> torch.Tensor:
    """The operand of an operator whose backward reads it again, for one that stands in and does not."""
    if not x.requires_grad or is_transformed():
        return x
    again: Any = _ReadAgain.apply
    with watched():
        result: torch.Tensor = again(x)
    return result


def _itself(saved: torch.Tensor) -> torch.Tensor:
    return saved


class _IfTaken(torch.autograd.Function):
    """The operand of a branch. A branch that is not taken may be undefined where it stands, and then the derivative of
    nothing is NaN: it gives no gradient instead."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(taken)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (taken,) = ctx.saved_tensors
        return torch.where(taken, gradient, 0.0), None


class _Gated(TorchFunctionMode):
    """Within it functions read what stands outside of a branch through `_IfTaken`: operands, and what the branch closes
    over."""

    def __init__(self, taken: torch.Tensor) -> None:
        super().__init__()
        self.taken = taken
        self.outside: dict[int, tuple[Any, torch.Tensor]] = {}
        self.inside: dict[int, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._gated, (args, kwargs or {}))
        result = func(*args, **kwargs)
        self.inside.update((id(x), x) for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor))
        return result

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad or id(x) in self.inside:
            return x
        if id(x) not in self.outside:
            gate: Any = _IfTaken.apply
            self.outside[id(x)] = x, gate(read_again(x), self.taken)
            self.inside[id(self.outside[id(x)][1])] = self.outside[id(x)][1]
        return self.outside[id(x)][1]


def cond(wanted: Any, if_true: Callable[..., Any], if_false: Callable[..., Any], operands: Any = ()) -> Any:
    """`torch.cond` on data: both branches run, and their results, a tensor or several, are selected from."""
    if not isinstance(wanted, torch.Tensor):
        return (if_true if wanted else if_false)(*operands)
    wanted = wanted.reshape(()).to(torch.bool)
    operands = pytree.tree_map_only(torch.Tensor, read_again, operands)

    def run(branch: Callable[..., Any], taken: torch.Tensor) -> tuple[list[Any], pytree.TreeSpec]:
        with _Gated(taken):
            return pytree.tree_flatten(branch(*operands))

    results = []
    (one, spec), (other, other_spec) = run(if_true, wanted), run(if_false, wanted.logical_not())
    if spec != other_spec:
        raise ValueError(f"the branches of torch.cond return {spec} and {other_spec}: they must be alike")
    for a, b in zip(one, other, strict=True):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            raise ValueError("a branch of torch.cond returns what is no tensor: autopar selects from tensors")
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"the branches of torch.cond return {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}: both run, "
                f"and one result is selected, so that they must be alike"
            )
        results.append(torch.where(wanted, a, b))
    return pytree.tree_unflatten(results, spec)


def _branch(pred, true_fn, false_fn, operands=()):  # type: ignore[no-untyped-def]
    return _autopar_cond(pred, true_fn, false_fn, operands)  # type: ignore[name-defined]  # noqa: F821


_COND: Any = torch.cond
_COND.__globals__["_autopar_cond"] = cond

_FAKES_LOG = logging.getLogger("torch._subclasses.fake_tensor")

_NEUTRAL: Mapping[Any, Mapping[str, Any]] = {
    nn.Module: {"_apply": _settled},
    _BatchNorm: {"forward": _averaged},
    torch.inference_mode: {"__enter__": _without_inference},
    torch.utils.dlpack: {"to_dlpack": _to_dlpack},
    torch: {"to_dlpack": _to_dlpack},
    # whoever holds it by whatever name
    _COND: {"__code__": _branch.__code__},
    utils: {"setup_compilation_env": _refused},
    # nn.TransformerEncoder compares its mask with the causal one, to give attention a hint: a branch on data, with and
    # without which the result is the same
    transformer: {"_detect_is_causal_mask": lambda mask, is_causal=None, size=None: is_causal is True},
    torch.backends.mha: {"_is_fastpath_enabled": False},
    CausalBias: {"__new__": lambda kind, *_, **named: stand_in(kind)},
    # fakes log what they raise, which the model may catch, or the error says
    _FAKES_LOG: {"disabled": True},
}
"""Holders of parts of torch, and what stands there while a step is recorded, by name."""


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """Within it parts of torch run in ways that a graph can hold. Recurrent and Transformer layers are their steps, on
    every device and in every dtype: a CPU, like CUDA, would run some of them as one operator, of which no dim can be
    split."""
    with contextlib.ExitStack() as stack:
        for holder, parts in _NEUTRAL.items():
            stack.enter_context(patched(holder, **parts))
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # a scripted function's first runs are profiled, and the others rewritten
        stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
        yield


def causal_biases() -> contextlib.AbstractContextManager[None]:
    """Within it a causal bias of torch may be made under any modes. It is an empty tensor of its class, which torch
    cannot make where tensors are to be fakes, or watched."""
    return patched(CausalBias, **_NEUTRAL[CausalBias])


def unlogged_fakes() -> contextlib.AbstractContextManager[None]:
    """Within it fakes raise errors, and do not log them."""
    return patched(_FAKES_LOG, **_NEUTRAL[_FAKES_LOG])


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which ops take their operands as they are."""
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` as matrix products and a softmax, on any device."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    attended, _ = torch.ops.aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    result: torch.Tensor = attended
    return result
