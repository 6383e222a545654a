"""Traced values: what stands for the tensors of a rank while the code of its local program runs.

Code on tensors, given traced values, writes a program: `(x - mean) * scale` appends `aten.sub.Tensor` and
`aten.mul.Tensor`, each with the meta of what it makes. Functions of torch, methods and operators of tensors, and
operators under `torch.ops` are recorded as they are called, one node a call; none is decomposed. So code that writes
programs says `torch.Tensor` of its values, and type checkers know them.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from autopar.ir.emitter import Emitter
from autopar.ir.graph import WAIT, Ref, TensorMeta, map_references, overload, schema
from autopar.ir.program import RankIndex

_OPERATORS = type(torch.ops.aten.mm), type(torch.ops.aten.mm.default)
"""What stands under `torch.ops`, called "aten.mm" and "aten.mm.default"."""


class Traced:
    """A tensor of a program that is being written. It has a shape and a dtype, and no elements."""

    __slots__ = ("emitter", "name")

    def __init__(self, emitter: Emitter, name: str) -> None:
        self.emitter, self.name = emitter, name

    @property
    def meta(self) -> TensorMeta:
        return self.emitter.metas[self.name]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.meta.shape

    @property
    def ndim(self) -> int:
        return len(self.meta.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    def numel(self) -> int:
        return self.meta.numel

    def to(self, dtype: torch.dtype) -> Any:
        """The value in this dtype: itself, if that is its own."""
        return self if self.dtype == dtype else record(self.emitter, "aten._to_copy.default", self, dtype=dtype)

    def reshape(self, *shape: Any) -> Any:
        return record(self.emitter, "aten.reshape.default", self, _one(shape))

    def expand(self, *shape: Any) -> Any:
        return record(self.emitter, "aten.expand.default", self, _one(shape))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What a function of torch, or an operator, becomes that is called with a traced value."""
        name = str(function) if isinstance(function, _OPERATORS) else f"aten.{function.__name__}"
        return trace(_emitter(args), name, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """The method of a tensor that does what the operator of this name does."""
        if name.startswith("_") or not hasattr(torch.ops.aten, name):
            raise AttributeError(f"a traced value has no {name}: no operator of torch is called so")
        return partial(self._method, f"aten.{name}")

    def _method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return trace(self.emitter, name, (self, *args), kwargs)

    def __bool__(self) -> bool:
        raise TypeError(f"{self.name} has no value while a program is written: use torch.where or masked_fill")

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.shape[0]))

    def __getitem__(self, key: Any) -> Any:
        """Elements by number, which may differ by rank, and slices of dims from the first on."""
        value, dim = self, 0
        for item in key if isinstance(key, tuple) else (key,):
            if not isinstance(item, slice):
                value = record(self.emitter, "aten.select.int", value, dim, item)
                continue
            assert item.step is None, f"{self.name}[{key}]"
            if item != slice(None):
                end = value.shape[dim] if item.stop is None else item.stop
                value = record(self.emitter, "aten.slice.Tensor", value, dim, item.start or 0, end)
            dim += 1
        return value

    def __neg__(self) -> Any:
        return self.neg()

    def __add__(self, other: Any) -> Any:
        return self._shifted("aten.add", other)

    def __sub__(self, other: Any) -> Any:
        return self._shifted("aten.sub", other)

    def _shifted(self, name: str, other: Any) -> Any:
        """With a number that differs by rank, which torch takes for a tensor as it does every number, too."""
        kind = "Scalar" if isinstance(other, int | float) else "Tensor"
        return record(self.emitter, f"{name}.{kind}", self, other)

    def __mul__(self, other: Any) -> Any:
        return self.mul(other)

    def __truediv__(self, other: Any) -> Any:
        return self.div(other)

    def __floordiv__(self, other: Any) -> Any:
        return self.floor_divide(other)

    def __mod__(self, other: Any) -> Any:
        return self.remainder(other)

    def __pow__(self, other: Any) -> Any:
        return self.pow(other)

    def __eq__(self, other: object) -> Any:
        return self.eq(other)

    def __ne__(self, other: object) -> Any:
        return self.ne(other)

    def __lt__(self, other: Any) -> Any:
        return self.lt(other)

    def __le__(self, other: Any) -> Any:
        return self.le(other)

    def __gt__(self, other: Any) -> Any:
        return self.gt(other)

    def __ge__(self, other: Any) -> Any:
        return self.ge(other)


def traced(emitter: Emitter, value: Any) -> Any:
    """An argument of a node with traced values in the place of references."""
    return map_references(value, partial(Traced, emitter))


