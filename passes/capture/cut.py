"""Cutting: layers that a record shows to be alike are taken out of it, all but the ends of their run.

    Recorded --cut--> Cut: a shorter record, and what was taken out --joint, convert--> JointGraph --stamp--> all layers

A record lists what every line of the model's Python did: operators, constants, operands, and regions without
gradients or with autocast. Nothing is supposed of a layer whose Python did not run. A run is a stretch of the list
that repeats with a period: node i + period is node i again, with the same operator and constants, values of the same
form, and operands that are one period further, or the same value for all periods, or values of the same form from
before the run that depend on no parameter (a window's mask, or the whole one), or tensors of the model of the same form
that only their own period reads. What autograd makes of equal lists is equal, so it is enough to
differentiate the ends of a run. `stamp` checks the rest in the graph that comes out.
"""

import itertools
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar import compat
from autopar.compat import Recorded, RecordedInput
from autopar.passes.segments.facts import Ints, periodic

from .numbered import entered
from .varied import Slot, read_differently, shows_all

logger = logging.getLogger(__name__)

PERIODS_LEAST = 2
"""Periods that a cut must take out to pay."""
PERIOD_MOST = 65_536
"""Nodes of a layer; longer ones are captured in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRun:
    """Nodes [begin, end) of the record repeat with `period`; [start, start + count * period) were taken out."""

    begin: int
    end: int
    period: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.period

    def __contains__(self, index: int) -> bool:
        return self.begin <= index < self.end


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A shorter record, and what `stamp` reads of the full one. Indices count the calls of the full one.

    `paths` are the nodes' modules, `targets` the tensors of the model that are read in a slot, and `readers` the first
    slot that reads a tensor. `varied` is what is read in slots where periods read different values: the call that
    makes it, and those before it of which it alone is made, the last one first. `order` are all tensors of the model in
    the order of the full record.
    """

    record: Recorded
    runs: tuple[CutRun, ...]
    paths: tuple[str, ...] = field(repr=False)
    targets: Mapping[Slot, str] = field(repr=False)
    readers: Mapping[str, Slot] = field(repr=False)
    varied: Mapping[Slot, tuple[int, ...]] = field(repr=False)
    order: tuple[str, ...] = field(repr=False)


def cut(record: Recorded) -> Cut | None:
    """The record without what repeats, or None where too little does."""
    listing = _Listing(record)
    runs = _runs(listing)
    if not runs:
        logger.info("differentiated in full: no layers of the record are alike")
        return None
    for run in runs:
        layers = " to ".join(listing.paths[i] or "the model" for i in (run.begin, run.end - 1))
        logger.info(
            "%s: %d of %d periods are differentiated once",
            layers,
            run.count + 1,
            (run.end - run.begin) // run.period,
        )
    readers: dict[str, Slot] = {}
    for slot, target in listing.targets.items():
        readers.setdefault(target, slot)
    return Cut(
        record=_shortened(listing, runs),
        runs=tuple(runs),
        paths=tuple(listing.paths),
        targets=listing.targets,
        readers=readers,
        varied={
            slot: listing.made_of(value)
            for run in runs
            for slot, value in read_differently(listing.operands, run.begin, run.end, run.period).items()
        },
        order=tuple(i.target.removeprefix("model.") for i in record.inputs if i.target),
    )


# ---- the calls of a record -------------------------------------------------------------------------


class _Listing:
    """The calls of a record as a list: `labels[i]` is equal for calls of one operator with equal constants and values
    of the same form, `operands[i]` are its operands: the index of a call or a placeholder. `readers[j]` are the
    calls that read the value of call j; the results of the record count as a last one."""

    def __init__(self, record: Recorded) -> None:
        self.record = record
        self.nodes = [node for node in record.graph.nodes if node.op == "call_function"]
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.given = {given.node: given for given in record.inputs}
        numbers: dict[Hashable, int] = {}
        first = entered([compat.region_of(node) for node in self.nodes])
        labels = [(_label(node, record.module), *extra) for node, extra in zip(self.nodes, first, strict=True)]
        self.labels: Ints = np.array([numbers.setdefault(label, len(numbers)) for label in labels], dtype=np.int64)
        self.operands = [[self._operand(n) for n in _operands(node)] for node in self.nodes]
        self.paths = [(compat.module_path(node) or "").removeprefix("model").removeprefix(".") for node in self.nodes]
        self.readers: list[list[int]] = [[] for _ in self.nodes]
        self.reading: dict[str, list[int]] = {}
        self.targets: dict[Slot, str] = {}
        for i, operands in enumerate(self.operands):
            for slot, operand in enumerate(operands):
                if isinstance(operand, int):
                    self.readers[operand].append(i)
                elif operand is not None and operand.target:
                    self.reading.setdefault(operand.target, []).append(i)
                    self.targets[i, slot] = operand.target.removeprefix("model.")
        self.untrained = [False] * len(self.nodes)
        """Of calls whose values depend on inputs, buffers and constants alone."""
        for i, operands in enumerate(self.operands):
            self.untrained[i] = all(
                self.untrained[a] if isinstance(a, int) else a is not None and a.kind != "parameter" for a in operands
            )
        for node in record.graph.output_node().all_input_nodes:
            if node in self.index:
                self.readers[self.index[node]].append(len(self.nodes))
            elif node in self.given and self.given[node].target:
                self.reading.setdefault(self.given[node].target, []).append(len(self.nodes))

    def made_of(self, index: int) -> tuple[int, ...]:
        """A call, the one whose value is all that it reads, and so on."""
        calls = [index]
        while len(self.operands[calls[-1]]) == 1 and isinstance(before := self.operands[calls[-1]][0], int):
            calls.append(before)
        return tuple(calls)

    def _operand(self, node: fx.Node) -> int | RecordedInput | None:
        return self.index[node] if node in self.index else self.given.get(node)


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes in a call's arguments, in order, repeats included, without regions, which are a part of the label."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), nodes.append)
    return [n for n in nodes if n.op != "get_attr"]


