"""Functions that are traced as others of the same result."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar import compat

from .asked import (
    ADDRESSING,
    ASKING,
    PACKING,
    PICKLING,
    READING_GRADIENTS,
    READING_VALUES,
    WRITING_GRADIENTS,
    refusing,
)
from .attention import attended
from .concrete import StepRecorder
from .here import Here
from .looks import is_library
from .selections import Selected, Selections

logger = logging.getLogger(__name__)
_DATA: Any = torch.Tensor.data

_SPARSE: dict[Any, int] = {F.embedding: 6, F.embedding_bag: 7}
"""Functions whose gradient may be sparse, and the place of the argument that says so."""

_LISTS: dict[Any, int] = {torch.tensor: 0, torch.as_tensor: 0, torch.Tensor.new_tensor: 1}
"""Functions that turn lists into tensors, and the place of the list."""


class OtherWays(TorchFunctionMode):
    """Attention is an operator of our own, the same on every device: see `attention`. CTC loss, covariances and counts
    are operators of static shapes: see `Selections`. Lookups with sparse gradients are those with dense ones, which
    collectives can reduce. What draws from a `torch.Generator` draws from the seed of the step, as all else does: see
    `Generators`. Overlapping windows by `as_strided` are those of `unfold`. Devices that the model names are that of
    the trace: see `Here`."""

    def __init__(self, generators: Generators, recorder: StepRecorder, here: Here) -> None:
        super().__init__()
        self.generators, self.recorder, self.here = generators, recorder, here
        self.selections = Selections()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__ is not _GRAD and compat.is_fake(args[0]):
            return func(*args)  # most calls are of attributes, which need nothing
        func, args, kwargs = self.here.call(func, args, kwargs or {})
        name = getattr(func, "__name__", "")
        file = sys._getframe(1).f_code.co_filename
        if message := self._refusal(func, name, args, file):
            refusing(message)()
        if name in _STRIDES and not is_library(file):
            return self.recorder.strides(name, args[0], func(*args, **kwargs))
        if name in _VALUES and compat.is_real(args[0]):
            self.recorder.valued.add(compat.memory_of(args[0]))
        if kwargs.get("generator") is not None:
            self.generators.check(kwargs["generator"])
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        selected = self.selections.traced(func, args, kwargs)
        if selected is not NotImplemented:
            return selected
        if self.selections.are_in((args, kwargs)):
            args, kwargs = pytree.tree_map_only(Selected, lambda x: x.picked[x.mask], (args, kwargs))
            with self:
                return func(*args, **kwargs)
        if (place := _SPARSE.get(func)) is not None:
            sparse = kwargs["sparse"] if "sparse" in kwargs else args[place] if len(args) > place else False
            if sparse:
                logger.warning("the gradient of %s(sparse=True) is dense, with the same values", func.__name__)
                args, kwargs = args[:place], {**_named(func, args[place + 1 :], place + 1), **kwargs, "sparse": False}
        if func in (torch.as_strided, torch.Tensor.as_strided) and compat.is_fake(args[0]):
            sizes, named = pytree.tree_map_only(torch.Tensor, int, (args[1:], kwargs))
            unfolded = windows(args[0], *sizes, **named)
            if unfolded is not None:
                return unfolded
        if func in TRACED:
            return TRACED[func](*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # torch calls the mode for it, and for nothing inside
            with compat.patched(F, "scaled_dot_product_attention", attended):
                return func(*args, **kwargs)
        if func == _DATA.__set__:
            return _write_data(*args)
        if func is torch.Tensor.__deepcopy__ and compat.is_fake(args[0]) and args[0].is_leaf:
            return _deep_copy(*args)
        if func in _WHOLE:
            values: Any = NotImplemented
            if not compat.is_transformed():
                values = self.recorder.read(torch.ops.aten.clone.default, args[:1], {})
            if values is not NotImplemented:
                with compat.unmodified():
                    return func(values.requires_grad_(args[0].requires_grad), *args[1:], **kwargs)
            if func is not torch.Tensor.tolist:  # whose numbers may be sizes
                refusing(READING_VALUES)()
        if (place := _LISTS.get(func)) is not None:
            named = {**kwargs}
            args = (*args, named.pop("data")) if "data" in named else args
            if _is_list_of_fakes(args[place]):
                own = {"dtype": args[0].dtype, "device": args[0].device} if place else {}
                return _stacked(*args[place:], **{**own, **named})
            return func(*args, **named)
        return func(*args, **kwargs)

    def _refusal(self, func: Any, name: str, args: tuple[Any, ...], file: str) -> str:
        """Why forward cannot call a function, from code of a file; empty where it can."""
        if name == "_pack_padded_sequence":
            return PACKING
        if name == "is_inference":
            return "" if is_library(file) else ASKING
        if name == "share_memory_" or (name == "data_ptr" and not is_library(file)):
            return ADDRESSING
        if func is torch.Tensor.__reduce_ex__ and compat.is_fake(args[0]):
            return PICKLING
        if func not in (_GRAD.__get__, _GRAD.__set__) or not args[0].is_leaf or not args[0].requires_grad:
            return ""
        if not self.recorder.is_given(args[0]) or file == torch._tensor.__file__:  # which copies it, and shows it
            return ""
        return READING_GRADIENTS if func == _GRAD.__get__ else WRITING_GRADIENTS


_VALUES = frozenset({"item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__", "__complex__"})
_WHOLE = frozenset(
    {getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__")}
)
"""Functions that make Python's values of a tensor's, or text."""
_STRIDES = frozenset({"stride", "is_contiguous", "storage_offset", "dim_order"})
_GRAD: Any = torch.Tensor.grad


def _named(function: Callable[..., Any], values: Sequence[Any], first: int) -> dict[str, Any]:
    """Positional arguments from the place `first` on, by name."""
    return dict(zip([*inspect.signature(function).parameters][first:], values, strict=False))


def _write_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`."""
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ValueError(
            f"forward sets .data of a tensor of {tensor.dtype} {list(tensor.shape)} to one of {value.dtype} "
            f"{list(value.shape)}: keep its shape and dtype"
        )
    with torch.no_grad():
        tensor.copy_(value)


