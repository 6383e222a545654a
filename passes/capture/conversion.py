"""The joint graph of a trace: from `torch.fx` to our nodes.

In the graph that comes out every pure view is one of two operators, `aten.reshape.default(x, shape)` with explicit
sizes and `aten.permute.default(x, order)` with non-negative dims, and there is none that does nothing. Which module a
node belongs to: a forward node to the module whose forward made it, a backward node to that of the forward node whose
gradient it computes. The adds by which autograd accumulates the gradients of a tensor with several consumers compute
the gradient of no forward node; their module is "" and their sequence -1.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar import compat
from autopar.ir.graph import PERMUTE, RESHAPE, GraphInput, GraphOutput, InputRole, JointGraph, Ref, TensorMeta, meta_of
from autopar.ir.rewrite import with_own_metas

from .captured import CaptureError
from .draft import Draft, Drafts, identifier
from .refusals import OfData, Unlocated, line_of_node


class Conversion(Drafts):
    """From the traced `torch.fx` graph to ours."""

    def __init__(
        self,
        joint: compat.Joint,
        input_paths: Sequence[str],
        output_paths: Sequence[str],
        input_names: Mapping[str, str],
        *,
        lines: bool,
    ) -> None:
        """With `lines`, nodes know the lines of code that made them."""
        super().__init__()
        self.joint, self.lines = joint, lines
        self.parameters = [name.removeprefix("model.") for name in joint.parameters]
        self.buffers = [name.removeprefix("model.") for name in joint.buffers]
        self.input_paths, self.output_paths, self.input_names = input_paths, output_paths, input_names
        self.constants = {name.removeprefix("model."): tensor for name, tensor in joint.constants.items()}

    def graph(self) -> JointGraph:
        inputs = [self._input(p) for p in self.joint.placeholders]
        needed = self._needed()
        for node in self.joint.graph.nodes:
            if node not in needed:
                continue  # assertions, and what only they read
            if node.op == "call_function":
                self._node(node)
            elif node.op == "get_attr":
                raise CaptureError(f"the model has control flow ({node.target}), which one graph cannot hold")
        outputs = tuple(self._output(r) for r in self.joint.results)
        nodes, used = self.ordered(inputs, outputs)
        # constants that only no-ops read
        unused = {i.target for i in inputs if i.role == "buffer" and i.target in self.constants and i.name not in used}
        self.constants = {name: tensor for name, tensor in self.constants.items() if name not in unused}
        inputs = [i for i in inputs if i.target not in unused or i.role != "buffer"]
        return with_own_metas(JointGraph(inputs=tuple(inputs), nodes=nodes, outputs=outputs, metas=self.metas))

    def _needed(self) -> set[fx.Node]:
        """The nodes that a result needs."""
        waiting = [result.node for result in self.joint.results if result.node is not None]
        needed = set(waiting)
        while waiting:
            fresh = [node for node in waiting.pop().all_input_nodes if node not in needed]
            needed.update(fresh)
            waiting += fresh
        return needed

    def _input(self, placeholder: compat.Placeholder) -> GraphInput:
        kind, index = placeholder.kind, placeholder.index
        role: InputRole = kind
        if kind == "parameter":
            target = path = self.parameters[index]
        elif kind == "buffer":
            target = path = self.buffers[index]
        elif kind == "input":
            target = self.input_paths[index]
            path = self.input_names[target]
        else:
            target = self.output_paths[index]
            path = f"tangent.{target}"
        name = identifier(path, self.taken)
        self.metas[name] = meta_of(placeholder.node.meta["val"])
        self.values[placeholder.node] = name
        return GraphInput(name=name, role=role, target=target)

    def _output(self, result: compat.Result) -> GraphOutput:
        name = None if result.node is None else self.values[result.node]
        if result.kind == "output":
            return GraphOutput(name=name, role="output", target=self.output_paths[result.index])
        if result.kind in ("mutation", "parameter mutation"):
            written = self.buffers if result.kind == "mutation" else self.parameters
            return GraphOutput(name=name, role="mutation", target=written[result.index])
        targets = self.parameters if result.kind == "parameter gradient" else self.input_paths
        return GraphOutput(name=name, role="gradient", target=targets[result.index])

    # -- nodes

    def _node(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            self._item(node)
            return
        value = node.meta["val"]
        if isinstance(value, (tuple, list)):
            sizes = [size for part in value if isinstance(part, torch.Tensor) for size in part.shape]
            if any(type(size) is not int for size in sizes):  # even where nobody reads that part: it runs all the same
                if not self.lines:
                    raise Unlocated(node.name)
                raise OfData(
                    f"{target} makes a tensor whose shape depends on the data{line_of_node(node)}: a graph has static "
                    f"shapes (compute it outside of the model, or select with torch.where or a mask)"
                )
            self.emit(node, outputs=[""] * len(value))
            return
        if not isinstance(value, torch.Tensor):
            if not self.lines:
                raise Unlocated(node.name)
            raise OfData(
                f"{node.name} = {target} is a number that depends on the data ({value}): the model reads a tensor's "
                f"value{line_of_node(node)}, and shapes must be static"
            )
        meta = self._static_meta(node)
        if self._is_no_op(node, meta):
            self.values[node] = self.name(node.args[0])
        elif target in RESHAPES:
            self._reshape(node, meta)
        elif target in PERMUTES:
            self._permute(node, meta)
        elif target is aten.cat.default:
            self._cat(node, meta)
        elif target in FILLED:
            self._filled(node, meta)
        elif target in LAZY:
            self._now(node, meta)
        elif target is aten.as_strided.default:
            self._as_strided(node, meta)
        elif target is aten.as_strided_scatter.default:
            self._as_strided_scatter(node, meta)
        elif target is aten.expand.default:
            self.emit(node, meta=meta, args=(Ref(self.name(node.args[0])), meta.shape))
        elif target is aten.copy.default and self.metas[self.name(node.args[1])] == meta:
            # nothing is left of what is written over, which may be an empty tensor with strides of its own
            contiguous = (("memory_format", torch.contiguous_format),)
            self.emit(node, meta=meta, op="aten.clone.default", args=(Ref(self.name(node.args[1])),), kwargs=contiguous)
        else:
            self.emit(node, meta=meta)

    def _static_meta(self, node: fx.Node) -> TensorMeta:
        meta = meta_of(node.meta["val"])
        if any(type(size) is not int for size in meta.shape):
            raise OfData(
                f"{node.name} = {node.target} has a shape that depends on the data ({meta}): a graph has static shapes "
                f"(select with torch.where or a mask, not with a boolean index)"
            )
        return meta

    def _item(self, node: fx.Node) -> None:
        source, index = node.args
        draft = self.values[source]  # type: ignore[index]
        assert isinstance(draft, Draft) and isinstance(index, int)
        if not draft.outputs[index]:
            draft.outputs[index] = self.take(node, self._static_meta(node), draft)
        self.values[node] = draft.outputs[index]

    def _is_no_op(self, node: fx.Node, meta: TensorMeta) -> bool:
        target, args = node.target, node.args
        if target in NO_OPS:
            return True
        if not args or not isinstance(args[0], fx.Node) or self.metas.get(self.name(args[0])) != meta:
            return False
        if target in (aten.expand.default, aten.slice.Tensor):
            return target is aten.expand.default or len(args) < 5 or bool(args[4] == 1)
        if len(args) < 2 or node.kwargs or isinstance(args[1], fx.Node):
            return False
        # not add(x, 0), which turns -0.0 into 0.0
        keeps_with_one = (aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor)
        return target in keeps_with_one and bool(args[1] == 1)

    def _reshape(self, node: fx.Node, meta: TensorMeta) -> None:
        source = self.name(node.args[0])
        if (producer := self.producers.get(source)) and producer.op == RESHAPE:
            source = producer.args[0].name  # a reshape of a reshape is a reshape
        if self.metas[source].shape == meta.shape:
            self.values[node] = source
        else:
            self.emit(node, meta=meta, op=RESHAPE, args=(Ref(source), meta.shape))

    def _now(self, node: fx.Node, meta: TensorMeta) -> None:
        """A change of sign that a view would leave to its readers. Autograd asks for the conjugates of numbers, too."""
        (given,) = node.args
        if isinstance(given, fx.Node):
            self.emit(node, meta=meta, op=LAZY[node.target], args=(Ref(self.name(given)),))
            return
        assert isinstance(given, (int, float, complex))
        value = given.conjugate() if node.target is aten._conj.default else -given
        where = ("dtype", meta.dtype), ("device", node.meta["val"].device)
        self.emit(node, meta=meta, op="aten.full.default", args=(meta.shape, value), kwargs=where)

    def _as_strided(self, node: fx.Node, meta: TensorMeta) -> None:
        """A view by addresses, where it sees all of a dense tensor, or only restrides dims of size 1."""
        source, base, view = self.name(node.args[0]), node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        here = base.storage_offset() == view.storage_offset()
        if here and long_dims(base) == long_dims(view):
            self.values[node] = self.reshaped(node, source, meta.shape)
        elif here and (order := dense(base)) is not None and (target := dense(view)) is not None:
            source = self.permuted(node, source, order)
            source = self.reshaped(node, source, tuple(meta.shape[d] for d in target))
            self.values[node] = self.permuted(node, source, inverse(target))
        else:
            self._refuse_addresses(node, source)

    def _as_strided_scatter(self, node: fx.Node, meta: TensorMeta) -> None:
        """Autograd's gradient of a view by addresses: a tensor that is written over, all of it."""
        base, given = node.args[0].meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
        size, stride, offset = (*node.args[2:], base.storage_offset())[:3]
        source = self.name(node.args[1])
        order = dense(torch.empty_strided(size, stride, device="meta"))
        target = dense(base)
        covers_all = offset == base.storage_offset() and given.numel() == base.numel()
        if not covers_all or order is None or target is None:
            self._refuse_addresses(node, source)
            return
        source = self.permuted(node, source, order)
        source = self.reshaped(node, source, tuple(meta.shape[d] for d in target))
        self.values[node] = self.permuted(node, source, inverse(target))

    def _refuse_addresses(self, node: fx.Node, source: str) -> None:
        raise CaptureError(
            f"{node.name} = as_strided of {self.metas[source]} (module {compat.module_path(node)}) reads a tensor "
            f"by its addresses in memory, which shards do not have: write it with views, slices, unfold or gather"
        )

    def _permute(self, node: fx.Node, meta: TensorMeta) -> None:
        source = self.name(node.args[0])
        order = PERMUTES[node.target](len(meta.shape), *node.args[1:])
        if (producer := self.producers.get(source)) and producer.op == PERMUTE:
            source, inner = producer.args[0].name, producer.args[1]
            order = tuple(inner[d] for d in order)
        if order == tuple(range(len(order))):
            self.values[node] = source
        else:
            self.emit(node, meta=meta, op=PERMUTE, args=(Ref(source), order))

    def _cat(self, node: fx.Node, meta: TensorMeta) -> None:
        parts = [self.name(part) for part in node.args[0]]  # type: ignore[union-attr]
        # an empty cache is a tensor of shape [0], to which the first keys are appended
        kept = [part for part in parts if self.metas[part].numel] or parts[:1]
        if len(kept) == 1 and self.metas[kept[0]] == meta:
            self.values[node] = kept[0]
        else:
            self.emit(node, meta=meta, args=(tuple(map(Ref, kept)), *node.args[1:]))

    def _filled(self, node: fx.Node, meta: TensorMeta) -> None:
        """Factories such as `new_zeros` read no element: without their tensor, it need not be kept alive."""
        op, value = FILLED[node.target], node.meta["val"]
        filling = node.args[-1:] if op == "aten.full.default" else ()
        where = ("dtype", meta.dtype), ("device", value.device)
        self.emit(node, meta=meta, op=op, args=(meta.shape, *filling), kwargs=where)


