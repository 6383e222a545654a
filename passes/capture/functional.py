"""A recorded step in functional form: no node writes in place, and what is read is what was last written there.

Nodes that touch memory which some node writes run again, on fakes, under `torch.func.functionalize`, and a recorder
writes down what that makes of them. All others stay.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from autopar.ir.graph import Node, ran
from autopar.ir.rewrite import reading

from .recorder import Geometry, Origin, Recorder

Moments = Mapping[int, Iterable[str]]
"""How many nodes have run -> the values that somebody reads then."""


class Functional:
    """The nodes of a record in functional form. `values` are theirs; `at(moment, name)` is the name of what a value
    was at a moment."""

    def __init__(self, record: Recorder, moments: Moments, mode: Any) -> None:
        self.values: Mapping[str, Geometry] = record.values
        self._names: Mapping[str, str] = {}
        self._then: dict[tuple[int, str], str] = {}
        self._same: Mapping[str, str] = {}
        made = self._rewritten(record, moments, mode) if record.writes else [[node] for node in record.nodes]
        self.nodes: Sequence[Node] = [*itertools.chain.from_iterable(made)]
        if record.again:
            again = {node.name: run for number, run in record.again.items() for node in made[number] if node.name}
            self.nodes, self._same = record.without_recomputed(self.nodes, again, self.values)

    def at(self, moment: int, name: str) -> str:
        name = self._then.get((moment, name), self._names.get(name, name))
        return self._same.get(name, name)

    def _rewritten(self, record: Recorder, moments: Moments, mode: Any) -> list[list[Node]]:
        """What becomes of each node."""
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
                    ran(node, here)
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
        record.constants |= replay.constants
        record.lines |= replay.lines
        return [replay.made[i] if i in replay.made else [reading(node, names)] for i, node in enumerate(record.nodes)]


class _Replay(Recorder):  # type: ignore[no-untyped-call]
    """Records what functionalization makes of the nodes that it is told of."""

    def __init__(self, record: Recorder) -> None:
        super().__init__()
        self.values |= record.values
        self._counts |= record._counts
        self.record, self.current = record, Origin()
        self.made: dict[int, list[Node]] = {}
        self.looked: list[str] = []
        self.ended, self._looking = False, False

    @property
    def is_again(self) -> bool:
        return self.current.again is not None

    def stand_in(self, name: str, value: Geometry, mode: Any) -> torch.Tensor:
        """A tensor like a value that is there before, under its name."""
        with mode:
            fake = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
        self._call(fake, name)
        return fake

    def begin(self, number: int, node: Node) -> None:
        self.made[number] = self.nodes = []
        line, again = self.record.lines.get(node.name), self.record.again.get(number)
        self.current = Origin(node.module, node.sequence, node.region, node.backward, line, again)

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
        # what was written in place may lie in memory in another way than it did
        call = torch.reshape if func is torch.ops.aten.view.default else func
        result = call(*args, **(kwargs or {}))
        if not self.ended and func is not torch.ops.prim.device.default:
            self.note(func, args, kwargs or {}, result)
        return result
