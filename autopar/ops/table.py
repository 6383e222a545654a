"""What autopar knows about operators: a line each.

A template says which dims move together (see `template`); where dims depend on arguments a family
says it (see `families`). `linear` lists the arguments that may be Partial(sum) together. What takes
sizes says how they shrink (see `local`); what is not itself on shards has an expansion (see `expansions`).
`oracle.check_rule` proves a line by brute force.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from . import attention, expansions, local
from .attention import attention as attended
from .families import (
    BOTH,
    EACH,
    FIRST,
    Rule,
    along,
    convolution,
    either,
    expanded,
    filled_with_zero,
    from_template,
    gathered,
    index_put,
    index_selected,
    indexed,
    joined,
    last_two,
    loss,
    loss_backward,
    new,
    nll,
    nll_backward,
    normalized,
    padded,
    part,
    permuted,
    pieces,
    pointwise,
    put_back,
    reduce,
    repeated,
    select_scattered,
    split_sizes,
    stacked,
    taken,
    the_dim,
    the_dims,
    to_dtype,
    true_division,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """All that is known about an op."""

    rule: Rule
    local: local.Local = local.unchanged
    expand: expansions.Expansion | None = None


def _aten(names: str, entry: Entry) -> dict[str, Entry]:
    """The same entry for ATen ops; ".default" may be left out."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": entry for name in names.split()}


_mean = reduce("sum", average=True)

# with a bias, linear only jointly with it
_linear = either(
    lambda call: call.argument("bias") is None,
    from_template("*i k, n k -> *i n", linear=EACH, contraction=True),
    from_template("*i k, n k, n -> *i n", linear=((0, 2), (1, 2)), expands=("k",), contraction=True),
)
# scaling by frequency has to see all indices
_embedding_backward = either(
    lambda call: call.argument("scale_grad_by_freq"),
    from_template("*i! d, *i! -> v d", linear=FIRST, expands=("v",), contiguous=("v",)),
    from_template("*i d, *i -> v d", linear=FIRST, expands=("v",), contiguous=("v",)),
)
# the range of the bins must not depend on the data
_histogram = either(
    lambda call: call.argument("min") < call.argument("max"),
    from_template("*i -> bins!"),
    from_template("*i! -> bins!"),
)

