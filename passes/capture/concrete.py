"""Concrete values of a forward on fakes: those that depend on inputs and constants alone.

A fake has no values. Operators whose operands are all concrete are noted, and run on real tensors once Python asks for
a value: a number, or how many elements a mask picks. What depends on an input, which the next call may change, is
pinned: the program is right for calls in which everything that was read comes out the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree

from autopar import compat

from .looks import line_of_model

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor in the arguments of a call."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedCall:
    """An operator and the slots of its operands and outputs. A call that reads has the leaves of its result in `read`,
    and in `line` where the model's code asked."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int | None, ...] = ()
    given: tuple[int, ...] = ()
    writes: frozenset[int] = frozenset()
    """The memory that it writes."""
    read: tuple[Any, ...] | None = None
    line: str = ""

    def run(self, values: dict[int, torch.Tensor]) -> Any:
        """Its result on these tensors, by slot, to which it adds its own outputs."""

        def filled(leaf: Any) -> Any:
            return values[leaf.number] if isinstance(leaf, Slot) else leaf

        args, kwargs = pytree.tree_map(filled, (self.args, dict(self.kwargs)))
        result = self.func(*args, **kwargs)
        for slot, leaf in zip(self.outputs, pytree.tree_leaves(result), strict=False):
            if slot is not None:
                values[slot] = leaf
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """What Python read of inputs while a model was captured, and how it is computed of them."""

    calls: tuple[NotedCall, ...] = ()
    slots: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """By the path of an input."""

    def __bool__(self) -> bool:
        return bool(self.slots)

    def __str__(self) -> str:
        lines = list(dict.fromkeys(call.line for call in self.calls if call.read is not None))
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        return f"values of {', '.join(self.slots)}{lines[0] if lines else ''}{more}"

    def differs(self, inputs: Mapping[str, torch.Tensor]) -> NotedCall | None:
        """The first that reads something else of these inputs, by path."""
        with compat.unmodified():
            values = {slot: inputs[path].detach() for path, slot in self.slots.items()}
            if any(call.writes for call in self.calls):
                values = {slot: value.clone() for slot, value in values.items()}
            for call in self.calls:
                leaves, read = pytree.tree_leaves(call.run(values)), call.read
                if read is not None and not (len(leaves) == len(read) and all(map(same_value, leaves, read))):
                    return call
        return None


def same_value(a: Any, b: Any) -> bool:
    """Whether two constants or tensors are one to a program, bit by bit: NaN is NaN, 0.0 is not -0.0, and 1 is not
    True."""
    if type(a) is not type(b):
        return False
    if not isinstance(a, torch.Tensor):
        return repr(a) == repr(b) if isinstance(a, float | complex) else bool(a == b)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    one, other = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, other)


@dataclass(frozen=True, slots=True)
class _ConcreteTensor:
    fake: torch.Tensor
    slot: int
    memory: int


