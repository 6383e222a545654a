"""Rivals: the other ways to multiply matrices that lie on a mesh, to compare slices with (MeshSlice 2.3, Fig. 2 to 4).

All take a shard of a rank at a time, in as many parts as the axis has ranks:

- *Collective* gathers, multiplies and scatters whole operands: the program as codegen writes it, `slices = 1`.
- *Wang* takes one collective apart into messages to the next rank: each shard is multiplied while it is passed on, or
  each partial sum is passed on while the next one is made. Which shard a rank has at a time depends on the rank.
- *SUMMA* broadcasts shards, one after the other, and reduces each part of the result to its owner.
- *Cannon*, on a square mesh, shifts both operands once so that shards of the same indices meet, then passes both on.

They are no part of autopar: `python benchmarks/rivals.py` registers them as any package would, and says what a planner
that may take them makes of layers on two mesh axes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

import autopar
from autopar.cost.streams import timeline
from autopar.extensions import scoped
from autopar.ir.graph import RESHAPE, WAIT, Node, Ref, TensorMeta
from autopar.ir.layout import Split
from autopar.ir.program import Program, RankIndex
from autopar.passes.lower.adopt import halves_of
from autopar.passes.lower.lowering import Write, where_quicker
from autopar.passes.lower.parts import PartsWriter
from autopar.passes.lower.regions import Refused, spread
from autopar.passes.lower.slice import Around
from autopar.planning.planner import Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """How shards come (`arrives`: "rotate", "broadcast" or "skew"), and parts of results leave ("rotate" or
    "broadcast"; None: by the collective)."""

    name: str
    arrives: str | None
    leaves: str | None
    both: bool
    """Whether all collectives of a product are taken apart, or one."""


WANG = Rival(name="wang", arrives="rotate", leaves="rotate", both=False)
SUMMA = Rival(name="summa", arrives="broadcast", leaves="broadcast", both=True)
CANNON = Rival(name="cannon", arrives="skew", leaves=None, both=True)


def wang(program: Program) -> Program:
    """One collective of each product as messages from rank to rank."""
    return _rewritten(program, WANG)


def summa(program: Program) -> Program:
    """Gathers of products as broadcasts, and reductions as reductions to one rank after the other."""
    return _rewritten(program, SUMMA)


def cannon(program: Program) -> Program:
    """Products of two gathered operands, on square meshes, as shards of both that are passed on."""
    return _rewritten(program, CANNON)


@dataclass(frozen=True, slots=True)
class _End:
    """A collective at an end of a stretch: its operand, the value of its wait, and its mesh axis."""

    collective: int
    wait: int
    axis: int
    given: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Products with what comes and leaves, and the value whose cut starts it all."""

    members: tuple[int, ...]
    arriving: tuple[_End, ...]
    leaving: tuple[_End, ...]
    seed: str

    @property
    def dropped(self) -> tuple[int, ...]:
        return tuple(p for end in (*self.arriving, *self.leaving) for p in (end.collective, end.wait))

    @property
    def span(self) -> tuple[int, int]:
        positions = (*self.members, *self.dropped)
        return min(positions), max(positions)


def _rewritten(program: Program, rival: Rival) -> Program:
    metas: dict[str, TensorMeta] = dict(program.metas)
    halves = []
    for half, later in halves_of(program):
        around = Around(half, metas)
        last_read = {name: position for position, i in enumerate(half) for name in i.inputs}
        written, begin = list(half), len(half)
        for position in reversed(range(len(half))):
            if not around.is_product(position):
                continue
            for stretch in _stretches(around, position, rival):
                first, last = stretch.span
                if last >= begin:
                    continue
                names = {name for i in half[first : last + 1] for name in i.outputs if name}
                kept = frozenset(n for n in names if n in later or last_read.get(n, -1) > last)
                try:
                    window = _window(half[first : last + 1], metas, program.mesh, stretch, first, kept, rival)
                except Refused:
                    continue
                written[first : last + 1] = window
                begin = first
                break
        halves.append(tuple(written))
    return replace(program, forward=halves[0], backward=halves[1], metas=metas)


