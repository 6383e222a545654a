"""The ranks check themselves: the first steps also run in one process, and must give the same.

Each rank gathers parameters and buffers, runs the model itself on the global batch, as PyTorch runs it on one device,
and compares outputs, buffers and gradients. Where the program draws random numbers (dropout) the captured graph runs
on global tensors in the place of the model, with the same keys: PyTorch's own generator draws other numbers.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.compat.rebinding import Rebound
from autopar.compat.watching import hook_gradient
from autopar.compat.wrapping import unwrapped
from autopar.ir.graph import JointGraph
from autopar.ir.program import ProgramOutput
from autopar.ir.tree import flatten
from autopar.passes.capture.captured import Captured
from autopar.passes.capture.fakes import copied, gradient_hooks, skeleton
from autopar.passes.codegen.narrow import narrowed_parameters, rounded
from autopar.passes.codegen.precision import at_rest

from .agreement import together
from .differences import difference, largest_element
from .places import gathered
from .simulate import GraphRun
from .state import State as _State
from .values import all_slots

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
"""The largest difference, relative to the largest element of the tensor, by the narrowest floating dtype of the step.
Sums in another order, as ranks make them, differ by less; a wrong collective, mask or scale by much more."""

NEGLIGIBLE = 1e-2
"""The part of the largest gradient of all (or the tolerance, if that is more) as which a gradient's largest element
counts at least: one that is zero by arithmetic, as that of a bias before a norm, is the rounding of the others."""

UNDECIDED = 1e-2
"""The part of an integer output's elements that may differ, as the index of the largest of two equal numbers does."""

Values = dict[str, torch.Tensor]


class Eager:
    """A step in one process: the model itself on global tensors. `outputs` by path, `buffers` after it by name."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        captured: Captured,
        given: Given,
        hooks: Mapping[str, Sequence[Callable[[torch.Tensor], Any]]],
    ) -> None:
        """`hooks` are those of the gradients of the model's parameters, by name."""
        self.leaves = {
            name: nn.Parameter(p, requires_grad=name in given.trained) for name, p in given.parameters.items()
        }
        for name, leaf in self.leaves.items():
            hook_gradient(leaf, hooks.get(name, ()))
        held = {**self.leaves, **given.buffers}
        for slot in all_slots(model):
            slot.hold(held[captured.tied.get(slot.name, slot.name)])
        inputs = {path: x.requires_grad_(path in given.trained) for path, x in given.inputs.items()}
        self.leaves |= {path: x for path, x in inputs.items() if x.requires_grad}  # type: ignore[misc]
        given_as = ((leaf, leaf.same or leaf.path) for leaf in captured.input_leaves)
        leaves = [leaf.constant if leaf.meta is None else inputs[path] for leaf, path in given_as]
        args, kwargs = captured.precision.cast_inputs(pytree.tree_unflatten(leaves, captured.input_spec))
        output = captured.precision.cast_outputs(model(*args, **kwargs))
        output = output if loss_fn is None else loss_fn(output)
        self.outputs = {path: x for path, x in flatten("output", output)[0] if isinstance(x, torch.Tensor)}
        self.model = model

    @property
    def buffers(self) -> Values:
        """And parameters, which forward may write too."""
        return {name: x.detach() for name, x in (*self.model.named_parameters(), *self.model.named_buffers())}

    def gradients(self, tangents: Values) -> Values:
        """By the parameter's name or the input's path, from those of outputs by path."""
        wanted = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        roots = [(self.outputs[path], t) for path, t in tangents.items() if self.outputs[path].requires_grad]
        if roots:  # forward may have differentiated before, and accumulated
            torch.autograd.backward([root for root, _ in roots], [t for _, t in roots], retain_graph=True)
        return {name: leaf.grad for name, leaf in wanted.items() if leaf.grad is not None}


class GraphReference:
    """The same by the captured graph."""

    def __init__(self, graph: JointGraph, given: Given) -> None:
        held = {**given.parameters, **given.buffers, **given.constants}
        self.graph, self.run = graph, GraphRun(graph, held, given.inputs, given.keys)
        values = self.run.forward
        self.outputs, mutations = self._results("output", values), self._results("mutation", values)
        self.buffers = {**given.buffers, **mutations}

    def gradients(self, tangents: Values) -> Values:
        values = self.run.backward(tangents)
        self.buffers |= self._results("update", values)
        return self._results("gradient", values)

    def _results(self, role: str, values: Mapping[str, torch.Tensor]) -> Values:
        return {o.target: values[o.name] for o in self.graph.outputs if o.role == role and o.name is not None}


