"""What autopar knows about operators: a line each.

A template says which dims are split together (see `template`); where dims depend on arguments, a family does (see
`families`). `linear` lists the arguments that may be Partial(sum) together. An op that takes sizes says how they shrink
(see `local`); one that does not run on shards as it is has an expansion (see `expansions`). `oracle.check_rule` proves
a line by brute force.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from . import (
    attention,
    convolution,
    ctc,
    expansions,
    experts,
    layer_norm,
    local,
    normalization,
    places,
    pooling,
    randomness,
    reductions,
    resampling,
    sdpa,
    views,
    windows,
)
from .attention import attended
from .families import (
    BOTH,
    EACH,
    FIRST,
    Rule,
    along,
    division,
    either,
    filled,
    filled_with_zero,
    from_template,
    halves,
    new,
    padded,
    pointwise,
    pointwise_with_buffer,
    reduce,
    the_dim,
    the_dims,
    to_dtype,
    transformed,
    true_division,
    weight_normalized,
)
from .layer_norm import normalized
from .local import Place
from .losses import loss, loss_backward, nll, nll_backward, nll_backward_on_shards, nll_on_shards
from .rule import Call
from .strides import Preparation, needs
from .views import expanded, joined, permuted, pieces, repeated, split_sizes, stacked, taken


@dataclass(frozen=True, slots=True)
class Entry:
    """All facts about an op. `strides` names the arguments that its kernel reads without their strides, each with the
    function that lays it out for the kernel."""

    rule: Rule
    local: local.Local = local.unchanged
    expand: expansions.Expansion | None = None
    place: Place | None = None
    strides: Mapping[str, Preparation] = field(default_factory=dict)


def _own(names: str, entry: Entry) -> dict[str, Entry]:
    """The same entry for operators of autopar."""
    return {f"autopar.{name}.default": entry for name in names.split()}


def _aten(names: str, entry: Entry) -> dict[str, Entry]:
    """The same entry for ATen ops; ".default" may be left out."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": entry for name in names.split()}


_mean = reduce("sum", average=True)


def _with_bias(template: str) -> Rule:
    """A matrix product plus a bias, of which every rank can add its share, unless it holds integers."""
    return either(
        lambda call: call.inputs[0].dtype.is_floating_point or call.inputs[0].dtype.is_complex,
        from_template(template, linear=((0, 1), (0, 2)), expands=("k",), uneven=("k",), contraction=True),
        from_template(template.replace("k", "k!"), linear=((0, 1), (0, 2)), contraction=True),
    )


def _upsampled(spatial: int) -> dict[str, Entry]:
    """Nearest and linear upsampling of this many dims, and their backward ops."""
    sizes, linear = resampling.local_sizes(spatial), ("linear", "bilinear", "trilinear")[spatial - 1]
    centred = Entry(resampling.nearest(spatial, centred=True), sizes)
    return {
        **_aten(f"upsample_nearest{spatial}d upsample_nearest{spatial}d_backward",
                Entry(resampling.nearest(spatial), sizes)),
        **_aten(f"_upsample_nearest_exact{spatial}d _upsample_nearest_exact{spatial}d_backward", centred),
        **_aten(f"upsample_{linear}{spatial}d upsample_{linear}{spatial}d_backward", _interpolated(spatial, 1)),
    }  # fmt: skip


def _interpolated(spatial: int, taps: int) -> Entry:
    sizes = resampling.local_sizes(spatial)
    return Entry(resampling.interpolated(spatial, taps), sizes, resampling.interpolation(spatial, taps))


# with a bias, linear only jointly with it
_linear = either(
    lambda call: call.argument("bias") is None,
    from_template("*i k, n k -> *i n", linear=EACH, contraction=True),
    from_template("*i k, n k, n -> *i n", linear=((0, 2), (1, 2)), expands=("k",), uneven=("k",), contraction=True),
)
# scaling by frequency has to see all indices
_embedding_backward = either(
    lambda call: call.argument("scale_grad_by_freq"),
    from_template("*i! d, *i! -> v d", linear=FIRST, expands=("v",), contiguous=("v",), uneven=("v",)),
    from_template("*i d, *i -> v d", linear=FIRST, expands=("v",), contiguous=("v",), uneven=("v",)),
)
_spread = reductions.combined(reductions.real, padding=lambda call: 0.0)
_maximum = reductions.combined(reductions.numbers, padding=reductions.least)
_minimum = reductions.combined(reductions.numbers, padding=reductions.greatest)
_place_of_maximum = reductions.combined(reductions.one_dim, padding=reductions.least)
_place_of_minimum = reductions.combined(reductions.one_dim, padding=reductions.greatest)
# the range of the bins must not depend on the data, and padding would be counted
_histogram = either(
    lambda call: call.argument("min") < call.argument("max"),
    from_template("*i -> bins!", even=tuple(f"i{n}" for n in range(8))),
    from_template("*i! -> bins!"),
)


