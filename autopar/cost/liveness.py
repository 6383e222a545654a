"""Liveness: which values of a program share memory. `memory` counts bytes from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from autopar.ir.emitter import on_meta
from autopar.ir.graph import WAIT, Node, TensorMeta, map_references
from autopar.ir.layout import local_meta
from autopar.ir.program import Program
from autopar.ops import contract
from autopar.ops.host import FROM_HOST, HOST_COPIES
from autopar.ops.prepared import prepared_arguments
from autopar.ops.rules import RULES

from .lifetimes import Line

MOST_OPERATORS = 1 << 16
"""Calls of operators that `PlacementCache` keeps."""


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Where a tensor lies in its memory. The hash, which every operand needs, is computed once."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    hashed: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hashed", hash((self.shape, self.stride, self.offset, self.dtype)))

    def __hash__(self) -> int:
        return self.hashed

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        step = 1
        for size, stride in reversed(list(zip(self.shape, self.stride, strict=True))):
            if size != 1 and stride != step:
                return 0 in self.shape
            step *= size
        return True

    @property
    def span(self) -> tuple[int, int]:
        """First byte, and the byte after the last one."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        end = self.offset + (1 + reach if math.prod(self.shape) else 0)
        return self.offset * self.dtype.itemsize, end * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """On the meta device."""
        extent = self.span[1] // self.dtype.itemsize
        return torch.empty(extent, dtype=self.dtype, device="meta").as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Result:
    """A view of operand `of`, or, where that is None, memory of its own of so many bytes."""

    placed: MemoryPlace
    of: int | None
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """How the results of an operator lie in memory, for given placements of its operands. `copies`: some result has
    memory of its own, and is not just a view."""

    results: tuple[Result | None, ...]
    copies: bool
    operands_bytes: int
    """Of the copies that the kernel needs of operands (`ops.contract`), dropped after it."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacementCache:
    """How values lie in memory, cached for programs that are much alike. Of those that are compiled, a compiler `fuses`
    operators, and what stays within a kernel lies nowhere."""

    operators: ClassVar[dict[tuple[Any, ...], Results]] = {}
    """By an instruction's form, its operands and what its kernel needs of them, which is all that it depends on: cached
    for the process."""
    contiguous: dict[TensorMeta, MemoryPlace] = field(default_factory=dict)
    fuses: bool = False

    def fresh(self, meta: TensorMeta) -> MemoryPlace:
        """A contiguous value in memory of its own."""
        place = self.contiguous.get(meta)
        if place is None:
            stride = torch.empty(meta.shape, device="meta").stride()
            place = self.contiguous[meta] = MemoryPlace(meta.shape, stride, 0, meta.dtype)
        return place

    def results(self, instruction: Node, placed: dict[str, MemoryPlace]) -> Results:
        """How the results of a local operator lie in memory, where its operands are `placed`, as they are then, too."""
        operands = tuple([placed[name] for name in instruction.inputs])
        key: tuple[Any, ...] = (instruction.form, operands)
        if instruction.op not in RULES.rows:  # a user may register it again, with other strides that its kernel needs
            key = (*key, *contract.needed_by(instruction.op).items())
        known = self.operators.get(key)
        if known is None:
            if len(self.operators) >= MOST_OPERATORS:
                self.operators.clear()
            results, operands_bytes = _run(instruction, operands)
            copies = any(result is not None and result.of is None for result in results)
            known = self.operators[key] = Results(results, copies, operands_bytes)
        for name, result in zip(instruction.outputs, known.results, strict=True):
            if name and result is not None:
                placed[name] = result.placed
        return known


@dataclass(eq=False)
class Memory:
    """Who shares memory in a program: every value has storages, by number, of so many bytes. A collective under way
    has that of its result, which comes first, and those that it holds until it is waited for."""

    bytes: list[int] = field(default_factory=list)
    storages: dict[str, tuple[int, ...]] = field(default_factory=dict)
    placed: dict[str, MemoryPlace] = field(default_factory=dict)
    unnamed: dict[int, int] = field(default_factory=dict)
    """Node, by its id -> bytes of its results that have no name, and of copies of its operands."""
    cache: PlacementCache = field(default_factory=PlacementCache)

    @staticmethod
    def of(program: Program, instructions: Sequence[Node], cache: PlacementCache | None = None) -> Memory:
        """Of the inputs and the results of these instructions; no all-reduce works in place."""
        memory = Memory(cache=cache or PlacementCache())
        for i in program.inputs:
            memory.give(i.name, local_meta(i.meta, i.layout, program.mesh))
        for instruction in instructions:
            memory.run(program, Line(instruction, False, ()), by_parts=False)
        return memory

    def give(self, name: str, meta: TensorMeta) -> None:
        """Place a contiguous value in memory of its own."""
        self.placed[name] = self.cache.fresh(meta)
        self.storages[name] = (self.new(meta.bytes),)

    def new(self, size: int) -> int:
        self.bytes.append(size)
        return len(self.bytes) - 1

    def run(self, program: Program, line: Line, *, by_parts: bool) -> None:
        """Place the results of an instruction. `by_parts`: a reduce-scatter receives all parts before it adds them."""
        instruction = line.instruction
        if instruction.op == WAIT:
            (name,), (started,) = instruction.outputs, instruction.inputs
            self.placed[name] = self.placed[started]
            self.storages[name] = self.storages[started][:1]
        elif instruction.collective:
            self._collective(program, line, by_parts)
        elif instruction.op in HOST_COPIES:
            (name,), (source,) = instruction.outputs, instruction.inputs
            on_device = program.metas[name].bytes * (instruction.op == FROM_HOST)
            self.placed[name] = self.placed[source]
            self.storages[name] = (self.new(on_device), *self.storages[source])
        else:
            self.local(instruction)

    def local(self, instruction: Node) -> None:
        """Place the results of a local op."""
        results = self.cache.results(instruction, self.placed)
        inside = results.operands_bytes
        for name, result in zip(instruction.outputs, results.results, strict=True):
            if result is None:
                continue
            if not name:
                inside += result.bytes
            else:
                viewed = None if result.of is None else self.storages[instruction.inputs[result.of]]
                self.storages[name] = viewed or (self.new(result.bytes),)
        if inside:
            self.unnamed[id(instruction)] = inside

    def _collective(self, program: Program, line: Line, by_parts: bool) -> None:
        instruction = line.instruction
        source, (name,) = instruction.inputs[0], instruction.outputs
        kind, meta = instruction.collective, program.metas[instruction.outputs[0]]
        if kind == "all_reduce" and line.in_place:
            self.placed[name], (result, *held) = self.placed[source], self.storages[source]
        else:
            self.placed[name], result, held = self.cache.fresh(meta), self.new(meta.bytes), list(self.storages[source])
        given = program.metas[source]
        if kind in ("all_reduce", "reduce_scatter"):
            if instruction.args[1] != "sum" and given.dtype.is_floating_point:
                held.append(self.new(given.numel * max(4, given.dtype.itemsize)))  # as numbers in their order
            elif kind == "reduce_scatter" and by_parts:
                held.append(self.new(given.bytes))
        self.storages[name] = (result, *held)


def _run(instruction: Node, operands: Sequence[MemoryPlace]) -> tuple[tuple[Result | None, ...], int]:
    """The op on such operands, run on the meta device, and the bytes of the copies that its kernel needs of them."""
    given = [placed.empty() for placed in operands]
    feed = iter(given)
    args, kwargs = map_references((instruction.args, instruction.kwargs), lambda _: next(feed))
    storages = {x.untyped_storage()._cdata: i for i, x in enumerate(given)}
    positional, named = prepared_arguments(instruction.op, list(args), dict(kwargs))
    outputs = on_meta(instruction.op, tuple(positional), tuple(named.items()))
    results: list[Result | None] = []
    for x in outputs:
        if x is None:
            results.append(None)
            continue
        placed = MemoryPlace(tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), x.dtype)
        of = storages.get(x.untyped_storage()._cdata)
        results.append(Result(placed, of, x.untyped_storage().nbytes() if of is None else 0))
    copied = [x for x in _tensors((positional, named)) if x.untyped_storage()._cdata not in storages]
    return tuple(results), sum(x.untyped_storage().nbytes() for x in copied)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among a call's arguments."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [x for item in items for x in _tensors(item)]
