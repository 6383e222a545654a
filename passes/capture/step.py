"""The step that is recorded: the model's forward, its loss, and autograd's backward, on fakes."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.compat.tensors import memory_of
from autopar.ir.graph import GraphInput, GraphOutput, JointGraph, meta_of
from autopar.ir.tree import flatten, joined

from .conversion import identifier, joint_graph
from .errors import CaptureError, listed
from .functional import Functional
from .leaves import Leaf, is_constant, repeated, same_value
from .recorder import Recorder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the model returned. `loss` is the path of what is differentiated, None for every floating output."""

    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    loss: str | None

    def same(self, other: "Outcome") -> bool:
        """Whether another call returned the same structure and the same constants. A class that forward makes is
        another one each time."""
        leaves = [[(leaf.path, leaf.meta, leaf.requires_grad) for leaf in each.leaves] for each in (self, other)]
        constants = zip(self.leaves, other.leaves, strict=False)
        return (
            (leaves[0], str(self.spec), self.loss) == (leaves[1], str(other.spec), other.loss)
            and all(same_value(a.constant, b.constant) for a, b in constants)
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """One step as it was recorded. `inputs` are those of its graph but for constants, `results` its outputs, each with
    the number of nodes that had run when it was what it is; `early` are the parameters and inputs that forward gave
    gradients by a `backward()` of its own."""

    recorder: Recorder
    inputs: Sequence[GraphInput]
    results: Sequence[tuple[int, GraphOutput]]
    outcome: Outcome
    early: Sequence[str]
    mode: Any

    @property
    def end(self) -> int:
        return len(self.recorder.nodes)

    def functional(self, left: Iterable[str] = ()) -> Functional:
        """The step in functional form, in which it can be told what these values are at its end."""
        moments: dict[int, set[str]] = {self.end: set(left)}
        for moment, output in self.results:
            if output.name is not None:
                moments.setdefault(moment, set()).add(output.name)
        return Functional(self.recorder, moments, self.mode)

    def outputs(self, functional: Functional) -> list[GraphOutput]:
        """The outputs by the names that they have in functional form, without writes that change nothing."""
        outputs: list[GraphOutput] = []
        held: dict[str, str | None] = {i.target: i.name for i in self.inputs if i.role in ("parameter", "buffer")}
        for moment, output in self.results:
            name = None if output.name is None else functional.at(moment, output.name)
            if output.role in ("mutation", "update"):
                if name == held[output.target]:
                    continue
                held[output.target] = name
            outputs.append(replace(output, name=name))
        return outputs

    def graph(self, functional: Functional, targets: Mapping[str, str]) -> JointGraph:
        """The graph of the step in functional form. Constants are buffers, by `targets`."""
        return joint_graph(
            functional.nodes,
            functional.values,
            self.inputs,
            [GraphInput(name=name, role="buffer", target=target) for name, target in targets.items()],
            self.outputs(functional),
            of_data=self.recorder.of_data,
            lines=self.recorder.lines,
        )


@dataclass(eq=False)
class ModelStep:
    """A model on fakes, its inputs by path, and its loss. `canonical` maps every name of a parameter or buffer to the
    first of the same tensor; `call` is what calls the model, where that is more than a call; `at_rest` has the dtypes
    in which the model holds parameters that the graph uses in others."""

    model: nn.Module
    pairs: Sequence[tuple[str, Any]]
    spec: pytree.TreeSpec
    fakes: Mapping[str, torch.Tensor]
    mode: Any
    names: Mapping[str, str]
    canonical: Mapping[str, str]
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    call: Callable[..., Any] | None = None
    at_rest: Mapping[str, torch.dtype] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    """Paths of inputs that are an earlier one, and its path, where forward may see it."""

    def __post_init__(self) -> None:
        self.places = {
            joined(path, key): (registry, key)
            for path, module in self.model.named_modules()
            for registry in (module._parameters, module._buffers)
            for key in registry
        }

    def held(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that the model has now, by their first names."""
        tensors = ((name, registry[key]) for name, (registry, key) in self.places.items() if key in registry)
        return {name: tensor for name, tensor in tensors if tensor is not None and self.canonical.get(name) == name}

    def record(
        self,
        recorder: Recorder,
        python: contextlib.AbstractContextManager[bool],
        operators: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> Recording:
        """Runs and records one step. `python` is around all Python of the model, and says whether that may see which
        inputs are one object; `operators` is around forward, and around backward, and has them recorded."""
        held, wanted = self.held(), torch.is_grad_enabled()
        trained = {name: tensor for name, tensor in {**held, **self.fakes}.items() if tensor.requires_grad}
        inputs = self._enter(recorder, held)
        recorder.given = frozenset(recorder.values)
        with python as identities, self.mode, torch.set_grad_enabled(wanted):
            self.same = repeated(self.pairs) if identities else {}
            with operators():
                outcome, tensors = self._forward()
                if wanted and not torch.is_grad_enabled():
                    raise CaptureError(
                        "forward leaves gradients disabled for what runs after it: disable them with torch.no_grad() "
                        "as a context, which ends"
                    )
                results = [
                    GraphOutput(name=recorder.known(tensor), role="output", target=path)
                    for path, tensor in tensors.items()
                ]
                results += self._written(recorder, held)
            forward, late = len(recorder.nodes), list[GraphOutput]()
            early = [name for name, tensor in trained.items() if tensor.grad is not None]
            if early and not wanted:
                raise CaptureError(
                    f"forward computes gradients of {listed(early)} by a backward() of its own, though gradients are "
                    f"disabled where it is called: call the module without torch.no_grad()"
                )
            roots = {
                path: tensor
                for path, tensor in tensors.items()
                if wanted and outcome.loss in (None, path) and tensor.requires_grad
            }
            tangents = {path: torch.empty(tensor.shape, dtype=tensor.dtype) for path, tensor in roots.items()}
            for path, tangent in tangents.items():
                name = recorder.enter(identifier(f"tangent.{path}"), tangent)
                inputs.append(GraphInput(name=name, role="tangent", target=path))
            if roots:
                recorder.backward = True
                with operators():
                    torch.autograd.backward([*roots.values()], [*tangents.values()])
                    late = [replace(output, role="update") for output in self._written(recorder, held)]
        gradients = [
            GraphOutput(name=None if x.grad is None else recorder.known(x.grad), role="gradient", target=name)
            for name, x in trained.items()
            if wanted
        ]
        for tensor in (*trained.values(), *self.fakes.values()):
            tensor.grad = None
        for path, fake in self.fakes.items():
            fake.requires_grad_(path in trained)  # each call is given another one
        return Recording(
            recorder=recorder,
            inputs=inputs,
            results=[(forward, o) for o in results] + [(len(recorder.nodes), o) for o in (*late, *gradients)],
            outcome=outcome,
            early=early,
            mode=self.mode,
        )

    def _enter(self, recorder: Recorder, held: Mapping[str, torch.Tensor]) -> list[GraphInput]:
        inputs = [
            GraphInput(
                name=recorder.enter(identifier(name), tensor),
                role="parameter" if isinstance(tensor, nn.Parameter) else "buffer",
                target=name,
                at_rest=self.at_rest.get(name),
            )
            for name, tensor in held.items()
        ]
        for path, fake in self.fakes.items():
            name = recorder.enter_input(path, identifier(self.names[path]), fake)
            inputs.append(GraphInput(name=name, role="input", target=path))
        return inputs

    def _forward(self) -> tuple[Outcome, dict[str, torch.Tensor]]:
        """What the model returns, and its tensors by path."""
        leaves = [
            self.fakes[self.same.get(path, path)] if isinstance(value, torch.Tensor) else value
            for path, value in self.pairs
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        output = (self.call or self.model)(*args, **kwargs)
        if self.loss_fn is not None:
            output = self.loss_fn(output)
        pairs, spec = flatten("output", output)
        loss = self._loss(output, pairs)
        described: list[Leaf] = []
        tensors: dict[str, torch.Tensor] = {}
        memory = {memory_of(tensor): name for name, tensor in self.held().items()}
        for path, value in pairs:
            if isinstance(value, torch.Tensor):
                shares = memory.get(memory_of(value), "")
                described.append(Leaf(path=path, meta=meta_of(value), requires_grad=value.requires_grad, shares=shares))
                tensors[path] = value
            elif is_constant(value):
                described.append(Leaf(path=path, constant=value))
            else:
                logger.warning(
                    "output %s is a %s, which holds no tensors that a graph could return: it will be None",
                    path,
                    type(value).__name__,
                )
                described.append(Leaf(path=path))
        if not tensors:
            raise CaptureError(
                f"the model returns no tensor that autopar can find in a {type(output).__name__}: register its class "
                f"with torch.utils._pytree.register_pytree_node, or pass a loss_fn"
            )
        return Outcome(spec=spec, leaves=tuple(described), loss=loss), tensors

    def _written(self, recorder: Recorder, held: Mapping[str, torch.Tensor]) -> list[GraphOutput]:
        """What parameters and buffers hold now."""
        outputs: list[GraphOutput] = []
        lying: dict[int, str] = {}
        for name, old in held.items():
            registry, key = self.places[name]
            new = registry.get(key)
            other = name if new is None else lying.setdefault(memory_of(new), name)
            if other != name:
                raise CaptureError(
                    f"forward leaves {name} in the memory of {other}, with which it would change: give it a copy "
                    f"(clone())"
                )
            if new is not old and isinstance(old, nn.Parameter):
                continue  # refused by `Witness`
            if new is None or meta_of(old) != meta_of(new):
                now = "None" if new is None else str(meta_of(new))
                raise CaptureError(
                    f"forward replaces buffer {name}, which is {meta_of(old)}, by {now}: keep its shape and dtype"
                )
            if new is not old and sum(first == name for first in self.canonical.values()) > 1:
                raise CaptureError(
                    f"forward replaces buffer {name}, which has another name too: write into it with copy_() if both "
                    f"are to change, or give each its own tensor"
                )
            if new.requires_grad and not isinstance(new, nn.Parameter) and not new.is_leaf:
                raise CaptureError(
                    f"the model writes what requires a gradient into buffer {name}, from where the next step would "
                    f"differentiate it: write value.detach(), or write under torch.no_grad()"
                )
            outputs.append(GraphOutput(name=recorder.known(new), role="mutation", target=name))
        return outputs

    def _loss(self, output: Any, pairs: Sequence[tuple[str, Any]]) -> str | None:
        own = None if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if self.loss_fn is not None:
            loss, source = output, "loss_fn(output)"
        elif own is not None:
            loss, source = own, "the output's .loss"
        elif isinstance(output, torch.Tensor) and output.ndim == 0 and output.is_floating_point():
            loss, source = output, "the output"
        else:
            return None
        if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
            shown = meta_of(loss) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(f"{source} is {shown}: the loss must be a tensor that is one floating number")
        path = next((path for path, value in pairs if value is loss), None)
        if path is None:
            raise CaptureError(
                f"{source} is not among the tensors that autopar can find in a {type(output).__name__}: make it a "
                f"dataclass, register it with torch.utils._pytree.register_pytree_node, or pass a loss_fn"
            )
        return path
