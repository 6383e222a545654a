"""What autopar knows about operators beside those of `core`: a line each, read as there."""

from __future__ import annotations

from functools import partial

from autopar.compat.meta_kernels import meta_kernels
from autopar.ir import pointwise as known_shapes  # noqa: F401 - which spares runs on meta

from . import (
    along,
    attention,
    bias,
    convolution,
    elementwise,
    expansions,
    experts,
    float8,
    layer_norm,
    local,
    normalization,
    parts,
    places,
    pooling,
    randomness,
    reductions,
    resampling,
    sdpa,
    windows,
)
from . import core as core  # which rows these stand beside
from .attention import attended
from .families import EACH, FIRST, along_dims, either, from_template, pointwise, reduce, the_dim
from .layer_norm import normalized
from .reductions import loss, loss_backward
from .rule import Call
from .rules import RULES, Entry, aten
from .strides import needs
from .template import Dim

meta_kernels()


_spread = reductions.combined(reductions.real, padding=lambda call: 0.0)
_maximum = reductions.combined(reductions.numbers, padding=reductions.least)
_minimum = reductions.combined(reductions.numbers, padding=reductions.greatest)
_place_of_maximum = reductions.combined(reductions.one_dim, padding=reductions.least)
_place_of_minimum = reductions.combined(reductions.one_dim, padding=reductions.greatest)
# the range of the bins must not depend on the data, and padding would be counted
_histogram = either(
    lambda call: call.argument("min") < call.argument("max"),
    from_template("*i -> bins!", {f"i{n}": Dim(even=True) for n in range(8)}),
    from_template("*i! -> bins!"),
)


# a logit of which the loss is 0 but for rounding that no dtype sees
_logits_loss = partial(loss, none=-1e4)


def _adds(call: Call) -> bool:
    """Whether scatter_reduce adds to the elements of the target."""
    return bool(call.argument("reduce") == "sum" and call.argument("include_self"))


def own(names: str, entry: Entry) -> dict[str, Entry]:
    """The same entry for operators of autopar."""
    return {f"autopar.{name}.default": entry for name in names.split()}


