"""Layouts against index tensors, and redistributions against the shards that they promise."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster.collectives import collective_seconds
from autopar.cluster.library import named_cluster
from autopar.cost.bucketed import BucketingRedistributor
from autopar.cost.liveness import PlacementCache
from autopar.cost.redistribute import Redistributor, Route
from autopar.cost.roofline import LocalOperators
from autopar.ir.emitter import Emitter
from autopar.ir.graph import WAIT, TensorMeta
from autopar.ir.layout import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shape,
    Split,
    is_legal,
    local_shape,
    local_stride,
    nest,
    permute_layout,
    reshape_layout,
    shard,
    valid_shape,
)
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.ir.unsharded import unshard
from autopar.passes.codegen.redistribution import Redistribution
from autopar.planning.searches import hidden_buckets
from autopar.runtime.simulate import coordinates, run_ranks

R = Replicate()
MESHES = [(2,), (4,), (2, 2), (2, 2, 2), (2, 3)]
SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24]
PADDING = -1
"""What stands in padding: no index of any element."""


def index_tensor(shape: Shape) -> torch.Tensor:
    """Every element is its own row-major index."""
    return torch.arange(math.prod(shape)).reshape(shape)


def splits(shape: Shape, ranks: int) -> Iterator[Split]:
    """All splits of a tensor over one axis, those that other axes make illegal included."""
    for dim, size in enumerate(shape):
        for period in range(ranks, size + 1, ranks):
            if size % period == 0:
                yield Split(dim, period)
        for unit in range(1, size + 1):
            for ways in (ranks, 2 * ranks):
                stride = -(-size // (unit * ways)) * unit * ways // ranks
                if size % unit == 0 and stride < size < stride * ranks:
                    yield Split(dim, stride * ranks)


@st.composite
def layouts(draw: st.DrawFn, partial: bool = False) -> tuple[Shape, Layout, Shape]:
    """(shape, legal layout, mesh)"""
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    layout: Layout = ()
    for axis, ranks in enumerate(mesh):
        rest = (R,) * (len(mesh) - axis - 1)
        options: list[Placement] = [R, *splits(shape, ranks), *([Partial()] if partial else [])]
        legal = [p for p in options if is_legal(shape, (*layout, p, *rest), mesh)]
        layout = (*layout, draw(st.sampled_from(legal)))
    return shape, layout, mesh


def owned(shape: Shape, layout: Layout, mesh: Shape, coordinate: Shape) -> torch.Tensor:
    """The indices that a rank owns, by the definition: element by element."""
    kept = [
        [
            i
            for i in range(size)
            if all(
                i % p.period // (p.period // n) == c
                for p, n, c in zip(layout, mesh, coordinate, strict=True)
                if isinstance(p, Split) and p.dim == dim
            )
        ]
        for dim, size in enumerate(shape)
    ]
    tensor = index_tensor(shape)
    for dim, indices in enumerate(kept):
        tensor = tensor.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return tensor


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_a_rank_holds_what_the_definition_says(drawn: tuple[Shape, Layout, Shape]) -> None:
    shape, layout, mesh = drawn
    for coordinate in coordinates(mesh):
        local = shard(index_tensor(shape), layout, mesh, coordinate, PADDING)
        valid = valid_shape(shape, layout, mesh, coordinate)
        assert torch.equal(local[tuple(map(slice, valid))], owned(shape, layout, mesh, coordinate))
        assert int((local != PADDING).sum()) == math.prod(valid), "padding stands last"
        assert tuple(local.shape) == local_shape(shape, layout, mesh)


@given(layouts(partial=True))
@settings(max_examples=150, deadline=None)
def test_unshard_is_the_inverse_of_shard(drawn: tuple[Shape, Layout, Shape]) -> None:
    shape, layout, mesh = drawn
    whole = index_tensor(shape) + 1
    shards = {c: shard(whole, layout, mesh, c, PADDING) for c in coordinates(mesh)}
    assert torch.equal(unshard(shards, shape, layout, mesh), whole)


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_every_element_is_held_as_often_as_there_are_replicas(drawn: tuple[Shape, Layout, Shape]) -> None:
    shape, layout, mesh = drawn
    held = torch.zeros(math.prod(shape), dtype=torch.int64)
    for coordinate in coordinates(mesh):
        local = shard(index_tensor(shape), layout, mesh, coordinate, PADDING).flatten()
        held[local[local != PADDING]] += 1
    replicas = math.prod(n for p, n in zip(layout, mesh, strict=True) if isinstance(p, Replicate))
    assert (held == replicas).all()


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_local_stride_is_the_run_of_consecutive_local_indices(drawn: tuple[Shape, Layout, Shape]) -> None:
    """If the axis gave up its digit, that would stand in the local index at `local_stride`: ranks of the
    axis would take runs of that length in turn."""
    shape, layout, mesh = drawn
    for axis, split in enumerate(layout):
        if not isinstance(split, Split):
            continue
        stride, n = local_stride(layout, mesh, axis), mesh[axis]
        without = (*layout[:axis], R, *layout[axis + 1 :])
        if not is_legal(shape, without, mesh):
            continue  # what is left is no layout of the dim without padding
        origin = (0,) * len(mesh)
        gathered = shard(torch.arange(shape[split.dim]), _only(without, split.dim), mesh, origin)
        owner = gathered % split.period // (split.period // n)
        assert torch.equal(owner, torch.arange(len(gathered)) // stride % n)


def _only(layout: Layout, dim: int) -> Layout:
    """The layout of one dim by itself."""
    return tuple(Split(0, p.period) if isinstance(p, Split) and p.dim == dim else R for p in layout)


@given(layouts(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_view_of_the_shard_is_the_shard_of_the_view(
    drawn: tuple[Shape, Layout, Shape], generator: random.Random
) -> None:
    shape, layout, mesh = drawn
    target = generator.choice(list(factorizations(math.prod(shape), 3)))
    mapped = reshape_layout(shape, target, layout, mesh)
    if mapped is None or not is_legal(target, mapped, mesh):
        return
    whole = index_tensor(shape)
    for coordinate in coordinates(mesh):
        local = shard(whole, layout, mesh, coordinate, PADDING)
        expected = shard(whole.reshape(target), mapped, mesh, coordinate, PADDING)
        assert torch.equal(local.reshape(expected.shape), expected)
    assert reshape_layout(target, shape, mapped, mesh) == layout


def factorizations(number: int, dims: int) -> Iterator[Shape]:
    if dims == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factorizations(number // first, dims - 1))


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_splitting_and_flattening_dims_keeps_a_split(drawn: tuple[Shape, Layout, Shape]) -> None:
    """Flattening everything has a layout always: a digit of a dim is a digit of the flat index."""
    shape, layout, mesh = drawn
    # but padding inside of the flat index is none of its digits
    outermost = all(math.prod(shape[: p.dim]) == 1 for p in layout if isinstance(p, Split) and p.period > shape[p.dim])
    if outermost:
        assert reshape_layout(shape, (math.prod(shape),), layout, mesh) is not None


@given(layouts(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_permuted_shard_is_the_shard_of_the_permuted(
    drawn: tuple[Shape, Layout, Shape], generator: random.Random
) -> None:
    shape, layout, mesh = drawn
    order = list(range(len(shape)))
    generator.shuffle(order)
    mapped = permute_layout(order, layout, mesh)
    assert mapped is not None
    for coordinate in coordinates(mesh):
        local = shard(index_tensor(shape), layout, mesh, coordinate, PADDING).permute(order)
        assert torch.equal(local, shard(index_tensor(shape).permute(order), mapped, mesh, coordinate, PADDING))


def test_a_split_that_straddles_dims_has_no_view() -> None:
    # the digit [2, 4) of 12 spans the border between 4 and 3
    assert reshape_layout((12,), (4, 3), (Split(0, 4),), (2,)) is None
    assert reshape_layout((12,), (3, 4), (Split(0, 4),), (2,)) == (Split(1, 4),)


def test_axes_that_want_the_same_digit_nest_as_in_dtensor() -> None:
    layout = nest((Split(0, 12), Split(0, 12)), (2, 3))
    assert layout == (Split(0, 12), Split(0, 6))
    found = [shard(torch.arange(12), layout, (2, 3), c).tolist() for c in coordinates((2, 3))]
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


@given(layouts())
@settings(max_examples=50, deadline=None)
def test_nesting_leaves_legal_layouts_alone(drawn: tuple[Shape, Layout, Shape]) -> None:
    _, layout, mesh = drawn
    assert nest(layout, mesh) == layout


def test_axes_that_claim_one_digit_are_not_legal() -> None:
    assert not is_legal((8,), (Split(0, 8), Split(0, 8)), (2, 2))
    assert is_legal((8,), (Split(0, 8), Split(0, 4)), (2, 2))
    assert is_legal((8,), (Split(0, 4), Split(0, 8)), (2, 2))
    assert not is_legal((12,), (Split(0, 12), Split(0, 4)), (2, 2)), "4 does not divide 6: the digits interleave"


# ------------------------------------------------------------------------------------ redistribution


def redistributor(mesh: Shape) -> Redistributor:
    cluster = named_cluster(None, device_type="cpu")
    return BucketingRedistributor(mesh, cluster.links(mesh), cluster.device)


def program_of(meta: TensorMeta, route: Route, source: Layout, target: Layout, mesh: Shape) -> Program:
    """What codegen writes where a value "x" is made as `source` and wanted as `target`."""
    emitter = Emitter(metas={"x": TensorMeta(local_shape(meta.shape, source, mesh), meta.dtype)}, mesh=mesh)
    redistribution = Redistribution(
        emit=lambda op, *args: emitter.emit(op, args), metas=emitter.metas, mesh=mesh, whole=meta.shape
    )
    local = "x"
    for step in route.steps:
        local = redistribution.write(local, step)
    return Program(
        axes=tuple("abc"[: len(mesh)]),
        mesh=mesh,
        inputs=(ProgramInput(name="x", role="input", target="x", meta=meta, layout=source),),
        forward=tuple(emitter.written),
        backward=(),
        saved=(),
        outputs=(ProgramOutput(name=local, role="output", target="x", meta=meta, layout=target),),
        metas=emitter.metas,
    )


def check(shape: Shape, route: Route, source: Layout, target: Layout, mesh: Shape) -> Program:
    """The program of a route, run on all ranks, gives every rank its shard of the target."""
    program = program_of(TensorMeta(shape, torch.float64), route, source, target, mesh)
    whole = (index_tensor(shape) + 1).double()
    given = {c: {"x": _share(whole, source, mesh, c)} for c in coordinates(mesh)}
    (output,) = program.outputs
    assert output.name is not None
    for coordinate, values in run_ranks(program, given).items():
        if any(isinstance(p, Partial) for p in target):
            continue
        valid = tuple(map(slice, valid_shape(shape, target, mesh, coordinate)))
        expected = _share(whole, target, mesh, coordinate)
        assert torch.equal(values[output.name][valid], expected[valid]), (
            f"{source} -> {target} on {mesh} at {coordinate}"
        )
    return program


def _share(whole: torch.Tensor, layout: Layout, mesh: Shape, coordinate: Shape) -> torch.Tensor:
    """A rank's part; of partial sums every rank has a share (powers of two: exact)."""
    ranks = math.prod(n for p, n in zip(layout, mesh, strict=True) if isinstance(p, Partial))
    if ranks == 1:
        return shard(whole, layout, mesh, coordinate, math.nan)
    parts = [c if isinstance(p, Partial) else 0 for p, c in zip(layout, coordinate, strict=True)]
    spread = tuple(R if isinstance(p, Partial) else p for p in layout)
    local = shard(whole, spread, mesh, coordinate, math.nan)
    number = sum(parts) + 1
    # share 0 is what the others leave
    if any(parts):
        return local * number
    others = [
        sum(c) + 1
        for c in itertools.product(
            *(range(n) if isinstance(p, Partial) else (0,) for p, n in zip(layout, mesh, strict=True))
        )
        if any(c)
    ]
    return local * (1 - sum(others))


