"""The mission alone: what a model does in a step, split over the ranks of a mesh.

    model, example --trace--> Graph --space_of--> Space --search--> Assignment --codegen--> Program --Ranks--> a step

Each arrow is a function of what stands before it, and each noun can be printed. All else that autopar knows (what
Python did besides, layers that repeat, memory limits, presets, measured prices, overlap) stands around these steps and
is not imported here: `kernel.txt` names the modules that are.
"""

import copy
import math
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster.machine import Cluster
from autopar.compat.fakes import fake_mode
from autopar.compat.tensors import like
from autopar.ir.graph import JointGraph, overload
from autopar.ir.layout import shard
from autopar.ir.program import Program
from autopar.ir.tree import flatten
from autopar.ops import core as core  # the operators that are known here
from autopar.passes.capture.leaves import input_names
from autopar.passes.capture.recorder import Recorder
from autopar.passes.capture.step import ModelStep
from autopar.passes.codegen.program import codegen
from autopar.passes.space.build import strategies
from autopar.passes.space.problem import Assignment, ProblemBuilder
from autopar.passes.space.space import Space
from autopar.runtime.execute import compile, process_groups
from autopar.solve.narrow import least
from autopar.solve.problem import Choice

Tensors = Mapping[str, torch.Tensor]


def trace(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[JointGraph, Tensors]:
    """Forward, loss and backward of `model(*args, **kwargs)`, recorded while the model's own Python and autograd's own
    engine run on a copy without data; and the constants that it closes over, by name. The loss is the output, or its
    `.loss`. Raises ValueError where random numbers are drawn."""
    mode = fake_mode()

    def fake(x: torch.Tensor) -> torch.Tensor:
        with mode:
            return like(x, isinstance(x, nn.Parameter) and x.requires_grad)

    pairs, spec = flatten("", (args, kwargs))
    fakes = {path: fake(x) for path, x in pairs if isinstance(x, torch.Tensor)}
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(x), name) for name, x in named_tensors(model)}
    own = copy.deepcopy(model, {id(x): fake(x) for _, x in named_tensors(model)})
    step = ModelStep(own, pairs, spec, fakes, mode, names=input_names(model, [*fakes]), canonical=names)
    recorder = Recorder()
    recording = step.record(recorder, nullcontext(False), lambda: recorder)
    graph = recording.graph(recording.functional(), {name: name for name in recorder.constants})
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in overload(node.op).tags:  # type: ignore[attr-defined]
            raise ValueError(f"{node.op} draws random numbers, which the kernel does not know: use autopar.parallelize")
    return graph, recorder.constants


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, by every name that they have."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def space_of(graph: JointGraph, mesh: Mapping[str, int], cluster: Cluster) -> Space:
    """What can be decided about a graph on a mesh (axis name -> size), as one piece: no layer is known to repeat."""
    return strategies(graph, mesh, cluster)


def search(space: Space) -> Assignment:
    """The cheapest that is found from everything replicated, where one axis after the other is free and the others
    stay, until none of them improves it. An axis is solved exactly; where that is too wide, a few sites stay too,
    others each time."""
    builder, sites = ProblemBuilder(space), space.rest.sites
    best = {name: space.replicated(site) for name, site in sites.items()}
    seconds, unchanged, held = math.inf, 0, tuple[int, ...]()
    for axis in cycle(range(len(space.mesh))):
        allowed = {
            name: [best[name].on(axis, choice) for choice in site.choices[space.mesh[axis]]]
            for name, site in sites.items()
        }
        problem, decoder = builder.build(allowed)
        start = Choice(options=tuple([o.choice for o in decoder.options[name]].index(best[name]) for name in sites))
        solution, held = least(problem, start, free=held)
        improves = solution.score.seconds < seconds
        if improves:
            best, seconds = dict(decoder.decode(solution.choice).rest), solution.score.seconds
        unchanged = 0 if improves else unchanged + 1
        if unchanged == 2 * len(space.mesh):
            break
    return Assignment(rest=best)


class Ranks:
    """A program on this rank of a mesh: a module that holds its parts of the parameters."""

    def __init__(self, program: Program, model: nn.Module, constants: Tensors, mesh: DeviceMesh) -> None:
        self.program, self.coordinate = program, tuple(mesh.get_coordinate() or ())
        self.executable = compile(program, process_groups(mesh))
        whole = {**dict(named_tensors(model)), **constants}
        given = [i for i in program.inputs if i.role in ("parameter", "buffer")]
        self.held = {i.target: self.part(whole[i.target].detach(), i.layout) for i in given}
        """This rank's parts of parameters and buffers, by name."""

    def part(self, whole: torch.Tensor, layout: Any) -> torch.Tensor:
        return shard(whole, layout, self.program.mesh, self.coordinate).clone()

    def step(self, *args: Any, **kwargs: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """This rank's parts of the outputs, and of the gradients of what was differentiated, of one call."""
        program, leaves = self.program, dict(flatten("", (args, kwargs))[0])
        inputs = [i for i in program.inputs if i.role == "input"]
        known = {**self.held, **{i.target: self.part(leaves[i.target], i.layout) for i in inputs}}
        results, saved = self.executable.forward([known[i.target] for i in program.given])
        made = {o.target: x for o, x in zip(program.results, results, strict=True) if x is not None}
        ones = [self.part(torch.ones(i.meta.shape, dtype=i.meta.dtype), i.layout) for i in program.tangents]
        gradients = self.executable.backward([*saved, *ones])
        self.held |= {o.target: made[o.target] for o in program.results if o.role == "mutation"}
        outputs = {o.target: made[o.target] for o in program.results if o.role == "output"}
        return outputs, {o.target: x for o, x in zip(program.gradients, gradients, strict=True) if x is not None}


def parallel(model: nn.Module, mesh: DeviceMesh, cluster: Cluster, *args: Any, **kwargs: Any) -> Ranks:
    """The model, given an example of its inputs, on the ranks of a mesh whose prices are a cluster's."""
    graph, constants = trace(model, *args, **kwargs)
    axes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    space = space_of(graph, axes, cluster)
    return Ranks(codegen(space, search(space)), model, constants, mesh)
