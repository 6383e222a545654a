"""The joint graph: forward and backward of a model as one list of functional ATen operators.

Capture produces it and every later step reads it. It is a small type of our own rather than `torch.fx`: planning 32
layers walks it dozens of times, and it must be hashable, printable and stampable.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.utils._pytree as pytree

InputRole = Literal["parameter", "buffer", "input", "tangent", "seed"]
OutputRole = Literal["output", "mutation", "gradient", "update"]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Global shape and dtype of a tensor. A Python number that flows through the graph has shape ()."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference, inside a node's arguments, to a value of the graph."""

    name: str

    def __repr__(self) -> str:
        return self.name


CAST = "aten._to_copy.default"
"""The operator that casts, with `dtype` as its only keyword."""

WAIT = "collective.wait"
"""Finishes a collective: its value is available afterwards."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operator of a graph (on global tensors), or one operator or collective of a rank's program (on local ones).

    `op` is the qualified overload ("aten.mm.default"), or "collective.<kind>" (`program.COLLECTIVES`). `args` and
    `kwargs` hold constants, nested tuples, and `Ref`s; in a program also `program.RankIndex`es. `outputs` names its
    values, in order; "" stands for an output that nobody uses. `module` is the path of the module that called it
    ("model.layers.3.mlp", "" if unknown). In a graph, `backward` says which half of the step it belongs to, and
    `sequence` is autograd's sequence number, which a backward node shares with its forward node (-1 if unknown). In a
    program, `serves` names the node of the graph that it is for ("" for none); in a graph, the one that it makes again.
    `region` numbers the checkpoints around it, the outermost first, in a graph as it is captured.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[str, ...]
    module: str = ""
    backward: bool = False
    sequence: int = -1
    serves: str = ""
    region: tuple[int, ...] = ()

    @cached_property
    def name(self) -> str:
        """The first result that has a name."""
        return next((output for output in self.outputs if output), "")

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors that it reads, in the order of its arguments, repeats included."""
        return (*references(self.args), *references(self.kwargs))

    @cached_property
    def collective(self) -> str | None:
        """The kind of collective that it begins, if it is one."""
        return self.op.removeprefix("collective.") if self.op.startswith("collective.") and self.op != WAIT else None

    @cached_property
    def form(self) -> str:
        """The op and its arguments without the names of the values that it reads: equal for nodes that do the same to
        different values."""
        return f"{self.op}{_nameless(self.args)}{_nameless(self.kwargs)}"

    @property
    def label(self) -> str:
        """What it is called in traces: the op, and the value that it produces or, of a wait, waits for."""
        values = self.inputs if self.op == WAIT else self.outputs
        return " ".join([self.op, *[name for name in values if name][:1]])

    def __str__(self) -> str:
        arguments = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs]
        return f"{', '.join(o or '_' for o in self.outputs)} = {self.op}({', '.join(arguments)})"


def _nameless(value: Any) -> str:
    """An argument without the names in it. Numbers keep their type: 1, 1.0 and True differ."""
    if isinstance(value, Ref):
        return "."
    if isinstance(value, tuple):
        return f"({','.join(map(_nameless, value))})"
    return type(value).__name__ if isinstance(value, _UNKNOWN) else repr(value)


_UNKNOWN = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers that depend on data, whose names count up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """`target` is the parameter's or buffer's name, the path of an input in (args, kwargs)
    ("args.0", "kwargs.input_ids"), for a tangent the path of the output it belongs to, or, for a seed,
    the number of the random operator that it is the key of. `at_rest` is the dtype in which the module holds a
    parameter, where that is not the one in which operators use it."""

    name: str
    role: InputRole
    target: str
    at_rest: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOutput:
    """`target` is the path of an output of the model, the name of the parameter (or path of the
    input) whose gradient it is, or the buffer or parameter that it replaces: a mutation does after forward, an update
    after backward. `name` is None for a gradient or an output that is not a tensor of the graph."""

    name: str | None
    role: OutputRole
    target: str

    @property
    def backward(self) -> bool:
        """Whether it is a result of backward."""
        return self.role in ("gradient", "update")