class ConcreteValues(compat.Watching):
    """Notes the operators of a forward whose operands are concrete. `inputs` are its fakes, by path, each with the
    tensor that it stands for. Raises WritesReal before an operator writes a real tensor: while a model is traced,
    operators that are given real tensors alone run."""

    def __init__(self, inputs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[NotedCall] = []
        self.concrete: dict[int, _ConcreteTensor] = {}
        self.forgotten: list[torch.Tensor] = []  # alive, lest another take its identity
        self.memory: dict[int, int] = {}  # by slot
        self.devices: dict[int, torch.device] = {}  # by slot
        self.values: dict[int, torch.Tensor] = {}  # of what nobody writes
        self.paths: dict[int, tuple[str, torch.Tensor]] = {}  # by slot
        self.valued: set[int] = set()
        """The memory of real tensors whose numbers became Python's."""
        self.unread: list[tuple[str, tuple[str, ...]]] = []
        """Lines that ask for a value that is not concrete, each with the inputs that were given without values, if that
        is why."""
        for path, (fake, source) in inputs.items():
            self.paths[self._slot(fake)] = path, source

    # -- noting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind.asks:
            return func(*args, **kwargs)
        if kind.reads:
            number = self.read(func, args, kwargs)
            if number is not NotImplemented:
                return number
        written = compat.written_by(func, args, kwargs)
        for x in written:
            if compat.is_real(x):
                raise compat.WritesReal(str(func), x)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result, kind, written)
        return result

    def _note(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, kind: _Kind, written: Sequence[torch.Tensor]
    ) -> None:
        tensors = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        if not kind.is_determined or not all(map(self.is_concrete, tensors)) or _is_symbolic((args, kwargs)):
            # a higher-order operator may write what it is given
            for x in written if isinstance(func, torch._ops.OpOverload) else tensors:
                self._forget(x)
            return
        leaves = pytree.tree_leaves(result)
        if not any(isinstance(leaf, torch.Tensor) and compat.is_fake(leaf) for leaf in leaves):
            return
        if any(isinstance(leaf, torch.Tensor) and _is_symbolic(tuple(leaf.shape)) for leaf in leaves):
            return
        call = self._call(func, args, kwargs)
        outputs = tuple(self._slot(x) if isinstance(x, torch.Tensor) and compat.is_fake(x) else None for x in leaves)
        writes = frozenset(compat.memory_of(x) for x in written)
        # what is lifted is the constant itself, which calls must not write
        func = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        self.calls.append(
            NotedCall(func=func, args=call.args, kwargs=call.kwargs, outputs=outputs, given=call.given, writes=writes)
        )

    def is_concrete(self, x: Any) -> bool:
        if not isinstance(x, torch.Tensor):
            return False
        if compat.is_fake(x):
            return id(x) in self.concrete
        return compat.is_real(x) and compat.is_plain(x) and not x.requires_grad

    def _slot(self, fake: torch.Tensor) -> int:
        tensor = self.concrete.get(id(fake))
        if tensor is None:
            tensor = _ConcreteTensor(fake, len(self.memory), compat.memory_of(fake))
            self.concrete[id(fake)], self.memory[tensor.slot] = tensor, tensor.memory
            self.devices[tensor.slot] = fake.device
        return tensor.slot

    def _forget(self, x: torch.Tensor) -> None:
        """Forget all that lies in the memory of a tensor into which a value was written that is not concrete."""
        memory = compat.memory_of(x)
        for key, tensor in list(self.concrete.items()):
            if tensor.memory == memory:
                self.forgotten.append(tensor.fake)
                del self.concrete[key]

    def _call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> NotedCall:
        given: list[int] = []

        def slot(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not compat.is_fake(leaf):
                return leaf
            given.append(self.concrete[id(leaf)].slot)
            return Slot(given[-1])

        args, kwargs = pytree.tree_map(slot, (tuple(args), dict(kwargs)))
        return NotedCall(func=func, args=args, kwargs=kwargs, given=tuple(given))

    # -- reading

    def read(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function that asks for values, if its tensors are concrete, or NotImplemented."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not any(map(compat.is_fake, tensors)):
            return NotImplemented
        if not all(map(self.is_concrete, tensors)) or _is_symbolic((args, kwargs)):
            self.unread.append((line_of_model(), ()))
            return NotImplemented
        call = self._call(func, args, kwargs)
        needed = sliced(self.calls, [call], self.memory)
        slots = {slot for c in needed for slot in c.given}
        paths = [self.paths[slot] for slot in sorted(slots) if slot in self.paths]
        bare = tuple(path for path, source in paths if not compat.is_real(source))
        if bare:
            self.unread.append((line_of_model(), bare))
            return NotImplemented
        for x in pytree.tree_leaves([(c.args, dict(c.kwargs)) for c in needed]):
            if isinstance(x, torch.Tensor):
                self.valued.add(compat.memory_of(x))
        with compat.unmodified():
            values = self._evaluated(needed, slots)
            result = call.run(values)
            read = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(result))
        if paths:
            self.calls.append(
                NotedCall(
                    func=func, args=call.args, kwargs=call.kwargs, given=call.given, read=read, line=line_of_model()
                )
            )
        return result

    def _evaluated(self, needed: Sequence[NotedCall], slots: set[int]) -> dict[int, torch.Tensor]:
        """The tensors of these calls, by slot."""
        writes = any(call.writes for call in needed)
        values = {} if writes else self.values
        for slot in slots & self.paths.keys():
            if slot not in values:
                values[slot] = self.paths[slot][1].detach().to(self.devices[slot], copy=writes)
        for call in needed[:-1]:
            if call.read is None and (writes or not all(slot in values for slot in call.outputs if slot is not None)):
                call.run(values)
        return values

    def pinned(self) -> Pinned:
        """What was read of inputs."""
        reads = [call for call in self.calls if call.read is not None]
        needed = sliced(self.calls, [], self.memory)
        slots = {slot for call in needed for slot in call.given}
        paths = {path: slot for slot, (path, _) in self.paths.items() if slot in slots}
        return Pinned(calls=tuple(needed), slots=MappingProxyType(paths)) if reads else Pinned()


def sliced(calls: Sequence[NotedCall], last: Sequence[NotedCall], memory: Mapping[int, int]) -> list[NotedCall]:
    """Those of the calls on which the last ones depend, and these; without last ones, those that read."""
    slots: set[int] = set()
    spaces: set[int] = set()
    needed: list[NotedCall] = []

    def need(call: NotedCall) -> None:
        needed.append(call)
        slots.update(call.given)
        spaces.update(memory[slot] for slot in call.given)

    for call in last:
        need(call)
    for call in reversed(calls):
        read = call.read is not None
        if (read and not last) or (
            not read and (not slots.isdisjoint(call.outputs) or not spaces.isdisjoint(call.writes))
        ):
            need(call)
    return needed[len(last) :][::-1] + needed[: len(last)]


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_symbolic(given: Any) -> bool:
    return any(isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) for x in pytree.tree_leaves(given))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What an operator is: one that asks for a property of a tensor, one that reads values, and whether it gives the
    same whenever it is given the same."""

    asks: bool
    reads: bool
    is_determined: bool


@functools.cache
def _kind(func: Any) -> _Kind:
    tags = getattr(func, "tags", ())
    aten = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
    return _Kind(
        asks=getattr(func, "namespace", "") == "prim",
        reads=torch.Tag.data_dependent_output in tags,
        is_determined=aten
        and torch.Tag.nondeterministic_seeded not in tags
        and not any(word in func._schema.name for word in ("empty", "resize")),
    )
