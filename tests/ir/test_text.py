"""Graphs, programs and rewrites are texts that parse back."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch

from autopar.extensions import scoped
from autopar.ir.graph import Node, Ref
from autopar.ir.layout import REPLICATE, Partial, Routed
from autopar.ir.program import RankIndex
from autopar.ir.text import parsed_graph, parsed_program, text_of
from autopar.passes.flow import LOWERINGS, register_lowering, rewrites
from autopar.passes.lower.bucket import Bucket
from autopar.passes.lower.chunk import Chunk
from autopar.passes.lower.compact import Compact
from autopar.passes.lower.slice import Slice

PROGRAM = """\
mesh dp=2, tp=4
x = input args.0: float32[8, 4] S(0%8) R
w = parameter layers.0.weight: bfloat16[16, 4] R S(0%16)
t = tangent output: float32[8, 4] S(0%8) R

forward
# layers.0
g = collective.all_gather(w, tp): bfloat16[16, 4]
v = collective.wait(g): bfloat16[16, 4]
c = aten._to_copy.default(v, dtype=torch.float32): float32[16, 4]
y, _ = aten.max.dim(x, 1, True): float32[4, 1]
#
s = aten.select.int(y, 0, dp_rank * 2 + tp_rank + -1): float32[1] {serves='the mask, and 3 more'}
n = aten.add.Scalar(c, -inf): float32[16, 4]
saved n

backward
a = aten.arange.start(0, 4.0, dtype=torch.float32, device=device(type='cpu')): float32[4]
d = aten.mul.Tensor(t, a): float32[4, 4]
b = aten.cat.default([d, n], 0): float32[20, 4]
e = collective.reduce_scatter(d, 'sum', tp): float32[1, 4]
f = collective.wait(e): float32[1, 4]

output output.a b = s: float32[8, 1] R P(max)
gradient layers.0.weight = f: bfloat16[16, 4] R S(0%16)
gradient pending = b: R R
gradient args.0 = None: float32[8, 4] X(0%8)*1.5 R
uneven s, y
"""


def test_a_program_is_what_its_text_says() -> None:
    program = parsed_program(PROGRAM)
    assert text_of(program) == PROGRAM
    assert program.metas["x"].shape == (4, 4), "what a rank has of it"
    assert program.forward[4] == Node(
        op="aten.select.int",
        args=(Ref("y"), 0, RankIndex(((0, 2), (1, 1)), -1)),
        outputs=("s",),
        serves="the mask, and 3 more",
    )
    assert program.backward[0].kwargs == (("dtype", torch.float32), ("device", torch.device("cpu")))
    assert [(o.name, o.layout) for o in program.outputs] == [
        ("s", (REPLICATE, Partial("max"))),
        ("f", program.inputs[1].layout),
        ("b", (REPLICATE, REPLICATE)),
        (None, (Routed(0, 8, 1.5), REPLICATE)),
    ]


def test_what_instructions_make_and_what_is_saved_is_inferred() -> None:
    bare = re.sub(r"(?m)^(.*aten.*|.*collective.*)\): [^{}\n]*?( \{.*\})?$", r"\1)\2", PROGRAM)
    assert "y, _ = aten.max.dim(x, 1, True)\n" in bare
    assert text_of(parsed_program(bare.replace("saved n\n", ""))) == PROGRAM


def test_a_graph_is_what_its_text_says() -> None:
    text = """\
w = parameter w: bfloat16[4, 4] {at_rest=torch.float32}
x = input kwargs.x: bfloat16[2, 4]

forward
# a
y = aten.mm.default(x, w): bfloat16[2, 4] {sequence=3, region=(0, 1)}

backward
z = aten.mm.default(y, w): bfloat16[2, 4] {sequence=3, serves='y'}

