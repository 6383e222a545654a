"""Patterns find what they say, and nothing else, in graphs of ten lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.ir.matcher import Found, Matcher
from autopar.ir.rewriter import Rewriter
from autopar.ir.text import parsed_graph, parsed_program, text_of

GRAPH = parsed_graph(
    """
    x = input x: float32[4, 8]
    w = parameter w: float32[4, 8]

    forward
    two = aten.full.default([], 2.0)
    many = aten.full.default([4, 8], 2.0)
    a = aten.mul.Tensor(x, w)
    b = aten.mul.Tensor(two, a)
    c = aten.mul.Tensor(a, many)
    r = aten.reshape.default(b, [2, 2, 8])
    s = aten.sum.dim_IntList(r, [1], True)
    t = aten.sum.dim_IntList(r, [1])
    m, v = aten.topk.default(c, 2, 1)
    p = aten.mul.Tensor(m, m)
    q = aten.add.Tensor(x, w, alpha=3)

    backward

    output s = s
    output t = t
    output p = p
    output c = c
    output q = q
    output v = v
    """
)


def found(pattern: str, name: str, **such: Callable[[Any], bool]) -> Found | None:
    matcher = Matcher(graph=GRAPH, such=such)
    node = matcher.made_by(name)
    assert node is not None
    return next((found for _, found in matcher.find(((pattern, None),), node)), None)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("aten.mul.Tensor(x, y)", "a", {"x": "x", "y": "w"}),
        ("aten.mul.Tensor(aten.mul.Tensor(x, y), 2.0)", "b", None),
        ("aten.mul.Tensor({aten.mul.Tensor(x, y), 2.0})", "b", {"x": "x", "y": "w"}),  # in either order
        ("aten.mul.Tensor({aten.mul.Tensor(_, _), 3.0})", "b", None),
        ("aten.mul.Tensor(x, 2.0)", "c", None),  # many numbers are no constant
        ("aten.mul.Tensor(x, aten.full.default(shape, number))", "c", {"x": "a", "shape": (4, 8), "number": 2.0}),
        ("aten.mul.Tensor(x, x)", "p", {"x": "m"}),
        ("aten.mul.Tensor(x, x)", "a", None),
        ("aten.reshape.default(x, (2, _))", "r", None),
        ("aten.reshape.default(x, (2, _, n))", "r", {"x": "b", "n": 8}),
        ("aten.sum.dim_IntList(x, (1,), True)", "s", {"x": "r"}),
        ("aten.sum.dim_IntList(x, (0,) | (1,), keepdim=True)", "s", {"x": "r"}),
        ("aten.sum.dim_IntList(x, (1,), keepdim)", "t", {"x": "r", "keepdim": False}),
        ("aten.sum.dim_IntList(x, (1,))", "s", None),  # what is left out is as by default
        ("aten.sum.dim_IntList(x, ...)", "s", {"x": "r"}),
        ("aten.add.Tensor(x, y)", "q", None),
        ("aten.add.Tensor(x, y, alpha=n)", "q", {"x": "x", "y": "w", "n": 3}),
        (
            "aten.sum.dim_IntList(aten.reshape.default((b := aten.mul.Tensor(2.0, x)), _), ...)",
            "t",
            {"b": "b", "x": "a"},
        ),
        ("aten.sum.dim_IntList(aten.reshape.default(x, _), (1,))", "t", {"x": "b"}),
        ("aten.reshape.default(only(x), _)", "r", {"x": "b"}),
        ("aten.sum.dim_IntList(only(x), ...)", "s", None),  # another one reads it
        ("aten.mul.Tensor(aten.topk.default(x, ...), _)", "p", {"x": "c"}),
    ],
)
def test_a_pattern_says_what_it_finds(pattern: str, name: str, expected: Found | None) -> None:
    assert found(pattern, name) == expected


def test_variables_have_conditions() -> None:
    is_parameter = {i.name for i in GRAPH.inputs if i.role == "parameter"}.__contains__
    assert found("aten.mul.Tensor({x, weight})", "a", weight=is_parameter) == {"x": "x", "weight": "w"}
    assert found("aten.mul.Tensor({weight, x})", "a", weight=is_parameter) == {"x": "x", "weight": "w"}
    assert found("aten.mul.Tensor(x, weight)", "c", weight=is_parameter) is None


def test_a_value_is_the_first_result_of_its_node() -> None:
    assert found("aten.topk.default(x, k, 1)", "m") == found("aten.topk.default(x, k, 1)", "v") == {"x": "c", "k": 2}
    inner = "aten.mul.Tensor(aten.topk.default(x, ...), y)"
    other = parsed_graph(text_of(GRAPH).replace("p = aten.mul.Tensor(m, m)", "p = aten.mul.Tensor(v, v)"))
    matcher = Matcher(graph=other)
    node = matcher.made_by("p")
    assert node is not None and not [*matcher.find(((inner, None),), node)]


def test_collectives_of_a_program_match_too() -> None:
    program = parsed_program(
        """
        mesh tp=2
        x = input x: float32[4, 8] S(0%4)

        forward
        g = collective.all_gather(x, tp)
        y = collective.wait(g)

        backward

        output y = y: float32[4, 8] R
        """
    )
    matcher = Matcher(graph=program)
    gather = (("collective.wait(collective.all_gather(shard, axis))", "gathered"),)
    assert [*matcher.find(gather, program.forward[1])] == [("gathered", {"shard": "x", "axis": 0})]


def test_the_first_row_that_does_not_refuse_writes() -> None:
    def doubled(rewriter: Rewriter, x: str) -> None:
        rewriter.emit("aten.add.Tensor", (rewriter.now(x), rewriter.now(x)), rewriter.node.name)

    rules = (("aten.mul.Tensor(x, y)", lambda rewriter, x, y: x == y), ("aten.mul.Tensor({x, 2.0})", doubled))
    rewriter = Rewriter(graph=GRAPH, metas=dict(GRAPH.metas))
    for node in GRAPH.nodes:
        rewriter.at(node)
        if not rewriter.apply(rules, node):
            rewriter.keep(node)
    lines = text_of(rewriter.done())
    assert "b = aten.add.Tensor(a, a): float32[4, 8]" in lines and "two" not in lines
    assert "c = aten.mul.Tensor(a, many)" in lines and "p =" not in lines.partition("output")[0]
