"""What each rewrite writes, on programs and graphs of ten lines."""

from __future__ import annotations

import re
from textwrap import dedent

import pytest
import torch

from autopar.cluster.library import named_cluster
from autopar.ir.graph import JointGraph
from autopar.ir.program import Program
from autopar.ir.text import parsed_graph, parsed_program, text_of
from autopar.ops import registry as registry
from autopar.ops.routing import in_token_order
from autopar.ops.rules import rule_of
from autopar.passes.checkpoints import checkpoints
from autopar.passes.codegen.precision import with_casts
from autopar.passes.flow import lowered
from autopar.passes.lower.absent import without
from autopar.passes.lower.accumulate import accumulation
from autopar.passes.lower.hold import held
from autopar.passes.masks import without_masks
from autopar.passes.seeds import seeds
from autopar.runtime.simulate import simulate_step

LAYER = parsed_program(
    """
    mesh tp=2
    w = parameter w: float32[8, 4] S(0%8)
    x = input x: float32[8, 8] R
    t = tangent y: float32[8, 4] R

    forward
    g = collective.all_gather(w, tp)
    v = collective.wait(g)
    y = aten.mm.default(x, v)

    backward
    d = aten.mm.default(x, t)
    e = collective.reduce_scatter(d, 'sum', tp)
    f = collective.wait(e)

    output y = y: float32[8, 4] R
    gradient w = f: float32[8, 4] S(0%8)
    """
)
"""A product of a gathered weight, and the weight's gradient."""


def half(graph: Program | JointGraph, name: str) -> str:
    """The instructions of forward or backward, without metas and what they say of themselves."""
    lines = text_of(graph).partition(f"\n{name}\n")[2].partition("\n\n")[0].splitlines()
    lines = [line for line in lines if " = " in line and not re.match("output|gradient", line)]
    return "\n".join(re.sub(r"\): [^:]*$", ")", line) for line in lines)


def program(text: str, rewrites: str) -> Program:
    return lowered(parsed_program(text), rewrites, named_cluster("dgx-h100"))


def same(one: Program, other: Program) -> bool:
    w, x, t = torch.randn(8, 4), torch.randn(8, 8), torch.randn(8, 4)
    steps = [simulate_step(p, {"w": w}, {"x": x}, {"y": t}) for p in (one, other)]
    torch.testing.assert_close(steps[0].outputs, steps[1].outputs)
    torch.testing.assert_close(steps[0].gradients, steps[1].gradients)
    return True


def test_a_product_runs_in_slices_of_its_gather_and_of_its_reduction() -> None:
    made = program(text_of(LAYER), "slice{parts=2}")
    assert same(made, LAYER)
    assert half(made, "forward") == dedent(
        """\
        w_slice0 = aten.slice.Tensor(w, 0, 0, 2)
        w_slice0_ = aten.contiguous.default(w_slice0)
        g_slice0 = collective.all_gather(w_slice0_, tp)
        v_slice0 = collective.wait(g_slice0)
        w_slice1 = aten.slice.Tensor(w, 0, 2, 4)
        w_slice1_ = aten.contiguous.default(w_slice1)
        g_slice1 = collective.all_gather(w_slice1_, tp)
        x_blocks_slice0 = aten.reshape.default(x, [8, 2, 2, 2])
        x_block_slice0 = aten.select.int(x_blocks_slice0, 2, 0)
        x_slice0 = aten.reshape.default(x_block_slice0, [8, 4])
        y_slice0 = aten.mm.default(x_slice0, v_slice0)
        v_slice1 = collective.wait(g_slice1)
        x_blocks_slice1 = aten.reshape.default(x, [8, 2, 2, 2])
        x_block_slice1 = aten.select.int(x_blocks_slice1, 2, 1)
        x_slice1 = aten.reshape.default(x_block_slice1, [8, 4])
        y = aten.addmm.default(y_slice0, x_slice1, v_slice1)"""
    )
    assert half(made, "backward").endswith("f = aten.cat.default([f_slice0, f_slice1], 0)")


def test_some_places_run_in_parts_and_others_stay() -> None:
    made = program(text_of(LAYER), "slice{at=(('e',0,2),)}")
    assert same(made, LAYER)
    assert half(made, "forward") == half(LAYER, "forward")
    assert half(made, "backward").count("collective.reduce_scatter") == 2


