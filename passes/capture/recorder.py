"""The recorder: what a step does, operator by operator, while the model's own Python and autograd's own engine run.

    a call of torch on fakes --Recorder--> Node, with the module, the line and autograd's number that it comes from

The nodes are those of a graph, but that they still write in place, and view in the terms of ATen: `functional` and
`conversion` make a graph of them.
"""

from __future__ import annotations

import builtins
import functools
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from autopar.compat import dispatch
from autopar.compat.dispatch import Again, Watching, annotated, written_by
from autopar.compat.tensors import RECORDED, is_fake, memory_of, value_of
from autopar.ir.graph import Node, Ref, TensorMeta

aten = torch.ops.aten

Line = tuple[CodeType, int]
"""The code of the model that runs, and the number of its line."""


class Origin(NamedTuple):
    """Where a node comes from: see `Node`."""

    module: str = ""
    sequence: int = -1
    region: tuple[int, ...] = ()
    backward: bool = False
    line: Line | None = None
    again: Again | None = None
    """Whether the function of a checkpoint runs again."""


class Geometry(NamedTuple):
    """How a recorded tensor lies in memory; `memory` is the identity of its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    offset: int
    memory: int

    @property
    def meta(self) -> TensorMeta:
        return TensorMeta(self.shape, self.dtype)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return Geometry(tuple(tensor.shape), tensor.dtype, tensor.stride(), int(tensor.storage_offset()), memory_of(tensor))


class Recorder(Watching):  # type: ignore[no-untyped-call]
    """Writes down the operators that run, as nodes. `enter` names the tensors that are there before."""

    without_recomputed: Callable[
        [Sequence[Node], Mapping[str, Again], Mapping[str, Geometry]], tuple[Sequence[Node], Mapping[str, str]]
    ]
    """Of nodes, some of which are of a checkpoint's second run: those without what was computed before, and the names
    that stand for theirs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self.values: dict[str, Geometry] = {}
        self.given: frozenset[str] = frozenset()
        """What was there before the first operator."""
        self.backward = False
        """Whether the step's backward runs."""
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors that the model holds or makes of numbers, and that are neither entered nor recorded."""
        self.lines: dict[str, Line] = {}
        """Where in the model's code values were made."""
        self.writes: dict[int, frozenset[int]] = {}
        """The memory that a node writes in place, by the node's number."""
        self.again: dict[int, Again] = {}
        """Which nodes run since the function of a checkpoint does so again."""
        self.of_data: dict[str, str] = {}
        """Values whose shape or whose operands depend on the data: what the node does, in words."""
        self.earlier: dict[str, str] = {}
        """Values that the recorder of an earlier step has, and their names there."""
        self._by_memory: dict[int, list[str]] = {}
        self._counts: dict[str, int] = {}
        self._real: dict[int, str] = {}  # names of real tensors, by identity
        self._lifted: dict[Any, str] = {}
        # A tensor is not kept: autograd takes a gradient over that nobody else holds, and copies others. Its storage
        # is, lest another take its identity.
        self._kept: list[Any] = []

    # -- names

    @property
    def is_again(self) -> bool:
        """Whether the function of a checkpoint runs again: names beside it are those that they are without."""
        return False

    def enter(self, name: str, tensor: torch.Tensor) -> str:
        """Gives a tensor a name, or one like it that is not taken."""
        name = self._distinct(f"again_{name}" if self.is_again else name)
        self.values[name] = geometry = geometry_of(tensor)
        self._by_memory.setdefault(geometry.memory, []).append(name)
        self._call(tensor, name)
        return name

    def enter_input(self, path: str, name: str, fake: torch.Tensor) -> str:
        """Names the input at this path."""
        return self.enter(name, fake)

    def _call(self, tensor: torch.Tensor, name: str) -> None:
        if is_fake(tensor):
            vars(tensor).setdefault(RECORDED, {})[self] = name
            self._kept.append(tensor.untyped_storage())
        else:
            self._real[id(tensor)] = name
            self._kept.append(tensor)

    def name(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor that was seen."""
        if not is_fake(tensor):
            return self._real.get(id(tensor))
        names: dict[Recorder, str] = vars(tensor).get(RECORDED, {})
        return names.get(self)

    def is_given(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is none that an operator of the step made."""
        name = self.name(tensor)
        return name is None or name in self.given

    def known(self, tensor: torch.Tensor, *, lifted: bool = False) -> str:
        """The name of a tensor, which may be one that nobody recorded. Equal ones that forward makes of numbers
        (`lifted`) are one."""
        name = self.name(tensor)
        return self._unknown(tensor, lifted) if name is None else name

    def _unknown(self, tensor: torch.Tensor, lifted: bool) -> str:
        if is_fake(tensor):
            if before := [*vars(tensor).get(RECORDED, {}).values()]:
                name = self.enter("earlier", tensor)
                self.earlier[name] = before[-1]
                return name
            geometry = geometry_of(tensor)
            there = self._by_memory.get(geometry.memory, ())
            like = next((name for name in there if self.values[name] == geometry), "")
            if like:  # `.data`, and what autograd unpacks, are made without an operator
                name = self.enter("alias", tensor)
                self.nodes.append(Node(op="aten.detach.default", args=(Ref(like),), outputs=(name,)))
                return name
        key = None
        if lifted and tensor.numel() <= _LIFTED_MOST:
            key = value_of(tensor), tensor.dtype, tuple(tensor.shape), tensor.device
            if key in self._lifted:
                self._call(tensor, self._lifted[key])
                return self._lifted[key]
        name = self.enter("constant", tensor)
        self.constants[name] = tensor
        if key is not None:
            self._lifted[key] = name
        return name

    def _distinct(self, base: str) -> str:
        count = self._counts.get(base, int(hasattr(builtins, base) or keyword.iskeyword(base)))
        name = f"{base}_{count}" if count else base
        while name in self.values:
            count += 1
            name = f"{base}_{count}"
        self._counts[base] = count + 1
        return name

    # -- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, args = annotated(func, args)
        result = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, result)
        return result

    def origin(self) -> Origin:
        """Where the operator comes from that runs."""
        return Origin(backward=self.backward)

    def arguments(
        self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...], Sequence[Any]]:
        """The arguments of a call as a node has them, and the numbers among them that depend on data."""
        symbols: list[Any] = []

        def value(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return Ref(self.known(x, lifted=kind.lifts))
            if isinstance(x, (list, tuple)):
                return tuple([value(item) for item in x])
            if isinstance(x, SYMBOLS):
                symbols.append(x)
            elif isinstance(x, _STORAGES):
                raise ValueError(
                    f"{kind.op} reads a tensor's storage, which shards do not have, or bytes that forward loads: use "
                    f"the tensor itself, and load constants in the constructor, into buffers"
                )
            return x

        named = tuple([(key, value(x)) for key, x in kwargs.items()]) if kwargs else ()
        return tuple([value(x) for x in args]), named, symbols

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Node | None:
        """Writes down a call; None for one that makes and writes no tensor."""
        kind = kind_of(func)
        node_args, node_kwargs, symbols = self.arguments(kind, args, kwargs)
        leaves = (result,) if isinstance(result, torch.Tensor) else pytree.tree_leaves(result)
        fresh = False
        outputs: list[str] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                outputs.append("")
                continue
            name = self.name(leaf)
            if name is None:
                fresh, name = True, self.enter(kind.name, leaf)
            outputs.append(name)
        if not fresh and not kind.writes:
            return None
        module, sequence, region, backward, line, again = self.origin()
        node = Node(
            op=kind.op, args=node_args, kwargs=node_kwargs, outputs=tuple(outputs),
            module=module, sequence=sequence, region=region, backward=backward,
        )  # fmt: skip
        if kind.writes:
            self.writes[len(self.nodes)] = frozenset(map(memory_of, written_by(func, args, kwargs)))
        if again is not None:
            self.again[len(self.nodes)] = again
        self.nodes.append(node)
        if line is not None:
            self.lines.update((name, line) for name in outputs if name)
        for leaf, name in zip(leaves, outputs, strict=True):
            if symbols:
                self.of_data[name] = f"{kind.op} reads a number that depends on the data ({symbols[0]})"
            elif name and any(type(size) is not int for size in leaf.shape):
                self.of_data[name] = f"{kind.op} makes a tensor whose shape depends on the data"
        return node


_LIFTED_MOST = 64
"""Constants up to this size are one where they are equal."""

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What an operator is: its name in graphs and the name of what it makes; whether it takes a constant in, takes
    indices, asks for a property of a tensor, reads values, writes in place, gives a tensor the memory of another one,
    or multiplies matrices; whether it gives the same whenever it is given the same; and whether it is an operator, and
    no control flow."""

    op: str
    name: str
    lifts: bool
    indexes: bool
    asks: bool
    reads: bool
    writes: bool
    replaces: bool
    is_product: bool
    is_determined: bool
    is_operator: bool


@functools.cache
def kind_of(func: Any) -> Kind:
    tags = getattr(func, "tags", ())
    is_operator = isinstance(func, torch._ops.OpOverload)
    name = func._schema.name.split("::")[-1] if is_operator else getattr(func, "__name__", str(func))
    return Kind(
        # what is lifted is the constant itself, which nodes must not write
        op=str(aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func),
        name=name.rstrip("_") or name,
        lifts=func in (aten.lift_fresh.default, aten.lift_fresh_copy.default),
        indexes=is_operator and any(str(a.type) == "List[Optional[Tensor]]" for a in func._schema.arguments[1:2]),
        asks=getattr(func, "namespace", "") == "prim",
        reads=torch.Tag.data_dependent_output in tags,
        writes=is_operator and func._schema.is_mutable,
        replaces=is_operator and func._overloadpacket is aten.set_,
        is_product=dispatch.is_product(func),
        is_determined=is_operator
        and func.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in tags
        and not any(word in name for word in ("empty", "resize")),
        is_operator=is_operator,
    )


def line_of(line: Line | None) -> str:
    """A line of the model's code, in words; empty for none."""
    return "" if line is None else f" ({line[0].co_filename}:{line[1]} in {line[0].co_name})"