def _stretches(around: Around, product: int, rival: Rival) -> Iterator[_Stretch]:
    """The ways to take a product's collectives apart, the most at once first."""
    half = around.half

    def end(collective: int) -> _End:
        wait, instruction = around.wait_of(collective), half[collective]
        return _End(collective, wait, instruction.args[-1], instruction.inputs[0], half[wait].outputs[0])

    gathers = [end(p) for p in sorted(around.gathers(product)) if half[p].collective]
    reduction = [end(p) for p in sorted(around.reduction(product)) if half[p].collective == "reduce_scatter"]
    combinations: list[tuple[tuple[_End, ...], tuple[_End, ...]]]
    if rival.arrives == "skew":
        combinations = [(tuple(gathers), ())] if len(gathers) == 2 else []
    else:
        combinations = [(tuple(gathers), tuple(reduction))] if rival.both else []
        combinations += [((gather,), ()) for gather in gathers] + [((), (r,)) for r in reduction]
    for arriving, leaving in combinations:
        if not arriving and not leaving:
            continue
        members = {product}
        for gather in arriving:
            steps, products = around.ahead(gather.value)
            members |= steps | (products if len(arriving) + len(leaving) == 1 else set())
        for scatter in leaving:
            chain = around.back(scatter.given)
            members.update(chain)
        if len(arriving) + len(leaving) > 1:
            members = {m for m in members if not around.is_product(m) or m == product}
        seed = arriving[0].value if arriving else leaving[0].given
        yield _Stretch(members=tuple(sorted(members)), arriving=arriving, leaving=leaving, seed=seed)


def _window(
    window: Sequence[Node],
    metas: dict[str, TensorMeta],
    mesh: tuple[int, ...],
    stretch: _Stretch,
    offset: int,
    kept: frozenset[str],
    rival: Rival,
) -> list[Node]:
    """The window with a stretch taken apart. Raises Refused."""
    ends = (*stretch.arriving, *stretch.leaving)
    parts = {mesh[end.axis] for end in ends}
    if len(parts) > 1:
        raise Refused(f"{rival.name} wants axes of one size, and these have {sorted(parts)}")
    if rival.arrives == "skew" and len({end.axis for end in ends}) < 2:
        raise Refused(f"{rival.name} wants operands that come along two axes, and both come along one")
    (n,) = parts
    members = [m - offset for m in stretch.members]
    cut = Split(0, metas[stretch.seed].shape[0])
    region = spread(window, metas, members, stretch.seed, cut, n)
    for name in (*(e.value for e in stretch.arriving), *(e.given for e in stretch.leaving)):
        if region.cuts.get(name) != Split(0, metas[name].shape[0]):
            raise Refused(f"the shards of {name} are not those of {stretch.seed}")
    pending = dict(metas)
    dropped = frozenset(p - offset for p in stretch.dropped)
    writer = _Writer(
        half=window,
        metas=pending,
        region=region,
        kept=kept,
        label=rival.name,
        dropped=dropped,
        stretch_of=stretch,
        rival=rival,
    )
    result = writer.stretch(0, len(window) - 1)
    metas.update(pending)
    return result


