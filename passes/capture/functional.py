"""A recorded step in functional form: no node writes in place, and what is read is what was last written there.

Nodes that touch memory which some node writes run again, on fakes, under `torch.func.functionalize`, and a recorder
writes down what that makes of them. All others stay.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from autopar.compat.recording import Again
from autopar.ir.graph import Node, called
from autopar.ir.rewrite import reading
from autopar.ops.normalization import STATISTICS
from autopar.ops.randomness import FILLS, may_draw

from .captured import CaptureError
from .recorder import Geometry, Origin, Recorder

Moments = Mapping[int, Iterable[str]]
"""How many nodes have run -> the values that somebody reads then."""


class Functional:
    """The nodes of a record in functional form. `values` are theirs; `at(moment, name)` is the name of what a value
    was at a moment."""

    def __init__(self, record: Recorder, moments: Moments, mode: Any) -> None:
        self.nodes: Sequence[Node] = record.nodes
        self.values: Mapping[str, Geometry] = record.values
        self._names: Mapping[str, str] = {}
        self._then: dict[tuple[int, str], str] = {}
        self._same: Mapping[str, str] = {}
        again: Sequence[Again | None] = [record.again.get(i) for i in range(len(record.nodes))]
        if record.writes:
            again = self._rewrite(record, moments, mode, again)
        if record.again:
            self.nodes, self._same = once(self.nodes, again, self.values)

    def at(self, moment: int, name: str) -> str:
        name = self._then.get((moment, name), self._names.get(name, name))
        return self._same.get(name, name)

    def _rewrite(
        self, record: Recorder, moments: Moments, mode: Any, again: Sequence[Again | None]
    ) -> Sequence[Again | None]:
        """`again` is of each recorded node, and what is returned of each node in functional form."""
        written = frozenset().union(*record.writes.values())
        is_written = {name for name, value in record.values.items() if value.memory in written}
        touching = [
            i
            for i, node in enumerate(record.nodes)
            if any(name in is_written for name in (*node.inputs, *node.outputs) if name)
        ]
        replay = _Replay(record)
        made, read = set[str](), set[str]()
        for node in (record.nodes[i] for i in touching):
            read.update(name for name in node.inputs if name not in made)
            made.update(name for name in node.outputs if name and name not in read)
        read |= {name for names in moments.values() for name in names if name in is_written} - made
        given = {name: replay.stand_in(name, record.values[name], mode) for name in sorted(read)}
        fresh = sorted(made - is_written)
        then: list[tuple[int, str]] = []

        def run(*values: torch.Tensor) -> list[torch.Tensor]:
            here = dict(zip(given, values, strict=True))
            waiting = iter(touching)
            following = next(waiting, None)
            for moment in sorted({*moments, len(record.nodes)}):
                while following is not None and following < moment:
                    node = record.nodes[following]
                    replay.begin(following, node)
                    leaves = pytree.tree_leaves(called(node, here.__getitem__), is_leaf=lambda x: x is None)
                    here.update((name, leaf) for name, leaf in zip(node.outputs, leaves, strict=True) if name)
                    following = next(waiting, None)
                for name in moments.get(moment, ()):
                    if name in is_written:
                        replay.look(here[name])
                        then.append((moment, name))
            replay.ended = True
            return [here[name] for name in fresh]

        with mode, torch.no_grad(), replay:
            results = torch.func.functionalize(run)(*given.values())
        names = {name: replay.known(result) for name, result in zip(fresh, results, strict=True)}
        self._then = dict(zip(then, replay.looked, strict=True))
        self._names, self.values = names, replay.values
        nodes: list[Node] = []
        following: list[Again | None] = []
        for i, node in enumerate(record.nodes):
            nodes += replay.made.get(i, ()) if i in replay.made or i in replay.began else [reading(node, names)]
            following += [again[i]] * (len(nodes) - len(following))
        self.nodes = nodes
        record.constants |= replay.constants
        record.lines |= replay.lines
        return following


def once(
    nodes: Sequence[Node], again: Sequence[Again | None], values: Mapping[str, Geometry]
) -> tuple[list[Node], dict[str, str]]:
    """Nodes without those of a checkpoint's second run that compute what was computed before, and the names that stand
    for theirs. What the second run does besides, such as counting in a buffer once more, stays.

    Random operators compute the same where the run draws what the first one drew: one by one, in order. Where autograd
    differentiates the second run, its numbers are those of the first. Raises CaptureError where a run draws for other
    values what the first one drew for its own.
    """
    same: dict[str, str] = {}
    alike: dict[str, str] = {}  # values that are equal to an earlier one, for which that stands in keys
    kept: list[Node] = []
    made: dict[Any, list[int]] = {}
    norms: dict[Any, tuple[str, ...]] = {}
    counts: Counter[Any] = Counter()
    for given, run in zip(nodes, again, strict=True):
        node = reading(given, same)
        operands = tuple(alike.get(name, name) for name in node.inputs)
        random = may_draw(node.op)
        key: Any = (node.form, operands)
        if node.op in FILLS:
            key = (node.form, values[operands[0]].meta)
        before = made.setdefault(key, [])
        if run is not None and (run.draws_alike or not random):
            here = [i for i in before if kept[i].region == node.region]
            place = counts[run.run, key]
            counts[run.run, key] += 1
            places = here[place : place + 1] or ([] if random else here or before)
            if places:
                first = kept[places[0]]
                same.update((name, old) for name, old in zip(node.outputs, first.outputs, strict=True) if name)
                if run.is_differentiated and places[0] in here:
                    kept[places[0]] = replace(first, sequence=node.sequence)
                continue
            if random:
                raise CaptureError(
                    f"a checkpoint runs its function again in backward, where {node.op} of "
                    f"{node.module or 'the model'} draws for other values what it drew in forward: leave out of the "
                    f"checkpoint what changes these values (a buffer that it counts up), or pass "
                    f"preserve_rng_state=False"
                )
        if node.op in STATISTICS:
            kept_apart, count = STATISTICS[node.op]
            read = replace(node, args=tuple(None if k in kept_apart else x for k, x in enumerate(node.args)))
            outputs = norms.setdefault((read.form, tuple(alike.get(name, name) for name in read.inputs)), node.outputs)
            alike.update(zip(node.outputs[:count], outputs[:count], strict=True))
        if node.op in _PASSES_ON:
            alike[node.name] = operands[0]
        elif before and not random:
            alike.update(zip(node.outputs, kept[before[0]].outputs, strict=True))
        before.append(len(kept))
        kept.append(node)
    return kept, same


_PASSES_ON = frozenset({"aten.detach.default", "aten.alias.default"})


class _Replay(Recorder):  # type: ignore[no-untyped-call]
    """Records what functionalization makes of the nodes that it is told of."""

    def __init__(self, record: Recorder) -> None:
        super().__init__()
        self.values |= record.values
        self._counts |= record._counts
        self.record, self.current = record, Origin()
        self.began: set[int] = set()
        self.made: dict[int, list[Node]] = {}
        self.looked: list[str] = []
        self.ended, self._looking, self._number = False, False, -1

    @property
    def is_again(self) -> bool:
        return self._number in self.record.again

    def stand_in(self, name: str, value: Geometry, mode: Any) -> torch.Tensor:
        """A tensor like a value that is there before, under its name."""
        with mode:
            fake = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
        self._call(fake, name)
        return fake

    def begin(self, number: int, node: Node) -> None:
        self.began.add(number)
        self._number = number
        self.made[number] = self.nodes = []
        self.current = Origin(node.module, node.sequence, node.region, self.record.lines.get(node.name), node.backward)

    def origin(self) -> Origin:
        return self.current

    def look(self, value: torch.Tensor) -> None:
        """Notes the name of what a value is now."""
        self._looking = True
        torch.ops.aten.clone.default(value)
        self._looking = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._looking and func is torch.ops.aten.clone.default:
            self.looked.append(self.known(args[0]))
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if not self.ended and func is not torch.ops.prim.device.default:
            self.note(func, args, kwargs or {}, result)
        return result