def record(emitter: Emitter, op: str, *args: Any, **kwargs: Any) -> Any:
    """Append an operator, and return its result, or several. One that it leaves out (a masked gradient) is None."""
    named = tuple([(key, _plain(value)) for key, value in kwargs.items()]) if kwargs else ()
    name = emitter.emit(op, _plain(args), kwargs=named)
    names = emitter.written[-1].outputs
    return Traced(emitter, name) if len(names) == 1 else tuple([Traced(emitter, n) if n else None for n in names])


def started(kind: str, value: Any, *args: Any) -> Any:
    """Append a collective, whose last argument is a mesh axis. The value is contiguous."""
    return record(value.emitter, f"collective.{kind}", value, *args)


def arrived(value: Any) -> Any:
    """Append the wait for a collective that was started."""
    return record(value.emitter, WAIT, value)


def collective(kind: str, value: Any, *args: Any) -> Any:
    """Append a collective, and wait for it."""
    return arrived(started(kind, value, *args))


def trace(emitter: Emitter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Append a call of "namespace.name", by the overload that takes these arguments, or of "namespace.name.overload",
    and return what it makes. As torch does, it takes positional arguments by keyword, and a number for a list of one.
    """
    if name.count(".") == 2:
        return record(emitter, name, *args, **kwargs)
    forms = _form(args)
    named = tuple([(key, _form(value)) for key, value in kwargs.items()]) if kwargs else ()
    op, rest, wrapped = _overload(name, forms, named)
    if rest:
        args = (*args, *(kwargs.pop(key, default) for key, default in rest))
    if wrapped:
        args = tuple((arg,) if i in wrapped else arg for i, arg in enumerate(args))
    return record(emitter, op, *args, **kwargs)


Form = Any
"""The type of an argument, or a tuple of the forms of its items."""

_TAKES: dict[str, tuple[type, ...]] = {
    "Tensor": (Traced,),
    "number": (int, float, bool, RankIndex),
    "int": (int, RankIndex, torch.dtype),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
}


def _form(value: Any) -> Form:
    kind = type(value)
    return tuple([_form(item) for item in value]) if kind is tuple or kind is list else kind


@lru_cache(maxsize=1 << 12)
def _overload(
    name: str, forms: tuple[Form, ...], named: tuple[tuple[str, Form], ...]
) -> tuple[str, tuple[tuple[str, Any], ...], frozenset[int]]:
    """The first overload that takes arguments of these forms; positional ones that come by keyword, or by default
    before those; and which are numbers that stand for lists of one."""
    namespace, _, short = name.partition(".")
    kinds = [f"{name}.{kind}" for kind in getattr(getattr(torch.ops, namespace), short).overloads()]
    kinds = [op for op in kinds if hasattr(overload(op), "_schema")]
    for lists in (False, True):
        for op in kinds:
            arguments = schema(op).arguments
            positional = [a for a in arguments if not a.kwarg_only]
            given = {**{a.name: form for a, form in zip(positional, forms, strict=False)}, **dict(named)}
            if len(forms) > len(positional) or len(given) < len(forms) + len(named):
                continue
            absent = [a for a in arguments if a.name not in given and not a.has_default_value()]
            if absent or any(key not in {a.name for a in arguments} for key in given):
                continue
            wrapped = {a.name for a in arguments if lists and given.get(a.name) is int and "List[" in str(a.type)}
            if all(a.name in wrapped or _fits(given[a.name], str(a.type)) for a in arguments if a.name in given):
                keys = [i for i, a in enumerate(positional) if i >= len(forms) and a.name in given]
                rest = positional[len(forms) : keys[-1] + 1] if keys else []
                places = frozenset(i for i, a in enumerate(positional) if a.name in wrapped)
                return op, tuple((a.name, a.default_value) for a in rest), places
    raise TypeError(f"no overload of {name} takes {forms} and {dict(named)}: there are {', '.join(kinds)}")


def _fits(form: Form, type: str) -> bool:
    if type.startswith("Optional["):
        return form is None.__class__ or _fits(form, type[9:-1])
    if type.startswith("List["):
        return isinstance(form, tuple) and all(_fits(item, type[5:-1]) for item in form)
    return form in _TAKES.get(type, ())


def _one(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """A shape that is given as one tuple or as its numbers."""
    return tuple(shape[0]) if shape and isinstance(shape[0], (tuple, list)) else shape


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple([Ref(item.name) if type(item) is Traced else _plain(item) for item in value])
    return Ref(value.name) if isinstance(value, Traced) else value


def _emitter(args: Any) -> Emitter:
    for value in args:
        if isinstance(value, Traced):
            return value.emitter
        if isinstance(value, (tuple, list)):
            return _emitter(value)
    raise AssertionError("no traced value was given")
