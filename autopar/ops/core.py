"""What autopar knows about the operators of a transformer: a line each. `table` has the others.

A template says which dims are split together (see `template`); where dims depend on arguments, a family does (see
`families`). `linear` lists the arguments that may be Partial(sum) together. An op that takes sizes says how they shrink
(see `local`); one that does not run on shards as it is has an expansion (see `expansions`). `oracle.check_rule` proves
a line by brute force.
"""

import math
from functools import partial

from . import expansions, local, windows
from .families import (
    BOTH,
    EACH,
    FIRST,
    along_dims,
    either,
    filled,
    from_template,
    pointwise,
    reduce,
    the_dim,
    to_dtype,
)
from .losses import nll, nll_backward, nll_backward_on_shards, nll_on_shards
from .rules import RULES, Entry, aten
from .strides import needs
from .template import OWN_PART
from .views import expanded, joined

MEAN = reduce("sum", average=True)


# scaling by frequency has to see all indices
_embedding_backward = either(
    lambda call: call.argument("scale_grad_by_freq"),
    from_template("*i! d, *i! -> v d", {"v": OWN_PART}, linear=FIRST),
    from_template("*i d, *i -> v d", {"v": OWN_PART}, linear=FIRST),
)

RULES.know({
    # contractions
    **aten("mm", Entry(from_template("m k, k n -> m n", linear=EACH, contraction=True))),
    **aten("bmm", Entry(from_template("b m k, b k n -> b m n", linear=EACH, contraction=True))),

    # embedding and losses
    **aten("embedding", Entry(
        from_template("v d, *i -> *i d", {"v": OWN_PART}, linear=FIRST),
        expand=expansions.embedding)),
    **aten("embedding_dense_backward", Entry(
        _embedding_backward, local.rows_of_output("num_weights"), expansions.embedding_backward)),
    **aten("_softmax", Entry(along_dims(the_dim, name="c", padding=-math.inf), expand=expansions.softmax)),
    **aten("_log_softmax", Entry(
        along_dims(the_dim, name="c", padding=-math.inf), expand=partial(expansions.softmax, log=True))),
    **aten("_safe_softmax", Entry(
        along_dims(the_dim, name="c", padding=-math.inf), expand=partial(expansions.softmax, safe=True))),
    **aten("_softmax_backward_data", Entry(
        along_dims(the_dim, linear=FIRST, name="c", padding=0.0), expand=expansions.softmax_backward)),
    **aten("_log_softmax_backward_data", Entry(
        along_dims(the_dim, linear=FIRST, name="c", padding=0.0),
        expand=partial(expansions.softmax_backward, log=True))),
    **aten("nll_loss_forward nll_loss2d_forward", Entry(nll, expand=nll_on_shards)),
    **aten("nll_loss_backward nll_loss2d_backward", Entry(
        nll_backward, expand=nll_backward_on_shards, strides=needs("self"))),

    # reductions
    **aten("sum sum.dim_IntList", Entry(reduce("sum"))),
    **aten("mean mean.dim", Entry(MEAN, expand=expansions.share(MEAN))),
    **aten("amax max", Entry(reduce("max", linear=()))),
    **aten("amin min", Entry(reduce("min", linear=()))),

    # parts and wholes
    **aten("slice.Tensor", Entry(windows.windowed("slice"), local.window_of_input, windows.slice_of_few)),
    **aten("slice_backward", Entry(
        windows.windowed("backward"), local.window_of_output, windows.slice_backward)),
    **aten("cat", Entry(joined)),
    **aten("expand", Entry(expanded, local.shape_of_output("size"))),
    **aten("full zeros ones", Entry(filled, local.shape_of_output("size"))),

    # pointwise, by the operands that they are linear in
    **aten("neg clone detach alias _conj _conj_physical mul.Scalar div.Scalar lift_fresh_copy",
            Entry(pointwise(FIRST))),
    **aten("_to_copy", Entry(pointwise(to_dtype))),
    **aten("add.Tensor sub.Tensor rsub.Tensor complex", Entry(pointwise(BOTH))),
    **aten("mul.Tensor", Entry(pointwise(EACH))),
    **aten("div.Tensor", Entry(pointwise(FIRST))),
    **aten("where.self", Entry(pointwise(((1, 2),)))),
    **aten("masked_fill.Tensor", Entry(pointwise(((0, 2),)))),
    **aten("copy", Entry(pointwise(((1,),)))),
    # backward ops are linear in the gradient
    **aten("gelu_backward silu_backward tanh_backward sigmoid_backward threshold_backward hardtanh_backward "
            "leaky_relu_backward elu_backward softplus_backward mish_backward hardswish_backward "
            "hardsigmoid_backward native_dropout_backward rrelu_with_noise_backward", Entry(pointwise(FIRST))),
    **aten("relu gelu silu sigmoid tanh mish hardtanh hardswish hardsigmoid leaky_relu elu softplus threshold abs "
            "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh erf erfc "
            "sign sgn ceil floor round trunc frac isnan isinf logical_not bitwise_not",
            Entry(pointwise())),
    **aten("add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar clamp clamp.Tensor "
            "clamp_min clamp_max clamp_min.Tensor clamp_max.Tensor maximum minimum fmax fmin remainder.Scalar "
            "fmod.Scalar floor_divide.Scalar atan2 "
            "eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor "
            "ge.Scalar ge.Tensor logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor "
            "bitwise_xor.Tensor bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar "
            "polar where.ScalarOther where.ScalarSelf where.Scalar lerp.Scalar xlogy.Tensor "
            "fill.Scalar fill.Tensor zeros_like ones_like full_like empty_like", Entry(pointwise())),
})  # fmt: skip
