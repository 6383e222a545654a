"""Functions that are traced as others of the same result."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.compat.neutral import read_again
from autopar.compat.patching import patched
from autopar.compat.tensors import is_fake, is_real, is_transformed, memory_of, notes_of, unmodified, untransformed
from autopar.extensions import Plug, Table

from .attention import attended
from .concrete import StepRecorder
from .refusals import (
    ADDRESSING,
    ASKING,
    OF_CALLER,
    PACKING,
    PICKLING,
    READING_GRADIENTS,
    READING_VALUES,
    WRITING_GRADIENTS,
    refuse,
)
from .saved import is_hooked
from .source import is_library
from .trace_device import TraceDevice

logger = logging.getLogger(__name__)
_DATA: Any = torch.Tensor.data

OVERRIDES = Table("override", Plug)
"""What adds to `TRACED`: of the recorder, functions and what is traced in their place."""


class Overrides(TorchFunctionMode):
    """Functions that are traced as others of the same result: see `TRACED`. What draws from a `torch.Generator` draws
    from the seed of the step, as all else does: see `Generators`. Devices that the model names are that of the trace:
    see `TraceDevice`."""

    def __init__(self, generators: Generators, recorder: StepRecorder, here: TraceDevice) -> None:
        super().__init__()
        self.generators, self.recorder, self.here = generators, recorder, here
        self.traced: dict[Any, Callable[..., Any]] = {
            **TRACED,
            _DATA.__set__: recorder.replace,
            **{func: functools.partial(self._read, func) for func in _WHOLE},
        }
        for override in OVERRIDES.values():
            self.traced.update(override.value(recorder))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__ not in _NOTED and is_fake(args[0]):
            return func(*args)  # most calls are of attributes, which need nothing
        func, args, kwargs = self.here.call(func, args, kwargs or {})
        for kind in types:
            if func not in getattr(kind, "readers", (func,)):  # a class whose tensors stand for others until these read
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        file = sys._getframe(1).f_code.co_filename
        if message := self._refusal(func, name, args, file):
            refuse(message)
        if name in _STRIDES and not is_library(file):
            return self.recorder.strides(name, args[0], func(*args, **kwargs))
        if name in _VALUES and is_real(valued := untransformed(args[0])):
            self.recorder.valued.add(memory_of(valued))
        if (generator := kwargs.pop("generator", None)) is not None:
            self.generators.check(generator)
        return self.traced.get(func, func)(*args, **kwargs)

    def _read(self, func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The numbers of a tensor, where they are known."""
        values: Any = NotImplemented
        if not is_transformed():
            values = self.recorder.read(torch.ops.aten.clone.default, (tensor,), {})
        if values is not NotImplemented:
            if func in _ARRAYS:
                self.recorder.share(tensor, values)
            with unmodified():
                return func(values.requires_grad_(tensor.requires_grad), *args, **kwargs)
        if func is not torch.Tensor.tolist:  # whose numbers may be sizes
            refuse(READING_VALUES)
        return func(tensor, *args, **kwargs)

    def _refusal(self, func: Any, name: str, args: tuple[Any, ...], file: str) -> str:
        """Why forward cannot call a function, from code of a file; empty where it can."""
        if name == "_pack_padded_sequence":
            return PACKING
        if name == "is_inference":
            return "" if is_library(file) else ASKING
        if name == "share_memory_" or (name == "data_ptr" and not is_library(file)):
            return ADDRESSING
        if func is torch.Tensor.__reduce_ex__ and is_fake(args[0]):
            return PICKLING
        if func in _OF_CALLER and is_fake(args[0]) and not is_library(file):
            is_written = func == _VERSION.__get__ and self.recorder.is_given(args[0])
            return OF_CALLER if is_written or self.recorder.name(args[0]) in self.recorder.paths else ""
        if func not in (_GRAD.__get__, _GRAD.__set__) or not args[0].is_leaf or not args[0].requires_grad:
            return ""
        if not self.recorder.is_given(args[0]) or file == _METHODS:  # which copy it, and show it
            return ""
        return READING_GRADIENTS if func == _GRAD.__get__ else WRITING_GRADIENTS


