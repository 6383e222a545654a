"""The model's own random operators, with the numbers that a program draws.

A program's numbers are a function of a key and of a global index (`autopar.randomness`), and PyTorch's are those of a
generator. While `Draws` is active, the k-th random operator that eager runs takes the numbers that the k-th of the
captured graph takes, so that masks are the same and everything else can be compared.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree

from autopar.compat.dispatch import Watching
from autopar.compat.tensors import memory_of
from autopar.ir.emitter import Emitter
from autopar.ir.graph import JointGraph, Node, Ref, meta_of
from autopar.ops.kinds import FUNCTIONAL
from autopar.ops.lockstep import run
from autopar.ops.randomness import draws, seeded
from autopar.ops.rule import Call
from autopar.runtime.checkpoints import draw_from, random_states

DROPOUT = "autopar.dropout.default"


@contextmanager
def untouched_random_state() -> Iterator[None]:
    """Puts the states of torch's, Python's and numpy's generators back."""
    states = random_states()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        draw_from(states)


class Draws(Watching):  # type: ignore[no-untyped-call]
    """Eager's random operators with these keys. The number of the next one is the seed of torch's generator: a
    checkpoint that puts the generator back draws the same numbers again. `read` are the numbers of those that the graph
    has too, where it lacks some that nobody reads."""

    def __init__(self, graph: JointGraph, keys: Sequence[torch.Tensor], read: Sequence[int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = keys
        self.place = None if read is None else {number: k for k, number in enumerate(read)}
        self.most = 0
        seeds = {i.name: int(i.target) for i in graph.inputs if i.role == "seed"}
        self.readers: dict[int, Node] = {}
        for node in graph.nodes:
            for name in node.inputs:
                if name in seeds:
                    self.readers.setdefault(seeds[name], node)
        torch.default_generator.manual_seed(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        number = torch.default_generator.initial_seed()
        results = func(*args, **kwargs)
        node, tensors = _node(func, args, kwargs)
        if not draws(node):
            torch.default_generator.manual_seed(number)
            return results
        torch.default_generator.manual_seed(number + 1)
        self.most = max(self.most, number + 1)
        self.drew(number, results)
        if self.place is not None:
            if number not in self.place:
                return results  # nobody reads it
            number = self.place[number]
        if number >= len(self.keys):  # `most` tells that the program draws less often
            return results
        reader = self.readers.get(number)
        if reader is not None and reader.op == DROPOUT and node.op == FUNCTIONAL["aten.bernoulli_.float"]:
            _, kept = torch.ops.autopar.dropout(self.keys[number], torch.ones_like(results), reader.args[2])
            return results.copy_(kept)
        return _drawn(func, node, tensors, self.keys[number], args, results)

    def drew(self, number: int, results: Any) -> None:
        """Called with the number of a random operator, and its results."""


class Readers(Draws):  # type: ignore[no-untyped-call]
    """Which random operators anything depends on. A storage depends on what was ever written into it."""

    def __init__(self, graph: JointGraph) -> None:
        super().__init__(graph, ())
        self.sources: dict[int, frozenset[int]] = {}
        self.kept: list[torch.UntypedStorage] = []  # an identity is one storage's as long as that lives
        self.drawn: frozenset[int] = frozenset()

    def drew(self, number: int, results: Any) -> None:
        self.drawn = frozenset({number})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.drawn = frozenset()
        results = super().__torch_dispatch__(func, types, args, kwargs)
        sources = self.of((args, kwargs)) | self.drawn
        written = [args[position] for position in _written(func) if position < len(args)]
        for tensor in _in_memory((results, written)):
            self.kept.append(tensor.untyped_storage())
            self.sources[memory_of(tensor)] = self.sources.get(memory_of(tensor), frozenset()) | sources
        return results

    def of(self, tree: Any) -> frozenset[int]:
        """The random operators that tensors depend on."""
        return frozenset().union(*(self.sources.get(memory_of(x), ()) for x in _in_memory(tree)))


def _in_memory(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree that have memory."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [x for x in tensors if x.layout is torch.strided and x.untyped_storage().nbytes()]


def _node(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Node, dict[str, torch.Tensor]]:
    """The call as a node that writes nothing, and the tensors that it reads."""
    tensors: dict[str, torch.Tensor] = {}

    def value(given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            name = f"x{len(tensors)}"
            tensors[name] = given
            return Ref(name)
        return tuple(map(value, given)) if isinstance(given, list | tuple) else given

    # defaults of the operator that writes need not be those of the other
    missing = [a for a in func._schema.arguments[len(args) :] if not a.kwarg_only and a.name not in kwargs]
    args = (*args, *(a.default_value for a in missing))
    op = str(func)
    name, overload = op.removeprefix("aten.").split(".")
    overload = _OF_GENERATOR.get(overload, overload)
    count = len(func._schema.returns) + (0 if name.endswith("_") else len(_written(func)))
    node = Node(
        op=FUNCTIONAL.get(op, f"aten.{name.removesuffix('_')}.{overload}"),
        args=tuple(map(value, args)),
        kwargs=tuple((key, value(given)) for key, given in kwargs.items() if key != "generator"),
        outputs=tuple(f"drawn{i}" for i in range(count)),
    )
    return node, tensors


_OF_GENERATOR = {"generator": "default", "low_generator": "low"}
"""Overloads of random operators that are given a generator, and those that are given none."""


def _written(func: Any) -> list[int]:
    """Positions of the arguments that an operator writes."""
    schema = getattr(func, "_schema", None)  # control flow has none
    aliases = [] if schema is None else [a.alias_info for a in schema.arguments]
    return [position for position, alias in enumerate(aliases) if alias is not None and alias.is_write]


def _drawn(
    func: Any, node: Node, tensors: Mapping[str, torch.Tensor], key: torch.Tensor, args: tuple[Any, ...], eager: Any
) -> Any:
    """The results of a random operator from a key; what it writes is written."""
    returned = list(eager) if isinstance(eager, list | tuple) else [eager]
    targets = [*returned, *(args[position] for position in _written(func))][: len(node.outputs)]
    metas = {name: meta_of(x) for name, x in (*tensors.items(), ("key", key))}
    call = Call(node, tuple(metas[i] for i in node.inputs), tuple(map(meta_of, targets)))
    number = itertools.count()
    emitter = Emitter(metas=metas, named=lambda hint: f"{hint}_{next(number)}")
    names = seeded(emitter, call, "key")
    if names is None:
        raise ValueError(f"{func} draws numbers that no program can draw: draw them outside of the model")
    values: dict[str, Any] = {**tensors, "key": key}
    for instruction in emitter.written:
        run(instruction, (), {(): values})
    for target, name in zip(targets, names, strict=True):
        if name is not None:
            target.copy_(values[name.name])
    return eager