def pairs(mesh: Shape, seed: int, count: int) -> Iterator[tuple[Shape, Layout, Layout]]:
    """Random legal (shape, source, target)."""
    generator = random.Random(seed)
    while count:
        shape = tuple(generator.choice([3, 4, 5, 6, 7, 8, 9, 12, 16, 24]) for _ in range(generator.randint(1, 3)))
        source, target = (_random_layout(shape, mesh, generator, partial) for partial in (True, False))
        if source != target:
            count -= 1
            yield shape, source, target


def _random_layout(shape: Shape, mesh: Shape, generator: random.Random, partial: bool) -> Layout:
    while True:
        layout = tuple(
            generator.choice([R, Partial() if partial else R, generator.choice(list(splits(shape, n)) or [R])])
            for n in mesh
        )
        if is_legal(shape, layout, mesh):
            return layout


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_route_gives_every_rank_its_shard(mesh: Shape) -> None:
    seen = set()
    rates = redistributor(mesh)
    for shape, source, target in pairs(mesh, seed=len(mesh), count=120):
        route = rates.route(shape, torch.float64, source, target)
        assert route is not None, f"{source} -> {target} of {shape} on {mesh}"
        check(shape, route, source, target, mesh)
        seen.update(step.kind for step in route.steps)
    assert seen == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice"}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_route_sends_what_it_is_priced_for(mesh: Shape) -> None:
    rates = redistributor(mesh)
    for shape, source, target in pairs(mesh, seed=7, count=40):
        route = rates.route(shape, torch.float64, source, target)
        assert route is not None
        program = check(shape, route, source, target, mesh)
        planned = [(s.kind, program.axes[s.axis], s.bytes) for s in route.steps if s.kind != "slice"]
        assert program.collectives() == planned
        assert route.seconds == pytest.approx(sum(map(rates.step_seconds, route.steps)), rel=1e-12)
        links = sum(collective_seconds(s.kind, s.bytes, rates.links[s.axis]) for s in route.steps if s.kind != "slice")
        assert links <= route.seconds
        copied = sum(s.copies.bytes for s in route.steps)
        assert copied >= copied_bytes_of(program)
        assert sum(s.copies.operators for s in route.steps) == operators_of(program)
        if all(s.kind != "slice" for s in route.steps):
            assert copied == copied_bytes_of(program)


