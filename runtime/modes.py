"""Captures of a model again, in another mode or with inputs of another form: what the mode is, and the program that is
planned for it with every parameter where it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.compat.watching import hook_gradient
from autopar.compat.wrapping import unwrapped
from autopar.ir.graph import JointGraph, Ref, map_references
from autopar.ir.layout import Layout
from autopar.ir.program import Program
from autopar.ir.rewrite import living
from autopar.passes.capture.captured import Captured
from autopar.passes.capture.errors import NothingTrainedError
from autopar.passes.capture.fakes import gradient_hooks, skeleton
from autopar.passes.lower.stages import TIME, cuts_by, staged
from autopar.passes.space.problem import Assignment
from autopar.planning.account import gathered_once
from autopar.planning.at_rest import Decided, best_at_rest
from autopar.planning.capturing import captured_for_planning
from autopar.planning.meshes import mesh_of
from autopar.planning.pipelines import divisors, time_pins
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.presets.context import Context
from autopar.planning.reports import Once
from autopar.planning.request import Request
from autopar.planning.training import Training
from autopar.solve.schedules import in_turn

from .agreement import all_equal, on_first_rank, together
from .inputs import Inputs, each
from .pipelined import Pipelined
from .places import gathered
from .state import trained_by

logger = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True)
class Mode:
    """What a captured graph depends on beside the model: which modules train, in the order of `modules()`, which
    parameters and inputs require gradients, whether gradients are wanted at all, and what `torch.autocast` casts to."""

    training: tuple[bool, ...]
    trainable: frozenset[str]
    gradients: bool
    autocast: torch.dtype | None

    def covers(self, other: Mode) -> bool:
        """Whether a graph of this mode gives what one of the other would, and maybe gradients beside, if the model does
        not ask which gradients are wanted."""
        if (self.training, self.autocast) != (other.training, other.autocast):
            return False
        return not other.gradients or (self.gradients and other.trainable <= self.trainable)

    def __str__(self) -> str:
        count = sum(self.training)
        what = "evaluation" if not count else "training" if count == len(self.training) else "partly training"
        cast = f", autocast to {self.autocast}" if self.autocast else ""
        return f"{what} {'with' if self.gradients else 'without'} gradients{cast}"


Again = Callable[[Mode, nn.Module, Sequence[Captured], Inputs], tuple[Captured, Program | Pipelined | int]]
"""Captures in another mode, with other attributes of the model or with other inputs. Gives the step and its program,
with the parameters where they are, or the index of an earlier step whose program serves it. Called on all ranks at
once."""


def serves(captured: Captured, wanted: Captured) -> bool:
    """Whether the program of a captured step computes all that is wanted of another, and maybe gradients beside."""
    targets = {o.target for o in wanted.graph.outputs if o.role == "gradient" and o.name is not None}
    return lines(captured.graph, targets) == lines(wanted.graph, targets)


def lines(graph: JointGraph, gradients: Collection[str]) -> list[str]:
    """The graph as text, without the gradients that are not among these and what only they need. Values are numbered,
    so that two graphs of the same operators give the same lines whatever their values are called."""
    outputs = [o for o in graph.outputs if o.name is not None and (o.role != "gradient" or o.target in gradients)]
    nodes = living(graph.nodes, (o.name for o in outputs))
    needed = {o.name for o in outputs}.union(*(node.inputs for node in nodes))
    names: dict[str, Ref] = {}

    def number(name: str) -> Ref:
        return names.setdefault(name, Ref(f"v{len(names)}"))

    text = [f"{number(i.name)}: {graph.metas[i.name]} = {i.role} {i.target}" for i in graph.inputs if i.name in needed]
    for node in nodes:
        arguments: tuple[Any, ...] = (map_references(node.args, number), map_references(node.kwargs, number))
        results = [number(o) if o else "_" for o in node.outputs]
        metas = [str(graph.metas[o]) for o in node.outputs if o]
        text.append(f"{'<' if node.backward else '>'} {results} = {node.op}{arguments}: {metas}")
    return [*text, *(f"{o.role} {o.target} = {number(o.name)}" for o in outputs if o.name is not None)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A step for inputs of another form, whose program is planned, and is written when a call first needs it."""

    captured: Captured
    write: Callable[[], Program]

    @staticmethod
    def of(planner: Planner, plan: Plan) -> Planned:
        return Planned(captured=planner.captured, write=partial(planner.program, plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """How programs for further modes are planned: all train as the `request` says; `decided` is where the plans for
    inputs of other forms begin; `once` knows what has been warned of."""

    request: Request
    decided: Decided
    once: Once
    pipelined: Pipelined | None = None


class Modes:
    """Captures, plans and writes a program for a mode and a form of inputs, on all ranks together.

    A captured graph holds one mode: which modules train (dropout, batch norm, whatever reads `self.training`), which
    parameters take gradients, whether any do, and what autocast casts; and one form of inputs: their structure, shapes
    and dtypes. A call in another mode, such as evaluation between epochs, or with the smaller last batch needs another
    graph. It is captured when it is first needed, from a copy of the model that has shapes and no values, and planned
    with every parameter where it is, so that nothing is moved or held twice. Where a program that there is computes the
    same, and maybe gradients that the mode does not ask for, nothing is planned.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        mesh: DeviceMesh,
        at_rest: Mapping[str, Layout],
        loss_fn: Callable[[Any], torch.Tensor] | None,
        planning: Planning,
    ) -> None:
        self.once, self.decided, self.request = planning.once, planning.decided, planning.request
        self.pipelined, self.sizes = planning.pipelined, mesh_of(mesh)
        if planning.pipelined is not None:  # how many micro-batches are taken, a batch says
            self.request = replace(self.request, micro_batches=1)
        self.form = Inputs.captured(captured, unwrapped(model)).form
        self.model, _ = skeleton(unwrapped(model))
        self.captured, self.mesh, self.at_rest = captured, mesh, at_rest
        self.loss_fn = loss_fn
        self.hooks = gradient_hooks(unwrapped(model))
        """Of the gradients of the model as it was given: they are part of its programs. Those that are registered on
        the parallel module's parameters run where gradients are given to these."""

    def __call__(
        self, mode: Mode, model: nn.Module, earlier: Sequence[Captured], inputs: Inputs
    ) -> tuple[Captured, Program | Pipelined | int]:
        """The step as it is captured in this mode from `model`, whose attributes may have changed, and from the
        `inputs` of a call, and its program, or which of the `earlier` ones has a program that serves it.

        Raises ValueError, the same on every rank, where the model cannot be captured in this mode."""
        self.model, rebound = skeleton(model)
        loss_fn = rebound.of(self.loss_fn)
        for module, training in zip(self.model.modules(), mode.training, strict=True):
            module.training = training
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in mode.trainable)
            hook_gradient(parameter, map(rebound.of, self.hooks.get(name, ())))
        # Python may read values of inputs: a DTensor is gathered, on all ranks alike
        given = each(inputs.tensors, _whole)
        planner = None
        with together(self.mesh), self.once.said():
            kind = self.mesh.device_type
            cast = torch.autocast(kind, dtype=mode.autocast, enabled=mode.autocast is not None)
            with torch.inference_mode(False), torch.set_grad_enabled(mode.gradients), cast:
                args, kwargs = self._example(inputs, given, mode.trainable)
                captured = self._captured(args, kwargs, loss_fn)
                # what forward differentiates for itself is told by a program of its own
                enables = not mode.gradients and any(leaf.requires_grad for leaf in captured.output_leaves)
                alike = (
                    i
                    for i, other in enumerate(earlier)
                    if not enables and serves(other, captured) and self._keeps(other, captured)
                )
                serving = next(alike, None)
                if serving is None:
                    planner = Planner(
                        self.model, self.sizes, args, kwargs, loss_fn=loss_fn, captured=captured, request=self.request
                    )
            if planner is not None and self.pipelined is not None:
                planner = planner.in_time(min(self.pipelined.staged.micro_batches, planner.batch))
        all_equal(
            serving, self.mesh, f"the ranks captured different models for {mode}: give every rank the same versions"
        )
        if serving is not None:
            return captured, serving
        assert planner is not None
        near = None if inputs.form == self.form else self.decided
        with self.once.said():
            count, assignment = on_first_rank(partial(self._assigned, planner, near), self.mesh)
        with together(self.mesh, ValueError), self.once.said():
            planner = planner.in_time(count)
            program = (
                planner.writer.written(assignment) if self.pipelined is None else self._staged(planner, assignment)
            )
        return planner.captured, program

    def _keeps(self, other: Captured, captured: Captured) -> bool:
        """Whether the program of a step keeps what another one returns: a pipeline that trains keeps little."""
        return self.pipelined is None or bool(trained_by(other)) == bool(trained_by(captured))

    def _assigned(self, planner: Planner, near: Decided | None) -> tuple[int, Assignment]:
        """The number of micro-batches, and the decisions: as many as there were or, where a batch cannot be cut so, the
        next ones that divide it; in the end it is not cut. Raises what the first number does if none leads to any."""
        most = planner.training.micro_batches
        if self.pipelined is None:
            return most, planner.assignment_at(self.at_rest, near)
        errors: list[ValueError] = []
        for count in dict.fromkeys((most, *(n for n in divisors(planner.batch) if n > most), 1)):
            on = planner.in_time(count)
            try:
                pins = time_pins(Context(on.space, on.searches.blocks()))
                assignment = best_at_rest(on.space, self.at_rest, near, pins)
                self._staged(on, assignment)
                return count, assignment
            except ValueError as error:
                errors.append(error)
        raise errors[0]

    def _staged(self, planner: Planner, assignment: Assignment) -> Pipelined:
        """In the stages that there are, by the schedule that there is; a batch of fewer samples than that has
        micro-batches passes in turn."""
        assert self.pipelined is not None
        program, of, units = planner.writer.plain(assignment), self.pipelined.staged, self.pipelined.schedule
        homes = {i.target: of.homes[i.name] for i in of.program.inputs if i.name in of.homes}
        if (count := program.mesh[TIME]) != units.micro_batches:
            units = in_turn(units.devices, count)
        cuts = cuts_by(program, homes, len(units.devices))
        return Pipelined.of(staged(program, cuts, gathered_once(planner.space, assignment)), units)

    def _captured(self, args: Any, kwargs: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> Captured:
        def again() -> Captured:
            kind = self.mesh.device_type
            training = Training.of(self.request)
            return captured_for_planning(self.model, args, kwargs, loss_fn=loss_fn, device_type=kind, training=training)

        try:
            return again()
        except NothingTrainedError:  # a mode need not train what the module does
            self.model.requires_grad_(False)
            return again()

    def _example(
        self, inputs: Inputs, given: Mapping[str, torch.Tensor], trainable: Collection[str]
    ) -> tuple[Any, Any]:
        """The inputs of a call with the `given` tensors. Of those that there were when the model was captured first,
        some are `trainable`."""
        known = {leaf.path for leaf in self.captured.input_leaves}
        for path, tensor in given.items():
            if path in trainable if path in known else inputs.leaves[path].requires_grad:
                tensor.requires_grad_()
        return inputs.with_tensors(given)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """An input on all ranks, which lies in memory as it is given."""
    return gathered(tensor) if isinstance(tensor, DTensor) or tensor.is_inference() else tensor.detach()