def test_gradients_are_reduced_in_one_bucket_and_gathers_start_first() -> None:
    two = """
        mesh dp=2
        p = parameter p: float32[4] R
        q = parameter q: float32[4] R
        x = input x: float32[4] R

        forward
        y = aten.mul.Tensor(x, p)
        z = aten.mul.Tensor(y, q)

        backward
        a = aten.mul.Tensor(x, y)
        a1 = collective.all_reduce(a, 'sum', dp)
        a2 = collective.wait(a1)
        b = aten.mul.Tensor(x, q)
        b1 = collective.all_reduce(b, 'sum', dp)
        b2 = collective.wait(b1)

        output z = z: float32[4] R
        gradient q = a2: float32[4] R
        gradient p = b2: float32[4] R
        """
    assert half(program(two, "bucket"), "backward") == dedent(
        """\
        a = aten.mul.Tensor(x, y)
        b = aten.mul.Tensor(x, q)
        bucket_1 = aten.reshape.default(a, [1, 4])
        bucket_2 = aten.reshape.default(b, [1, 4])
        bucket_3 = aten.cat.default([bucket_1, bucket_2], 1)
        bucket_4 = collective.all_reduce(bucket_3, 'sum', dp)
        bucket_5 = collective.wait(bucket_4)
        bucket_6, bucket_7 = aten.split_with_sizes.default(bucket_5, [4, 4], 1)
        a2 = aten.reshape.default(bucket_6, [4])
        b2 = aten.reshape.default(bucket_7, [4])"""
    )
    assert half(program(two, "bucket{limit_bytes=16}"), "backward").count("all_reduce") == 2


def test_what_forward_gathers_is_given_to_the_next_micro_batch() -> None:
    forms = held(LAYER)
    assert (forms.names, forms.cold.saved, forms.warm.inputs[-1].name) == (("v",), ("x", "v"), "v")
    assert half(forms.warm, "forward") == "y = aten.mm.default(x, v)"


def test_backward_is_taken_apart_before_its_reductions() -> None:
    parts = accumulation(LAYER)
    assert half(parts.micro, "backward") == "d = aten.mm.default(x, t)"
    assert half(parts.last, "backward") == dedent(
        """\
        d = aten.mm.default(x, t)
        d_sum = aten.add.Tensor(d, d_pending)
        e = collective.reduce_scatter(d_sum, 'sum', tp)
        f = collective.wait(e)"""
    )
    assert half(parts.rest, "backward") == dedent(
        """\
        e = collective.reduce_scatter(d_pending, 'sum', tp)
        f = collective.wait(e)"""
    )


def test_weights_are_cast_before_they_are_gathered_and_gradients_around_their_reduction() -> None:
    made = with_casts(LAYER, {"w": torch.float64}, torch.bfloat16)
    assert half(made, "forward").startswith("w_used = aten._to_copy.default(w, dtype=torch.float32)\ng = ")
    assert half(made, "backward") == dedent(
        """\
        d = aten.mm.default(x, t)
        d_to_reduce = aten._to_copy.default(d, dtype=torch.bfloat16)
        e = collective.reduce_scatter(d_to_reduce, 'sum', tp)
        f = collective.wait(e)
        f_at_rest = aten._to_copy.default(f, dtype=torch.float64)"""
    )


def test_backward_makes_again_what_it_reads_of_a_region() -> None:
    graph = parsed_graph(
        """
        x = input x: float32[4, 4]
        t = tangent y: float32[4, 4]

        forward
        a = aten.sin.default(x) {region=(0,)}
        b = aten.cos.default(a) {region=(0,)}
        y = aten.exp.default(b)

        backward
        c = aten.mul.Tensor(t, y)
        d = aten.mul.Tensor(c, b) {sequence=1, region=(0,)}

        output y = y
        gradient x = d
        """
    )
    made = checkpoints(graph)
    assert half(made, "forward") == half(graph, "forward")
    assert half(made, "backward") == dedent(
        """\
        c = aten.mul.Tensor(t, y)
        a_again = aten.sin.default(x)
        b_again = aten.cos.default(a_again)
        d = aten.mul.Tensor(c, b_again)"""
    )
    assert not any(node.region for node in made.nodes)


def test_dropout_reads_a_key() -> None:
    graph = parsed_graph(
        """
        x = input x: float32[4, 4]

        forward
        y, m = aten.native_dropout.default(x, 0.5, True)

        backward

        output y = y
        """
    )
    made = seeds(graph)
    assert half(made, "forward") == "y, _ = autopar.dropout.default(seed_0, x, 0.5)"
    assert [(i.name, i.role, i.target) for i in made.inputs[1:]] == [("seed_0", "seed", "0")]


