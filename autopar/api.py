"""The verbs: `plan`, `parallelize`, `compare`, `read_plan`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster.library import named_cluster
from autopar.cluster.machine import Cluster
from autopar.cost.optimizers import Optimizer
from autopar.passes.capture.source import presented
from autopar.planning.at_rest import Decided
from autopar.planning.checks import check_mesh
from autopar.planning.lengths import planned_together, planners_of, resized
from autopar.planning.meshes import mesh_of, meshes
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.planning.progress import ended_by_interrupts
from autopar.planning.reading import refreshed, request_of
from autopar.planning.reports import Once
from autopar.planning.request import AUTO, LengthOptions, Request, Several, takes
from autopar.planning.texts import mesh_words
from autopar.report.comparison import Comparison
from autopar.report.question import Question, Variant, asked
from autopar.report.telling import Ticker, following
from autopar.runtime.agreement import all_equal, follow_world_timeout, on_first_rank, telling, together
from autopar.runtime.attempts import mesh_of_ranks
from autopar.runtime.modes import Modes, Planned, Planning
from autopar.runtime.module import CallOptions, ParallelModule
from autopar.runtime.padding import Padder, Padding
from autopar.runtime.pipelined import Pipelined
from autopar.runtime.profiled import profiled
from autopar.runtime.verify import Verifier

T = TypeVar("T")


@presented()
@takes(LengthOptions)
def plan(
    model: nn.Module,
    mesh_shape: Mapping[str, int] | int | Literal["auto"],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    **options: Unpack[LengthOptions],
) -> Plan:
    """The plan for a `model` on a mesh, without devices and without a process group. The model may be on meta.

    `mesh_shape` maps axis names to sizes, outermost first: `{"dp": 8, "tp": 8}`. For a number of devices, or "auto" for
    all of the cluster, autopar chooses the mesh too (`plan.mesh`). `args` and `kwargs` are the global example inputs,
    such as token ids [batch, sequence] of the whole batch (real, meta or fake; values are read only where forward's
    Python reads them). `loss_fn` takes the model's output to the loss, a scalar; without it the output's `.loss`, or a
    scalar output, is the loss. `cluster` is a name, the path of a file, or a `Cluster`. If it is None, plans are for
    "local", and `parallelize` on a CUDA mesh plans for "dgx-h100".

    `solver` is "auto" (the default: what "dp" finds, or a preset's plan where its step is shorter), "dp" (dynamic
    programming), "ilp" (integer program), "exhaustive", or a preset: "ddp" (data parallel), "fsdp", "megatron",
    "megatron_sp", or those of papers, "atp" (ATP 3.2), "par4d" (Par4D III), "meshslice" (MeshSlice 2.3; see
    `autopar.planning.presets`).

    `cost` says what the plan is the best of: "serial", "analytical" (the default), "volume" or "hybrid".

    - "serial": the cheapest plan as if nothing overlapped;
    - "analytical": the cheapest plan with half of the traffic in buckets hidden, one near it, or that of a preset,
      whichever has the shortest step on its timeline (`autopar.cost.timeline`);
    - "volume": the plan with the fewest bytes on links as Alpa counts them (`autopar.planning.costs`);
    - "hybrid": as "analytical", with operators measured on this device, and recorded in the database `profiles` (a
      file; the user's own if not given; see docs/profiling.md).

    `memory_limit_bytes` bounds the predicted peak of a rank's memory during a training step, in bytes. If it is None,
    the limit is the memory of the cluster's devices less their reserve, or none if the cluster does not say what memory
    they have (as "local" does not); `math.inf` lifts it. Of that memory the plan leaves the part `headroom` free
    (None: 0.05); a limit in bytes is used up to the last one. The peak includes the states of the `optimizer`: "adamw",
    "adamw_fp32" (float32 moments, and float32 weights beside narrower ones), "adamw_on_host" and "adamw_fp32_on_host"
    (in the host's memory between steps, see `autopar.states_on_host`), "sgd", "sgd_momentum", or a number of bytes per
    element of a parameter. `constraints` pins placements of parameters and inputs, and keeps modules off an
    axis: `{"lm_head.weight": {"tp": "S(0)"}, "model.layers.*.mlp": {"dp": "R"}}` (see `autopar.planning.constraints`).

    `recompute` says what backward makes again instead of keeping it: "auto" leaves it to the planner, which recomputes
    layers where a memory limit asks for it; "asked" makes again exactly what `torch.utils.checkpoint` marks in the
    model, as `gradient_checkpointing_enable()` of Hugging Face does; "none" keeps all that backward needs.

    With `offload` some of what is kept for backward may wait in the host's memory, where that makes the step shorter
    within the limit (see docs/long.md). The cluster must say its `host_bytes_per_second`.

    With `micro_batches` a step is so many calls with batches of the example's size, all but the last within
    `no_sync()`, and one step of the optimizer. The objective, the step and the peak are those of the whole step, with
    one reduction; whether what forward gathers is held from one micro-batch to the next is chosen too.

    A mesh axis "pp", or that which `pipeline` names, has the stages of a pipeline; it is the outermost. Then the
    example is the whole batch of a step, `micro_batches` is into how many parts it is cut ("auto", and 1: chosen), and
    `schedule` is "auto" (the shortest step) or that of a name, such as "1f1b" (see docs/pipelines.md). A constraint
    such as `{"model.layers.12": {"pp": 1}}` pins a module to a stage.

    `precision` says in which dtypes parameters are used and gradients reduced, where these are not the model's own:
    `autopar.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` trains a float32 model in bfloat16.
    Gathers, reductions, casts and the peak are those of these dtypes (see docs/howto.md).

    `imbalance` says how unevenly rows fall on experts: the rows of the fullest rank over the mean of all (1.0: evenly),
    or a list with the rows of each expert. Prices and the peak are those of the fullest rank.

    `lengths` are what batches are padded to in dim 1, such as `(512, 1024, 4096)`, or each with its share of the
    batches. All are planned, with parameters in one placement at rest: of those that the plans of single lengths
    choose, the one with the shortest mean step (see docs/lengths.md). The plan is that of the longest.

    A search ends when its work is done, which is counted so that the same inputs give the same plan on any machine.
    With `effort` seconds it ends then with the best that it has, and the plan says so (what is under way is finished
    first, and the program is written after that; the model's capture comes before). So it does at a first Ctrl-C; a
    second one stops it.

    Raises ValueError for what cannot be planned, and if no plan keeps the limit: the message says what was given and
    what to change.
    """
    request = Request(**options)
    shape = mesh_shape
    if not isinstance(shape, Mapping):
        machine = named_cluster(request.cluster, device_type="cpu")
        if isinstance(shape, bool) or not (shape == "auto" or (isinstance(shape, int) and shape > 0)):
            raise ValueError(f"mesh_shape is {shape!r}: give axis names with sizes, a number of devices, or 'auto'")
        if shape != "auto" and shape > machine.devices:
            raise ValueError(
                f"mesh_shape is {shape}, and cluster {machine.name} has {machine.devices} devices: give fewer, or a "
                f"larger cluster"
            )
        candidates = meshes(machine.devices if shape == "auto" else shape)
        request = replace(request, cluster=machine)
        longest = next(iter(request.shares), 0)
        args, kwargs = resized((args, kwargs), longest)
        first = Planner(model, candidates[0], args, kwargs, loss_fn=loss_fn, request=request)
        with ended_by_interrupts(first.effort.until):
            chosen = first.over(candidates, request)
        if not longest:
            return chosen.answering(lambda: first.on(chosen.mesh, machine).in_time(chosen.training.micro_batches))
        shape = chosen.mesh

    def of(length: int) -> Planner:
        return Planner(model, shape, *resized((args, kwargs), length), loss_fn=loss_fn, request=request)

    planners = planners_of(request.shares, of)
    on = next(iter(planners.values()))
    with ended_by_interrupts(on.effort.until):
        chosen, *_ = planned_together(planners, request).values()
    return chosen.answering(lambda: on.in_time(chosen.training.micro_batches))


@presented()
def read_plan(
    plan: str | Path | Plan,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    cluster: str | Cluster | None = None,
    optimizer: str | float | Optimizer | None = None,
) -> Plan:
    """A saved plan with its model: its step, its peak and all tables are computed again, on the cluster by the figures
    that the plan carries, so that an edited plan shows its own; and it answers questions (`Plan.explain`).

    `plan` is a file that `Plan.save` wrote, or a plan; the others are as for `autopar.plan`. Give a `cluster` to see
    the plan on another one (figures of a file leave out single operators that were measured), and an `optimizer` if it
    is one of your own. Raises ValueError for a plan of another model or other inputs, and for decisions that contradict
    themselves.
    """
    saved = plan if isinstance(plan, Plan) else Plan.load(plan)
    given = {name: value for name, value in (("cluster", cluster), ("optimizer", optimizer)) if value is not None}
    args, kwargs = resized((args, kwargs), saved.longest)
    planner = Planner(model, saved.mesh, args, kwargs, loss_fn=loss_fn, request=request_of(saved, **given))
    return refreshed(planner, saved).answering(lambda: planner)


@presented()
@takes(Several)
def compare(
    model: nn.Module,
    mesh_shape: Mapping[str, int] | Sequence[Mapping[str, int]],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    solvers: Sequence[str] | None = None,
    cluster: str | Cluster | Sequence[str | Cluster | None] | None = None,
    **options: Unpack[Several],
) -> Comparison:
    """Plans of several solvers and presets side by side, on one mesh and cluster or on each of several. The model is
    captured once.

    Arguments as for `plan`; `solvers` are "auto" and all presets if not given. A solver without a plan (no plan keeps
    the limit, a preset does not fit the batch) has its error in the place of a plan. `report` gets the part that is
    done, from 0 to 1, and what is next; `each` gets what is known so far, after each plan; plans are kept in the file
    `keep`, if one is given, as `autopar.fit` keeps them. Raises ValueError for arguments that no plan could take.
    """
    of_request, keep, report, each = asked(options)
    solvers = (AUTO, *PRESETS) if solvers is None else solvers
    if isinstance(solvers, str) or not isinstance(solvers, Sequence):
        raise ValueError(f"solvers is {solvers!r}: give a list of solvers and presets, such as ['auto', 'fsdp']")
    requests = [Request(solver=solver, **of_request) for solver in solvers]
    shape: Any = mesh_shape
    if not isinstance(shape, (Mapping, Sequence)) or isinstance(shape, str):
        check_mesh(shape)  # which raises: this is no mesh
    on = [mesh_shape] if isinstance(mesh_shape, Mapping) else list(mesh_shape)
    several = isinstance(cluster, Sequence) and not isinstance(cluster, str)
    clusters: list[str | Cluster | None] = list(cluster) if several else [cluster]  # type: ignore[arg-type, list-item]
    if not on or not clusters:
        raise ValueError("nothing to compare: give a mesh or more, and a cluster or more (or None)")
    cases = []
    for machine, mesh, request in product(clusters, on, requests):
        check_mesh(mesh)
        place = [mesh_words(mesh)] * (len(on) > 1) + [named_cluster(machine).name] * (len(clusters) > 1)
        cases.append(
            Variant(name=" ".join([request.solver, *place]), mesh=mesh, request=replace(request, cluster=machine))
        )
    report(0.0, "reading the model")
    request = Request(cluster=clusters[0], **of_request)
    planner = Planner(model, on[0], args, kwargs, loss_fn=loss_fn, request=request)
    known = Comparison({})
    question = Question(planner, total=max(1, len(cases)), keep=keep, report=report)
    for answer in map(question.answer, cases):
        known = Comparison({**known.results, answer.name: answer.plan or answer.error})
        each(known)
    report(1.0, "")
    return known


@presented()
@takes(LengthOptions)
def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    plan: Plan | None = None,
    whole_outputs: bool = False,
    verify: int = 0,
    padding: Padding | None = None,
    **options: Unpack[LengthOptions],
) -> ParallelModule:
    """The model as a module that trains on the mesh: same loss, same gradients, same parameter names.

    Every rank of the `mesh` (a `DeviceMesh` of PyTorch) calls it, with the same model and the same global example
    inputs. The first rank plans (unless a `plan` is given) and the others receive the plan; all ranks then write the
    same program. Without a mesh, all ranks that there are call it, and the mesh (`module.mesh`) is chosen too, or is
    that of the `plan`; where there is no process group yet, `autopar.init_process_group` makes one.

    Arguments as for `autopar.plan`; with `cost="profiled"` all ranks measure the programs among which the first one
    chooses, except for those in the database `profiles` (docs/profiling.md). `materialize` must give a model on meta
    its values before the first step.

    Outputs that the plan splits are DTensors. With `whole_outputs` each rank gathers them, and returns the plain
    tensors of the model on one device, for code that computes a metric or a loss with plain labels.

    The first `verify` calls and one of the next hundred, and the backward of each, also run in one process: every rank
    gathers parameters and buffers, runs the model on one device, and compares outputs, buffers and gradients. If they
    differ by more than 1e-9 (float64), 1e-3 (float32), 2e-2 (float16) or 1e-1 (bfloat16) of a tensor's largest element,
    all ranks raise a ValueError that names the first such tensor and the operator and module that compute it (the
    narrowest dtype of the step counts; integers must be equal, except for 1% of an output's elements). Every rank needs
    the memory and the time of one device for that. A model with random operators runs as its captured graph in that
    process, with the same random numbers, instead of as Python.

    With `padding`, batches with fewer rows than the example are padded to its rows, and with `lengths` to the smallest
    length that holds them (see `Padding`); outputs are cut back to the length of the batch, unless they are split along
    it. Inputs of any other form are captured and planned again when they first come.

    Raises ValueError, the same on every rank, for what cannot be planned or run.
    """
    if not isinstance(mesh, DeviceMesh | None):
        raise ValueError(
            f"mesh is {mesh!r} ({type(mesh).__name__}): give a DeviceMesh, such as init_device_mesh returns, or None "
            f"to have it chosen for all ranks; autopar.plan plans without ranks"
        )
    everyone = mesh_of_ranks() if mesh is None else mesh
    follow_world_timeout(everyone)
    once = Once()
    with together(everyone):
        request = Request(**options, device_type=everyone.device_type)
        if padding is not None and not isinstance(padding, Padding):
            raise ValueError(f"padding is {padding!r}: give an autopar.Padding, or None")
        if plan is not None:
            request = _as_planned(plan, request)
        shapes = [mesh_of(mesh)] if mesh is not None else meshes(everyone.size()) if plan is None else [plan.mesh]
        if (ranks := math.prod(shapes[0].values())) != everyone.size():
            raise ValueError(
                f"the plan is for {ranks} ranks ({mesh_words(shapes[0])}), and there are {everyone.size()}: leave plan "
                f"out, to plan for these, or start as many ranks as it is for"
            )
        padder = Padder.of(padding, request.shares, model)

        def of(length: int) -> Planner:
            example = (args, kwargs) if padder is None else padder.example(args, kwargs, length)
            return Planner(model, shapes[0], *example, loss_fn=loss_fn, request=request)

        with once.said(), telling("capturing the model", everyone):
            planners = planners_of(request.shares, of)
            planner, *others = planners.values()
            if plan is not None:
                planner.check(plan)
        if isinstance(verify, bool) or not isinstance(verify, int) or verify < 0:
            raise ValueError(f"verify is {verify!r}: give the number of first steps to check, or 0")
    given = None if plan is None else plan.digest
    all_equal(
        given, everyone, "the ranks were given different plans (None: no plan): give all of them the same, or none"
    )
    measured = request.cost == "profiled"
    if mesh is None:
        chosen = plan or on_first_rank(partial(_aloud, partial(_on_any, planner, shapes, request)), everyone)
        mesh = mesh_of_ranks(chosen.mesh)
        follow_world_timeout(mesh)
        on = {length: partial(each.on, chosen.mesh, each.cluster) for length, each in planners.items()}
        planners = planners if plan else planners_of(request.shares, lambda length: on[length]())
        planner, *others = planners.values()
        plan = plan if measured or others else chosen
    plans: list[Plan] = []
    if plan is None and measured:
        plan, _ = profiled(planner, mesh, planner.asked)
    elif plan is None or others:
        made = on_first_rank(partial(_aloud, partial(planned_together, planners, request, plan)), mesh)
        plan, *plans = made.values()
    with together(mesh):
        planner = planner.in_time(plan.training.micro_batches)
        pipelined = Pipelined.of(*planner.pipelined(plan)) if planner.axis else None
        program = planner.program(plan) if pipelined is None else pipelined.outside
    at_rest = {i.target: i.layout for i in program.inputs if i.role == "parameter"}
    decided = Decided.of(planner.space, planner.assignment(plan))
    request = plan.training.asked_by(planner.asked)
    planning = Planning(request=request, decided=decided, once=once, pipelined=pipelined)
    again = Modes(model, planner.captured, mesh, at_rest, loss_fn, planning)
    verifier = Verifier(model, loss_fn, verify) if verify else None
    if padder is not None:
        padder.captured([planner.captured, *(other.captured for other in others)])
    holds = plan.training.gathers == "once"
    calls = CallOptions(
        again=again,
        planned=[Planned.of(other, its) for other, its in zip(others, plans, strict=True)],
        whole_outputs=whole_outputs,
        verifier=verifier,
        padder=padder,
        holds=holds,
        compiled=request.compiled,
        pipelined=pipelined,
    )
    return ParallelModule(model, planner.captured, program, plan, mesh, calls)


def _as_planned(plan: Any, request: Request) -> Request:
    """What was asked for the plan that is given. Raises ValueError where something else is asked now."""
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is {plan!r} ({type(plan).__name__}): give a Plan, such as Plan.load(path), or None")
    plan.training.check_asked(request)
    request = plan.training.asked_by(request)
    if plan.pipeline is not None:
        if request.schedule not in (AUTO, plan.pipeline.schedule):
            raise ValueError(
                f"schedule is {request.schedule!r}, and the plan that was given has {plan.pipeline.schedule!r}: "
                f"leave it out, or plan with it"
            )
        request = replace(request, pipeline=plan.pipeline.axis)
    return replace(request, lengths=request.lengths or {one.length: one.share for one in plan.lengths} or None)


def _on_any(planner: Planner, shapes: Sequence[Mapping[str, int]], request: Request) -> Plan:
    """The best plan on any mesh. What is measured is measured on one mesh, without stages, which prices choose."""
    if request.cost == "profiled":
        request = replace(request, cost="analytical", solver="dp" if request.solver == AUTO else request.solver)
    return planner.over(shapes, request)


def _aloud(make: Callable[[], T]) -> T:
    """What `make` plans; on standard error it says that it is planning, if that takes a while."""
    with Ticker("autopar: planning") as ticker, following(lambda what, part: ticker.tell(f"autopar: {what}", part)):
        return make()


__all__ = ["Comparison", "compare", "mesh_of", "parallelize", "plan", "read_plan"]
