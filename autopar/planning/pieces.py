"""What lies between the places where a program can be cut into stages: seconds and bytes, before anything is cut."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from autopar.ir.graph import WAIT
from autopar.ir.layout import local_meta
from autopar.ir.program import LAYOUT, Program
from autopar.ops.kinds import ADD
from autopar.passes.lower.hold import gathered
from autopar.passes.lower.stages import Kinds, unstacked
from autopar.passes.space.space import Space
from autopar.solve.cuts import Chain
from autopar.solve.schedules import StageCost

PLACES = 400
"""The most places where cuts are searched: beyond, those where the least crosses."""


@dataclass(frozen=True, kw_only=True)
class ForwardPieces:
    """The pieces of a program, each from a place where it may be cut to the next. `names` are the operators with which
    they begin, `positions` where these stand in forward. Seconds are those of a micro-batch, but for what is done
    `once` a step; bytes are those that a stage has at rest, holds of a micro-batch, and keeps of it between the
    gradient of inputs and that of weights; and what `crosses` the beginning of a piece."""

    names: tuple[str, ...]
    positions: tuple[int, ...]
    forward: Sequence[float]
    inputs: Sequence[float]
    weights: Sequence[float]
    once: Sequence[float]
    rest: Sequence[float]
    held: Sequence[float]
    kept: Sequence[float]
    crosses: Sequence[float]

    def chain(self, micro_batches: int) -> Chain:
        parts = zip(self.forward, self.inputs, self.weights, self.once, strict=True)
        return Chain(
            seconds=[micro_batches * (f + i + w) + once for f, i, w, once in parts],
            rest_bytes=self.rest,
            held_bytes=self.held,
            crosses=self.crosses,
        )

    def costs(self, cuts: Sequence[int]) -> tuple[list[StageCost], list[float]]:
        """What the stages cost that begin with these pieces, and the seconds of what each does once."""
        costs, once = [], []
        for number, (a, b) in enumerate(pairwise((0, *cuts, len(self.names)))):
            forward, inputs, weights, rest, held, kept, of_step = (
                sum(values[a:b])
                for values in (self.forward, self.inputs, self.weights, self.rest, self.held, self.kept, self.once)
            )
            if number == 0:  # nobody needs its gradient of inputs
                inputs, weights, kept = 0.0, inputs + weights, held
            costs.append(
                StageCost(
                    forward_seconds=forward, inputs_seconds=inputs, weights_seconds=weights,
                    held_bytes=held, kept_bytes=min(kept, held), rest_bytes=rest,
                )
            )  # fmt: skip
            once.append(of_step)
        return costs, once


def pieces(
    program: Program,
    seconds: Mapping[str, float],
    space: Space,
    held: Collection[str],
    wanted: Collection[int] = (),
) -> ForwardPieces:
    """The pieces of a program whose first axis is time, given the seconds of its operators by their first results, and
    the parameters that are held as they are gathered. Places `wanted` are among those where they begin. Raises
    ValueError as `stages.staged`."""
    kinds = Kinds(unstacked(program))
    return _Pieces(kinds, seconds, space, gathered(kinds.program, held) - kinds.varying).pieces(wanted)


@dataclass(eq=False)
class _Pieces:
    """Figures by the place in forward that an operator stands at, or that its part of backward belongs to: the last one
    that has all of forward that it reads, up to where its gradients are from, or that of the parameter whose gradient
    it is."""

    kinds: Kinds
    seconds: Mapping[str, float]
    space: Space
    gathered: Collection[str]
    """What is gathered once, before the first micro-batch."""
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    """Value that a parameter leads to -> the first and the last place of forward that makes or reads it."""
    back: dict[str, int] = field(default_factory=dict)
    """Value of backward -> its place."""

    def __post_init__(self) -> None:
        kinds, self.program, self.metas = self.kinds, self.kinds.program, self.kinds.program.metas
        forward = self.program.forward
        self.size = len(forward)
        for place in reversed(range(self.size)):
            node = forward[place]
            results = [name for name in node.outputs if name in kinds.trained]
            own = kinds.is_of_stage(node)
            here = [place] if own else [at[name] for name in results for at in (self.first, self.last) if name in at]
            for name in (*node.inputs, *(results if own else ())) if here else ():
                if name in kinds.trained:
                    self.first[name] = min(self.first.get(name, self.size), *here)
                    self.last[name] = max(self.last.get(name, 0), *here)
        leading = kinds.leading({name: self.first.get(name, 0) for name in kinds.parameters.values()})
        for node in self.program.backward:
            read = [kinds.viewed(name) for name in node.inputs]
            behind = [self.back[name] for name in read if name in self.back]
            saved = [name for name in read if name in self.last and not kinds.is_late(name)]
            place = min([*behind, *(self.last[name] for name in saved)], default=self.size - 1)
            home = leading.get(node.name, self.size)
            if home < place and all(self.first[name] <= home for name in saved):
                place = home
            self.back |= dict.fromkeys(filter(None, node.outputs), place)

    def pieces(self, wanted: Collection[int]) -> ForwardPieces:
        kinds, zero = self.kinds, [0.0] * self.size
        forward, once, rest, held, change = [*zero], [*zero], [*zero], [*zero], [*zero, 0.0]
        for place, node in enumerate(self.program.forward):
            at = place if kinds.is_of_stage(node) else self.first.get(node.name, place)
            (once if node.name in self.gathered else forward)[at] += self.seconds.get(node.name, 0.0)
            if node.name in self.gathered and node.op not in LAYOUT | {WAIT}:
                rest[at] += self.metas[node.name].bytes
            for name in filter(None, node.outputs) if kinds.is_of_stage(node) else ():
                change[place + 1] += self.metas[name].bytes
                change[self.last.get(name, place) + 1] -= self.metas[name].bytes
        for base in {kinds.viewed(name) for name in self.program.saved} & kinds.varying & self.first.keys():
            held[self.first[base]] += self.metas[base].bytes
        mesh, trained = self.program.mesh, self.program.trained
        for i in self.program.inputs:
            if i.role == "parameter":
                own = local_meta(i.meta, i.layout, mesh)
                states = self.space.optimizer.bytes(own) if i.target in trained else 0
                rest[self.first.get(i.name, 0)] += own.bytes + states
        ends = [n for n in self.program.backward if n.name in kinds.tail]
        summed = {name for n in ends for name in n.inputs}.difference(*(n.outputs for n in ends))
        for name in summed:
            rest[self.back.get(name, 0)] += self.metas[name].bytes
        starts = self._starts(list(accumulate(change[:-1])), forward, wanted)
        inputs, weights, kept = [0.0] * len(starts), [0.0] * len(starts), [0.0] * len(starts)
        begins = self._reached(starts)
        late: dict[str, int] = {}
        for node in self.program.backward:
            place, seconds = self.back[node.name], self.seconds.get(node.name, 0.0)
            piece = bisect_right(starts, place) - 1
            if not kinds.is_of_stage(node):
                once[place] += seconds
            elif begins[node.name] < piece:
                inputs[piece] += seconds
            else:
                weights[piece] += seconds
                late |= {kinds.viewed(name): piece for name in node.inputs}
        device = self.space.cluster.device
        for name in summed:
            meta = self.metas[name]
            piece = bisect_right(starts, self.back.get(name, 0)) - 1
            weights[piece] += device.operator_seconds(ADD, [meta, meta], [meta], 0.0)
        for base, piece in late.items():
            kept[piece] += self.metas[base].bytes if base in kinds.varying and base in kinds.trained else 0

        def summed_up(values: Sequence[float]) -> list[float]:
            return [sum(values[a:b]) for a, b in pairwise((*starts, self.size))]

        crossing = list(accumulate(change[:-1]))
        return ForwardPieces(
            names=tuple(self.program.forward[at].serves for at in starts), positions=tuple(starts),
            forward=summed_up(forward), inputs=inputs, weights=weights, once=summed_up(once), rest=summed_up(rest),
            held=summed_up(held), kept=kept, crosses=[crossing[at] for at in starts],
        )  # fmt: skip

    def _starts(self, crossing: Sequence[float], seconds: Sequence[float], wanted: Collection[int]) -> list[int]:
        """Where pieces begin: at the first operator that serves a node of the graph, if a stage computes something of
        that node. What lays values out before it is done where it is read."""
        firsts: dict[str, int] = {}
        for place, node in enumerate(self.program.forward):
            firsts.setdefault(node.serves, place)
        served = {node.serves for node in self.program.forward if self.kinds.is_of_stage(node)}
        places = sorted({firsts[name] for name in served if name and firsts[name]})
        if len(places) > PLACES:
            around = [math.inf, *(crossing[at] for at in places), math.inf]
            dips = [at for k, at in enumerate(places) if around[k] > around[k + 1] <= around[k + 2]]
            places = sorted(sorted(dips, key=lambda at: (crossing[at], at))[:PLACES])
        return sorted({0, *places, *(at for at in wanted if 0 < at < self.size)})

    def _reached(self, starts: Sequence[int]) -> dict[str, int]:
        """Operator of backward -> the first piece that what follows from it belongs to."""
        reached: dict[str, int] = {}
        for node in reversed(self.program.backward):
            after = [
                reached[self.kinds.nodes[k].name]
                for name in node.outputs
                for k in self.kinds.read.get(name, ())
                if self.kinds.nodes[k].name in reached
            ]
            here = [bisect_right(starts, self.back[node.name]) - 1] if self.kinds.is_of_stage(node) else []
            if after or here:
                reached[node.name] = min([*after, *here])
        return reached
