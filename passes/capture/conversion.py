"""The joint graph of a recorded step.

In the graph that comes out every pure view is one of two operators, `aten.reshape.default(x, shape)` with explicit
sizes and `aten.permute.default(x, order)` with non-negative dims, and there is none that does nothing. Which module a
node belongs to: a forward node to the module whose forward made it, a backward node to that of the forward node whose
gradient it computes. The adds by which autograd accumulates the gradients of a tensor with several consumers compute
the gradient of no forward node; their module is "" and their sequence -1.
"""

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.graph import PERMUTE, RESHAPE, GraphInput, GraphOutput, JointGraph, Node, Ref, TensorMeta, references
from autopar.ir.rewrite import living, numbered, reading, with_own_metas
from autopar.ops.aten import COPIES, FILLED, KEEPS_WITH_ONE, LAZY, NO_OPS, PERMUTES, RESHAPES

from .errors import CaptureError, OfData
from .recorder import Geometry, Line, line_of

HERE = torch.device("cpu")
"""The device that graphs name, whatever device a step will run on."""


def joint_graph(
    nodes: Sequence[Node],
    values: Mapping[str, Geometry],
    inputs: Sequence[GraphInput],
    constants: Sequence[GraphInput],
    outputs: Sequence[GraphOutput],
    *,
    of_data: Mapping[str, str],
    lines: Mapping[str, Line],
) -> JointGraph:
    """The graph of nodes that write nothing in place, with those constants that it reads. Values that depend on the
    data are described in `of_data`: raises CaptureError, with the line of the model, where an output needs one."""
    results = [output.name for output in outputs if output.name is not None]
    needed = living(nodes, results)
    conversion = _Conversion(values, lines, frozenset(o.name for o in outputs if o.name is not None))
    for i in (*inputs, *constants):
        conversion.metas[i.name], conversion.names[i.name] = values[i.name].meta, i.name
    # an operator runs all the same where nobody reads the result that depends on the data
    refused = {
        name: of_data[cause] for node in nodes for cause in node.outputs if cause in of_data for name in node.outputs
    }
    for node in needed:
        if node.name in refused:
            raise OfData(
                f"{refused[node.name]}{conversion.line(node)}: a graph has static shapes (select with torch.where or a "
                f"mask, or compute it outside of the model)"
            )
        conversion.node(node)
    renamed = [o if o.name is None else replace(o, name=conversion.names[o.name]) for o in outputs]
    ordered = _ordered(conversion.written, inputs, renamed)
    read = {name for node in ordered for name in node.inputs} | {o.name for o in renamed}
    return with_own_metas(
        JointGraph(
            inputs=(*inputs, *(i for i in constants if i.name in read)),
            nodes=ordered,
            outputs=tuple(renamed),
            metas=conversion.metas,
        )
    )


def identifier(path: str) -> str:
    """A Python identifier for a path."""
    base = re.sub(r"\W", "_", path)
    return f"_{base}" if not base or base[0].isdigit() or keyword.iskeyword(base) else base


def _ordered(nodes: Sequence[Node], inputs: Sequence[GraphInput], outputs: Sequence[GraphOutput]) -> tuple[Node, ...]:
    """The live nodes, all forward nodes first.

    Forward is what an output or a mutation needs, unless that needs a tangent, and what was recorded in forward and
    needs no tangent. A backward node that needs no tangent either (a weight's transpose, zeros to scatter into) stays
    in backward, where its value is not held between the two.
    """
    tainted = {i.name for i in inputs if i.role == "tangent"}
    for node in nodes:
        if any(name in tainted for name in references((node.args, node.kwargs))):
            tainted.update(name for name in node.outputs if name)
    early = {o.name for o in outputs if o.name is not None and o.role != "gradient"} - tainted
    forward: list[Node] = []
    backward: list[Node] = []
    for node in reversed(living(nodes, [o.name for o in outputs])):
        late = node.backward or any(name in tainted for name in node.outputs)
        if any(name in early for name in node.outputs):
            late = False
        if not late:
            early.update(node.inputs)
        (backward if late else forward).append(replace(node, backward=late))
    return (*reversed(forward), *reversed(backward))