_VALUES = frozenset({"item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__", "__complex__"})
_WHOLE = frozenset(
    {getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__")}
)
"""Functions that make Python's values of a tensor's, or text."""
_ARRAYS = frozenset({getattr(torch.Tensor, name) for name in ("numpy", "__array__", "__dlpack__")})
"""Those that give the memory of the tensor."""
_STRIDES = frozenset({"stride", "is_contiguous", "storage_offset", "dim_order"})
_GRAD: Any = torch.Tensor.grad
_VERSION: Any = torch.Tensor._version
_BOOKKEEPING: Any = [torch.Tensor.is_leaf, torch.Tensor.grad_fn, torch.Tensor.retains_grad, torch.Tensor.output_nr]
_BOOKKEEPING += [torch.Tensor._base, torch.Tensor._backward_hooks, _VERSION]
_NOTED = frozenset([_GRAD, *_BOOKKEEPING])
_OF_CALLER = frozenset([*(kept.__get__ for kept in _BOOKKEEPING), torch.Tensor._is_view, torch.Tensor.is_pinned])
"""What a caller may have done to an input before: it has another answer from call to call."""
_METHODS = torch.Tensor.__repr__.__code__.co_filename


def _dense(func: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """A lookup whose gradient is dense, which collectives can reduce."""
    call = inspect.signature(func).bind(*args, **kwargs)
    if call.arguments.get("sparse"):
        logger.warning("the gradient of %s(sparse=True) is dense, with the same values", func.__name__)
        call.arguments["sparse"] = False
    result: torch.Tensor = func(*call.args, **call.kwargs)
    return result


def _attended_heads(*args: Any, **kwargs: Any) -> Any:
    """`multi_head_attention_forward`, for which torch calls a mode, and for nothing inside."""
    with patched(F, scaled_dot_product_attention=attended):
        return F.multi_head_attention_forward(*args, **kwargs)


def _deep_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """`copy.deepcopy(tensor)`, as an operator."""
    if not (is_fake(tensor) and tensor.is_leaf) or is_transformed():
        return copy.deepcopy(tensor, memo)
    if id(tensor) not in memo:
        same = tensor.detach().clone()
        same = nn.Parameter(same) if isinstance(tensor, nn.Parameter) else same
        memo[id(tensor)] = same.requires_grad_(tensor.requires_grad)
        vars(same).update(copy.deepcopy(notes_of(tensor), memo))
    made: torch.Tensor = memo[id(tensor)]
    return made


def _of_list(func: Callable[..., Any], place: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`func`, which turns a list at this place among its arguments into a tensor."""
    args = (*args, kwargs.pop("data")) if "data" in kwargs else args
    if isinstance(args[place], (list, tuple)) and any(
        isinstance(x, torch.Tensor) and is_fake(x) for x in pytree.tree_leaves(args[place])
    ):
        like = {"dtype": args[0].dtype, "device": args[0].device} if place else {}
        return _stacked(*args[place:], **{**like, **kwargs})
    result: torch.Tensor = func(*args, **kwargs)
    return result


def _stacked(values: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
    """`torch.tensor` of lists with tensors in them: it reads their numbers, which no gradient reaches."""
    if isinstance(values, (list, tuple)):
        return torch.stack([_stacked(value, dtype, device) for value in values])
    if isinstance(values, torch.Tensor):
        return values.detach().to(device=device, dtype=dtype)
    return torch.tensor(values, dtype=dtype, device=device)


class Generators:
    """The generators that forward draws from. Their numbers are functions of the step's seed and of the global index,
    whatever the generator's state, so that one which forward itself makes or seeds, and which therefore draws the
    same numbers in every step, is refused."""

    def __init__(self) -> None:
        self.marks: dict[int, torch.Tensor] = {}
        self.base, self.default = torch.Generator, torch.default_generator

    @contextlib.contextmanager
    def watched(self, reached: Iterable[torch.Generator]) -> Iterator[None]:
        """While forward runs, which can reach these and torch's own: a state of which nobody knows tells whether a
        generator was seeded since."""
        with unmodified():
            held = [generator for generator in reached if generator is not self.default]
            states = [(generator, generator.get_state()) for generator in held]
            for generator in held:
                generator.manual_seed(0x5EED5EED)
                self.marks[id(generator)] = generator.get_state()
        try:
            with patched(torch, Generator=_own_class(self.base)):
                yield
        finally:
            with unmodified():
                for generator, state in states:
                    generator.set_state(state)

    def check(self, generator: torch.Generator) -> None:
        mark = self.marks.get(id(generator))
        with unmodified():
            seeded = mark is not None and not torch.equal(mark, generator.get_state())
        if seeded or (type(generator) is not self.base and generator is not torch.default_generator):
            what = "seeds a torch.Generator" if seeded else "makes a torch.Generator of its own"
            raise ValueError(
                f"forward {what}, which then draws the same numbers in every step: draw them once, outside of forward, "
                f"into a buffer, or use a generator that forward neither makes nor seeds"
            )


def _own_class(base: type[torch.Generator]) -> Any:
    """A class of generators to tell those that forward makes; every generator passes for one of its own."""

    class Meta(type(base)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, base)

    class OwnGenerator(base, metaclass=Meta):  # type: ignore[misc, valid-type]
        pass

    return OwnGenerator


def as_strided(
    input: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: int | None = None
) -> torch.Tensor:
    """`input.as_strided(size, stride)` of a tensor without gaps, by `unfold`, since shards have no addresses in memory.
    What has none of that form is the operator."""
    sizes, strides = (pytree.tree_map_only(torch.Tensor, int, tuple(given)) for given in (size, stride))
    made = None if storage_offset or not is_fake(input) else windows(input, sizes, strides)
    return torch.as_strided(input, sizes, strides, storage_offset) if made is None else made


def windows(x: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor | None:
    """`x.as_strided(size, stride)` of a tensor without gaps, by `unfold`; None where that is not possible."""
    if not all(isinstance(n, int) for n in (*size, *stride)) or x.storage_offset() or not x.numel() or 0 in size:
        return None
    strides = x.stride()
    memory = x.permute(sorted(range(x.dim()), key=lambda dim: -strides[dim] if x.shape[dim] > 1 else 1))
    dims = sorted((dim for dim in range(len(size)) if size[dim] > 1), key=lambda dim: -stride[dim])

    def extent(dims: Sequence[int]) -> int:
        return 1 + sum((size[dim] - 1) * stride[dim] for dim in dims)

    def first(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        return x if x.shape[dim] == length else x.narrow(dim, 0, length)

    def cut(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        """Cuts the last dim by the outermost dims that overlap: it is rows, by which they step, and within which the
        others lie. Each of them takes pieces that it steps over, or windows."""
        if not dims:
            return first(x, -1, 1).squeeze(-1)
        for count in range(1, len(dims) + 1):
            width = math.gcd(*(stride[dim] for dim in dims[:count]))
            if extent(dims[count:]) <= width and x.shape[-1] % width == 0:
                break
        outer, begin = dims[:count], x.dim() - 1
        x = cut(x.unflatten(-1, (-1, width)), dims[count:])  # type: ignore[no-untyped-call]
        for at, dim in enumerate(outer, begin):
            step, length = stride[dim] // width, math.ceil(extent(outer[at - begin + 1 :]) / width)
            if length > step or x.shape[at] % step:
                x = x.unfold(at, length, step).movedim(-1, at + 1)
            elif step > 1:
                x = first(x.unflatten(at, (-1, step)), at + 1, length)  # type: ignore[no-untyped-call]
            x = first(x, at, size[dim])
        return x.squeeze(begin + count) if step > 1 else x

    if not memory.is_contiguous() or not dims or stride[dims[-1]] != 1 or extent(dims) > x.numel():
        return None
    made = cut(memory.reshape(-1), dims)
    return made.permute([dims.index(dim) for dim in sorted(dims)]).reshape(tuple(size))


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """`torch.cov`, without its checks of weights, which read data."""
    if fweights is None and aweights is None:
        return torch.cov(input, correction=correction)
    observations = input.reshape(1, -1) if input.dim() < 2 else input
    weights: Tensor = math.prod(each for each in (fweights, aweights) if each is not None)  # type: ignore[assignment]
    total = weights.sum()
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    centred = observations - ((observations * weights).sum(1) / total).unsqueeze(1)
    return (torch.mm(centred, (centred * weights).t().conj()) / (total - lost).clamp_min(0)).squeeze()


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """`torch.bincount` of numbers below `minlength`, which others make an index error."""
    if not minlength:
        raise ValueError(
            "torch.bincount without minlength is as long as the largest number says: pass minlength=n, for numbers "
            "of 0 to n - 1"
        )
    if weights is None:
        ones = torch.ones_like(input, dtype=torch.int64)
    else:
        ones = weights.detach() if weights.dtype is torch.float32 else weights.detach().double()
    return ones.new_zeros(minlength).scatter_add(0, input.long(), ones)


def multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Tensor:
    """Labels of a row end at the first -1. (Torch's decomposition counts what follows as label 0.)"""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    input = read_again(input)
    given = (target >= 0).to(torch.int64).cumprod(-1).to(torch.bool)
    labels = target.clamp(min=0)
    classes = torch.arange(input.shape[-1], device=input.device)
    is_label = ((labels.unsqueeze(-1) == classes) & given.unsqueeze(-1)).any(-2)
    margins = (1 - input.gather(-1, labels).unsqueeze(-1) + input.unsqueeze(-2)).clamp(min=0)
    counted = given.unsqueeze(-1) & ~is_label.unsqueeze(-2)
    losses = torch.where(counted, margins, 0.0).sum((-2, -1)) / input.shape[-1]
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.dropout`, as the operator of every device that keeps what it kept as truth values. Hooks see
    what a CPU keeps; of no elements PyTorch draws no numbers."""
    is_plain = inplace or is_transformed() or is_hooked() or not input.numel()
    if is_plain or not training or not 0 < p < 1 or not input.is_floating_point():
        return F.dropout(input, p, training, inplace)
    result: Tensor = torch.ops.aten.native_dropout.default(input, p, True)[0]
    return result


STFT = inspect.signature(torch.stft)


def stft(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.stft`, whose frames are windows by `unfold` and not by their addresses."""
    asked = STFT.bind(*args, **kwargs)
    asked.apply_defaults()
    of = asked.arguments
    input, n_fft, window, center = (of[name] for name in ("input", "n_fft", "window", "center"))
    length = n_fft if of["win_length"] is None else of["win_length"]
    hop = n_fft // 4 if of["hop_length"] is None else of["hop_length"]
    is_usual = 0 < length <= n_fft and hop > 0 and of["return_complex"] and of.get("align_to_window") is None
    is_complex = input.is_complex() or (window is not None and window.is_complex())
    if not is_usual or input.dim() not in (1, 2) or (window is not None and window.shape != (length,)):
        usual: Tensor = torch.stft(*args, **kwargs)
        return usual
    x = input.reshape(1, -1, input.shape[-1])
    x = F.pad(x, (n_fft // 2, n_fft // 2), of["pad_mode"]) if center else x
    frames = x.unfold(-1, n_fft, hop)
    if window is not None or length < n_fft:
        left = (n_fft - length) // 2
        weights = input.new_ones(length) if window is None else window
        frames = frames * F.pad(weights, (left, n_fft - length - left))
    half = of["onesided"] if of["onesided"] is not None else not is_complex
    transformed = torch.fft.rfft if half else torch.fft.fft
    spectrum: Tensor = transformed(frames, norm="ortho" if of["normalized"] else "backward")
    return spectrum.transpose(-1, -2).reshape(*input.shape[:-1], spectrum.shape[-1], spectrum.shape[-2])


TRACED: Mapping[Any, Callable[..., Any]] = {
    **{
        getattr(holder, override.__name__): override
        for holder in (torch, torch.Tensor)
        for override in (as_strided, bincount, cov, stft)
    },
    **{func: functools.partial(_dense, func) for func in (F.embedding, F.embedding_bag)},
    **{func: functools.partial(_of_list, func, 0) for func in (torch.tensor, torch.as_tensor)},
    torch.Tensor.new_tensor: functools.partial(_of_list, torch.Tensor.new_tensor, 1),
    torch.Tensor.__deepcopy__: _deep_copy,
    F.multilabel_margin_loss: multilabel_margin_loss,
    F.dropout: dropout,
    torch.dropout: dropout,
    F.multi_head_attention_forward: _attended_heads,
    F.scaled_dot_product_attention: attended,
    torch.ops.aten.scaled_dot_product_attention: attended,
    torch.ops.aten.scaled_dot_product_attention.default: attended,
}
"""Functions of torch -> what is traced in their place: operators of static shapes, the same on every device, which
collectives can reduce, where torch looks at data on the way, or at addresses, or decomposes into something else."""