RULES.know({
    # contractions
    experts.MM: Entry(experts.mm_rule, expand=experts.mm),
    experts.SUM: Entry(experts.sum_rule),
    experts.DOT: Entry(experts.dot_rule),
    experts.TO: Entry(experts.moved_rule, expand=experts.to_experts),
    experts.FROM: Entry(experts.moved_rule, expand=experts.from_experts),
    experts.WANTED: Entry(experts.moved_rule, expand=experts.ids_at_experts),
    experts.MM_WEIGHT: Entry(experts.mm_weight_rule, local.rows_of_output("experts"), experts.mm_weight),
    **aten("mv", Entry(from_template("m k, k -> m", linear=EACH, contraction=True))),
    **aten("dot", Entry(from_template("k, k -> ", linear=EACH, contraction=True))),
    **aten("addmm", Entry(bias.with_bias("...m n, m k, k n -> m n"), expand=bias.share_of_bias)),
    **aten("baddbmm", Entry(bias.with_bias("...b m n, b m k, b k n -> b m n"), expand=bias.share_of_bias)),
    **aten("linear", Entry(bias.linear, expand=bias.linear_with_share)),
    **aten("convolution", Entry(
        convolution.convolution, convolution.group_count, convolution.convolution_with_halos,
        strides=needs("weight"))),
    **aten("convolution_backward", Entry(
        convolution.convolution, convolution.group_count, convolution.convolution_backward_with_halos,
        strides=needs("weight"))),

    # pooling and resampling
    **aten("max_pool2d_with_indices", Entry(pooling.pooled(2), expand=partial(pooling.max_pool, spatial=2))),
    **aten("max_pool2d_with_indices_backward", Entry(
        pooling.pooled(2), expand=partial(pooling.max_pool_backward, spatial=2))),
    **aten("max_pool3d_with_indices", Entry(
        pooling.pooled(3), expand=partial(pooling.max_pool, spatial=3), strides=needs("self"))),
    **aten("max_pool3d_with_indices_backward", Entry(
        pooling.pooled(3), expand=partial(pooling.max_pool_backward, spatial=3),
        strides=needs("grad_output self indices"))),
    **aten("avg_pool2d avg_pool2d_backward", Entry(pooling.pooled(2), expand=partial(pooling.average_pool, spatial=2))),
    **aten("avg_pool3d avg_pool3d_backward", Entry(pooling.pooled(3), expand=partial(pooling.average_pool, spatial=3))),
    **aten("_adaptive_avg_pool2d", Entry(pooling.averaged_to_size(2), pooling.size_of_output(2))),
    **aten("_adaptive_avg_pool2d_backward", Entry(pooling.averaged_to_size(2))),
    **aten("_adaptive_avg_pool3d", Entry(pooling.averaged_to_size(3), pooling.size_of_output(3))),
    **aten("_adaptive_avg_pool3d_backward", Entry(pooling.averaged_to_size(3))),
    **aten("adaptive_max_pool2d", Entry(pooling.unsplit_planes(2, linear=()))),
    **aten("adaptive_max_pool2d_backward", Entry(pooling.unsplit_planes(2))),
    **aten("reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward", Entry(
        pooling.unsplit_planes(1))),
    **aten("reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward", Entry(
        pooling.unsplit_planes(2))),
    **aten("reflection_pad3d reflection_pad3d_backward replication_pad3d replication_pad3d_backward", Entry(
        pooling.unsplit_planes(3))),
    **aten("im2col col2im", Entry(pooling.columns)),
    **resampling.upsampled(1),
    **resampling.upsampled(2),
    **aten("pixel_shuffle", Entry(resampling.shuffled(up=True))),
    **aten("pixel_unshuffle", Entry(resampling.shuffled(up=False))),

    # attention: query, key, value, mask, which weights dropout keeps, documents -> output, logsumexp
    sdpa.ATTENTION: Entry(
        attended("b h q d!, b h k d!, b h k e!, ...b h q k, b h q k, b q, b k -> b h q e!, b h q", products=2,
                 over=("sum", "")),
        expand=attention.forward, strides=needs("query key value attn_mask", attention.contiguous_rows)),
    sdpa.ATTENTION_BACKWARD: Entry(
        attended("b h q e!, b h q d!, b h k d!, b h k e!, b h q e!, b h q, ...b h q k, b h q k, b q, b k"
                 " -> b h q d!, b h k d!, b h k e!", products=5, linear=FIRST),
        expand=attention.backward, strides={
            **needs("logsumexp"), **needs("grad_out query key value out attn_mask", attention.contiguous_rows)}),

    # embedding and losses
    **aten("mse_loss smooth_l1_loss huber_loss", Entry(loss, expand=expansions.share(loss))),
    **aten("binary_cross_entropy_with_logits", Entry(_logits_loss, expand=expansions.share(_logits_loss))),
    **aten("mse_loss_backward smooth_l1_loss_backward huber_loss_backward", Entry(
        loss_backward, expand=expansions.share(loss_backward))),

    # norms
    **aten("native_layer_norm", Entry(normalized, expand=layer_norm.layer_norm)),
    **aten("native_layer_norm_backward", Entry(
        normalized, expand=layer_norm.layer_norm_gradients, strides=needs("mean rstd"))),
    **aten("_native_batch_norm_legit_functional _native_batch_norm_legit.no_stats "
            "_native_batch_norm_legit_no_training", Entry(
        normalization.batch_norm, expand=normalization.batch_norm_statistics)),
    **aten("native_batch_norm_backward", Entry(
        normalization.batch_norm_backward, expand=normalization.batch_norm_gradients,
        strides=needs("grad_out input weight running_mean running_var save_mean save_invstd"))),
    **aten("native_group_norm", Entry(
        normalization.group_norm, normalization.group_sizes, normalization.group_norm_statistics,
        strides=needs("input weight bias"))),
    **aten("_weight_norm_interface", Entry(along_dims(along.all_but_dim), strides=needs("v g"))),
    **aten("_weight_norm_interface_backward", Entry(
        along_dims(along.all_but_dim, linear=FIRST), strides=needs("grad_w saved_v saved_g saved_norms"))),
    **aten("native_group_norm_backward", Entry(
        normalization.group_norm_backward, normalization.group_sizes, normalization.group_norm_gradients,
        strides=needs("grad_out input mean rstd weight"))),

    # reductions
    **aten("count_nonzero.dim_IntList", Entry(reduce("sum", linear=()))),
    **aten("any any.dim any.dims", Entry(
        reductions.combined(padding=lambda call: 0.0), expand=partial(reductions.truth, reduction="max"))),
    **aten("all all.dim all.dims", Entry(
        reductions.combined(padding=lambda call: 1.0), expand=partial(reductions.truth, reduction="min"))),
    **aten("max.dim", Entry(_maximum, expand=partial(reductions.extreme, reduction="max", values=True))),
    **aten("min.dim", Entry(_minimum, expand=partial(reductions.extreme, reduction="min", values=True))),
    **aten("argmax", Entry(_place_of_maximum, expand=partial(reductions.extreme, reduction="max", values=False))),
    **aten("argmin", Entry(_place_of_minimum, expand=partial(reductions.extreme, reduction="min", values=False))),
    **aten("logsumexp", Entry(
        reductions.combined(reductions.real, padding=reductions.least), expand=reductions.logsumexp)),
    **aten("var.correction", Entry(_spread, expand=reductions.variance)),
    **aten("std.correction", Entry(_spread, expand=partial(reductions.variance, root=True))),
    **aten("var_mean.correction", Entry(_spread, expand=partial(reductions.variance, mean=True))),
    **aten("linalg_vector_norm", Entry(
        reductions.combined(reductions.has_power, padding=reductions.no_part), expand=reductions.vector_norm)),
    **aten("prod prod.dim_int", Entry(reduce("", linear=()))),
    **aten("histc", Entry(_histogram)),

    # along a dim
    **aten("cumsum", Entry(reductions.running, expand=reductions.cumsum)),
    **aten("cumprod logcumsumexp sort argsort topk", Entry(along_dims(the_dim))),
    **aten("glu glu_backward", Entry(along.halves)),
    **aten("_fft_c2c _fft_r2c _fft_c2r", Entry(along_dims(along.in_argument("dim"), linear=FIRST))),
    **aten("flip", Entry(along_dims(along.in_argument("dims"), linear=FIRST))),
    **aten("roll", Entry(along_dims(along.in_argument("dims"), linear=FIRST))),
    **aten("tril triu", Entry(reductions.triangle, expand=reductions.cut_triangle)),
    **aten("constant_pad_nd", Entry(along_dims(along.padded, linear=elementwise.filled_with_zero))),

    # parts and wholes
    **aten("slice_scatter", Entry(windows.windowed("scatter"), local.window_of_input, parts.slice_scatter)),
    **aten("split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes", Entry(
        parts.pieces(parts.split_sizes), parts.piece_sizes)),
    **aten("stack", Entry(parts.stacked)),
    **aten("select.int", Entry(parts.selected, expand=parts.select)),
    **aten("unbind.int", Entry(parts.taken)),
    **aten("select_backward", Entry(
        parts.put_back, local.shape_of_output("input_sizes"), parts.select_backward)),
    **aten("select_scatter", Entry(parts.select_scattered, expand=parts.select_scatter)),
    **aten("repeat", Entry(parts.repeated, parts.repeats)),

    **aten("permute", Entry(parts.permuted)),
    **aten("new_zeros new_ones new_full new_empty", Entry(elementwise.new, local.shape_of_output("size"))),

    # elementwise
    **aten("masked_fill.Scalar", Entry(pointwise(elementwise.filled_with_zero))),
    **aten("div.Scalar_mode", Entry(pointwise(elementwise.true_division))),
    **aten("div.Tensor_mode", Entry(elementwise.division(elementwise.true_division))),
    **aten("floor_divide remainder.Tensor fmod.Tensor", Entry(elementwise.division())),
    **aten("log_sigmoid_forward", Entry(elementwise.pointwise_with_buffer())),
    **aten("log_sigmoid_backward", Entry(elementwise.pointwise_with_buffer(FIRST))),

    # indexing
    **aten("index.Tensor _unsafe_index.Tensor", Entry(places.indexed, expand=places.index)),
    **aten("index_put _unsafe_index_put", Entry(places.index_put, expand=places.put_at_indices)),
    **aten("index_select", Entry(places.index_selected, expand=places.index_select)),
    **aten("gather", Entry(places.gathered, expand=places.gather)),
    **aten("scatter.src", Entry(places.scattered(False, ((0, 2),)), expand=places.write)),
    **aten("scatter.value", Entry(places.scattered(False), expand=places.write)),
    **aten("scatter_add", Entry(places.scattered(True, ((0, 2),)), expand=places.write)),
    **aten("scatter_reduce.two", Entry(places.scattered(_adds), expand=places.write)),
    **aten("index_add", Entry(places.index_written(True, ((0, 2),)), expand=places.write)),
    **aten("index_copy", Entry(places.index_written(False, ((0, 2),)), expand=places.write)),
    **aten("index_fill.int_Scalar index_fill.int_Tensor", Entry(
        places.index_written(False), expand=partial(places.write, from_end=True))),

    # other views
    **aten("unfold", Entry(parts.unfolded)),
    **aten("unfold_backward", Entry(parts.unfold_backward, local.shape_of_output("input_sizes"))),
    **aten("diagonal", Entry(parts.diagonal)),
    **aten("diagonal_backward", Entry(parts.diagonal_backward, local.shape_of_output("input_sizes"))),
    **aten("view_as_complex", Entry(
        from_template("*i r! -> *i", linear=FIRST), strides=needs("self", parts.contiguous_pairs))),
    **aten("view_as_real", Entry(from_template("*i -> *i r!", linear=FIRST))),
    **aten("bucketize.Tensor", Entry(from_template("*i, b! -> *i"))),
    **aten("searchsorted.Tensor", Entry(either(
        lambda call: len(call.inputs[0].shape) == 1 and len(call.inputs) == 2,
        from_template("b!, *i -> *i"), from_template("*i b!, *i n, *i b! -> *i n")))),

    # weights on their way
    float8.TO: Entry(float8.passes),
    float8.FROM: Entry(float8.passes),

    # random numbers, by key and global index
    **aten("_standard_gamma_grad _dirichlet_grad zero", Entry(pointwise())),
    **own("dropout poisson standard_gamma", Entry(randomness.drawn, place=randomness.held)),
    **own("bernoulli uniform normal integers", Entry(
        randomness.drawn, local.shape_of_output("size"), place=randomness.held)),
})  # fmt: skip
