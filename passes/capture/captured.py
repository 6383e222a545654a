"""What capture knows about a step: its graph, its leaves, and how a call is bound to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from autopar.ir import records as records  # what inputs and outputs may be packed in
from autopar.ir.graph import JointGraph, meta_of
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.tree import flatten

from .concrete import Pinned
from .leaves import Leaf, same_value
from .ledger import Reads


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What capture knows about a step.

    `input_leaves` are the leaves of (args, kwargs) and `output_leaves` those of the model's output
    (of the loss, where a loss_fn is given), which `output_spec` puts together again. `loss` is the path
    of the scalar that is differentiated, or None where gradients flow into every floating output.
    `tied` maps other names of a parameter or buffer to the name under which it stands in the graph.
    `constants` are tensors that the model closed over: graph inputs of role "buffer" by target.
    `without_gradient` names the trainable parameters on which nothing that is differentiated depends.
    `autocast` is the dtype of the `torch.autocast` context in which it was captured. `reads` are the attributes that
    Python read while the model was traced. `pinned` is what Python read of the values of inputs: the graph is the step
    of calls in which that comes out the same. `checkpoints` counts the calls of `torch.utils.checkpoint`. `early` names
    what forward gives gradients by a `backward()` of its own, `late` what a function's backward gives gradients so, and
    `hooked` the parameters whose gradients hooks see. `reread` names what forward writes and backward reads in
    the model's own memory. `inner` has outputs of which others are computed, and these. `precision` says what is cast.
    """

    graph: JointGraph
    input_spec: pytree.TreeSpec
    input_leaves: tuple[Leaf, ...]
    output_spec: pytree.TreeSpec
    output_leaves: tuple[Leaf, ...]
    loss: str | None
    tied: Mapping[str, str]
    constants: Mapping[str, torch.Tensor] = field(repr=False)
    training: bool
    without_gradient: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    reads: Reads = field(default_factory=Reads, repr=False)
    pinned: Pinned = field(default_factory=Pinned, repr=False)
    checkpoints: int = 0
    early: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    reread: frozenset[str] = frozenset()
    inner: Mapping[str, frozenset[str]] = field(default_factory=dict)
    precision: Precision = AS_IS

    def bind(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """The tensors of a call by path. Raises ValueError where the call differs from the captured one in
        structure, in a shape or dtype, or in a Python constant."""
        return self.bound(dict(flatten("", (tuple(args), dict(kwargs or {})))[0]))

    def bound(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """As `bind`, of the leaves of a call by path."""
        expected = {leaf.path: leaf for leaf in self.input_leaves}
        if given.keys() != expected.keys():
            missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
            raise ValueError(
                f"the inputs differ in structure from those that the model was captured with: "
                f"missing {missing or 'none'}, unexpected {extra or 'none'}"
            )
        tensors = {}
        for path, leaf in expected.items():
            value = given[path]
            if leaf.meta is None:
                if not same_value(value, leaf.constant):
                    raise ValueError(
                        f"input {path} is {value!r}, and the model was captured with the constant {leaf.constant!r}: "
                        f"capture it again for another value"
                    )
            elif not isinstance(value, torch.Tensor) or meta_of(value) != leaf.meta:
                shown = meta_of(value) if isinstance(value, torch.Tensor) else repr(value)
                raise ValueError(f"input {path} is {shown}, and the model was captured with {leaf.meta}")
            elif leaf.same and value is not given[leaf.same]:
                raise ValueError(f"input {path} is another tensor than {leaf.same}, and was the same one when captured")
            else:
                tensors[path] = value
        return tensors

    def unflatten(self, values: Mapping[str, Any]) -> Any:
        """The model's output, in its own structure, from its tensors by path."""
        leaves = [leaf.constant if leaf.meta is None else values[leaf.path] for leaf in self.output_leaves]
        return pytree.tree_unflatten(leaves, self.output_spec)
