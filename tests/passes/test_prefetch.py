"""Gathers of parameters start as far ahead as pays, within a bound on the bytes in flight."""

from __future__ import annotations

import torch
from test_bucket import assert_same

from autopar.cluster.library import named_cluster
from autopar.cost.streams import timeline
from autopar.ir.program import Program
from autopar.ir.text import parsed_program
from autopar.passes.flow import LOWERINGS
from autopar.passes.lower.bucket import LIMIT_BYTES, bucket
from autopar.passes.lower.lowering import Target
from autopar.runtime.simulate import simulate_step


def layers(width: int) -> Program:
    """A long product, and after it three parameters that are gathered and read one after the other."""
    meta = f"float32[{width}, {width}]"
    return parsed_program(
        f"""
        mesh dp=2
        p = parameter p: {meta} S(0%{width})
        q = parameter q: {meta} S(0%{width})
        r = parameter r: {meta} S(0%{width})
        x = input x: {meta} R

        forward
        a = aten.mm.default(x, x)
        p1 = collective.all_gather(p, dp)
        p2 = collective.wait(p1)
        b = aten.mul.Tensor(a, p2)
        q1 = collective.all_gather(q, dp)
        q2 = collective.wait(q1)
        c = aten.mul.Tensor(b, q2)
        r1 = collective.all_gather(r, dp)
        r2 = collective.wait(r1)
        d = aten.mul.Tensor(c, r2)

        output d = d: {meta} R
        """
    )


def ahead(made: Program) -> int:
    """Gathers that start before the product."""
    ops = [i.op for i in made.forward]
    return ops[: ops.index("aten.mm.default")].count("collective.all_gather")


def test_gathers_start_further_ahead_where_that_hides_them() -> None:
    cluster, given = named_cluster("a100-pcie"), layers(4096)
    plain, made = bucket(given), LOWERINGS["bucket"].on(given, Target(cluster=cluster))
    assert (ahead(plain), ahead(made)) == (1, 3)
    assert timeline(made, cluster).exposed_seconds < 0.5 * timeline(plain, cluster).exposed_seconds


def test_the_bound_is_kept_where_more_ahead_saves_nothing_or_memory_is_short() -> None:
    cluster = named_cluster("a100-pcie")
    assert str(LOWERINGS["bucket"].on(layers(64), Target(cluster=cluster))) == str(bucket(layers(64)))
    tight = LIMIT_BYTES // 8
    given = layers(4096)
    assert ahead(LOWERINGS["bucket"].on(given, Target(cluster=cluster, limit_bytes=tight))) == 1


def test_values_are_the_same_whatever_the_bound() -> None:
    given = layers(4)
    wholes = {name: torch.randn(4, 4) for name in "pqrx"}
    expected = simulate_step(given, wholes, wholes)
    for bound in (32, 64, 128, 256):
        made = bucket(given, alone_bytes=1, ahead_bytes=bound)
        assert_same(simulate_step(made, wholes, wholes), expected)