def _label(node: fx.Node, module: torch.nn.Module) -> Hashable:
    if compat.is_recorded_function(node):
        return ("a function's own backward", id(node))  # its Python runs when the record is differentiated
    form = _form(node.meta.get("val"))
    return node.target, _constants(node.args, module), _constants(dict(node.kwargs), module), form


_Constant = (int, float, complex, str, bytes, type(None))


def _constants(value: Any, module: torch.nn.Module) -> Hashable:
    """An argument without its operands, such that equal ones mean the same."""
    if isinstance(value, fx.Node):
        return _region(getattr(module, str(value.target))) if value.op == "get_attr" else "operand"
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(_constants(item, module) for item in value))
    if isinstance(value, dict):
        return ("dict", *((key, _constants(item, module)) for key, item in value.items()))
    if isinstance(value, _Constant):
        return type(value).__name__, repr(value)
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    return "object", id(value)


def _region(value: Any) -> Hashable:
    """What a region of a record does, from its own arguments to its results."""
    if not isinstance(value, fx.GraphModule):
        return "object", id(value)
    place = {node: i for i, node in enumerate(value.graph.nodes)}
    return tuple(
        (
            node.op,
            str(node.target) if node.op == "placeholder" else _label(node, value),
            tuple(place[n] for n in _operands(node)),
        )
        if node.op in ("placeholder", "call_function", "output")
        else ("get_attr", _region(getattr(value, str(node.target))))
        for node in value.graph.nodes
    )


