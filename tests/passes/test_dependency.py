"""Dependencies against brute force: index tensors sent through the real op, and perturbed inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ops.rule import Call
from autopar.ops.rules import rule_of
from autopar.passes.dependency.affine import AffineMap, Expression, compose, identity, permute, preserved, reshape
from autopar.passes.dependency.operators import dependency

Index = tuple[int, ...]


def value(expression: Expression, variables: Index) -> int:
    total = expression.constant
    for term in expression.terms:
        source = variables[term.source] if isinstance(term.source, int) else value(term.source, variables)
        total += term.coefficient * (source // term.divisor % term.modulus)
    return total


def reached(mapping: AffineMap, output: Index) -> set[Index]:
    """The input elements that the map says an output element depends on."""
    free = itertools.product(*map(range, mapping.free))
    found = {tuple(value(index, output + s) for index in mapping.indices) for s in free}
    assert all(0 <= b < size for element in found for b, size in zip(element, mapping.inputs, strict=True))
    return found


def elements(shape: Index) -> list[Index]:
    return list(itertools.product(*map(range, shape)))


def check_view(mapping: AffineMap, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    source = torch.arange(math.prod(mapping.inputs)).reshape(mapping.inputs)
    viewed = view(source)
    assert mapping.outputs == tuple(viewed.shape)
    for output in elements(mapping.outputs):
        (read,) = reached(mapping, output)
        assert source[read] == viewed[output]


def factorizations(total: int) -> st.SearchStrategy[Index]:
    def pieces(n: int, parts: int) -> list[Index]:
        if parts == 1:
            return [(n,)]
        return [(d, *rest) for d in range(1, n + 1) if n % d == 0 for rest in pieces(n // d, parts - 1)]

    return st.sampled_from([shape for parts in (1, 2, 3) for shape in pieces(total, parts)])


shapes = st.sampled_from([4, 6, 8, 12, 24]).flatmap(lambda n: st.tuples(*(factorizations(n),) * 4))


@settings(max_examples=150, deadline=None)
@given(shapes)
def test_reshape_is_exact(chain: tuple[Index, ...]) -> None:
    before, after, *_ = chain
    check_view(reshape(before, after), lambda x: x.reshape(after))


@settings(max_examples=150, deadline=None)
@given(shapes, st.randoms(use_true_random=False))
def test_views_compose_exactly(chain: tuple[Index, ...], random) -> None:  # type: ignore[no-untyped-def]
    mapping = identity(chain[0])
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    for shape in chain[1:]:
        mapping = compose(reshape(mapping.outputs, shape), mapping)
        order = tuple(random.sample(range(len(shape)), len(shape)))
        mapping = compose(permute(shape, order), mapping)
        steps.append(lambda x, shape=shape, order=order: x.reshape(shape).permute(order))  # type: ignore[misc]

    def view(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = step(x)
        return x

    check_view(mapping, view)


@settings(max_examples=60, deadline=None)
@given(factorizations(12), factorizations(12))
def test_there_and_back_is_the_identity(before: Index, after: Index) -> None:
    check_view(compose(reshape(after, before), reshape(before, after)), lambda x: x)


def test_digits_that_come_together_again_are_joined() -> None:
    assert compose(reshape((4, 6, 8), (24, 8)), reshape((24, 8), (4, 6, 8))) == identity((24, 8))
    assert compose(reshape((3, 4), (2, 6)), reshape((2, 6), (3, 4))) == identity((2, 6))


def node(op: str, *args: object, outputs: int = 1) -> Node:
    return Node(op=op, args=args, outputs=tuple(f"y{i}" for i in range(outputs)))


def maps(op: Node, function: Callable[..., torch.Tensor], *inputs: Index) -> tuple[AffineMap | None, ...]:
    metas = tuple(TensorMeta(shape, torch.float32) for shape in inputs)
    output = function(*(torch.zeros(shape) for shape in inputs))
    call = Call(op, metas, (TensorMeta(tuple(output.shape), torch.float32),))
    return dependency(call, rule_of(call))[0]


def depends(
    function: Callable[..., torch.Tensor], inputs: tuple[Index, ...], operand: int, element: Index
) -> torch.Tensor:
    """Which output elements change when one input element does."""
    torch.manual_seed(0)
    tensors = [torch.rand(shape, dtype=torch.float64) + 0.5 for shape in inputs]
    before = function(*tensors)
    tensors[operand] = tensors[operand].clone()
    tensors[operand][element] += 0.25
    return function(*tensors) != before


A, B = Ref("a"), Ref("b")


@pytest.mark.parametrize(
    ("op", "function", "inputs", "exact"),
    [
        (node("aten.mm.default", A, B), torch.mm, ((2, 3), (3, 4)), True),
        (node("aten.bmm.default", A, B), torch.bmm, ((2, 2, 3), (2, 3, 2)), True),
        (node("aten.mul.Tensor", A, B), torch.mul, ((2, 3, 2), (2, 3, 2)), True),
        (node("aten.add.Tensor", A, B), torch.add, ((2, 3, 2), (3, 1)), True),
        (node("aten.relu.default", A), torch.relu, ((2, 3),), True),
        (node("aten._softmax.default", A, -1, False), lambda x: x.softmax(-1), ((2, 3),), True),
        (node("aten.sum.dim_IntList", A, (1,)), lambda x: x.sum(1), ((2, 3, 2),), True),
        (node("aten.expand.default", A, (4, 3)), lambda x: x.expand(4, 3), ((1, 3),), True),
        (node("aten.slice.Tensor", A, 1, 2, 4), lambda x: x[:, 2:4], ((3, 6),), False),
        (node("aten.cat.default", (A, B), 1), lambda x, y: torch.cat((x, y), 1), ((2, 2), (2, 2)), False),
    ],
    ids=lambda v: v.op if isinstance(v, Node) else "",
)
def test_operators_against_perturbation(
    op: Node, function: Callable[..., torch.Tensor], inputs: tuple[Index, ...], exact: bool
) -> None:
    for operand, mapping in enumerate(maps(op, function, *inputs)):
        assert mapping is not None
        said = {output: reached(mapping, output) for output in elements(mapping.outputs)}
        for element in elements(inputs[operand]):
            changed = depends(function, inputs, operand, element)
            for output in elements(mapping.outputs):
                if exact:
                    assert (element in said[output]) == bool(changed[output])
                else:
                    assert element in said[output] or not changed[output]


def attention(batch: int, sequence: int, heads: int, width: int) -> tuple[AffineMap, AffineMap, AffineMap]:
    """CFP Fig. 4: V[B·S, H·D] viewed as I_R[B, H, S, D], I_M = P @ I_R, Y[B·S, H·D] the view of I_M."""
    flat, split, whole = (batch * sequence, heads * width), (batch, sequence, heads, width), (0, 2, 1, 3)
    to_heads = compose(permute(split, whole), reshape(flat, split))
    heads_shape = (batch, heads, sequence, width)
    product = node("aten.matmul.default", A, B)
    scores = TensorMeta((batch * heads, sequence, sequence), torch.float32)
    folded = TensorMeta((batch * heads, sequence, width), torch.float32)
    call = Call(node("aten.bmm.default", *product.args), (scores, folded), (folded,))
    contraction = dependency(call, rule_of(call))[0][1]
    assert contraction is not None
    fold = reshape(heads_shape, folded.shape)
    unfold = reshape(folded.shape, heads_shape)
    contracted = compose(compose(unfold, contraction), fold)
    back = compose(reshape(split, flat), permute(heads_shape, whole))
    return to_heads, contracted, back


def test_equations_3_to_6() -> None:
    batch, sequence, heads, width = 4, 6, 8, 5
    to_heads, contracted, back = attention(batch, sequence, heads, width)
    assert str(to_heads) == "(a0, a1, a2, a3) -> (6·a0 + a2, 5·a1 + a3)"  # Eq. 4
    assert str(contracted) == "(a0, a1, a2, a3) -> (a0, a1, *, a3)"  # Eq. 5
    assert str(back) == "(a0, a1) -> (⌊a0/6⌋, ⌊a1/5⌋, a0%6, a1%5)"  # Eq. 6
    composed = compose(compose(back, contracted), to_heads)
    assert str(composed) == "(a0, a1) -> (6·⌊a0/6⌋ + s0, a1) : 0 ≤ s0 < 6"  # Eq. 3
    for output in [(0, 0), (7, 11), (23, 39)]:
        rows = range(output[0] // 6 * 6, output[0] // 6 * 6 + 6)
        assert reached(composed, output) == {(row, output[1]) for row in rows}


@pytest.mark.parametrize(("ranks", "holds"), [(2, True), (4, True), (8, False)])
def test_equation_2_of_attention(ranks: int, holds: bool) -> None:
    """Y -> V: dim 0 survives in blocks of a sequence, so only if the batch divides."""
    to_heads, contracted, back = attention(4, 6, 8, 5)
    mapping = compose(compose(back, contracted), to_heads)
    rows, columns = preserved(mapping, ranks)
    assert (rows is not None) == holds
    assert rows is None or (rows.block, rows.output_dim, rows.output_block, rows.count) == (6, 0, 6, 4)
    assert columns is not None and (columns.block, columns.count) == (1, 40)


def test_equation_2_fails_where_a_dim_is_needed_whole() -> None:
    (mapping,) = maps(node("aten._softmax.default", A, -1, False), lambda x: x.softmax(-1), (4, 8))
    assert mapping is not None
    assert preserved(mapping, 2)[1] is None
    assert None not in preserved(identity((4, 8)), 2)
    assert preserved(identity((4, 9)), 2)[1] is None, "a dim that does not divide cannot be split"


def test_without_a_rule_everything_depends_on_everything() -> None:
    metas = (TensorMeta((2, 3), torch.float32),)
    ((mapping,),) = dependency(Call(node("some.unknown.op", A), metas, metas), None)
    assert mapping is not None and str(mapping) == "(a0, a1) -> (*, *)"
