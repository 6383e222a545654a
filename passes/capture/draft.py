"""Nodes under construction: what a node of fx is called in our graph, and the order in which nodes stand."""

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import compat
from autopar.ir.graph import PERMUTE, RESHAPE, GraphInput, GraphOutput, Node, Ref, TensorMeta, references
from autopar.ir.rewrite import distinct

from .captured import CaptureError


@dataclass(slots=True)
class Draft:
    """A node under construction."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: list[str]
    module: str
    backward: bool
    sequence: int
    place: int | None
    region: tuple[int, ...]


_Origin = tuple[str, int, int | None, tuple[int, ...]]
"""Module, sequence, place in the record, and the checkpoints around it."""


def identifier(path: str, taken: set[str]) -> str:
    """A Python identifier for a path, distinct from those taken, and takes it."""
    base = re.sub(r"\W", "_", path)
    if not base or base[0].isdigit() or keyword.iskeyword(base):
        base = f"_{base}"
    name = distinct(base, taken)
    taken.add(name)
    return name


class Drafts:
    """The nodes of one graph, in the order in which they were traced."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.metas: dict[str, TensorMeta] = {}
        self.values: dict[fx.Node, Any] = {}  # what a node of fx is called here, or the Draft whose outputs it is
        self.producers: dict[str, Draft] = {}  # value -> the draft that produces it
        self.drafts: list[Draft] = []
        self.origins: dict[int, _Origin] = {}  # of the forward nodes, by autograd's number
        self.places: dict[str, int] = {}  # node -> the node of the record that made it, or whose gradient it computes

    def reshaped(self, node: fx.Node, source: str, shape: tuple[int, ...]) -> str:
        return source if self.metas[source].shape == shape else self._emit_view(RESHAPE, node, source, shape)

    def permuted(self, node: fx.Node, source: str, order: tuple[int, ...]) -> str:
        in_order = order == tuple(range(len(order)))
        return source if in_order else self._emit_view(PERMUTE, node, source, order)

    def _emit_view(self, op: str, node: fx.Node, source: str, argument: tuple[int, ...]) -> str:
        """A view on the way to a node's result."""
        shape = argument
        if op == PERMUTE:
            shape = tuple(self.metas[source].shape[d] for d in argument)
        self.emit(node, meta=TensorMeta(shape, self.metas[source].dtype), op=op, args=(Ref(source), argument))
        return self.name(node)

    def emit(
        self,
        node: fx.Node,
        *,
        meta: TensorMeta | None = None,
        op: str | None = None,
        args: tuple[Any, ...] | None = None,
        kwargs: tuple[tuple[str, Any], ...] = (),
        outputs: list[str] | None = None,
    ) -> None:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(
                f"{node.name} = {node.target} is not an ATen operator (module {compat.module_path(node)})"
            )
        backward = compat.is_backward(node)
        module, sequence, place, region = self._origin(node, backward)
        draft = Draft(
            op=op or str(node.target),
            args=tuple(self.argument(a) for a in node.args) if args is None else args,
            kwargs=kwargs if op else tuple((key, self.argument(value)) for key, value in node.kwargs.items()),
            outputs=[] if outputs is None else outputs,
            module=module,
            backward=backward,
            sequence=sequence,
            place=place,
            region=region,
        )
        self.drafts.append(draft)
        if meta is None:
            self.values[node] = draft
        else:
            self.values[node] = name = self.take(node, meta, draft)
            draft.outputs.append(name)

    def _origin(self, node: fx.Node, backward: bool) -> _Origin:
        """Module and sequence of a node, the place in the record from which it has them, and the checkpoints around it.

        Autograd's counter is at the operator's own number when it is traced, and stays there for what
        follows it and is not differentiable: of the forward nodes with one number the first is meant.
        The counter lives as long as the thread: the numbers are counted anew, to be the same each time.
        """
        number = node.meta.get("seq_nr", -1)
        if not backward:
            path = (compat.module_path(node) or "").removeprefix("model").removeprefix(".")
            here = compat.place_of(node), compat.region_of(node)
            _, sequence, *_ = self.origins.setdefault(number, (path, len(self.origins), *here))
            return path, sequence, *here
        if compat.is_accumulation(node):
            return "", -1, None, ()
        return self.origins.get(number, ("", -1, None, ()))

    def take(self, node: fx.Node, meta: TensorMeta, draft: Draft) -> str:
        name = identifier(node.name, self.taken)
        self.metas[name] = meta
        self.producers[name] = draft
        return name

    def name(self, argument: Any) -> str:
        name = self.values[argument]
        assert isinstance(name, str), f"{argument} has several outputs"
        return name

    def argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Ref(self.name(value))
        if isinstance(value, (tuple, list)):
            return tuple(self.argument(item) for item in value)
        return value

    def ordered(
        self, inputs: Sequence[GraphInput], outputs: Sequence[GraphOutput]
    ) -> tuple[tuple[Node, ...], set[str]]:
        """The live nodes, all forward nodes first, and the names that are read.

        Forward is what an output or a mutation needs, and what was traced in forward and needs no
        tangent. A backward node that needs no tangent either (a weight's transpose, zeros to scatter
        into) stays in backward, where its value is not held between the two.
        """
        tainted = {i.name for i in inputs if i.role == "tangent"}
        for draft in self.drafts:
            if any(name in tainted for name in references((draft.args, draft.kwargs))):
                tainted.update(name for name in draft.outputs if name)
        live = {o.name for o in outputs if o.name is not None}
        early = {o.name for o in outputs if o.name is not None and o.role != "gradient"}
        forward: list[Node] = []
        backward: list[Node] = []
        for draft in reversed(self.drafts):
            used = [name for name in draft.outputs if name in live]
            if not used:
                continue
            reads = tuple(references((draft.args, draft.kwargs)))
            late = draft.backward or any(name in tainted for name in used)
            if any(name in early for name in used):
                late = False
            live.update(reads)
            if not late:
                early.update(reads)
            outputs_kept = tuple(name if name in live else "" for name in draft.outputs)
            node = Node(
                op=draft.op,
                args=draft.args,
                kwargs=draft.kwargs,
                outputs=outputs_kept,
                module=draft.module,
                backward=late,
                sequence=draft.sequence,
                region=draft.region,
            )
            if draft.place is not None:
                self.places[node.name] = draft.place
            (backward if late else forward).append(node)
        return tuple(reversed(forward)) + tuple(reversed(backward)), live