class _Conversion:
    """From ATen's views and factories to those of a graph, node by node."""

    def __init__(self, values: Mapping[str, Geometry], lines: Mapping[str, Line], outputs: frozenset[str]) -> None:
        self.values, self.lines, self.outputs = values, lines, outputs
        self.metas: dict[str, TensorMeta] = {}
        self.names: dict[str, str] = {}
        """What a recorded value is called in the graph."""
        self.producers: dict[str, Node] = {}
        self.written: list[Node] = []

    def line(self, node: Node) -> str:
        return line_of(self.lines.get(node.name))

    def node(self, recorded: Node) -> None:
        node = reading(recorded, self.names)
        metas = [self.values[name].meta if name else None for name in node.outputs]
        op, meta = node.op, metas[0] if len(metas) == 1 else None
        if meta is None:
            self._emit(node, metas)
            return
        if self._is_no_op(node, meta):
            self.names[node.name] = node.inputs[0]
        elif op in RESHAPES:
            self.names[node.name] = self._view(node, RESHAPE, node.inputs[0], meta.shape, node.name)
        elif op in PERMUTES:
            order = PERMUTES[op](len(meta.shape), *node.args[1:])
            self.names[node.name] = self._view(node, PERMUTE, node.inputs[0], order, node.name)
        elif op == "aten.cat.default":
            self._cat(node, meta)
        elif op in FILLED:
            self._fill(node, FILLED[op], meta, node.args[-1:])
        elif op in LAZY and node.inputs:
            self._emit(replace(node, op=LAZY[op]), metas)
        elif op in LAZY:  # autograd asks for the conjugates of numbers, too
            (number,) = node.args
            self._fill(
                node, "aten.full.default", meta, (number.conjugate() if op == "aten._conj.default" else -number,)
            )
        elif op in _BY_ADDRESS:
            self.names[node.name] = self._by_address(recorded, node, meta)
        elif op == "aten.expand.default":
            self._emit(replace(node, args=(node.args[0], meta.shape), kwargs=()), metas)
        elif op == "aten.copy.default" and self.metas[node.args[1].name] == meta:
            # nothing is left of what is written over, which may be an empty tensor with strides of its own
            contiguous = (("memory_format", torch.contiguous_format),)
            self._emit(replace(node, op="aten.clone.default", args=(node.args[1],), kwargs=contiguous), metas)
        else:
            self._emit(node, metas)

    def _emit(self, node: Node, metas: Sequence[TensorMeta | None]) -> None:
        for name, meta in zip(node.outputs, metas, strict=True):
            if meta is not None:
                self.metas[name], self.names[name], self.producers[name] = meta, name, node
        self.written.append(node)

    def _view(self, node: Node, op: str, source: str, argument: tuple[int, ...], name: str = "") -> str:
        """A view of a value on the way to a node's result, or, by its name, that result. A reshape of a reshape is a
        reshape, and one that changes nothing is the value."""
        if (producer := self.producers.get(source)) and producer.op == op:
            source, inner = producer.args[0].name, producer.args[1]
            argument = argument if op == RESHAPE else tuple(inner[d] for d in argument)
        given = self.metas[source]
        shape = argument if op == RESHAPE else tuple(given.shape[d] for d in argument)
        if argument == (given.shape if op == RESHAPE else tuple(range(len(shape)))):
            return source
        name = name or numbered(f"{node.name}_view", self.values, self.metas)
        meta = TensorMeta(shape, given.dtype)
        self._emit(replace(node, op=op, args=(Ref(source), argument), kwargs=(), outputs=(name,)), [meta])
        return name

    def _is_no_op(self, node: Node, meta: TensorMeta) -> bool:
        op, args = node.op, node.args
        if op in NO_OPS:
            return True
        # what autograd clones on its way into a leaf is the gradient itself; values that lie alike are one, but for
        # those that the caller gets, and may write
        if op in COPIES and (node.sequence < 0 or not (node.kwargs or node.name in self.outputs)):
            return True
        if not args or not isinstance(args[0], Ref) or self.metas.get(args[0].name) != meta:
            return False
        if op in ("aten.expand.default", "aten.slice.Tensor"):
            return op == "aten.expand.default" or len(args) < 5 or bool(args[4] == 1)
        if len(args) < 2 or node.kwargs or isinstance(args[1], Ref):
            return False
        # not add(x, 0), which turns -0.0 into 0.0
        return op in KEEPS_WITH_ONE and bool(args[1] == 1)

    def _by_address(self, recorded: Node, node: Node, meta: TensorMeta) -> str:
        """A view by addresses, where it sees all of a dense tensor, or only restrides dims of size 1; and autograd's
        gradient of one: a tensor that is written over, all of it."""
        writes = node.op == "aten.as_strided_scatter.default"
        base, source = self.values[recorded.inputs[0]], node.args[writes].name
        size, stride, offset = (*node.args[1 + writes :], base.offset)[:3]
        lies, becomes = (base.shape, base.stride), (size, stride)
        here = offset == base.offset
        if writes:
            lies, becomes = becomes, lies
        elif here and long_dims(*lies) == long_dims(*becomes):
            return self._view(node, RESHAPE, source, meta.shape)
        order, target = dense(*lies), dense(*becomes)
        if not here or order is None or target is None or self.metas[source].numel != meta.numel:
            raise CaptureError(
                f"as_strided of {self.metas[source]}{self.line(node)} reads a tensor by its addresses in memory, which "
                f"shards do not have: write it with views, slices, unfold or gather"
            )
        source = self._view(node, PERMUTE, source, order)
        source = self._view(node, RESHAPE, source, tuple(meta.shape[d] for d in target))
        return self._view(node, PERMUTE, source, inverse(target))

    def _cat(self, node: Node, meta: TensorMeta) -> None:
        parts = [ref.name for ref in node.args[0]]
        # an empty cache is a tensor of shape [0], to which the first keys are appended
        kept = [part for part in parts if self.metas[part].numel or not meta.numel]
        if len(kept) == 1 and self.metas[kept[0]] == meta:
            self.names[node.name] = kept[0]
        else:
            self._emit(replace(node, args=(tuple(map(Ref, kept)), *node.args[1:])), [meta])

    def _fill(self, node: Node, op: str, meta: TensorMeta, filling: tuple[Any, ...]) -> None:
        """Factories such as `new_zeros` read no element: without their tensor, it need not be kept alive."""
        args = (meta.shape, *(filling if op == "aten.full.default" else ()))
        where = ("dtype", meta.dtype), ("device", HERE)
        self._emit(replace(node, op=op, args=args, kwargs=where), [meta])


_BY_ADDRESS = ("aten.as_strided.default", "aten.as_strided_scatter.default")


def long_dims(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    """(size, stride) of the dims that have a stride that means something."""
    return [(size, step) for size, step in zip(shape, stride, strict=True) if size != 1]


def dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order in which the dims of a tensor stand in memory, of which every element is one of it; else None."""
    order = tuple(sorted(range(len(shape)), key=lambda d: (shape[d] != 1, -stride[d])))
    lies = torch.empty_strided(shape, stride, device="meta").permute(order)
    return order if lies.is_contiguous() else None


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(d) for d in range(len(order)))