TABLE: Mapping[str, Entry] = MappingProxyType({
    # contractions
    **_aten("mm", Entry(from_template("m k, k n -> m n", linear=EACH, contraction=True))),
    **_aten("bmm", Entry(from_template("b m k, b k n -> b m n", linear=EACH, contraction=True))),
    **_aten("mv", Entry(from_template("m k, k -> m", linear=EACH, contraction=True))),
    **_aten("dot", Entry(from_template("k, k -> ", linear=EACH, contraction=True))),
    **_aten("addmm", Entry(
        from_template("...m n, m k, k n -> m n", linear=((0, 1), (0, 2)), expands=("k",), contraction=True),
        expand=expansions.share_of_bias)),
    **_aten("baddbmm", Entry(
        from_template("...b m n, b m k, b k n -> b m n", linear=((0, 1), (0, 2)), expands=("k",), contraction=True),
        expand=expansions.share_of_bias)),
    **_aten("linear", Entry(_linear, expand=expansions.share_of_last("k"))),
    **_aten("convolution", Entry(
        convolution("n c *s!, o c *k!, o -> n o *s!", "n c *s!, c o *k!, o -> n o *s!",
                    "n c! *s!, o! c! *k!, o! -> n o! *s!", products=1),
        expand=expansions.share_of_last("c"))),
    **_aten("convolution_backward", Entry(
        convolution("n o *s!, n c *s!, o c *k! -> n c *s!, o c *k!, o",
                    "n o *s!, n c *s!, c o *k! -> n c *s!, c o *k!, o",
                    "n o! *s!, n c! *s!, o! c! *k! -> n c! *s!, o! c! *k!, o!", products=2),
        local.bias_sizes)),

    # attention: query, key, value, mask -> output, logsumexp, and what random numbers need
    **_aten("_scaled_dot_product_flash_attention_for_cpu", Entry(
        attended("b h q d!, b h k d!, b h k e!, ...b h q k -> b h q e!, b h q", products=2,
                 reductions={"k": ("sum", "")}, expands=("k",), masked=("q",)),
        expand=attention.flash)),
    **_aten("_scaled_dot_product_flash_attention_for_cpu_backward", Entry(
        attended("b h q e!, b h q d!, b h k d!, b h k e!, b h q e!, b h q, ...b h q k -> b h q d!, b h k d!, b h k e!",
                 products=5, linear=FIRST, masked=("q", "k")),
        expand=attention.flash_backward)),
    **_aten("_scaled_dot_product_flash_attention", Entry(attended(
        "b h q d!, b h k! d!, b h k! e! -> b h q e!, b h q, *r!, *r!, *r!, *r!, *r!, *r!, *r!", products=2))),
    **_aten("_scaled_dot_product_flash_attention_backward", Entry(attended(
        "b h q e!, b h q d!, b h k! d!, b h k! e!, b h q e!, b h q, *r!, *r!, *r!, *r!"
        " -> b h q d!, b h k! d!, b h k! e!", products=5, linear=FIRST), local.query_length)),
    # its logsumexp is padded along the queries
    **_aten("_scaled_dot_product_efficient_attention", Entry(attended(
        "b h q! d!, b h k! d!, b h k! e!, ...b h q! k! -> b h q! e!, b h q!, *r!, *r!", products=2))),
    **_aten("_scaled_dot_product_efficient_attention_backward", Entry(attended(
        "b h q! e!, b h q! d!, b h k! d!, b h k! e!, ...b h q! k!, b h q! e!, b h q!, *r!, *r!"
        " -> b h q! d!, b h k! d!, b h k! e!, ...b h q! k!", products=5, linear=FIRST))),
    **_aten("_scaled_dot_product_cudnn_attention", Entry(attended(
        "b h q! d!, b h k! d!, b h k! e!, ...b h q! k! -> b h q! e!, b h q! *r!, *r!, *r!, *r!, *r!, *r!, *r!, *r!",
        products=2))),
    **_aten("_scaled_dot_product_cudnn_attention_backward", Entry(attended(
        "b h q! e!, b h q! d!, b h k! d!, b h k! e!, b h q! e!, b h q! *r!, *r!, *r!, ...b h q! k!, *r!, *r!"
        " -> b h q! d!, b h k! d!, b h k! e!", products=5, linear=FIRST))),

    # embedding and losses
    **_aten("embedding", Entry(
        from_template("v d, *i -> *i d", linear=FIRST, expands=("v",), contiguous=("v",)),
        expand=expansions.embedding)),
    **_aten("embedding_dense_backward", Entry(
        _embedding_backward, local.rows_of_output("num_weights"), expansions.embedding_backward)),
    **_aten("_softmax", Entry(along(the_dim, name="c"), expand=expansions.softmax(log=False))),
    **_aten("_log_softmax", Entry(along(the_dim, name="c"), expand=expansions.softmax(log=True))),
    **_aten("_softmax_backward_data", Entry(
        along(the_dim, linear=FIRST, name="c"), expand=expansions.softmax_backward(log=False))),
    **_aten("_log_softmax_backward_data", Entry(
        along(the_dim, linear=FIRST, name="c"), expand=expansions.softmax_backward(log=True))),
    **_aten("nll_loss_forward nll_loss2d_forward", Entry(nll, expand=expansions.nll)),
    **_aten("nll_loss_backward nll_loss2d_backward", Entry(nll_backward, expand=expansions.nll_backward)),
    **_aten("mse_loss smooth_l1_loss huber_loss", Entry(loss, expand=expansions.share(loss))),
    **_aten("mse_loss_backward smooth_l1_loss_backward huber_loss_backward", Entry(
        loss_backward, expand=expansions.share(loss_backward))),

    # norms
    **_aten("native_layer_norm _fused_rms_norm", Entry(normalized())),
    **_aten("native_layer_norm_backward _fused_rms_norm_backward", Entry(normalized(FIRST))),
    **_aten("native_group_norm", Entry(
        from_template("n c! *s!, c!, c! -> n c! *s!, n g!, n g!"), local.rows_of_input("N"))),
    **_aten("native_group_norm_backward", Entry(
        from_template("n c! *s!, n c! *s!, n g!, n g!, c! -> n c! *s!, c!, c!", linear=FIRST),
        local.rows_of_input("N"))),

    # reductions
    **_aten("sum sum.dim_IntList", Entry(reduce("sum"))),
    **_aten("mean mean.dim", Entry(_mean, expand=expansions.share(_mean))),
    **_aten("amax max", Entry(reduce("max", linear=()))),
    **_aten("amin min", Entry(reduce("min", linear=()))),
    **_aten("max.dim min.dim argmax argmin any any.dim any.dims all all.dim all.dims prod prod.dim_int logsumexp "
            "std.correction var.correction var_mean.correction linalg_vector_norm count_nonzero.dim_IntList",
            Entry(reduce("", linear=()))),

    **_aten("histc", Entry(_histogram)),

    # along a dim
    **_aten("cumsum", Entry(along(the_dim, linear=FIRST))),
    **_aten("cumprod logcumsumexp _safe_softmax sort argsort topk", Entry(along(the_dim))),
    **_aten("flip", Entry(along(the_dims, linear=FIRST))),
    **_aten("roll", Entry(along(the_dims, linear=FIRST))),
    **_aten("tril triu", Entry(along(last_two, linear=FIRST))),
    **_aten("constant_pad_nd", Entry(along(padded, linear=filled_with_zero))),

    # parts and wholes
    **_aten("slice.Tensor", Entry(part(), local.window_of_input)),
    **_aten("slice_backward", Entry(part("output", moves_nothing=False), local.window_of_output)),
    **_aten("slice_scatter", Entry(part(linear=BOTH, moves_nothing=False), local.window_of_input)),
    **_aten("split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes", Entry(
        pieces(split_sizes), local.piece_sizes)),
    **_aten("cat", Entry(joined)),
    **_aten("stack", Entry(stacked)),
    **_aten("select.int unbind.int", Entry(taken)),
    **_aten("select_backward", Entry(put_back, local.shape_of_output("input_sizes"))),
    **_aten("select_scatter", Entry(select_scattered)),
    **_aten("expand", Entry(expanded, local.shape_of_output("size"))),
    **_aten("repeat", Entry(repeated, local.repeats)),
    **_aten("permute", Entry(permuted)),
    **_aten("new_zeros new_ones new_full new_empty", Entry(new, local.shape_of_output("size"))),

    # indexing
    **_aten("index.Tensor", Entry(indexed)),
    **_aten("index_put", Entry(index_put)),
    **_aten("index_select", Entry(index_selected)),
    **_aten("gather", Entry(gathered(FIRST, index_splits=True))),
    **_aten("scatter.src", Entry(gathered(((0, 2),), index_splits=False))),
    **_aten("scatter_add", Entry(gathered(((0, 2),), index_splits=False))),
    **_aten("scatter.value", Entry(gathered((), index_splits=False))),

    # pointwise, by what they are linear in
    **_aten("neg clone detach alias mul.Scalar div.Scalar lift_fresh_copy", Entry(pointwise(FIRST))),
    **_aten("_to_copy", Entry(pointwise(to_dtype))),
    **_aten("masked_fill.Scalar", Entry(pointwise(filled_with_zero))),
    **_aten("add.Tensor sub.Tensor rsub.Tensor", Entry(pointwise(BOTH))),
    **_aten("mul.Tensor", Entry(pointwise(EACH))),
    **_aten("div.Tensor", Entry(pointwise(FIRST))),
    **_aten("div.Tensor_mode div.Scalar_mode", Entry(pointwise(true_division))),
    **_aten("where.self", Entry(pointwise(((1, 2),)))),
    **_aten("masked_fill.Tensor", Entry(pointwise(((0, 2),)))),
    **_aten("copy", Entry(pointwise(((1,),)))),
    # backward ops are linear in the gradient
    **_aten("gelu_backward silu_backward tanh_backward sigmoid_backward threshold_backward hardtanh_backward "
            "leaky_relu_backward elu_backward softplus_backward mish_backward hardswish_backward "
            "hardsigmoid_backward native_dropout_backward", Entry(pointwise(FIRST))),
    **_aten("relu gelu silu sigmoid tanh mish hardtanh hardswish hardsigmoid leaky_relu elu softplus threshold abs "
            "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh erf erfc "
            "sign sgn ceil floor round trunc frac isnan isinf logical_not bitwise_not",
            Entry(pointwise())),
    **_aten("add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar clamp clamp.Tensor "
            "clamp_min clamp_max clamp_min.Tensor clamp_max.Tensor maximum minimum fmax fmin remainder.Scalar "
            "remainder.Tensor fmod.Scalar fmod.Tensor floor_divide floor_divide.Scalar atan2 "
            "eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor "
            "ge.Scalar ge.Tensor logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor "
            "bitwise_xor.Tensor bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar "
            "where.ScalarOther where.ScalarSelf where.Scalar lerp.Scalar xlogy.Tensor "
            "fill.Scalar fill.Tensor zeros_like ones_like full_like empty_like", Entry(pointwise())),
})  # fmt: skip