def _deep_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """`copy.deepcopy(tensor)`, as an operator."""
    if id(tensor) not in memo:
        same = tensor.detach().clone()
        same = nn.Parameter(same) if isinstance(tensor, nn.Parameter) else same
        memo[id(tensor)] = same.requires_grad_(tensor.requires_grad)
        vars(same).update(copy.deepcopy(compat.notes_of(tensor), memo))
    made: torch.Tensor = memo[id(tensor)]
    return made


def _is_list_of_fakes(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and any(
        isinstance(x, torch.Tensor) and compat.is_fake(x) for x in pytree.tree_leaves(values)
    )


def _stacked(values: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
    """`torch.tensor` of lists with tensors in them: it reads their numbers, which no gradient reaches."""
    if isinstance(values, (list, tuple)):
        rows = [_stacked(value, device=device) for value in values]
        wanted = dtype or functools.reduce(torch.promote_types, (row.dtype for row in rows))
        return torch.stack([row.to(wanted) for row in rows])
    if isinstance(values, torch.Tensor):
        return values.detach().to(device=device, dtype=dtype)
    return torch.tensor(values, dtype=dtype, device=device)


class Generators:
    """The generators that forward draws from. Their numbers are functions of the step's seed and of the global index,
    whatever the generator's state, so that one which forward itself makes or seeds, and which therefore draws the
    same numbers in every step, is refused."""

    def __init__(self, model: nn.Module) -> None:
        leaves = (leaf for module in model.modules() for leaf in pytree.tree_leaves(list(vars(module).values())))
        self.held = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        self.marks: dict[int, torch.Tensor] = {}
        self.base = torch.Generator

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While forward runs: a state of which nobody knows tells whether a generator was seeded since."""
        with compat.without_modes():
            states = [(generator, generator.get_state()) for generator in self.held]
            for generator in self.held:
                generator.manual_seed(0x5EED5EED)
                self.marks[id(generator)] = generator.get_state()
        try:
            with compat.patched(torch, "Generator", _own_class(self.base)):
                yield
        finally:
            with compat.without_modes():
                for generator, state in states:
                    generator.set_state(state)

    def check(self, generator: torch.Generator) -> None:
        mark = self.marks.get(id(generator))
        with compat.without_modes():
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

    class Own(base, metaclass=Meta):  # type: ignore[misc, valid-type]
        pass

    return Own


def windows(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor | None:
    """`x.as_strided(size, stride)` of a tensor without gaps, by `unfold`, since shards have no addresses in
    memory; None for what is no windows of it.

    Two dims (count, width) whose strides are (step, 1) times that of what lies inside are windows of one dim.
    """
    given = all(isinstance(n, int) for n in (*size, *stride)) and len(size) == len(stride)
    if not given or x.storage_offset() or storage_offset not in (None, 0) or not x.numel() or 0 in size:
        return None
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim] if x.shape[dim] > 1 else 1)
    dims = sorted((dim for dim in range(len(size)) if size[dim] > 1), key=lambda dim: -stride[dim])
    memory = x.permute(order)
    if not memory.is_contiguous():
        return None
    unfolded = _in_order(memory, [size[dim] for dim in dims], [stride[dim] for dim in dims])
    if unfolded is None:
        return None
    back = [dims.index(dim) for dim in sorted(dims)]
    return unfolded.permute(back).reshape(tuple(size))


def _in_order(x: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor | None:
    """Of a contiguous tensor, with strides that fall."""
    groups: list[tuple[int, int, int]] = []  # (length of a dim of x, width, step) or (length, 0, 0), innermost first
    inside, dim = 1, len(size) - 1
    while dim >= 0:
        if stride[dim] != inside:
            return None
        step = stride[dim - 1] // inside if dim else 0
        paired = 0 < step < size[dim] and stride[dim - 1] % inside == 0
        outer = dim - 2 if paired else dim - 1
        # the next dim outwards tells how long this one is
        length, rest = divmod(stride[outer] if outer >= 0 else x.numel(), inside)
        needed = (size[dim - 1] - 1) * step + size[dim] if paired else size[dim]
        if rest or length < needed:
            return None
        groups.append((length, size[dim], step) if paired else (length, 0, 0))
        inside, dim = inside * length, outer
    if inside != x.numel() or not any(step for *_, step in groups):
        return None
    result, at = x.reshape([length for length, *_ in reversed(groups)]), 0
    for _, width, step in reversed(groups):
        if step:
            result = result.unfold(at, width, step).movedim(-1, at + 1).narrow(at, 0, size[at])
            at += 1
        elif result.shape[at] != size[at]:
            result = result.narrow(at, 0, size[at])
        at += 1
    return result


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """`torch.cov`, without its check that weights are not negative and its warning of too few observations."""
    if input.dim() > 2:
        raise ValueError(f"cov of {input.dim()} dims: give variables in rows and observations in columns")
    observations = input.reshape(1, -1) if input.dim() < 2 else input
    weights = aweights if fweights is None else fweights if aweights is None else fweights * aweights
    if weights is None:
        total: Tensor | int = observations.shape[1]
        weighted, normal = observations, max(total - correction, 0)
    else:
        total = weights.sum()
        weighted = observations * weights
        lost = correction if aweights is None else correction * (weights * aweights).sum() / total
        normal = (total - lost).clamp_min(0)
    centred = observations - (weighted.sum(1) / total).unsqueeze(1)
    other = centred if weights is None else centred * weights
    return (torch.mm(centred, other.t().conj()) / normal).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """`torch.corrcoef`, of the covariance above."""
    covariance = cov(input)
    if covariance.dim() == 0:
        return covariance / covariance
    variance = covariance.diagonal()
    deviation = (variance.real if variance.is_complex() else variance).sqrt()
    correlation = covariance / deviation[:, None] / deviation
    if not correlation.is_complex():
        return correlation.clip(-1, 1)
    return torch.complex(correlation.real.clip(-1, 1), correlation.imag.clip(-1, 1))


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


def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """`torch.masked_select`, as an index."""
    x, picked = torch.broadcast_tensors(input, mask)  # type: ignore[no-untyped-call]
    result: Tensor = x[picked]
    return result


def multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Tensor:
    """Labels of a row end at the first -1. (Torch's decomposition counts what follows as label 0.)"""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    given = (target >= 0).to(torch.int64).cumprod(-1).to(torch.bool)
    labels = target.clamp(min=0)
    classes = torch.arange(input.shape[-1], device=input.device)
    is_label = ((labels.unsqueeze(-1) == classes) & given.unsqueeze(-1)).any(-2)
    margins = (1 - input.gather(-1, labels).unsqueeze(-1) + input.unsqueeze(-2)).clamp(min=0)
    counted = given.unsqueeze(-1) & ~is_label.unsqueeze(-2)
    losses = torch.where(counted, margins, 0.0).sum((-2, -1)) / input.shape[-1]
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.dropout`, as the operator of every device that keeps what it kept as truth values."""
    if inplace or not training or not 0 < p < 1 or not input.is_floating_point() or compat.is_transformed():
        return F.dropout(input, p, training, inplace)
    result: Tensor = torch.ops.aten.native_dropout.default(input, p, True)[0]
    return result


def stft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    """`torch.stft`, whose frames are windows by `unfold` and not by their addresses."""
    length = n_fft if win_length is None else win_length
    hop = n_fft // 4 if hop_length is None else hop_length
    is_usual = 0 < length <= n_fft and hop > 0 and return_complex and align_to_window is None
    is_complex = input.is_complex() or (window is not None and window.is_complex())
    if not is_usual or input.dim() not in (1, 2) or (window is not None and window.shape != (length,)):
        usual: Tensor = torch.stft(
            input, n_fft, hop_length, win_length, window, center, pad_mode, normalized, onesided, return_complex,
            align_to_window,
        )  # fmt: skip
        return usual
    x = input.reshape(1, -1, input.shape[-1])
    x = F.pad(x, (n_fft // 2, n_fft // 2), pad_mode) if center else x
    frames = x.unfold(-1, n_fft, hop)
    if window is not None or length < n_fft:
        left = (n_fft - length) // 2
        weights = input.new_ones(length) if window is None else window
        frames = frames * F.pad(weights, (left, n_fft - length - left))
    half = onesided if onesided is not None else not is_complex
    spectrum: Tensor = (torch.fft.rfft if half else torch.fft.fft)(frames, norm="ortho" if normalized else "backward")
    return spectrum.transpose(-1, -2).reshape(*input.shape[:-1], spectrum.shape[-1], spectrum.shape[-2])


TRACED: Mapping[Any, Callable[..., Tensor]] = {
    **{getattr(holder, way.__name__): way for holder in (torch, torch.Tensor) for way in (cov, corrcoef, bincount)},
    torch.masked_select: masked_select,
    torch.Tensor.masked_select: masked_select,
    torch.stft: stft,
    torch.Tensor.stft: stft,
    F.multilabel_margin_loss: multilabel_margin_loss,
    F.dropout: dropout,
    torch.dropout: dropout,
    F.scaled_dot_product_attention: attended,
    torch.ops.aten.scaled_dot_product_attention: attended,
    torch.ops.aten.scaled_dot_product_attention.default: attended,
}
"""Functions of torch -> what is traced in their place: torch's own look at data on the way, to warn or to size the
result, or decompose into something else."""
