"""A model that is tried: captured once, run by eager once, and compared with any number of programs."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.compat.neutral import without_autocast
from autopar.compat.wrapping import unwrapped
from autopar.ir.layout import Layout
from autopar.ir.program import Program
from autopar.passes.capture.captured import Captured
from autopar.passes.capture.fakes import copied
from autopar.passes.codegen.demand import placed
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space
from autopar.planning.planner import Planner
from autopar.planning.request import Recompute

from .draws import untouched_random_state
from .locate import Departure, first_difference, reference_values
from .plans import random_assignment
from .steps import DRAWS, KINDS, StepResult, eager_steps, errors, read_draws, simulated_steps, tangents_of

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
"""Relative errors up to which two orders of adding the same numbers count as equal, by the narrowest dtype of a
graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One plan beside eager. `errors` holds the largest relative error of each of `KINDS` over the steps, up to the
    first at which something differs (`step`), and `worst` the name of the tensor that has it. A plan whose program does
    not run has what stopped it in `failure`."""

    plan: str
    tolerance: float
    errors: Mapping[str, float] = field(default_factory=dict)
    worst: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    first: Departure | None = None
    failure: str = ""

    @property
    def equal(self) -> bool:
        return not self.failure and self.step is None


class EagerTrial:
    """Eager's steps of a copy of the model, and what compares programs with them.

    Raises ValueError where the model is refused."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = torch.float64,
        steps: int = 1,
        recompute: Recompute = "auto",
    ) -> None:
        check_numbers(model, seed, steps, dtype)
        self.seed, self.steps = seed, steps
        self.args, self.kwargs = _cast(tuple(args), dtype), _cast(dict(kwargs or {}), dtype)
        self.model, self.loss_fn = _copy(unwrapped(model), loss_fn, dtype)
        self.planners: dict[tuple[tuple[str, int], ...], Planner] = {}
        with untouched_random_state():
            # a copy of its own, lest what capture does to it is seen by eager
            traced, traced_loss = _copy(self.model, self.loss_fn, None)
            self.base = Planner(traced, {"a": 1}, self.args, self.kwargs, loss_fn=traced_loss, recompute=recompute)
        metas = self.captured.graph.metas  # a norm may work in float32 whatever the model is in
        self.tolerance = max(
            TOLERANCES[dtype] for dtype in (torch.float64, *(m.dtype for m in metas.values())) if dtype in TOLERANCES
        )

    @property
    def captured(self) -> Captured:
        return self.base.captured

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs that a model may write into."""

        def fresh(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)

        inputs: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(fresh, (self.args, self.kwargs))
        return inputs

    @cached_property
    def expected(self) -> list[StepResult]:
        """Eager's steps. Raises ValueError where the model itself does not run."""

        def steps(read: Sequence[int] | None) -> list[StepResult]:
            model, loss_fn = _copy(self.model, self.loss_fn, None)
            return eager_steps(
                model, self.inputs, self.captured, loss_fn=loss_fn, steps=self.steps, seed=self.seed, read=read
            )

        try:
            with untouched_random_state():
                results = steps(None)
                if DRAWS in results[0].outputs:
                    model, loss_fn = _copy(self.model, self.loss_fn, None)
                    results = steps(read_draws(model, self.inputs, self.captured, loss_fn=loss_fn))
                return results
        except Exception as error:
            raise ValueError(
                f"the model does not run in PyTorch as it is given: {type(error).__name__}: {error}"
            ) from error

    def on(self, mesh_shape: Mapping[str, int]) -> Planner:
        """The planner for a mesh."""
        key = tuple(mesh_shape.items()) if isinstance(mesh_shape, Mapping) else ()
        if key not in self.planners:
            self.planners[key] = self.base.on(mesh_shape, None)
        return self.planners[key]

    def of_solver(self, mesh_shape: Mapping[str, int], solver: str) -> PlanRow:
        """A solver's or preset's plan beside eager. Raises ValueError where it is refused."""
        planner = self.on(mesh_shape)

        def write() -> tuple[Program, Mapping[str, Layout]]:
            plan = planner.plan(solver=solver)
            return planner.program(plan), layouts(planner.space, planner.assignment(plan))

        return self._row(solver, write)

    def of_random(self, mesh_shape: Mapping[str, int], seed: int, *, lower: bool = True) -> PlanRow:
        """A random plan beside eager, in buckets and in parts where these pay; or as it is."""
        planner = self.on(mesh_shape)

        def write() -> tuple[Program, Mapping[str, Layout]]:
            assignment = random_assignment(planner.space, seed)
            writer = planner.writer
            program = writer.written(assignment) if lower else writer.plain(assignment)
            return program, layouts(planner.space, assignment)

        return self._row(f"random {seed}", write)

    def _row(self, name: str, write: Callable[[], tuple[Program, Mapping[str, Layout]]]) -> PlanRow:
        """ValueErrors refuse; whatever else is raised is a failure of the plan."""
        try:
            program, laid_out = write()
        except ValueError:
            raise
        except Exception as raised:
            return PlanRow(plan=name, tolerance=self.tolerance, failure=f"planning: {_shown(raised)}")
        return self.row(name, program, laid_out)

    def row(self, name: str, program: Program, laid_out: Mapping[str, Layout]) -> PlanRow:
        """A program beside eager; `laid_out` says how its values lie (see `codegen.layouts`)."""
        expected, captured = self.expected, self.captured
        inputs = captured.bind(self.args, self.kwargs)
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        start: Mapping[str, torch.Tensor] = {**parameters, **buffers, **captured.constants}
        held = {name: tensor.detach() for name, tensor in start.items()}
        try:
            with without_autocast("cpu"):
                steps = simulated_steps(
                    program,
                    captured,
                    held,
                    (list(parameters), list(buffers)),
                    inputs,
                    steps=self.steps,
                    seed=self.seed,
                    tolerance=self.tolerance,
                )
        except Exception as raised:
            first = self._located(program, laid_out, held, inputs, 0) if isinstance(raised, AssertionError) else None
            return PlanRow(plan=name, tolerance=self.tolerance, failure=_shown(raised), first=first)
        most: dict[str, float] = {}
        worst: dict[str, str] = {}
        wrong: int | None = None
        for number, ((_, actual), wanted) in enumerate(zip(steps, expected, strict=True)):
            for (kind, tensor), error in errors(actual, wanted).items():
                if error > most.get(kind, -1.0):
                    most[kind], worst[kind] = error, tensor
                if not error <= self.tolerance:
                    wrong = number
            if wrong is not None:
                break
        where = None if wrong is None else self._located(program, laid_out, steps[wrong][0], inputs, wrong)
        ordered = {kind: most[kind] for kind in KINDS if kind in most}
        return PlanRow(plan=name, tolerance=self.tolerance, errors=ordered, worst=worst, step=wrong, first=where)

    def _located(
        self,
        program: Program,
        laid_out: Mapping[str, Layout],
        held: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        step: int,
    ) -> Departure:
        """Where a step departs from eager."""
        graph, seed, tangents = self.captured.graph, self.seed + step, tangents_of(program, self.captured)
        with without_autocast("cpu"):
            try:
                difference = first_difference(
                    program, laid_out, graph, held, inputs, tangents, seed=seed, tolerance=self.tolerance
                )
            except Exception as raised:
                return Departure(what=f"the program does not run to its end: {_shown(raised)}")
            if difference is not None:
                return difference
            values = reference_values(graph, held, inputs, tangents, seed)
        wanted = self.expected[step]
        for o in graph.outputs:
            theirs = {"output": wanted.outputs, "gradient": wanted.gradients}.get(o.role, wanted.buffers or {})
            if o.name is None or o.target not in theirs:
                continue
            given = StepResult(outputs={o.target: values[o.name]})
            (error,) = errors(given, StepResult(outputs={o.target: theirs[o.target]})).values()
            if not error <= self.tolerance:
                return Departure(
                    what=f"the captured graph is not what the model does: {o.role} {o.target} differs by {error:.3g}",
                    error=error,
                )
        return Departure(what="every operator agrees with the captured graph on one device; what leaves it does not")