@pytest.mark.parametrize("part", [0.25, 0.9, 1.0])
def test_what_is_hidden_changes_no_route(part: float) -> None:
    """Programs take the routes of the space: a search that hides traffic prices these, and no others."""
    mesh = (2, 4)
    rates = redistributor(mesh)
    hidden = hidden_buckets(rates, part)
    for shape, source, target in pairs(mesh, seed=11, count=60):
        taken, priced = (r.route(shape, torch.float64, source, target, True) for r in (rates, hidden))
        assert taken is not None and priced is not None
        assert priced.steps == taken.steps and priced.seconds <= taken.seconds


def copied_bytes_of(program: Program) -> float:
    """What the operators of a program read and write: its seconds on a device that moves a byte a second."""
    return local_seconds(program, memory_bytes_per_second=1.0, memory_efficiency=((1.0, 1.0),), seconds_per_op=0.0)


def operators_of(program: Program) -> float:
    """The operators of a program that are no views: its seconds on a device on which each takes a second."""
    return local_seconds(program, memory_bytes_per_second=math.inf, seconds_per_op=1.0)


def local_seconds(program: Program, **rates: Any) -> float:
    device = replace(named_cluster(None, device_type="cpu").device, operator_ratios={}, **rates)
    local = LocalOperators(program, device, {}, PlacementCache())
    total = 0.0
    for instruction in program.forward:
        if instruction.collective or instruction.op == WAIT:
            local.pass_by(instruction)
        else:
            total += local.cost(instruction).seconds
    return total


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_all_wanted_layouts_are_acquired_without_circles(mesh: Shape) -> None:
    rates = redistributor(mesh)
    generator = random.Random(3)
    for shape, source, _ in pairs(mesh, seed=5, count=25):
        wanted = frozenset(_random_layout(shape, mesh, generator, False) for _ in range(3))
        acquired = rates.acquire(shape, torch.float64, source, wanted)
        assert acquired is not None
        there = {source}
        for item in acquired:
            assert item.source in there
            there.add(item.layout)
            check(shape, item.route, item.source, item.layout, mesh)
        assert wanted <= there
        alone = sum(r.seconds for t in wanted if (r := rates.route(shape, torch.float64, source, t)) is not None)
        assert sum(item.route.seconds for item in acquired) <= alone * (1 + 1e-12)