@dataclass(eq=False, kw_only=True)
class _Writer(PartsWriter):
    """Parts are shards of ranks, which come and leave one by one."""

    stretch_of: _Stretch
    rival: Rival
    under_way: dict[tuple[str, int], str] = field(default_factory=dict)
    turned: dict[str, str] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)

    def stretch(self, first: int, last: int) -> list[Node]:
        for end in self.stretch_of.arriving:
            wait = end.wait - self.stretch_of.span[0]
            self.maker[end.value], self.stage[wait] = wait, 0
            self.done.update((wait, part) for part in range(self.region.parts))
        return super().stretch(first, last)

    # --- what comes

    def _head(self, later: set[str]) -> None:
        return

    def _body(self) -> None:
        for part in range(self.region.parts):
            for end in self.stretch_of.arriving:
                self._arrive(end, part)
            for end in self.stretch_of.arriving:
                if part + 1 < self.region.parts:
                    self._start(end, part + 1)
            for member in self.region.members:
                self._write(member, part)
            for end in self.stretch_of.leaving:
                self._leave(end, part)
        for end in self.stretch_of.leaving:
            self._left(end)

    def _start(self, end: _End, part: int) -> None:
        """Start what brings a shard, unless it is there."""
        like = self.half_of(end)
        given, meta = end.given, self.metas[end.given]
        before = self.part_names.get((end.value, part - 1))
        name = self._name(f"{end.value}_{self.rival.arrives}", part)
        args: tuple[object, ...]
        if self.rival.arrives == "broadcast":
            args = (Ref(given), part, end.axis)
        elif self.rival.arrives == "rotate" and part:
            assert before is not None
            args = (Ref(before), 1, end.axis)
        elif self.rival.arrives == "skew":
            (other,) = (e.axis for e in self.stretch_of.arriving if e.axis != end.axis)
            args = (Ref(before), -1, end.axis) if before else (Ref(given), RankIndex(((other, -1),)), end.axis)
        else:
            return
        op = "collective.broadcast" if self.rival.arrives == "broadcast" else "collective.rotate"
        self.under_way[end.value, part] = self._emit(like, op, args, name, meta)

    def half_of(self, end: _End) -> Node:
        """The collective whose place is taken."""
        first = self.stretch_of.span[0]
        return self.half[end.collective - first]

    def _arrive(self, end: _End, part: int) -> None:
        if part == 0:
            self._start(end, 0)
        if (end.value, part) not in self.under_way:
            self.part_names[end.value, part] = end.given
            return
        started = self.under_way[end.value, part]
        name = self._name(end.value, part)
        self.part_names[end.value, part] = self._emit(
            self.half_of(end), WAIT, (Ref(started),), name, self.metas[end.given]
        )

    # --- what leaves

    def _leave(self, end: _End, part: int) -> None:
        like, value = self.half_of(end), self.part_names[end.given, part]
        meta, reduction = self.metas[value], like.args[1]
        if self.rival.leaves == "broadcast":
            onto = (Ref(value), reduction, part, end.axis)
            name = self._name(f"{end.value}_reduce", part)
            self.under_way[end.value, part] = self._emit(like, "collective.reduce", onto, name, meta)
            return
        if part:
            started = self.under_way[end.value, part - 1]
            came = self._emit(like, WAIT, (Ref(started),), self._name(f"{end.value}_came", part), meta)
            last = part == self.region.parts - 1
            name = end.value if last else self._name(f"{end.value}_sum", part)
            value = self._emit(like, "aten.add.Tensor", (Ref(came), Ref(value)), name, meta)
        if part < self.region.parts - 1:
            name, args = self._name(f"{end.value}_rotate", part), (Ref(value), 1, end.axis)
            self.under_way[end.value, part] = self._emit(like, "collective.rotate", args, name, meta)

    def _left(self, end: _End) -> None:
        if self.rival.leaves != "broadcast":
            return
        like, n = self.half_of(end), self.region.parts
        meta = self.metas[end.value]
        came = tuple(
            Ref(self._emit(like, WAIT, (Ref(self.under_way[end.value, p]),), self._name(f"{end.value}_came", p), meta))
            for p in range(n)
        )
        wide = TensorMeta((n * meta.shape[0], *meta.shape[1:]), meta.dtype)
        together = self._emit(like, "aten.cat.default", (came, 0), self._name(f"{end.value}_all", 0), wide)
        apart = TensorMeta((n, *meta.shape), meta.dtype)
        ranks = self._emit(like, RESHAPE, (Ref(together), apart.shape), self._name(f"{end.value}_ranks", 0), apart)
        self._emit(like, "aten.select.int", (Ref(ranks), 0, RankIndex(((end.axis, 1),))), end.value, meta)

    # --- the order of parts

    def _turns(self) -> tuple[int, int] | None:
        """(axis, constant) where part t is the shard of rank (this one + constant - t) mod n."""
        if self.rival.arrives != "rotate":
            return None
        if self.stretch_of.arriving:
            return self.stretch_of.arriving[0].axis, 0
        return self.stretch_of.leaving[0].axis, -1

    def _turn(self, like: Node, value: str, cut: Split, name: str) -> str:
        """The shards of a value in the order of parts, or back: it is the same."""
        turns = self._turns()
        assert turns is not None
        (axis, constant), n = turns, self.region.parts
        meta = self.metas[value]
        above, below = meta.shape[: cut.dim], meta.shape[cut.dim + 1 :]
        blocks = TensorMeta((*above, meta.shape[cut.dim] // cut.period, n, cut.period // n, *below), meta.dtype)
        at = cut.dim + 1
        wide = self._emit(like, RESHAPE, (Ref(value), blocks.shape), self._name(f"{name}_blocks", 0), blocks)
        back = self._emit(like, "aten.flip.default", (Ref(wide), (at,)), self._name(f"{name}_flip", 0), blocks)
        by = (RankIndex(((axis, 1),), constant + 1),)
        moved = self._emit(like, "aten.roll.default", (Ref(back), by, (at,)), self._name(f"{name}_roll", 0), blocks)
        return self._emit(like, RESHAPE, (Ref(moved), meta.shape), name, meta)

    def _source(self, reader: Node, value: str, cut: Split) -> str:
        if self._turns() is not None:
            if value not in self.turned:
                self.turned[value] = self._turn(reader, value, cut, self._name(f"{value}_turned", 0))
            return self.turned[value]
        if self.rival.arrives == "skew":
            raise Refused(f"{value} has no shards that come")
        return value

    def _together(self, instruction: Node, value: str, full: str) -> None:
        cut = self.region.cuts[value]
        if isinstance(cut, Split) and self.rival.arrives == "skew":
            raise Refused(f"{value} is needed unsplit, and its shards come in an order of each rank's own")
        if not isinstance(cut, Split) or self._turns() is None:
            super()._together(instruction, value, full)
            return
        parts = self._name(f"{value}_parts", 0)
        super()._together(instruction, value, parts)
        self._turn(instruction, parts, cut, full)


RIVALS: Mapping[str, Write] = {"wang": wang, "summa": summa, "cannon": cannon}
"""Wherever they can be written, quicker or not."""


def register(name: str) -> None:
    """One of them, as a lowering that plans take where it is quicker."""
    autopar.register_lowering(
        autopar.Lowering(
            name=name,
            applies="products next to gathers and reductions along one mesh axis or two",
            writes=RIVALS[name].__doc__ or "",
            costs="a message for each shard, and products of shards",
            adopt=where_quicker(RIVALS[name]),
        )
    )


def main() -> None:
    sys.path[0] = str(Path(__file__).parents[1] / "tests/support")
    from papers import Layer

    with torch.device("meta"):
        model = nn.Sequential(*(Layer(12288, 96) for _ in range(4))).to(torch.bfloat16)
        x = torch.zeros(32, 2048, 12288, dtype=torch.bfloat16)
    first = Planner(model, {"rows": 8, "cols": 8}, (x,), loss_fn=torch.mean, cluster="tpu-v4")
    plan = first.plan(solver="meshslice")
    unsplit = first.writer.written(first.assignment(plan), plan.bucket_bytes, form="unsplit")
    print(f"nothing in parts: {timeline(unsplit, first.cluster).seconds * 1e3:.3f} ms")
    print(f"slices and chunks, where quicker: {first.timeline(plan).seconds * 1e3:.3f} ms")
    for name, write in RIVALS.items():
        with scoped():
            register(name)
            seconds = first.on(first.mesh, first.cluster).timeline(plan).seconds
        everywhere = timeline(write(unsplit), first.cluster).seconds
        print(f"{name} everywhere: {everywhere * 1e3:.3f} ms; with it in the table: {seconds * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