@dataclass(frozen=True, kw_only=True)
class JointGraph:
    """Forward and backward of one step. Nodes stand in an order in which they can run, all forward
    nodes before all backward nodes. `metas` holds every value's global shape and dtype."""

    inputs: tuple[GraphInput, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[GraphOutput, ...]
    metas: Mapping[str, TensorMeta] = field(repr=False)

    @cached_property
    def producer(self) -> dict[str, int]:
        """Index of the node that produces a value (inputs are absent)."""
        return producers(self.nodes)

    @cached_property
    def consumers(self) -> dict[str, tuple[int, ...]]:
        """Indices of the nodes that read a value, ascending, each once."""
        return {name: tuple(positions) for name, positions in readers(self.nodes).items()}

    @cached_property
    def first_backward(self) -> int:
        """Index of the first backward node; how many nodes there are, if there is none."""
        return next((i for i, node in enumerate(self.nodes) if node.backward), len(self.nodes))

    @property
    def halves(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The nodes of forward and backward."""
        return self.nodes[: self.first_backward], self.nodes[self.first_backward :]

    @cached_property
    def parameters(self) -> dict[str, str]:
        """Parameter name -> name of its value."""
        return {i.target: i.name for i in self.inputs if i.role == "parameter"}

    def __str__(self) -> str:
        lines = [f"{i.name}: {self.metas[i.name]} = {i.role} {i.target}" for i in self.inputs]
        for node in self.nodes:
            metas = ", ".join(str(self.metas[o]) for o in node.outputs if o)
            lines.append(f"{'<' if node.backward else '>'} {node}: {metas}  # {node.module}")
        lines += [f"{o.role} {o.target} = {o.name}" for o in self.outputs]
        return "\n".join(lines)


def references(value: Any) -> list[str]:
    """The names referred to in an argument, in order."""
    if isinstance(value, Ref):
        return [value.name]
    names: list[str] = []
    if isinstance(value, tuple):
        for item in value:
            if isinstance(item, Ref):
                names.append(item.name)
            elif isinstance(item, tuple):
                names += references(item)
    return names


def constants_of(value: Any, names: list[str]) -> Any:
    """The constants of an argument, hashable and distinct by type (1, 1.0 and True are not alike to
    an operator); the names of its references are appended to `names`."""
    if isinstance(value, Ref):
        names.append(value.name)
        return Ref
    if isinstance(value, tuple):
        return tuple([constants_of(item, names) for item in value])
    return (value.__class__, repr(value) if isinstance(value, float) else value)


def producers(nodes: Sequence[Node]) -> dict[str, int]:
    """Value -> position of the node that produces it."""
    return {name: position for position, node in enumerate(nodes) for name in node.outputs if name}


def readers(nodes: Sequence[Node]) -> dict[str, list[int]]:
    """Value -> positions of the nodes that read it, ascending, each once."""
    positions: dict[str, list[int]] = {}
    for position, node in enumerate(nodes):
        for name in dict.fromkeys(node.inputs):
            positions.setdefault(name, []).append(position)
    return positions


def map_references(value: Any, function: Callable[[str], Any]) -> Any:
    """The argument with every reference replaced by `function(name)`."""
    if isinstance(value, tuple):  # what stands directly in it, which is nearly all there is, without a call
        return tuple([
            function(item.name) if isinstance(item, Ref)
            else map_references(item, function) if isinstance(item, tuple) else item
            for item in value
        ])  # fmt: skip
    return function(value.name) if isinstance(value, Ref) else value


def called(node: Node, value: Callable[[str], Any]) -> Any:
    """The result of a node's operator on the values of what it reads, by name."""

    def filled(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return value(argument.name)
        return [filled(item) for item in argument] if isinstance(argument, tuple) else argument

    return overload(node.op)(*map(filled, node.args), **{key: filled(argument) for key, argument in node.kwargs})


def ran(node: Node, values: dict[str, Any]) -> list[Any]:
    """What a node makes, leaf by leaf, which is added to the values that it reads."""
    leaves = pytree.tree_leaves(called(node, values.__getitem__))
    values.update((name, leaf) for name, leaf in zip(node.outputs, leaves, strict=False) if name)
    return leaves


RESHAPE, PERMUTE = VIEWS = "aten.reshape.default", "aten.permute.default"
"""Every view of a graph is written as one of these, so that layouts can travel through it."""

CONTIGUOUS = "aten.contiguous.default"

FULL = ("aten.full.default", "aten.scalar_tensor.default")
"""They make tensors of one number, their last argument."""


def is_view(node: Node) -> bool:
    return node.op in VIEWS


@cache
def overload(op: str) -> Callable[..., Any]:
    """The callable behind "namespace.name.overload"."""
    namespace, name, kind = op.split(".")
    function: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), kind)
    return function


class Parameter(NamedTuple):
    """One argument of an op's schema."""

    name: str
    type: str
    default: Any


def schema(op: str) -> torch.FunctionSchema:
    """The op's arguments and results, as torch declares them."""
    of_op: torch.FunctionSchema = overload(op)._schema  # type: ignore[attr-defined]
    return of_op


@cache
def parameters(op: str) -> tuple[Parameter, ...]:
    """The arguments of an op's schema, in order."""
    return tuple(Parameter(a.name, str(a.type), a.default_value) for a in schema(op).arguments)


def takes(op: str, name: str) -> bool:
    """Whether the op's schema has an argument of this name."""
    return any(parameter.name == name for parameter in parameters(op))