@dataclass(kw_only=True)
class Given:
    """What a step starts from, as global tensors, parameters as operators use them. `trained` are the parameters
    and inputs that take a gradient."""

    parameters: Values
    buffers: Values
    inputs: Values
    constants: Values
    trained: frozenset[str]
    keys: Sequence[torch.Tensor] = ()


class Verifier:
    """Checks the first `steps` calls of a module and one of the next hundred, and the backward of each."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any], torch.Tensor] | None, steps: int) -> None:
        self.model, rebound = skeleton(unwrapped(model))
        self.loss_fn, self.steps = rebound.of(loss_fn), steps
        self.memo = rebound.memo
        self.hooks = {name: [*map(rebound.of, hooks)] for name, hooks in gradient_hooks(unwrapped(model)).items()}
        self.calls, self.done = 0, 0
        self.later = 0
        """The number of the later call, the same on all ranks. State that no first call shows may show in it."""

    def begin(
        self, state: _State, modules: Sequence[nn.Module], inputs: Mapping[str, torch.Tensor]
    ) -> StepCheck | None:
        """What checks the step that begins, or None where it is not checked. Gathers parameters."""
        self.later = self.later or self.steps + 1 + int(state.program.digest, 16) % 100
        self.calls += 1
        if self.calls > self.steps and self.calls != self.later:
            return None
        self.done += 1
        held = {name: state.values[name] for name in state.values.aliases}
        trained = {
            name
            for name, x in (*held.items(), *inputs.items())
            if x.requires_grad and torch.is_grad_enabled() and name in state.trained
        }
        parameters = {name: x for name, x in held.items() if isinstance(x, nn.Parameter)}
        precision = state.captured.precision
        used = {name: gathered(x).to(precision.used_in(x.dtype)) for name, x in parameters.items()}
        if (dtype := precision.gathered_in) is not None:
            used |= {name: rounded(used[name], dtype) for name in narrowed_parameters(state.program, dtype)}
        given = Given(
            parameters=used,
            buffers={name: gathered(x) for name, x in held.items() if name not in parameters},
            inputs={path: gathered(x) for path, x in inputs.items()},
            constants={name: x.clone() for name, x in state.constants.items()},
            trained=frozenset(trained),
        )
        model, rebound = copied(self.model, {})
        hooks = {name: [*map(rebound.of, each)] for name, each in self.hooks.items()}
        for module, other in zip(model.modules(), modules, strict=True):
            module.training = other.training
            for name, value in _plain(vars(other), vars(module)).items():
                vars(module)[name] = Rebound(rebound.memo).within(Rebound(self.memo).within(value))
        return StepCheck(
            step=self.calls, state=state, model=model, loss_fn=rebound.of(self.loss_fn), given=given, hooks=hooks
        )


@dataclass(kw_only=True)
class StepCheck:
    """One step beside itself in one process."""

    step: int
    state: _State
    model: nn.Module
    loss_fn: Callable[[Any], torch.Tensor] | None
    given: Given
    hooks: Mapping[str, Sequence[Callable[[torch.Tensor], Any]]]
    reference: Eager | GraphReference = field(init=False)

    def forward(self, outputs: Mapping[str, torch.Tensor], keys: Sequence[torch.Tensor]) -> None:
        """Compare what forward gave. `keys` are those of its random operators."""
        self.given.keys = keys
        returned = {path: gathered(x) for path, x in outputs.items()}
        with together(self.state.mesh):
            self.reference = self._graph() if keys else self._eager()
            expected = _cut(self.reference.outputs, returned)
            pairs = [(f"output {path}", path, "output", x, expected.get(path)) for path, x in returned.items()]
            self._compare([*pairs, *self._written(self.state.mutations)], {})

    def backward(self, tangents: Mapping[str, torch.Tensor | None], gradients: Mapping[str, torch.Tensor]) -> None:
        """Compare the gradients that came of those of outputs, by path; absent ones are zero."""
        actual = {name: gathered(g) for name, g in gradients.items()}
        given = {path: t if t is None else gathered(t) for path, t in tangents.items()}
        with together(self.state.mesh):
            filled = {
                i.target: torch.zeros(i.meta.shape, dtype=i.meta.dtype, device=self.state.device) if t is None else t
                for i in self.state.tangents
                for t in [given.get(i.target)]
            }
            expected = self._at_rest(self.reference.gradients(filled))
            pairs = [(f"the gradient of {name}", name, "gradient", g, expected.get(name)) for name, g in actual.items()]
            self._compare([*pairs, *self._written(self.state.updates)], filled)

    def _written(self, results: Sequence[tuple[int, ProgramOutput]]) -> list[Pair]:
        """What a pass wrote into buffers, and what it should have."""
        expected = {**self.given.buffers, **self.reference.buffers}
        return [
            (f"buffer {o.target}", o.target, o.role, gathered(self.state.values[o.target]), expected.get(o.target))
            for _, o in results
        ]

    def _at_rest(self, gradients: Values) -> Values:
        """Gradients in the dtypes in which the module holds their parameters."""
        held_in = at_rest(self.state.captured.graph)
        return {name: g.to(held_in.get(name, g.dtype)) for name, g in gradients.items()}

    def _eager(self) -> Eager:
        try:
            return Eager(self.model, self.loss_fn, self.state.captured, self._copy(), self.hooks)
        except Exception as error:
            raise ValueError(
                f"verify: the model does not run in one process on global tensors, {type(error).__name__}: {error}"
            ) from error

    def _graph(self) -> GraphReference:
        return GraphReference(self.state.captured.graph, self._copy())

    def _copy(self) -> Given:
        """Buffers are written."""
        buffers = {name: x.clone() for name, x in self.given.buffers.items()}
        inputs = {path: x.detach().clone() for path, x in self.given.inputs.items()}
        return replace(self.given, buffers=buffers, inputs=inputs)

    def _compare(self, pairs: Sequence[Pair], tangents: Values) -> None:
        """Raises ValueError for the first tensor, in the order of the graph, that differs."""
        graph = self.state.captured.graph
        reduced_in = self.state.captured.precision.reduced_in or torch.float64
        dtypes = [reduced_in, *(meta.dtype for meta in graph.metas.values() if meta.dtype in TOLERANCES)]
        dtype = max(dtypes, key=lambda d: TOLERANCES[d])
        largest = max(
            (largest_element(x) for _, _, role, _, x in pairs if role == "gradient" and x is not None), default=0.0
        )
        wrong = []
        for what, target, role, actual, expected in pairs:
            expected = torch.zeros_like(actual) if expected is None and role == "gradient" else expected
            limit = TOLERANCES[dtype]
            error = difference(actual, expected, max(NEGLIGIBLE, limit) * largest)
            if not actual.dtype.is_floating_point and not actual.dtype.is_complex:
                limit = UNDECIDED if role == "output" else 0.0
            if not error <= limit:
                place = next((o.name for o in graph.outputs if (o.role, o.target) == (role, target)), None)
                at = graph.producer.get(place or "", -1)
                wrong.append((at, what, error, limit, (role, target, actual)))
        if not wrong:
            return
        at, what, error, limit, (role, target, actual) = min(wrong, key=lambda w: w[0])
        node = graph.nodes[at] if at >= 0 else None
        origin = f", which `{node.op}` of module {node.module!r} makes" if node else ""
        raise ValueError(
            f"verify: in step {self.step}, {what}{origin}, differs from one process by {error:.3g} of its largest "
            f"element, and {limit:g} is the tolerance for {str(dtype).removeprefix('torch.')}; {len(wrong)} of "
            f"{len(pairs)} tensors differ. {self._fault(role, target, actual, limit, tangents)}"
        )

    def _fault(self, role: str, target: str, actual: torch.Tensor, limit: float, tangents: Values) -> str:
        """Whether the captured graph itself is wrong, or how the ranks compute it."""
        report = "please report it with the model and the plan"
        if isinstance(self.reference, GraphReference):
            return f"The ranks do not compute the captured graph: {report}"
        graph = self._graph()
        gradients = self._at_rest(graph.gradients(tangents)) if role in ("gradient", "update") else {}
        outputs = _cut(graph.outputs, {target: actual}) if role == "output" else {}
        expected = {"output": outputs, "gradient": gradients}.get(role, graph.buffers)
        if target in expected and difference(actual, expected[target], 0.0) <= limit:
            return f"The ranks compute the captured graph, and that is not the model: {report}"
        return f"The ranks do not compute the captured graph: {report}"


def _cut(outputs: Mapping[str, torch.Tensor], returned: Values) -> dict[str, torch.Tensor]:
    """Of outputs what the caller gets, where they are cut back to the length of a batch."""
    return {path: x[tuple(map(slice, returned[path].shape))] for path, x in outputs.items() if path in returned}


def _plain(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """The constants and containers that attributes hold now, which may have changed since."""
    kinds = (type(None), bool, int, float, complex, str, list, tuple, dict, set, SimpleNamespace, Namespace)
    names = (name for name in then.keys() & now.keys() if not name.startswith("_"))
    return {name: copy.deepcopy(now[name]) for name in names if type(now[name]) in kinds}


Pair = tuple[str, str, str, torch.Tensor, torch.Tensor | None]
"""What a tensor is, its target and role, its value here, and what it should be."""