aten = torch.ops.aten

NO_OPS = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.lift.default,
        aten.view_as.default,
        aten.resolve_conj.default,
        aten.resolve_neg.default,
    }
)

RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten._reshape_alias.default,
        aten.view_copy.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.flatten.using_ints,
        aten.unflatten.int,
    }
)

PERMUTES: dict[Any, Callable[..., tuple[int, ...]]] = {
    aten.permute.default: lambda rank, order: tuple(d % rank for d in order),
    aten.t.default: lambda rank: tuple(reversed(range(rank))),
    aten.numpy_T.default: lambda rank: tuple(reversed(range(rank))),
    aten.transpose.int: lambda rank, a, b: _swapped(rank, a, b),
    aten.swapaxes.default: lambda rank, a, b: _swapped(rank, a, b),
    aten.swapdims.default: lambda rank, a, b: _swapped(rank, a, b),
    aten.mT.default: lambda rank: _swapped(rank, -1, -2),
}

FILLED: dict[Any, str] = {
    aten.new_zeros.default: "aten.zeros.default",
    aten.new_ones.default: "aten.ones.default",
    aten.new_full.default: "aten.full.default",
}
"""Ops that take dtype and device of a tensor, and read nothing of it."""

LAZY: dict[Any, str] = {
    aten._conj.default: "aten._conj_physical.default",
    aten._neg_view.default: "aten.neg.default",
}
"""Views that leave a sign to whoever reads them: kernels and collectives of shards read what lies there."""


def long_dims(x: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dims that have a stride that means something."""
    return [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]


def dense(x: torch.Tensor) -> tuple[int, ...] | None:
    """The order in which the dims of a tensor stand in memory, of which every element is one of it; else None."""
    strides = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda d: (x.shape[d] != 1, -strides[d])))
    return order if x.permute(order).is_contiguous() else None


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(d) for d in range(len(order)))


def _swapped(rank: int, a: int, b: int) -> tuple[int, ...]:
    order = list(range(rank))
    if rank:
        order[a], order[b] = order[b], order[a]
    return tuple(order)
