"""Up- and downsampling by integer factors, and shuffled pixels: rows are split."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from autopar.ir.layout import Shape

from .expansions import LocalCall, Results
from .families import FIRST, Rule
from .halo import HaloWindow, at_end, halo_added, in_step, with_halo
from .local import Arguments, Local, replaced
from .parts import slice_of
from .pooling import leading
from .rule import Call, OpRule
from .rules import Entry, aten
from .template import Dim, Named, assemble


def _sizes(call: Call, spatial: int) -> tuple[Shape, Shape]:
    """Spatial sizes of the source and of the resampled tensor."""
    given, output = call.inputs[0], call.output
    small, large = (output, given) if call.has("grad_output") else (given, output)
    return small.shape[-spatial:], large.shape[-spatial:]


def _scales(call: Call, spatial: int) -> tuple[float | None, ...]:
    """The scales that the caller gave, one a spatial dim."""
    names = ("scales",) if spatial == 1 else ("scales_d", "scales_h", "scales_w")[-spatial:]
    return tuple(call.argument(name) for name in names)


def _factor(source: int, target: int, scale: float | None) -> int:
    """How many rows one row becomes or, negative, how many rows become one; 0 where these are no integers."""
    factor = target // source if target % source == 0 else -(source // target) if source % target == 0 else 0
    exact = target / source
    return factor if scale is None or abs(scale - exact) < 1e-9 * exact else 0


def nearest(spatial: int, *, centred: bool = False) -> Rule:
    """Rows go with the rows that they are copies of. Backward too."""

    def rule(call: Call) -> OpRule:
        factors = []
        for source, target, scale in zip(*_sizes(call, spatial), _scales(call, spatial), strict=True):
            factor = _factor(source, target, scale)
            factors.append(factor if _follows(source, target, scale, factor, 0.5 if centred else 0.0) else 0)
        return _in_step(call, spatial, factors)

    return rule


def _follows(source: int, target: int, scale: float | None, factor: int, shift: float) -> bool:
    """Whether kernels, which compute in float32, take every row from the source row that its own belongs to."""
    if factor == 0:
        return False
    rows = torch.arange(target)
    step = torch.tensor(1 / scale if scale else source / target, dtype=torch.float32)
    taken = ((rows.float() + shift) * step).floor().long().clamp(max=source - 1)
    own = rows // factor if factor > 0 else taken // -factor
    return torch.equal(taken if factor > 0 else rows, own)


def interpolated(spatial: int, taps: int) -> Rule:
    """Rows from `taps` source rows on either side: those of a shard need a halo where there are more of them than
    source rows. Backward too."""

    def rule(call: Call) -> OpRule:
        factors = _factors(call, spatial)
        if taps > 1:  # a row may come of more than its own
            factors = tuple(max(factor, 0) for factor in factors)
        # padding must not be interpolated, nor multiplied by zero
        dims = {f"s{i}": Dim(even=True) for i, factor in enumerate(factors) if factor > 0}
        halo = Dim(expands=True, contiguous=True, even=True, least=taps)
        return _in_step(call, spatial, factors, {**dims, **{f"s{i}": halo for i, f in enumerate(factors) if f > 1}})

    return rule


def _factors(call: Call, spatial: int) -> tuple[int, ...]:
    if call.argument("align_corners"):
        return (0,) * spatial
    return tuple(map(_factor, *_sizes(call, spatial), _scales(call, spatial)))


def _in_step(
    call: Call, spatial: int, factors: Sequence[int], dims: Mapping[str, Dim] = MappingProxyType({})
) -> OpRule:
    """Spatial dims split with their factors."""
    (meta,) = call.inputs
    coarse, fine = in_step(map(abs, factors))
    both = list(zip(coarse, fine, factors, strict=True))
    small: Named = [*leading(meta, spatial), *(fine if factor < 0 else coarse for coarse, fine, factor in both)]
    large: Named = [*leading(meta, spatial), *(coarse if factor < 0 else fine for coarse, fine, factor in both)]
    inputs, outputs = (large, small) if call.has("grad_output") else (small, large)
    return assemble(call, [inputs], [outputs], dims, FIRST)


def local_sizes(spatial: int) -> Local:
    """Upsampling and its backward: the sizes of the result and, backward, of the source too."""

    def local(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
        (given,), (result,) = local_inputs, local_outputs
        assert result is not None
        if not call.has("grad_output"):
            return replaced(call, output_size=result[-spatial:])
        return replaced(call, output_size=given[-spatial:], input_size=result)

    return local


def interpolation(local: LocalCall, spatial: int, taps: int) -> Results:
    """Interpolation with spatial dims split: the halo is resampled too, and its part of the result cut off. At the ends
    the halo repeats the outermost row."""
    window = HaloWindow(1, taps, 2 * taps)
    call = local.call
    value: Tensor = local.args[0]
    first, backward = value.ndim - spatial, call.has("grad_output")
    factors = dict(enumerate(_factors(call, spatial)))
    split = {i: local.splits[f"s{i}"] for i, f in factors.items() if f > 1 and f"s{i}" in local.splits}
    cut = {i: taps * factors[i] for i in split}
    sizes = list(value.shape)
    target = list(local.outputs[0] or ())
    for i, axes in split.items():
        if backward:
            sizes[first + i] += 2 * cut[i]
            target[first + i] += 2 * taps
        else:
            value = with_halo(local, value, first + i, window, axes, None)
            target[first + i] += 2 * cut[i]
    rest = (call.argument("align_corners"), *_scales(call, spatial))
    if backward:
        around = [n for d in reversed(range(first, first + spatial)) for n in [cut.get(d - first, 0)] * 2]
        value = local.result(torch.constant_pad_nd(value, around, 0.0), sizes[first:], target, *rest)
        for i, axes in split.items():
            value = _returned(local, value, first + i, window, axes)
        return value
    value = local.result(value, target[first:], *rest)
    for i, margin in cut.items():
        value = slice_of(value, first + i, margin, target[first + i] - margin)
    return value


def _returned(local: LocalCall, gradient: Tensor, dim: int, window: HaloWindow, axes: tuple[int, ...]) -> Tensor:
    """The transpose of `with_halo` where it repeats the outermost rows."""
    size = gradient.shape[dim]
    rows = size - window.before - window.after
    result = halo_added(local, gradient, dim, window, axes)
    for step, start, place in ((1, 0, 0), (-1, size - window.after, rows - 1)):
        repeated = slice_of(gradient, dim, start, start + window.before).sum(dim, keepdim=True)
        repeated = repeated.masked_fill(at_end(local, rows, axes, step).logical_not(), 0.0)
        parts = [slice_of(result, dim, place, place + 1) + repeated]
        if place:
            parts.insert(0, slice_of(result, dim, 0, place))
        if place + 1 < rows:
            parts.append(slice_of(result, dim, place + 1, rows))
        result = torch.cat(parts, dim)
    return result


def upsampled(spatial: int) -> dict[str, Entry]:
    """Nearest and linear upsampling of this many dims, and their backward ops."""
    sizes, linear = local_sizes(spatial), ("linear", "bilinear", "trilinear")[spatial - 1]
    return {
        **aten(f"upsample_nearest{spatial}d upsample_nearest{spatial}d_backward", Entry(nearest(spatial), sizes)),
        **aten(
            f"_upsample_nearest_exact{spatial}d _upsample_nearest_exact{spatial}d_backward",
            Entry(nearest(spatial, centred=True), sizes),
        ),
        **aten(f"upsample_{linear}{spatial}d upsample_{linear}{spatial}d_backward", interpolating(spatial, 1)),
    }


def interpolating(spatial: int, taps: int) -> Entry:
    return Entry(interpolated(spatial, taps), local_sizes(spatial), partial(interpolation, spatial=spatial, taps=taps))


def shuffled(*, up: bool) -> Rule:
    """pixel_shuffle [*, c r^2, h, w] -> [*, c, h r, w r], and (not `up`) its inverse."""

    def rule(call: Call) -> OpRule:
        (source,) = call.inputs
        factor = call.argument("upscale_factor" if up else "downscale_factor")
        *batch, channels = leading(source, 2)
        deep: Named = [*batch, (channels, factor * factor), "s0", "s1"]
        wide: Named = [*batch, channels, ("s0", factor), ("s1", factor)]
        return assemble(call, [deep if up else wide], [wide if up else deep], linear=FIRST)

    return rule