@pytest.mark.parametrize(
    ("source", "wanted", "kinds"),
    [
        (Partial(), {Split(0, 8)}, ["reduce_scatter"]),
        (Partial(), {R}, ["all_reduce"]),
        (Partial(), {R, Split(0, 8)}, ["all_reduce", "slice"]),
        (Split(0, 8), {R, Split(0, 8)}, ["all_gather"]),
        (Split(0, 8), {R, Split(1, 8)}, ["all_gather", "slice"]),
        (R, {R, Split(0, 8)}, ["slice"]),
    ],
    ids=str,
)
def test_nothing_is_sent_that_a_reader_does_not_want(
    source: Placement, wanted: set[Placement], kinds: list[str]
) -> None:
    """A shard of a sum is scattered; what is there already is not gathered from what was gathered of it."""
    rates = redistributor((4,))
    acquired = rates.acquire((8, 8), torch.float64, (source,), frozenset((p,) for p in wanted))
    assert acquired is not None
    assert [step.kind for item in acquired for step in item.route.steps] == kinds


def nodes(mesh: Shape) -> Redistributor:
    """Of a mesh whose first axis lies across nodes, on links that are a tenth as fast as those within."""
    local = named_cluster("local")
    levels = tuple(
        replace(local.levels[-1], size=size, bytes_per_second=rate, group_bytes_per_second=rate, latency_seconds=1e-9)
        for size, rate in zip(mesh, (1e8, *(1e9,) * (len(mesh) - 1)), strict=True)
    )
    return BucketingRedistributor(mesh, replace(local, levels=levels).links(mesh), local.device)