def _form(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        # as text, in which sizes that depend on data have names
        return str(tuple(value.shape)), str(value.stride()), value.dtype, str(value.device)
    if isinstance(value, (tuple, list)):
        return tuple(_form(item) for item in value)
    return type(value).__name__, repr(value)


# ---- runs ------------------------------------------------------------------------------------------


def _runs(listing: _Listing) -> list[CutRun]:
    """Runs that do not overlap, the longest first, in the order of the record."""
    runs: list[CutRun] = []
    candidates = [
        (run.period - run.length, run.period, run.start, run.stop - run.period)
        for run in periodic(listing.labels)
        if run.period <= PERIOD_MOST and run.length >= (PERIODS_LEAST + 2) * run.period
    ]
    for _, period, low, high in sorted(candidates):
        inside = [(low, high)]
        for run in runs:
            inside = [
                piece
                for a, b in inside
                for piece in ((a, min(b, run.begin - period)), (max(a, run.end), b))
                if piece[1] - piece[0] >= (PERIODS_LEAST + 1) * period
            ]
        for a, b in inside:
            runs += _runs_within(listing, period, a, b)
    return sorted(runs, key=lambda run: run.begin)


def _runs_within(listing: _Listing, period: int, low: int, high: int) -> Iterator[CutRun]:
    """The runs among nodes [low, high + period), whose labels repeat."""
    kinds = [_kinds(listing, i, period) for i in range(low, high)]
    begin = low
    for i in range(low, high + 1):
        fits = i < high and kinds[i - low] is not None
        steady = fits and (i - period < begin or kinds[i - low] == kinds[i - low - period])
        if not steady:
            yield from _cuts_within(listing, period, begin, i + period)
            # what does not fit with the period before it may be the first of a run
            begin = i if fits else i + 1


def _kinds(listing: _Listing, i: int, period: int) -> tuple[str, ...] | None:
    """How the operands of node i + period follow from those of node i; None where they do not."""
    kinds: list[str] = []
    for a, b in zip(listing.operands[i], listing.operands[i + period], strict=True):
        if isinstance(a, int) and isinstance(b, int):
            if b - a == period:
                kinds.append("produced")
            elif a == b or _varies(listing, a, b):
                kinds.append("shared")
            else:
                return None
        elif isinstance(a, RecordedInput) and isinstance(b, RecordedInput):
            if a.target == b.target and a.node is b.node:
                kinds.append("shared")
            elif a.target and b.target and _alike(a, b):
                kinds.append("shared" if a.target == b.target else "own")
            else:
                return None
        else:
            return None
    return tuple(kinds)


def _varies(listing: _Listing, a: int, b: int) -> bool:
    """Whether one period may read one of these values, and another the other, if both are from before the run."""
    forms = [_form(listing.nodes[i].meta.get("val")) for i in (a, b)]
    return listing.untrained[a] and listing.untrained[b] and forms[0] == forms[1]


def _alike(a: RecordedInput, b: RecordedInput) -> bool:
    assert a.tensor is not None and b.tensor is not None
    return (
        a.kind == b.kind
        and type(a.tensor) is type(b.tensor)
        and ((_form(a.tensor), a.tensor.requires_grad) == (_form(b.tensor), b.tensor.requires_grad))
    )


def _cuts_within(listing: _Listing, period: int, begin: int, end: int) -> Iterator[CutRun]:
    """What can be taken out of the nodes [begin, end), which repeat: one run between any two nodes whose values
    something beside the run reads."""
    if end - begin < (PERIODS_LEAST + 2) * period:
        return
    marks = [j for j in range(begin, end - period) if any(reader >= end for reader in listing.readers[j])]
    for low, high in itertools.pairwise([begin - 1, *marks, end]):
        run = _between(listing, period, low + 1, high)
        if run is not None:
            yield run


def _between(listing: _Listing, period: int, begin: int, end: int) -> CutRun | None:
    """The run that takes most out of nodes [begin, end), at the cut that the fewest values cross."""
    own = _own(listing, period, begin, end)
    if not own:
        return None
    straddled = np.zeros(end - begin + 1, dtype=np.int64)  # at a cut before node begin + c
    for target in own:
        reading = [i for i in listing.reading[target] if begin <= i < end]
        straddled[min(reading) + 1 - begin : max(reading) + 1 - begin] += 1
    crossing = np.zeros(end - begin + 1, dtype=np.int64)
    for j in range(begin, end):
        last = min(max(listing.readers[j], default=j), end)
        crossing[j + 1 - begin : last + 1 - begin] += 1
    varied = read_differently(listing.operands, begin, end, period)
    if any(value >= begin for value in varied.values()):
        return None
    best: tuple[int, int, int] | None = None
    for ahead in range(1, (end - begin) // period):
        for start in range(begin + ahead * period, min(begin + (ahead + 1) * period, end)):
            count = (end - period - start) // period
            while count >= PERIODS_LEAST and straddled[start + count * period - begin]:
                count -= 1
            if count < PERIODS_LEAST or straddled[start - begin]:
                continue
            if not shows_all(varied, start, start + count * period, period):
                continue
            if best is None or (-count, crossing[start - begin]) < (-best[1], best[2]):
                best = (start, count, int(crossing[start - begin]))
        if best is not None:
            break
    if best is None:
        return None
    run = CutRun(begin=begin, end=end, period=period, start=best[0], count=best[1])
    for target in own:
        reading = listing.reading[target]
        if any(run.start <= i < run.stop for i in reading) and not all(run.start <= i < run.stop for i in reading):
            return None
    return run


def _own(listing: _Listing, period: int, begin: int, end: int) -> set[str]:
    """The tensors that single periods own; empty where they do not follow from period to period one by one."""
    later: dict[str, str] = {}
    for i in range(begin, end - period):
        for a, b in zip(listing.operands[i], listing.operands[i + period], strict=True):
            if not isinstance(a, RecordedInput) or not isinstance(b, RecordedInput) or a.target == b.target:
                continue
            if later.setdefault(a.target, b.target) != b.target:
                return set()
    if len(set(later.values())) != len(later):
        return set()
    return {*later, *later.values()}


# ---- the shorter record ----------------------------------------------------------------------------


def _shortened(listing: _Listing, runs: Sequence[CutRun]) -> Recorded:
    """The record without the nodes of the runs that are taken out. What read a value of theirs reads the one that
    stands for it, whole periods earlier."""
    record = listing.record
    gone = {i: run for run in runs for i in range(run.start, run.stop)}
    unread = {
        target for target, reading in listing.reading.items() if all(i in gone for i in reading)
    }  # a tensor that nothing reads stays, as it does in full
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def stands_for(node: fx.Node) -> fx.Node:
        index = listing.index.get(node)
        if index is None or index not in gone:
            return copies[node]
        return copies[listing.nodes[index - gone[index].count * gone[index].period]]

    for node in record.graph.nodes:
        index = listing.index.get(node)
        if index in gone or (node in listing.given and listing.given[node].target in unread):
            continue
        copies[node] = graph.node_copy(node, stands_for)
        if index is not None:
            compat.set_place(copies[node], index)
    inputs = tuple(replace(given, node=copies[given.node]) for given in record.inputs if given.node in copies)
    return replace(record, graph=graph, inputs=inputs)
