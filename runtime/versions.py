"""The programs of a parallel module, one for each mode, state of Python and values read of inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import compat
from autopar.cluster.machine import Cluster
from autopar.ir.graph import JointGraph, Ref, map_references
from autopar.ir.layout import Layout
from autopar.ir.program import Program
from autopar.ir.rewrite import living
from autopar.passes.capture.captured import Captured, NothingTrainedError
from autopar.passes.capture.concrete import Pinned, same_value
from autopar.passes.capture.fakes import skeleton
from autopar.planning.meshes import mesh_of
from autopar.planning.planner import Planner, captured_for_planning

from .agree import all_equal, on_first_rank, together
from .guard import Guard, report_changed
from .held import State
from .verify import gathered


@dataclass(frozen=True, slots=True)
class Mode:
    """What a captured graph depends on beside the model: which modules train, in the order of `modules()`, which
    parameters require gradients, whether gradients are wanted at all, and what `torch.autocast` casts to."""

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


Again = Callable[[Mode, nn.Module, Sequence[Captured], Mapping[str, torch.Tensor]], tuple[Captured, Program | int]]
"""Captures in another mode, with other attributes of the model or with other values of inputs (by path). Gives the step
and its program, with the parameters where they are, or the index of an earlier step whose program serves it. Called on
all ranks at once."""


logger = logging.getLogger("autopar")

PINNED_MOST = 8
"""Programs that are kept for a mode, by what they read of inputs; those that were called last."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Version:
    """A program, and what it is right for."""

    mode: Mode
    guard: Guard
    pinned: Pinned
    state: State


