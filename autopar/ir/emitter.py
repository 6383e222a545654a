"""The emitter: all that writes nodes of graphs and programs writes them with it, and it infers what they make."""

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from .graph import CONTIGUOUS, PERMUTE, RESHAPE, Node, TensorMeta, map_references, meta_of, overload, takes
from .program import RankIndex
from .rewrite import numbered

Metas = tuple[TensorMeta | None, ...]


@dataclass(eq=False, kw_only=True)
class Emitter:
    """Writes nodes one after the other, and records the metas of what they make, inferred unless they are stated.

    An expansion (`ops`) writes the local program of an operator as code on tensors: see `autopar.ops.traced`.
    """

    metas: dict[str, TensorMeta]
    """Those of all values there are, whose names new values may not have."""
    taken: Container[str] = ()
    """More names that new values may not have."""
    mesh: tuple[int, ...] = ()
    """The sizes of mesh axes."""
    named: Callable[[str], str] | None = None
    """Makes a name of a hint; without it, hints are numbered."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What nodes say of themselves beside what they do: `module`, `serves` ..."""
    written: list[Node] = field(default_factory=list)
    numbers: Counter[str] = field(default_factory=Counter)

    def fresh(self, hint: str) -> str:
        """A name for a new value."""
        if self.named is not None:
            return self.named(hint)
        hint = hint.replace("|", "_")
        name = numbered(hint, self.metas, self.taken, start=self.numbers[hint] + 1)
        self.numbers[hint] = int(name.rpartition("_")[2])
        return name

    def emit(
        self,
        op: str,
        args: tuple[Any, ...],
        *names: str,
        kwargs: tuple[tuple[str, Any], ...] = (),
        metas: Metas | None = None,
        **about: Any,
    ) -> str:
        """Append a node, and return the name of its first result. Without names, results get fresh ones; values that
        there are keep their metas. A result that nobody uses has the name "", and no meta."""
        if metas is None and names and all(name in self.metas for name in names):
            metas = tuple(self.metas[name] for name in names)
        if metas is None:
            of = self.metas.__getitem__
            metas = infer(op, map_references(args, of), map_references(kwargs, of) if kwargs else (), self.mesh)
        if not names:
            hint = op.split(".")[1]
            names = tuple([self.fresh(hint) if meta else "" for meta in metas])
        for name, meta in zip(names, metas, strict=True):
            if name and meta:
                self.metas[name] = meta
        said = {**self.about, **about} if about else self.about
        self.written.append(Node(op=op, args=args, kwargs=kwargs, outputs=names, **said))
        return names[0]


def infer(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], mesh: tuple[int, ...] = ()) -> Metas:
    """Metas of what a node makes from its arguments, with `TensorMeta`s in the place of tensors."""
    if not op.startswith("collective.") and op not in (RESHAPE, PERMUTE, CONTIGUOUS):
        return _inferred(op, args, kwargs, types_of((args, kwargs)))
    shape = args[0].shape
    if op == RESHAPE:
        known = -math.prod(args[1])
        shape = tuple(args[0].numel // known if size == -1 else size for size in args[1])
    elif op == PERMUTE:
        shape = tuple(shape[dim] for dim in args[1])
    elif op == "collective.all_gather":
        shape = (mesh[args[-1]] * shape[0], *shape[1:])
    elif op == "collective.reduce_scatter":
        shape = (shape[0] // mesh[args[-1]], *shape[1:])
    elif op == "collective.exchange":
        shape = (args[2], *shape[1:])
    return (TensorMeta(shape, args[0].dtype),)


@lru_cache(maxsize=1 << 16)
def _inferred(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], types: Any) -> Metas:
    """`types` tells 1, 1.0 and True apart, which are equal, and what is the default dtype."""
    return tuple(None if o is None else meta_of(o) for o in on_meta(op, args, kwargs))


def types_of(value: tuple[Any, ...]) -> Any:
    """The types of arguments, and the default dtype: what decides, beside their values, which dtype an op makes."""
    return torch.get_default_dtype(), _types(value)


def _types(value: tuple[Any, ...]) -> Any:
    return tuple([_types(item) if isinstance(item, tuple) else type(item) for item in value])


QUICK: list[Callable[..., tuple[torch.Tensor | None, ...] | None]] = []
"""Functions that know what `on_meta` gives of some operators, and None of others; `pointwise` has one."""


def on_meta(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[torch.Tensor | None, ...]:
    """An op's outputs, without values. Operands are tensors of the meta device, or `TensorMeta`s of contiguous ones. An
    op that knows no shapes, which few of torch's are, runs on zeros."""
    for quick in QUICK:
        if (known := quick(op, args, kwargs)) is not None:
            return known
    return on_any(op, args, kwargs)


def on_any(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[torch.Tensor | None, ...]:
    try:
        return _on(torch.device("meta"), op, args, kwargs)
    except NotImplementedError:
        outputs = _on(torch.device("cpu"), op, args, kwargs)
        return tuple(o if o is None else torch.empty_like(o, device="meta") for o in outputs)


def _on(
    device: torch.device, op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> tuple[torch.Tensor | None, ...]:
    made = torch.empty if device.type == "meta" else torch.zeros

    def concrete(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            return made(value.shape, dtype=value.dtype, device=device)
        if isinstance(value, torch.Tensor):
            if value.device == device:
                return value
            return torch.zeros_like(value, device=device)
        if isinstance(value, RankIndex):
            return value.constant
        if isinstance(value, torch.device):
            return device
        if isinstance(value, tuple):
            return [concrete(item) for item in value]
        return value

    named = {key: concrete(value) for key, value in kwargs}
    if takes(op, "device"):
        named["device"] = device
    outputs = overload(op)(*(concrete(a) for a in args), **named)
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