output output = y
gradient kwargs.x = z
gradient w = None
"""
    graph = parsed_graph(text)
    assert text_of(graph) == text
    assert [node.backward for node in graph.nodes] == [False, True]
    assert graph.inputs[0].at_rest is torch.float32 and graph.nodes[0].region == (0, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mesh dp=2, tp=4\n", "", r"line 1 of the program, `x = input .*: it has 2 placements, and the mesh 0 axes"),
        ("(x, 1, True)", "(z, 1, True)", r"line 11 of .*: there is no value z before it"),
        ("aten.max.dim", "aten.most.dim", r"line 11 of .*most"),
        ("collective.wait(g)", "collective.gather(g)", r"there is no collective gather: there are all_reduce, "),
        ("(w, tp)", "(w, pp)", r"a collective ends with a mesh axis, one of dp, tp"),
        ("y, _ = ", "w, _ = ", r"there is a value w already"),
        ("R P(max)", "R Q", r"Q is no placement: write R, S\(dim%period\), P, P\(max\) or X\(dim%period\)"),
        ("bfloat16[16, 4] R", "bfloat[16, 4] R", r"there is no dtype bfloat"),
        ("forward\n", "", r"it stands neither in forward nor in backward"),
        ("saved n", "saved q", r"there is no value q before it"),
        ("saved n", "keeps n", r"no mesh, input, instruction or output is written so"),
        ("-inf", "open('/etc/passwd')", r"open\('/etc/passwd'\) is no argument"),
        ("): float32[4, 1]", "): float32[4, 1], int64[4, 1]", r"it has 2 metas, and 1 of its results has a name"),
        ("(c, -inf): float32[16, 4]", "(c, )", r"line 14 of .*aten::add"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(old: str, new: str, message: str) -> None:
    assert old in PROGRAM
    with pytest.raises(ValueError, match=message):
        parsed_program(PROGRAM.replace(old, new, 1))


def test_a_value_that_is_called_as_a_number_is_refused() -> None:
    text = "mesh dp=2\ndp_rank = input x: int64[] R\n\nforward\n\nbackward\n"
    with pytest.raises(ValueError, match="the value dp_rank cannot be told from a number of that name"):
        text_of(parsed_program(text))


# --- rewrites


def test_rewrites_are_what_their_text_says() -> None:
    given = (
        Bucket(axis_bytes=(1000, 2000), unhidden=(0,)),
        Slice(parts=4),
        Chunk(at=(("mm_1", 0, 2), ("mm_2", 1, 4))),
        Compact(),
    )
    text = "bucket{axis_bytes=(1000,2000),unhidden=(0,)},slice{parts=4},chunk{at=(('mm_1',0,2),('mm_2',1,4))},compact"
    assert ",".join(map(str, given)) == text
    assert rewrites(text) == given
    assert rewrites(" bucket{ axis_bytes = (1000, 2000), unhidden = (0,) },\n slice{parts=4}") == given[:2]
    assert rewrites("") == ()


@dataclass(frozen=True, kw_only=True)
class Finer(Slice):
    """A rewrite with arguments, from outside."""

    name = "finer"


def test_a_registered_lowering_names_its_rewrites() -> None:
    with scoped():
        register_lowering(replace(LOWERINGS["slice"], name="mine", rewrites=(Finer(),)))
        assert rewrites("finer{parts=4},slice{parts=2}") == (Finer(parts=4), Slice(parts=2))
    with pytest.raises(ValueError, match="unknown rewrite 'finer'"):
        rewrites("finer")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("buckets", r"unknown rewrite 'buckets' \(did you mean 'bucket'\?\); known: bucket, overlap, slice"),
        ("slice{part=4}", r"unknown argument of slice 'part' \(did you mean 'parts'\?\); known: parts, at"),
        ("slice{parts=four}", r"'slice{parts=four}' has no arguments that can be read"),
        ("slice{parts=4.0}", r"parts of slice is 4.0: write it as 1"),
        ("slice{parts=4", r"'slice{parts=4' is no rewrite: write name or name{argument=value,...}"),
        ("compact{bytes=1}", r"unknown argument of compact 'bytes'"),
    ],
)
def test_what_is_no_rewrite_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewrites(text)