def test_a_sum_over_nodes_crosses_them_in_shards() -> None:
    """A hierarchical all-reduce, and one that ends sharded."""
    rates, shape, summed = nodes((2, 4)), (64, 64), (Partial(), Partial())
    whole = rates.route(shape, torch.float32, summed, (R, R))
    part = rates.route(shape, torch.float32, summed, (Split(0, 64), R))
    assert whole is not None and part is not None
    size = 64 * 64 * 4
    assert [(step.kind, step.axis, step.bytes) for step in whole.steps] == [
        ("reduce_scatter", 1, size),
        ("all_reduce", 0, size // 4),
        ("all_gather", 1, size),
    ]
    assert [(step.kind, step.axis, step.bytes) for step in part.steps] == [
        ("reduce_scatter", 1, size),
        ("reduce_scatter", 0, size // 4),
        ("all_gather", 1, size // 2),
    ]


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (7, 24), (64,), (3, 5), ()], ids=str)
@pytest.mark.parametrize("mesh", [(2, 2), (2, 4), (2, 3), (2, 2, 2)], ids=str)
def test_no_way_by_other_layouts_is_cheaper(shape: Shape, mesh: Shape) -> None:
    """Of a sum to the whole: all layouts without padding tried by brute force, step by step. (What is there already is
    not cut to be gathered again.)"""
    rates = nodes(mesh)

    def placements(axis: int) -> list[Placement]:
        return [R, Partial(), *(s for s in splits(shape, mesh[axis]) if s.period <= shape[s.dim])]

    layouts = [x for x in itertools.product(*map(placements, range(len(mesh)))) if is_legal(shape, x, mesh)]
    graph = networkx.DiGraph()
    for source, target in itertools.permutations(layouts, 2):
        changed = [(a, b) for a, b in zip(source, target, strict=True) if a != b]
        if len(changed) == 1 and changed[0][0] != R:
            step = rates.route(shape, torch.float32, source, target)
            if step is not None:
                graph.add_edge(source, target, seconds=step.seconds)
    whole = (R,) * len(mesh)
    best = networkx.single_source_dijkstra_path_length(graph.reverse(), whole, weight="seconds")
    for source in itertools.product((R, Partial()), repeat=len(mesh)):
        route = rates.route(shape, torch.float32, source, whole)
        assert route is not None and route.seconds == pytest.approx(best[source], rel=1e-12)


def test_a_partial_maximum_is_reduced_before_it_is_split() -> None:
    route = redistributor((4,)).route((8,), torch.float64, (Partial("max"),), (Split(0, 8),))
    assert route is not None and [step.kind for step in route.steps] == ["all_reduce", "slice"]


def test_nothing_becomes_partial() -> None:
    assert redistributor((4,)).route((8,), torch.float64, (R,), (Partial(),)) is None