def _shown(error: BaseException) -> str:
    """An exception in a line, with where it was raised."""
    message = " ".join(str(error).split())
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"({Path(last.filename).name}:{last.lineno})"
    return "; ".join([f"{type(error).__name__}: {message} {where}", *getattr(error, "__notes__", ())])


def check_numbers(model: nn.Module, seed: int, steps: int, dtype: torch.dtype | None) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: give an nn.Module")
    for name, value, least in (("seed", seed, 0), ("steps", steps, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}: give a whole number, at least {least}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}: give a floating dtype, or None for the model's own")
    tensors = (*model.named_parameters(), *model.named_buffers())
    bare = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if bare:
        raise ValueError(f"{bare[0]} is on meta: a model that is run must have values, so make it on a device")


def _copy(
    model: nn.Module, loss_fn: Callable[[Any], torch.Tensor] | None, dtype: torch.dtype | None
) -> tuple[nn.Module, Callable[[Any], torch.Tensor] | None]:
    """Copies that share nothing with the model and the loss, nor with each other's originals, in this dtype
    (None: as they are), on the CPU."""
    holder: Any = nn.Module()
    holder.model, holder.loss_fn = model, loss_fn  # as submodules, of which what cannot be copied is shared one by one
    copies: Any
    copies, _ = copied(holder, {})
    model, loss_fn = copies.model, copies.loss_fn
    modules = [*model.modules(), *(loss_fn.modules() if isinstance(loss_fn, nn.Module) else ())]
    seen: set[int] = set()
    for module in modules:
        for leaf in pytree.tree_leaves(vars(module)):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
                seen.add(id(leaf))
                wanted = leaf.dtype if dtype is None else _like(leaf.dtype, dtype)
                if leaf.device.type != "cpu" or leaf.dtype != wanted:
                    leaf.data = leaf.data.to("cpu", wanted)
                if isinstance(leaf, nn.Parameter):
                    leaf.grad = None
    return model, loss_fn


def _like(own: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    if own.is_complex:
        return {torch.float64: torch.complex128, torch.float16: torch.complex32}.get(wanted, torch.complex64)
    return wanted if own.is_floating_point else own


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        wanted = leaf.dtype if dtype is None else _like(leaf.dtype, dtype)
        return leaf.detach().to("cpu", wanted).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(cast, tree)


def layouts(space: Space, assignment: Assignment) -> dict[str, Layout]:
    """The layout in which each value of the graph is produced, by the name that it has there and in the program. (Views
    of these values have no layout of their own, nor has what is made where it is read.)"""
    return {
        item.name(root): layout
        for item in placed(space, assignment)
        for root, layout in zip(item.site.makes, item.option.makes, strict=True)
        if root and not item.site.made
    }