class Versions:
    """The program for each mode that the module is called in."""

    def __init__(self, parallel: nn.Module, model: nn.Module, state: State, again: Again | None) -> None:
        self.base, self.again = state, again
        # the parallel module stands for the model; submodules are its mirrors, in the same order
        self.modules = tuple(parallel.modules())
        self.parameters = tuple(
            (name, *state.owners[name]) for name in state.aliases if isinstance(state.value(name), nn.Parameter)
        )
        captured = state.captured
        trained = {o.target for o in state.gradient_outputs if o.name is not None}
        mode = Mode(
            training=tuple(m.training for m in model.modules()),
            trainable=frozenset({name for name, *_ in self.parameters} & trained | set(captured.without_gradient)),
            gradients=bool(state.tangents)
            or (torch.is_grad_enabled() and not any(p.requires_grad for p in model.parameters())),
            autocast=captured.autocast,
        )
        self.root, self.loss_fn = vars(parallel)["_root"], getattr(again, "loss_fn", None)
        self.versions: list[_Version] = [self._version(mode, captured, state)]
        self.chosen: dict[tuple[Any, ...], _Version] = {}
        self.device_type = state.device.type

    def state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
        """That of the mode which the module is in now, and of these inputs."""
        gradients = torch.is_grad_enabled()
        flags: list[Any] = [compat.autocast_dtype(self.device_type), gradients, *[m.training for m in self.modules]]
        if gradients:
            flags += [registry[key].requires_grad for _, registry, key in self.parameters]
        key = tuple(flags)
        chosen = self.chosen.get(key)
        if chosen is None or not chosen.guard.holds() or (chosen.pinned and not self._reads(chosen, args, kwargs)):
            self.chosen[key] = chosen = self._choose(gradients, args, kwargs)
        return chosen.state

    def guard_again(self) -> None:
        """Guard the modules that these modes are of now, and no others."""
        for version in self.versions:
            version.guard = self._guard(version.state.captured)
        self.chosen = {}

    def _guard(self, captured: Captured) -> Guard:
        return Guard(self.root, self.loss_fn, captured.reads)

    def _version(self, mode: Mode, captured: Captured, state: State) -> _Version:
        return _Version(mode=mode, guard=self._guard(captured), pinned=captured.pinned, state=state)

    def _reads(self, version: _Version, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a program's numbers are those of these inputs, on all ranks alike."""
        differs = None
        bound = self._bound(args, kwargs)
        inputs = {path: gathered(bound[path]) for path in version.pinned.slots}
        with together(self.base.mesh):
            differs = version.pinned.differs(inputs)
        all_equal(
            differs is None,
            self.base.mesh,
            f"the ranks read different {version.pinned}: a plain tensor is the global batch and must be the same on "
            f"every rank",
        )
        return differs is None

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The inputs by path; what is wrong with those of any rank is raised on all of them."""
        bound: dict[str, torch.Tensor] = {}
        with together(self.base.mesh, ValueError):
            bound = self.base.captured.bind(args, kwargs)
        return bound

    def _choose(self, gradients: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Version:
        wanted = (name for name, registry, key in self.parameters if gradients and registry[key].requires_grad)
        cast = compat.autocast_dtype(self.device_type)
        mode = Mode(tuple(m.training for m in self.modules), frozenset(wanted), gradients, cast)
        changed: list[str] = []
        others: list[_Version] = []
        for version in self.versions:
            if version.mode == mode or (self.again is None and version.mode.covers(mode)):
                if not version.guard.holds():
                    changed = version.guard.changed
                elif version.pinned and not self._reads(version, args, kwargs):
                    others.append(version)
                else:
                    self.versions.append(self.versions.pop(self.versions.index(version)))
                    return version
        if others:
            self._report_read(others)
        elif changed:
            report_changed(changed, possible=self.again is not None)
        if self.again is None:
            raise ValueError(
                f"the module has a program for {self.versions[0].mode}, and is called for {mode}: call train(), eval() "
                f"and requires_grad_() as when it was captured, or make it with autopar.parallelize"
            )
        states = [version.state for version in self.versions]
        inputs = self._bound(args, kwargs)
        captured, program = self.again(mode, self.root, [state.captured for state in states], inputs)
        if isinstance(program, int):
            served = [state for state in states if state.program is states[program].program]
            same = [state for state in served if same_values(state.captured, captured)]
            state = same[0] if same else self.base.with_program(captured, states[program].program)
        else:
            state = self.base.with_program(captured, program)
        version = self._version(mode, captured, state)
        self.versions.append(version)
        return version

    def _report_read(self, others: Sequence[_Version]) -> None:
        """Say that the programs of a mode read other numbers; the one that was called longest ago is dropped if there
        are too many. Raises ValueError where another cannot be had."""
        pinned = others[0].pinned
        if self.again is None:
            raise ValueError(
                f"the program is right for other {pinned}: give the inputs that it was captured with, or make the "
                f"module with autopar.parallelize, which captures again"
            )
        logger.warning(
            "the model's Python reads %s, and these differ from those of the %s: it is captured and planned again, "
            "which takes long, and %d programs are kept. What differs from batch to batch should be computed with "
            "tensors (a mask, torch.where), not read",
            pinned,
            "program" if len(others) == 1 else f"{len(others)} programs",
            PINNED_MOST,
        )
        if len(others) >= PINNED_MOST:
            dropped = others[0]
            self.versions.remove(dropped)
            self.chosen = {key: version for key, version in self.chosen.items() if version is not dropped}


def serves(captured: Captured, wanted: Captured) -> bool:
    """Whether the program of a captured step computes all that is wanted of another, and maybe gradients beside."""
    targets = {o.target for o in wanted.graph.outputs if o.role == "gradient" and o.name is not None}
    return lines(captured.graph, targets) == lines(wanted.graph, targets)


def same_values(captured: Captured, other: Captured) -> bool:
    """Whether two steps of the same operators read equal constants and put their outputs together alike."""
    if captured.output_spec != other.output_spec or captured.constants.keys() != other.constants.keys():
        return False
    leaves = zip(captured.output_leaves, other.output_leaves, strict=True)
    return all((a.path, a.meta) == (b.path, b.meta) and same_value(a.constant, b.constant) for a, b in leaves) and all(
        tensor.device == other.constants[name].device and same_value(tensor, other.constants[name])
        for name, tensor in captured.constants.items()
    )


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


class Modes:
    """Captures, plans and writes a program for a mode, on all ranks together.

    A captured graph holds one mode: which modules train (dropout, batch norm, whatever reads `self.training`), which
    parameters take gradients, whether any do, and what autocast casts. A call in another mode, such as evaluation
    between epochs, needs another graph. It is captured when it is first needed, from a copy of the model that has
    shapes and no values, and planned with every parameter where it is, so that nothing is moved or held twice. Where a
    program that there is computes the same, and maybe gradients that the mode does not ask for, nothing is planned.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        mesh: DeviceMesh,
        at_rest: Mapping[str, Layout],
        *,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        cluster: str | Cluster | None,
    ) -> None:
        self.model, self.captured, self.mesh, self.at_rest = skeleton(model), captured, mesh, at_rest
        self.loss_fn, self.cluster = loss_fn, cluster

    def __call__(
        self, mode: Mode, model: nn.Module, earlier: Sequence[Captured], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[Captured, Program | int]:
        """The step as it is captured in this mode from `model`, whose attributes may have changed, and from the
        `inputs` of a call, and its program, or which of the `earlier` ones has a program that serves it.

        Raises ValueError, the same on every rank, where the model cannot be captured in this mode, or the
        ranks call it in different ones."""
        all_equal(
            mode,
            self.mesh,
            "the ranks call the module in different modes: call train(), eval(), requires_grad_() and autocast() alike",
        )
        self.model = skeleton(model)
        for module, training in zip(self.model.modules(), mode.training, strict=True):
            module.training = training
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in mode.trainable)
        # Python may read values of inputs: a DTensor is gathered, on all ranks alike
        given = {path: gathered(tensor) for path, tensor in inputs.items()}
        planner = serving = program = None
        with together(self.mesh, ValueError):
            kind = self.mesh.device_type
            cast = torch.autocast(kind, dtype=mode.autocast, enabled=mode.autocast is not None)
            with torch.inference_mode(False), torch.set_grad_enabled(mode.gradients), cast:
                args, kwargs = self._example(given)
                captured = self._captured(args, kwargs)
                serving = next((i for i, other in enumerate(earlier) if serves(other, captured)), None)
                if serving is None:
                    planner = Planner(
                        self.model, mesh_of(self.mesh), args, kwargs,
                        loss_fn=self.loss_fn, cluster=self.cluster, device_type=kind, captured=captured,
                    )  # fmt: skip
        all_equal(
            serving, self.mesh, f"the ranks captured different models for {mode}: give every rank the same versions"
        )
        logger.info("captured again, for %s%s", mode, "" if serving is None else ", which an earlier program serves")
        if serving is not None:
            return captured, serving
        assert planner is not None
        find = planner.assignment_at
        assignment = on_first_rank(lambda: find(self.at_rest), self.mesh)
        with together(self.mesh, ValueError):
            program = planner.writer.written(assignment)
        assert program is not None
        return planner.captured, program

    def _captured(self, args: Any, kwargs: Any) -> Captured:
        def again() -> Captured:
            kind = self.mesh.device_type
            return captured_for_planning(self.model, args, kwargs, loss_fn=self.loss_fn, device_type=kind)

        try:
            return again()
        except NothingTrainedError:  # a mode need not train what the module does
            self.model.requires_grad_(False)
            return again()

    def _example(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """The inputs of a call, as those that the model was captured with."""
        differentiated = {o.target for o in self.captured.graph.outputs if o.role == "gradient"}
        leaves = [
            leaf.constant if leaf.meta is None else inputs[leaf.path].requires_grad_(leaf.path in differentiated)
            for leaf in self.captured.input_leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.captured.input_spec)
        return args, kwargs