# a logit of which the loss is 0 but for rounding that no dtype sees
_logits_loss = partial(loss, none=-1e4)


def _adds(call: Call) -> bool:
    """Whether scatter_reduce adds to the elements of the target."""
    return bool(call.argument("reduce") == "sum" and call.argument("include_self"))


TABLE: Mapping[str, Entry] = MappingProxyType({
    # contractions
    experts.MM: Entry(experts.mm_rule, expand=experts.mm),
    experts.SUM: Entry(experts.sum_rule),
    experts.DOT: Entry(experts.dot_rule),
    experts.TO: Entry(experts.moved_rule, expand=experts.to_experts),
    experts.FROM: Entry(experts.moved_rule, expand=experts.from_experts),
    experts.WANTED: Entry(experts.moved_rule, expand=experts.ids_at_experts),
    experts.MM_WEIGHT: Entry(experts.mm_weight_rule, local.rows_of_output("experts"), experts.mm_weight),
    **_aten("mm", Entry(from_template("m k, k n -> m n", linear=EACH, contraction=True))),
    **_aten("bmm", Entry(from_template("b m k, b k n -> b m n", linear=EACH, contraction=True))),
    **_aten("mv", Entry(from_template("m k, k -> m", linear=EACH, contraction=True))),
    **_aten("dot", Entry(from_template("k, k -> ", linear=EACH, contraction=True))),
    **_aten("addmm", Entry(_with_bias("...m n, m k, k n -> m n"), expand=expansions.share_of_bias)),
    **_aten("baddbmm", Entry(_with_bias("...b m n, b m k, b k n -> b m n"), expand=expansions.share_of_bias)),
    **_aten("linear", Entry(_linear, expand=expansions.share_of_last("k"))),
    **_aten("convolution", Entry(
        convolution.convolution, convolution.group_count, convolution.convolution_with_halos,
        strides=needs("weight"))),
    **_aten("convolution_backward", Entry(
        convolution.convolution, convolution.group_count, convolution.convolution_backward_with_halos,
        strides=needs("weight"))),

    # pooling and resampling
    **_aten("max_pool2d_with_indices", Entry(pooling.pooled(2), expand=pooling.max_pool(2))),
    **_aten("max_pool2d_with_indices_backward", Entry(pooling.pooled(2), expand=pooling.max_pool_backward(2))),
    **_aten("max_pool3d_with_indices", Entry(pooling.pooled(3), expand=pooling.max_pool(3), strides=needs("self"))),
    **_aten("max_pool3d_with_indices_backward", Entry(
        pooling.pooled(3), expand=pooling.max_pool_backward(3), strides=needs("grad_output self indices"))),
    **_aten("avg_pool2d avg_pool2d_backward", Entry(pooling.pooled(2), expand=pooling.average_pool(2))),
    **_aten("avg_pool3d avg_pool3d_backward", Entry(pooling.pooled(3), expand=pooling.average_pool(3))),
    **_aten("_adaptive_avg_pool2d", Entry(pooling.averaged_to_size(2), pooling.size_of_output(2))),
    **_aten("_adaptive_avg_pool2d_backward", Entry(pooling.averaged_to_size(2))),
    **_aten("_adaptive_avg_pool3d", Entry(pooling.averaged_to_size(3), pooling.size_of_output(3))),
    **_aten("_adaptive_avg_pool3d_backward", Entry(pooling.averaged_to_size(3))),
    **_aten("adaptive_max_pool2d", Entry(pooling.unsplit_planes(2, linear=()))),
    **_aten("adaptive_max_pool2d_backward", Entry(pooling.unsplit_planes(2))),
    **_aten("reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward", Entry(
        pooling.unsplit_planes(1))),
    **_aten("reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward", Entry(
        pooling.unsplit_planes(2))),
    **_aten("reflection_pad3d reflection_pad3d_backward replication_pad3d replication_pad3d_backward", Entry(
        pooling.unsplit_planes(3))),
    **_aten("im2col col2im", Entry(pooling.columns)),
    **{op: entry for spatial in (1, 2, 3) for op, entry in _upsampled(spatial).items()},
    **_aten("upsample_bicubic2d upsample_bicubic2d_backward", _interpolated(2, 2)),
    **_aten("pixel_shuffle", Entry(resampling.shuffled(up=True))),
    **_aten("pixel_unshuffle", Entry(resampling.shuffled(up=False))),

    # attention: query, key, value, mask, which weights dropout keeps -> output, logsumexp
    sdpa.ATTENTION: Entry(
        attended("b h q d!, b h k d!, b h k e!, ...b h q k, b h q k -> b h q e!, b h q", products=2,
                 reductions={"k": ("sum", "")}),
        expand=attention.forward, strides=needs(rows="query key value attn_mask")),
    sdpa.ATTENTION_BACKWARD: Entry(
        attended("b h q e!, b h q d!, b h k d!, b h k e!, b h q e!, b h q, ...b h q k, b h q k"
                 " -> b h q d!, b h k d!, b h k e!", products=5, linear=FIRST),
        expand=attention.backward, strides=needs("logsumexp", rows="grad_out query key value out attn_mask")),

    # embedding and losses
    **_aten("embedding", Entry(
        from_template("v d, *i -> *i d", linear=FIRST, expands=("v",), contiguous=("v",), uneven=("v",)),
        expand=expansions.embedding)),
    **_aten("embedding_dense_backward", Entry(
        _embedding_backward, local.rows_of_output("num_weights"), expansions.embedding_backward)),
    **_aten("_softmax", Entry(along(the_dim, name="c", padding=-math.inf), expand=expansions.softmax())),
    **_aten("_log_softmax", Entry(along(the_dim, name="c", padding=-math.inf), expand=expansions.softmax(log=True))),
    **_aten("_safe_softmax", Entry(along(the_dim, name="c", padding=-math.inf), expand=expansions.softmax(safe=True))),
    **_aten("_softmax_backward_data", Entry(
        along(the_dim, linear=FIRST, name="c", padding=0.0), expand=expansions.softmax_backward(log=False))),
    **_aten("_log_softmax_backward_data", Entry(
        along(the_dim, linear=FIRST, name="c", padding=0.0), expand=expansions.softmax_backward(log=True))),
    **_aten("nll_loss_forward nll_loss2d_forward", Entry(nll, expand=nll_on_shards)),
    **_aten("nll_loss_backward nll_loss2d_backward", Entry(
        nll_backward, expand=nll_backward_on_shards, strides=needs("self"))),
    **_own("ctc_loss", Entry(ctc.rule, strides=needs("targets"))),
    **_own("ctc_loss_backward", Entry(ctc.rule_backward, strides=needs("targets"))),
    **_aten("mse_loss smooth_l1_loss huber_loss", Entry(loss, expand=expansions.share(loss))),
    **_aten("binary_cross_entropy_with_logits", Entry(_logits_loss, expand=expansions.share(_logits_loss))),
    **_aten("mse_loss_backward smooth_l1_loss_backward huber_loss_backward", Entry(
        loss_backward, expand=expansions.share(loss_backward))),

    # norms
    **_aten("native_layer_norm", Entry(normalized, expand=layer_norm.layer_norm)),
    **_aten("native_layer_norm_backward", Entry(
        normalized, expand=layer_norm.layer_norm_gradients, strides=needs("mean rstd"))),
    **_aten("_native_batch_norm_legit_functional _native_batch_norm_legit.no_stats "
            "_native_batch_norm_legit_no_training", Entry(
        normalization.batch_norm, expand=normalization.batch_norm_statistics)),
    **_aten("native_batch_norm_backward", Entry(
        normalization.batch_norm_backward, expand=normalization.batch_norm_gradients,
        strides=needs("grad_out input weight running_mean running_var save_mean save_invstd"))),
    **_aten("native_group_norm", Entry(
        normalization.group_norm, normalization.group_sizes, normalization.group_norm_statistics,
        strides=needs("input weight bias"))),
    **_aten("_weight_norm_interface", Entry(weight_normalized, strides=needs("v g"))),
    **_aten("_weight_norm_interface_backward", Entry(
        weight_normalized, strides=needs("grad_w saved_v saved_g saved_norms"))),
    **_aten("native_group_norm_backward", Entry(
        normalization.group_norm_backward, normalization.group_sizes, normalization.group_norm_gradients,
        strides=needs("grad_out input mean rstd weight"))),

    # reductions
    **_aten("sum sum.dim_IntList", Entry(reduce("sum"))),
    **_aten("mean mean.dim", Entry(_mean, expand=expansions.share(_mean))),
    **_aten("amax max", Entry(reduce("max", linear=()))),
    **_aten("amin min", Entry(reduce("min", linear=()))),
    **_aten("count_nonzero.dim_IntList", Entry(reduce("sum", linear=()))),
    **_aten("any any.dim any.dims", Entry(
        reductions.combined(padding=lambda call: 0.0), expand=reductions.truth("max"))),
    **_aten("all all.dim all.dims", Entry(
        reductions.combined(padding=lambda call: 1.0), expand=reductions.truth("min"))),
    **_aten("max.dim", Entry(_maximum, expand=reductions.extreme("max", values=True))),
    **_aten("min.dim", Entry(_minimum, expand=reductions.extreme("min", values=True))),
    **_aten("argmax", Entry(_place_of_maximum, expand=reductions.extreme("max", values=False))),
    **_aten("argmin", Entry(_place_of_minimum, expand=reductions.extreme("min", values=False))),
    **_aten("logsumexp", Entry(
        reductions.combined(reductions.real, padding=reductions.least), expand=reductions.logsumexp)),
    **_aten("var.correction", Entry(_spread, expand=reductions.variance())),
    **_aten("std.correction", Entry(_spread, expand=reductions.variance(root=True))),
    **_aten("var_mean.correction", Entry(_spread, expand=reductions.variance(mean=True))),
    **_aten("linalg_vector_norm", Entry(
        reductions.combined(reductions.has_power, padding=reductions.no_part), expand=reductions.vector_norm)),
    **_aten("prod prod.dim_int", Entry(reduce("", linear=()))),
    **_aten("histc", Entry(_histogram)),

    # along a dim
    **_aten("cumsum", Entry(reductions.running, expand=reductions.cumsum)),
    **_aten("cumprod logcumsumexp sort argsort topk", Entry(along(the_dim))),
    **_aten("glu glu_backward", Entry(halves)),
    **_aten("_fft_c2c _fft_r2c _fft_c2r", Entry(transformed)),
    **_aten("flip", Entry(along(the_dims, linear=FIRST))),
    **_aten("roll", Entry(along(the_dims, linear=FIRST))),
    **_aten("tril triu", Entry(reductions.triangle, expand=reductions.cut_triangle)),
    **_aten("constant_pad_nd", Entry(along(padded, linear=filled_with_zero))),

    # parts and wholes
    **_aten("slice.Tensor", Entry(windows.windowed("slice"), local.window_of_input, windows.slice_of_few)),
    **_aten("slice_backward", Entry(
        windows.windowed("backward"), local.window_of_output, windows.slice_backward)),
    **_aten("slice_scatter", Entry(windows.windowed("scatter"), local.window_of_input, windows.slice_scatter)),
    **_aten("split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes", Entry(
        pieces(split_sizes), local.piece_sizes)),
    **_aten("cat", Entry(joined)),
    **_aten("stack", Entry(stacked)),
    **_aten("select.int", Entry(windows.selected, expand=windows.select)),
    **_aten("unbind.int", Entry(taken)),
    **_aten("select_backward", Entry(
        windows.put_back, local.shape_of_output("input_sizes"), windows.select_backward)),
    **_aten("select_scatter", Entry(windows.select_scattered, expand=windows.select_scatter)),
    **_aten("expand", Entry(expanded, local.shape_of_output("size"))),
    **_aten("repeat", Entry(repeated, local.repeats)),
    **_aten("permute", Entry(permuted)),
    **_aten("full zeros ones", Entry(filled, local.shape_of_output("size"))),
    **_aten("new_zeros new_ones new_full new_empty", Entry(new, local.shape_of_output("size"))),

    # indexing
    **_aten("index.Tensor _unsafe_index.Tensor", Entry(places.indexed, expand=places.index)),
    **_aten("index_put _unsafe_index_put", Entry(places.index_put, expand=places.put_at_indices)),
    **_aten("index_select", Entry(places.index_selected, expand=places.index_select)),
    **_aten("gather", Entry(places.gathered, expand=places.gather)),
    **_aten("scatter.src", Entry(places.scattered(False, ((0, 2),)), expand=places.write())),
    **_aten("scatter.value", Entry(places.scattered(False), expand=places.write())),
    **_aten("scatter_add", Entry(places.scattered(True, ((0, 2),)), expand=places.write())),
    **_aten("scatter_reduce.two", Entry(places.scattered(_adds), expand=places.write())),
    **_aten("index_add", Entry(places.index_written(True, ((0, 2),)), expand=places.write())),
    **_aten("index_copy", Entry(places.index_written(False, ((0, 2),)), expand=places.write())),
    **_aten("index_fill.int_Scalar index_fill.int_Tensor", Entry(
        places.index_written(False), expand=places.write(from_end=True))),

    # other views
    **_aten("unfold", Entry(views.unfolded)),
    **_aten("unfold_backward", Entry(views.unfold_backward, local.shape_of_output("input_sizes"))),
    **_aten("diagonal", Entry(views.diagonal)),
    **_aten("diagonal_backward", Entry(views.diagonal_backward, local.shape_of_output("input_sizes"))),
    **_aten("view_as_complex", Entry(
        from_template("*i r! -> *i", linear=FIRST), strides=needs(pairs="self"))),
    **_aten("view_as_real", Entry(from_template("*i -> *i r!", linear=FIRST))),
    **_aten("bucketize.Tensor", Entry(from_template("*i, b! -> *i"))),
    **_aten("searchsorted.Tensor", Entry(either(
        lambda call: len(call.inputs[0].shape) == 1 and len(call.inputs) == 2,
        from_template("b!, *i -> *i"), from_template("*i b!, *i n, *i b! -> *i n")))),

    # random numbers, by key and global index
    **_aten("_standard_gamma_grad _dirichlet_grad zero", Entry(pointwise())),
    **_own("dropout poisson standard_gamma", Entry(randomness.drawn, place=randomness.held)),
    **_own("bernoulli uniform normal integers", Entry(
        randomness.drawn, local.shape_of_output("size"), place=randomness.held)),

    # pointwise, by the operands that they are linear in
    **_aten("neg clone detach alias _conj _conj_physical mul.Scalar div.Scalar lift_fresh_copy",
            Entry(pointwise(FIRST))),
    **_aten("_to_copy", Entry(pointwise(to_dtype))),
    **_aten("masked_fill.Scalar", Entry(pointwise(filled_with_zero))),
    **_aten("add.Tensor sub.Tensor rsub.Tensor complex", Entry(pointwise(BOTH))),
    **_aten("mul.Tensor", Entry(pointwise(EACH))),
    **_aten("div.Tensor", Entry(pointwise(FIRST))),
    **_aten("div.Scalar_mode", Entry(pointwise(true_division))),
    **_aten("div.Tensor_mode", Entry(division(true_division))),
    **_aten("floor_divide remainder.Tensor fmod.Tensor", Entry(division())),
    **_aten("where.self", Entry(pointwise(((1, 2),)))),
    **_aten("masked_fill.Tensor", Entry(pointwise(((0, 2),)))),
    **_aten("copy", Entry(pointwise(((1,),)))),
    **_aten("log_sigmoid_forward", Entry(pointwise_with_buffer())),
    **_aten("log_sigmoid_backward", Entry(pointwise_with_buffer(FIRST))),
    # backward ops are linear in the gradient
    **_aten("gelu_backward silu_backward tanh_backward sigmoid_backward threshold_backward hardtanh_backward "
            "leaky_relu_backward elu_backward softplus_backward mish_backward hardswish_backward "
            "hardsigmoid_backward native_dropout_backward rrelu_with_noise_backward", Entry(pointwise(FIRST))),
    **_aten("relu gelu silu sigmoid tanh mish hardtanh hardswish hardsigmoid leaky_relu elu softplus threshold abs "
            "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh erf erfc "
            "sign sgn ceil floor round trunc frac isnan isinf logical_not bitwise_not",
            Entry(pointwise())),
    **_aten("add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar clamp clamp.Tensor "
            "clamp_min clamp_max clamp_min.Tensor clamp_max.Tensor maximum minimum fmax fmin remainder.Scalar "
            "fmod.Scalar floor_divide.Scalar atan2 "
            "eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor "
            "ge.Scalar ge.Tensor logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor "
            "bitwise_xor.Tensor bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar "
            "polar where.ScalarOther where.ScalarSelf where.Scalar lerp.Scalar xlogy.Tensor "
            "fill.Scalar fill.Tensor zeros_like ones_like full_like empty_like", Entry(pointwise())),
})  # fmt: skip
