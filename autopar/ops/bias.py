"""Matrix products plus a bias, of which every rank adds its share where the contracted factor is split."""

from .expansions import LocalCall, Results
from .families import EACH, Rule, either, from_template
from .lookup import PADDED


def with_bias(template: str) -> Rule:
    """A matrix product plus a bias, of which every rank can add its share, unless it holds integers."""
    return either(
        lambda call: call.inputs[0].dtype.is_floating_point or call.inputs[0].dtype.is_complex,
        from_template(template, {"k": PADDED}, linear=((0, 1), (0, 2)), contraction=True),
        from_template(template.replace("k", "k!"), linear=((0, 1), (0, 2)), contraction=True),
    )


# with a bias, linear only jointly with it
linear = either(
    lambda call: call.argument("bias") is None,
    from_template("*i k, n k -> *i n", linear=EACH, contraction=True),
    from_template("*i k, n k, n -> *i n", {"k": PADDED}, linear=((0, 2), (1, 2)), contraction=True),
)


def share_of_bias(local: LocalCall) -> Results:
    """addmm, baddbmm with the contracted factor split: every rank adds its share of the bias, so that the sum holds it
    once. This is free, since the op scales the bias anyway."""
    scale = dict(local.kwargs).get("beta", 1)
    return local.result(beta=scale / local.ranks(local.splits["k"]))


def linear_with_share(local: LocalCall) -> Results:
    """linear with the contracted factor split: every rank adds its share of the bias."""
    x, weight, bias = local.args
    return local.result(x, weight, bias * (1.0 / local.ranks(local.splits["k"])))
