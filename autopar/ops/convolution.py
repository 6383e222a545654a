"""Convolutions: which dims are split together, and the exchange of edges where spatial dims are split.

A convolution reads a *fine* tensor (its input) and produces a *coarse* one; transposed, and in the gradient of the
input, it is the other way round. Rows beyond the ends are zeros, like the padding and the rows that fill an uneven
shard.
"""

from dataclasses import replace

from torch import Tensor

from autopar.ir.layout import Shape

from .expansions import LocalCall, Results
from .families import EACH, FIRST
from .halo import Halos, HaloWindow, each, halo_dims, halos_added, halos_of, in_step, surrounded, with_halos
from .local import Arguments, replaced
from .lookup import PADDED
from .rule import Call, OpRule
from .template import PLAIN, Dim, Linear, Name, Named, assemble, roles


def windows(call: Call) -> tuple[HaloWindow, ...]:
    """One a spatial dim."""
    kernel = dict(zip(roles(call), call.inputs, strict=True))["weight"].shape[2:]
    steps = zip(*(each(call, name, len(kernel)) for name in ("stride", "padding", "dilation")), kernel, strict=True)
    return tuple(HaloWindow(stride, padding, dilation * (size - 1)) for stride, padding, dilation, size in steps)


def convolution(call: Call) -> OpRule:
    """convolution and convolution_backward: batch, output channels ("o"), input channels ("c"), or, if there are
    several, groups ("g"), and spatial dims ("s0", ...) where the coarse and the fine rows keep step. A split of the
    input channels adds up outputs, each with its share of the bias."""
    metas = dict(zip(roles(call), call.inputs, strict=True))
    forward, transposed, groups = not call.has("grad_output"), call.argument("transposed"), call.argument("groups")
    source, weight = metas["input"], metas["weight"]
    target = call.outputs[0] if forward else metas["grad_output"]
    assert target is not None
    coarse, fine = (source, target) if transposed else (target, source)

    into: Name = ("g", source.shape[1] // groups) if groups > 1 else "c"
    out: Name = ("g", target.shape[1] // groups) if groups > 1 else "o"
    first, second = (into, out) if transposed else (out, into)
    kernel: Named = [first, second if groups == 1 else None, *([None] * (len(weight.shape) - 2))]
    over = windows(call)
    sizes = zip(over, fine.shape[2:], coarse.shape[2:], strict=True)
    coarse_dims, fine_dims = in_step(w.stride if size == w.stride * count else 0 for w, size, count in sizes)
    halos = halo_dims(over, (0,) if forward else (0, 1))
    source_dims, target_dims = (coarse_dims, fine_dims) if transposed else (fine_dims, coarse_dims)
    named = {"input": ["n", into, *source_dims], "output": ["n", out, *target_dims], "weight": kernel, "bias": [out]}

    flops = 2.0 * coarse.numel * weight.numel / weight.shape[0]
    if forward:
        biased = "bias" in metas
        linear: Linear = ((0, 2), (1, 2)) if biased else EACH
        inputs, outputs = [named[role] for role in metas], [named["output"]]
        channels = PADDED if biased else PLAIN
    else:
        inputs = [named["output"], named["input"], kernel]
        outputs = [named[name] if meta else [] for name, meta in zip(_GRADIENTS, call.outputs, strict=True)]
        linear, flops = FIRST, flops * sum(meta is not None for meta in call.outputs[:2])
        channels = Dim(reductions=("sum", "", ""))
    rule = assemble(call, inputs, outputs, {**halos, "c": channels}, linear)
    return replace(rule, flops=flops, contraction=True)


_GRADIENTS = ("input", "weight", "bias")


def group_count(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
    """The groups of a shard, whose weight has their share of the channels, and (backward) the bias has the channels
    of the output."""
    weight = roles(call).index("weight")
    groups = call.argument("groups")
    if groups > 1:
        groups = groups * local_inputs[weight][0] // call.inputs[weight].shape[0]
    if not call.has("bias_sizes"):
        return replaced(call, groups=groups)
    sizes = call.argument("bias_sizes")
    return replaced(call, groups=groups, bias_sizes=sizes and (local_inputs[0][1],))


# Halos


def _unpadded(local: LocalCall, halos: Halos) -> tuple[Shape, Shape, Shape, Shape]:
    """Stride, padding, dilation and output padding: the halo of a dim replaces its padding."""
    rank = len(local.call.inputs[0].shape) - 2
    padding, output_padding = (list(each(local.call, name, rank)) for name in ("padding", "output_padding"))
    for i, (window, _) in halos.items():
        padding[i] = 0
        output_padding[i] = max(0, -window.excess) if local.call.argument("transposed") else 0
    stride, dilation = (each(local.call, name, rank) for name in ("stride", "dilation"))
    return stride, tuple(padding), dilation, tuple(output_padding)


def convolution_with_halos(local: LocalCall) -> Results:
    """Spatial dims split, or input channels with a bias, of which each rank adds its share."""
    source, weight, bias = local.args[:3]
    halos = halos_of(local, windows(local.call))
    stride, padding, dilation, output_padding = _unpadded(local, halos)
    transposed, spatial = local.call.argument("transposed"), len(stride)
    if bias is not None and "c" in local.splits:
        bias = bias * (1.0 / local.ranks(local.splits["c"]))
    late = bias if transposed and halos else None  # or it would be added once more where halos overlap
    if not transposed:
        source = with_halos(local, source, spatial, halos)
    result: Tensor = local.result(
        source, weight, None if late is not None else bias, stride, padding, dilation, transposed, output_padding,
        local.args[8],
    )  # fmt: skip
    if transposed:
        result = halos_added(local, result, spatial, halos)
    return result if late is None else result + late.reshape(-1, *(1,) * spatial)


def convolution_backward_with_halos(local: LocalCall) -> Results:
    """Spatial dims split. Edges of fine tensors travel: those of the input for the gradient of the weight, those of the
    gradient of the input back; transposed, those of the gradient of the output, for both."""
    gradient, source, weight, bias_sizes = local.args[:4]
    groups, mask = local.args[9:11]
    halos = halos_of(local, windows(local.call))
    stride, padding, dilation, output_padding = _unpadded(local, halos)
    transposed, spatial = local.call.argument("transposed"), len(stride)
    original, bias = gradient, None
    if transposed:
        gradient = with_halos(local, gradient, spatial, halos)
    elif mask[1]:
        source = with_halos(local, source, spatial, halos)
    else:  # the kernel reads no more of it than its shape
        source = surrounded(source, spatial, halos)
    if mask[2] and transposed:
        bias = original.sum((0, *range(2, original.ndim)))
    result, of_weight, of_bias = local.result(
        gradient, source, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
        (mask[0], mask[1], mask[2] and not transposed),
    )  # fmt: skip
    if mask[0] and not transposed:
        result = halos_added(local, result, spatial, halos)
    return result, of_weight, bias if transposed else of_bias