@pytest.mark.parametrize(("compare", "left"), [("le", "None, scale=1.0, is_causal=True"), ("lt", "m, scale=1.0")])
def test_a_causal_mask_is_an_argument_and_no_other_is(compare: str, left: str) -> None:
    graph = parsed_graph(
        f"""
        q = input q: float32[2, 1, 4, 8]

        forward
        i = aten.arange.default(4)
        r = aten.reshape.default(i, [1, 1, 1, 4])
        c = aten.reshape.default(i, [1, 1, 4, 1])
        s = aten.{compare}.Tensor(r, c)
        z = aten.scalar_tensor.default(0.0)
        n = aten.scalar_tensor.default(-inf)
        m = aten.where.self(s, z, n)
        y, l = autopar.attention.default(q, q, q, m, scale=1.0)

        backward

        output y = y
        """
    )
    made = without_masks(graph, rule_of)
    assert half(made, "forward").splitlines()[-1].endswith(f" = autopar.attention.default(q, q, q, {left})")


def test_a_weight_looked_up_for_each_row_is_a_product_by_expert() -> None:
    graph = parsed_graph(
        """
        x = input x: float32[6, 4]
        w = parameter w: float32[3, 4, 5]
        k = input ids: int64[6]

        forward
        s = aten.index.Tensor(w, [k])
        c = aten.reshape.default(x, [6, 1, 4])
        b = aten.bmm.default(c, s)

        backward

        output y = b
        """
    )
    products = [line for line in half(in_token_order(graph, rule_of), "forward").splitlines() if "_mm" in line]
    assert len(products) == 1 and re.search(r"expert_mm\.default\(\w+, w, \w+\)", products[0])
    turned = text_of(graph).replace("aten.index.Tensor(w, [k])", "aten.mul.Tensor(w, w)").replace("[3, 4", "[6, 4")
    assert in_token_order(parsed_graph(turned), rule_of) == parsed_graph(turned), "there is nothing to look up"


def test_rows_sorted_by_expert_stand_in_the_order_of_tokens() -> None:
    graph = parsed_graph(
        """
        x = input x: float32[3, 4]
        w = parameter w: float32[2, 4, 5]
        k = input ids: int64[6]

        forward
        _, o = aten.sort.default(k)
        t = aten.floor_divide.default(o, 2)
        r = aten.index.Tensor(x, [t])
        e = aten.exp.default(r)
        z = aten.zeros.default([3, 4])
        y = aten.index_put.default(z, [t], e, True)

        backward

        output y = y
        """
    )
    assert half(in_token_order(graph, rule_of), "forward") == dedent(
        """\
        r_rows_1 = aten.reshape.default(x, [3, 1, 4])
        r_rows_2 = aten.expand.default(r_rows_1, [3, 2, 4])
        r_rows_3 = aten.clone.default(r_rows_2, memory_format=torch.contiguous_format)
        r = aten.reshape.default(r_rows_3, [6, 4])
        e = aten.exp.default(r)
        y_rows_1 = aten.reshape.default(e, [3, 2, 4])
        y = aten.sum.dim_IntList(y_rows_1, [1])"""
    )
    ordered = parsed_graph(text_of(graph).replace("aten.exp.default(r)", "aten.cumsum.default(r, 0)"))
    assert in_token_order(ordered, rule_of) == ordered, "the order matters to a sum over the rows before"


def test_absent_gradients_are_zero_and_what_is_made_of_them_alone_is_not_computed() -> None:
    program = parsed_program(
        """
        mesh tp=2
        w = parameter w: float32[4] R
        u = parameter u: float32[4] R
        x = input x: float32[8, 4] R
        t = tangent y: float32[8, 4] R
        s = tangent z: float32[8, 4] R

        forward
        y = aten.mul.Tensor(x, w)
        z = aten.mul.Tensor(x, u)

        backward
        a = aten.mul.Tensor(t, x)
        b = aten.mul.Tensor(s, x)
        c = aten.add.Tensor(a, b)
        d = aten.sum.dim_IntList(c, [0])
        e = aten.sum.dim_IntList(b, [0])

        saved x
        output y = y: float32[8, 4] R
        output z = z: float32[8, 4] R
        gradient w = d: float32[4] R
        gradient u = e: float32[4] R
        """
    )
    found = without(program, {"s"})
    assert found is not None and [i.name for i in found.tangents] == ["t"]
    assert found.forward == program.forward and found.saved == program.saved
    assert [node.op.split(".")[1] for node in found.backward] == ["full", "full", "mul", "add", "sum"]
    assert [o.name for o in found.gradients] == ["d", "e"]
    assert {node.name: node.args[0] for node in found.backward[:2]} == {"b": (8, 4), "e": (4,)}
