"""Plans with an axis of stages: cuts, micro-batches and schedules, what they promise, and what is refused."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from models import Case, assert_close
from staging import difference, in_time
from torch import nn

import autopar
from autopar.cost.streams import alone_seconds
from autopar.passes.capture.captured import Captured
from autopar.passes.lower.stages import staged
from autopar.planning.account import gathered_once
from autopar.planning.pieces import ForwardPieces, pieces
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.provenance import samples
from autopar.planning.request import Request
from autopar.runtime.pipeline import StageRun, simulate_pipeline
from autopar.runtime.simulate import simulate_step
from autopar.solve import schedules
from autopar.solve.cuts import AS_LONG, Chain, cut

CLUSTER = "dgx-h100"


@functools.cache
def case() -> zoo.Case:
    return zoo.case("GPT-2", 3)


@functools.cache
def captured() -> Captured:
    """Of `case`, once for all planners."""
    made = case()
    args, kwargs = made.batch(0)
    return Planner(made.model, {"dp": 1}, args, kwargs, loss_fn=made.loss_fn, cluster=CLUSTER).captured


def planner(mesh: dict[str, int], **options: Any) -> Planner:
    made = case()
    args, kwargs = made.batch(0)
    request = Request(**{"cluster": CLUSTER, **options})
    return Planner(made.model, mesh, args, kwargs, loss_fn=made.loss_fn, captured=captured(), request=request)


@functools.cache
def on_stages(count: int | str) -> Planner:
    return planner({"pp": 2, "dp": 2}, micro_batches=count)


@functools.cache
def planned(count: int | str = 4, schedule: str = "auto") -> tuple[Planner, Plan]:
    """A planner of two stages, which plans with any schedule share, and the plan."""
    made = on_stages(count)
    return made, made.plan(schedule=schedule)


# ---- cuts


def longest(chain: Chain, cuts: tuple[int, ...], in_flight: list[int], limits: list[float]) -> float:
    """Seconds of the longest stage; infinite if one keeps not its limit."""
    ends = list(itertools.pairwise((0, *cuts, len(chain.seconds))))
    for (a, b), count, limit in zip(ends, in_flight, limits, strict=True):
        if sum(chain.rest_bytes[a:b]) + count * sum(chain.held_bytes[a:b]) > limit:
            return math.inf
    return max(sum(chain.seconds[a:b]) for a, b in ends)


@pytest.mark.parametrize("seed", range(60))
def test_cuts_are_those_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(3, 9)
    stages = rng.randint(2, min(4, size))
    chain = Chain(*([rng.random() for _ in range(size)] for _ in range(0)), **{
        name: [rng.random() for _ in range(size)] for name in ("seconds", "rest_bytes", "held_bytes", "crosses")
    })  # fmt: skip
    in_flight, limits = [stages - k for k in range(stages)], [rng.choice((math.inf, 6.0, 4.0))] * stages
    every = itertools.combinations(range(1, size), stages - 1)
    best = min(longest(chain, cuts, in_flight, limits) for cuts in every)
    found = cut(chain, in_flight, limits)
    assert (found is None) == math.isinf(best)
    if found is not None:
        assert longest(chain, tuple(found), in_flight, limits) <= AS_LONG * best


@functools.cache
def parts_of_gpt2() -> tuple[Planner, ForwardPieces]:
    made, plan = planned()
    made = made.in_time(plan.training.micro_batches)
    program = made.program(plan)
    seconds = alone_seconds(program, made.cluster, made.operators)
    return made, pieces(program, seconds, made.space, gathered_once(made.space, made.assignment(plan)))


class Stack(nn.Module):
    """Layers that reshape what they read, and a loss that reshapes labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return nn.functional.mse_loss(x, y)


@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 1}, {"pp": 2, "dp": 2}])
def test_a_stage_may_begin_at_every_operator_that_computes(mesh: dict[str, int]) -> None:
    batch = torch.randn(8, 3, 4), torch.randn(8, 3, 4)
    made = in_time(Case(model=Stack(), batch=lambda step: (batch, {})), 2, mesh)
    parts = pieces(made.program, {}, made.planner.space, ())
    assert parts.names[1:] == ("tanh", "addmm_1", "tanh_1", "addmm_2", "tanh_2", "mse_loss")
    wanted = made.whole()
    for name in parts.names[1:]:
        cut_up = staged(made.program, (name,))
        assert difference(made.piped(cut_up, schedules.one_f_one_b(2, 2)), wanted) < 1e-12, name


def test_stages_take_what_their_pieces_were_estimated_to_take() -> None:
    made, parts = parts_of_gpt2()
    _, plan = planned()
    program = made.program(plan)
    few = 5 * made.cluster.device.seconds_per_op  # operators at a border may be of either stage
    for cuts in ([5], [12, 20], [3, 9, 24]):
        costs, _ = parts.costs(cuts)
        stages = made.pipelines.figures(made.pipelines.again(plan).look, program, [parts.names[k] for k in cuts]).stages
        for cost, stage in zip(costs, stages, strict=True):
            assert stage.cost.forward_seconds == pytest.approx(cost.forward_seconds, rel=0.2, abs=few)
            whole = stage.cost.inputs_seconds + stage.cost.weights_seconds
            assert whole == pytest.approx(cost.inputs_seconds + cost.weights_seconds, rel=0.2, abs=few)


def test_the_cut_of_a_plan_has_the_shortest_longest_stage_of_all() -> None:
    made, parts = parts_of_gpt2()
    chain = parts.chain(made.training.micro_batches)
    free = [math.inf] * 3
    found = cut(chain, [3, 2, 1])
    assert found is not None
    every = itertools.combinations(range(1, len(parts.names)), 2)
    assert longest(chain, tuple(found), [0] * 3, free) <= AS_LONG * min(
        longest(chain, cuts, [0] * 3, free) for cuts in every
    )


# ---- what a plan promises


def test_a_plan_is_the_simulation_of_its_own_stages() -> None:
    made, plan = planned()
    on = made.in_time(plan.training.micro_batches)
    step = on.pipelines.again(plan).step
    assert plan.seconds == step.seconds >= step.bound_seconds
    assert plan.bytes == max(peak.bytes for peak in step.peaks) == max(plan.pipeline.peak_bytes)
    assert plan.mesh == {"pp": 2, "dp": 2}
    assert len(plan.pipeline.stages) == len(plan.pipeline.cuts) + 1 == 2 * plan.pipeline.chunks
    staged, schedule = made.pipelined(plan)
    assert schedule.micro_batches == staged.micro_batches == plan.pipeline.micro_batches == 4


@pytest.mark.parametrize(
    "schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "searched"]
)
def test_the_free_choice_is_no_worse_than_each_schedule(schedule: str) -> None:
    _, best = planned()
    _, plan = planned(4, schedule)
    assert plan.pipeline.schedule == schedule
    assert best.seconds <= plan.seconds * (1 + 1e-9)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_the_free_choice_is_no_worse_than_each_number_of_micro_batches(count: int) -> None:
    _, best = planned("auto")
    _, plan = planned(count)
    assert plan.pipeline.micro_batches == count
    assert best.seconds <= plan.seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["GPT-2", "T5", "ViT"])
def test_a_planned_pipeline_computes_what_one_device_does(name: str) -> None:
    made = zoo.case(name, 3)
    model = made.model.double()
    args, kwargs = made.batch(0)

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs = tuple(map(double, args)), {key: double(value) for key, value in kwargs.items()}
    on = Planner(
        model, {"pp": 2, "dp": 2}, args, kwargs, loss_fn=made.loss_fn,
        request=Request(cluster=CLUSTER, micro_batches=3),
    )  # fmt: skip
    plan = on.plan()
    staged, schedule = on.pipelined(plan)
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    given = {k: v for k, v in on.captured.bind(args, kwargs).items() if isinstance(v, torch.Tensor)}
    tensors |= on.captured.constants
    whole = simulate_step(on.program(plan), tensors, given, None, seed=3)
    parts = simulate_pipeline(staged, schedule, tensors, given, None, seed=3)
    for found, wanted in ((parts.gradients, whole.gradients), (parts.outputs, whole.outputs)):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_close(found[key], value, key)


def test_an_addition_overwrites_the_sum_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first micro-batch made may be a view, or be travelling: it is not written."""
    memory: dict[tuple[int, str], list[set[int]]] = defaultdict(list)
    run = StageRun._run

    def watched(self: StageRun[Any], part: Any, values: Any, micro_batch: int, sums: Any) -> Any:
        made = run(self, part, values, micro_batch, sums)
        for name in part.totals if sums is self.sums else ():
            memory[self.stage.number, name].append({shard.data_ptr() for shard in sums[name].values()})
        return made

    monkeypatch.setattr(StageRun, "_run", watched)
    made = case()
    args, kwargs = made.batch(0)
    on = planner({"pp": 2, "dp": 2}, micro_batches=4)
    plan = on.plan(schedule="1f1b")
    staged, schedule = on.pipelined(plan)
    tensors = dict([*made.model.named_parameters(remove_duplicate=False), *made.model.named_buffers()])
    given = {k: v for k, v in on.captured.bind(args, kwargs).items() if isinstance(v, torch.Tensor)}
    simulate_pipeline(staged, schedule, {**tensors, **on.captured.constants}, given, None)
    assert memory
    for first, second, *others in memory.values():
        assert len(others) == 2 and first.isdisjoint(second) and all(each == second for each in others)


# ---- files


def test_a_plan_reads_back(tmp_path: Path) -> None:
    _, plan = planned()
    plan.save(tmp_path / "plan.json")
    made = case()
    args, kwargs = made.batch(0)
    again = autopar.read_plan(tmp_path / "plan.json", made.model, args, kwargs, loss_fn=made.loss_fn)
    assert again.pipeline == plan.pipeline and not again.is_edited
    assert (again.seconds, again.bytes, again.digest) == (plan.seconds, plan.bytes, plan.digest)
    assert "stages on pp" in str(again) and "stages on pp" in again._repr_html_()


def edited(plan: Plan, tmp_path: Path, cuts: list[str]) -> Plan:
    data = json.loads(json.dumps(plan.to_json()))
    data["pipeline"]["cuts"] = dict.fromkeys(cuts, "")
    (tmp_path / "plan.json").write_text(json.dumps(data))
    made = case()
    args, kwargs = made.batch(0)
    return autopar.read_plan(tmp_path / "plan.json", made.model, args, kwargs, loss_fn=made.loss_fn)


def test_an_edited_cut_has_its_own_figures(tmp_path: Path) -> None:
    _, parts = parts_of_gpt2()
    _, plan = planned(4, "1f1b")
    other = edited(plan, tmp_path, [parts.names[3]])
    assert other.provenance.winner == "edited"
    assert other.seconds > plan.seconds
    assert list(other.pipeline.cuts) == [parts.names[3]]


@pytest.mark.parametrize(
    ("cuts", "said"), [(["nonsense"], "no operator that is called so"), ([], "has 0 cuts"), (["a", "b"], "has 2 cuts")]
)
def test_cuts_that_are_none(tmp_path: Path, cuts: list[str], said: str) -> None:
    _, plan = planned(4, "1f1b")
    with pytest.raises(ValueError, match=said):
        edited(plan, tmp_path, cuts)


def test_a_plan_without_stages_says_nothing_of_them() -> None:
    plan = planner({"dp": 2}, solver="ddp").plan()
    assert plan.pipeline is None
    assert "pipeline" not in plan.to_json()


# ---- pins, limits, errors


@pytest.mark.parametrize(("module", "stage"), [("transformer.h.0", 1), ("transformer.h.2", 0), ("transformer.h.1", 1)])
def test_a_module_is_on_the_stage_that_it_is_pinned_to(module: str, stage: int) -> None:
    made = planner({"pp": 2}, micro_batches=2, constraints={module: {"pp": stage}})
    staged, _ = made.pipelined(made.plan())
    homes = {node.module: stage.number for stage in staged.stages for node in stage.step.forward if stage.number}
    own = [name for name in homes if name == module or name.startswith(f"{module}.")]
    assert bool(own) == bool(stage)


def test_a_memory_limit_is_kept() -> None:
    _, free = planned(4, "1f1b")
    made = planner({"pp": 2, "dp": 2}, micro_batches=4, schedule="1f1b", memory_limit_bytes=0.9 * free.bytes)
    plan = made.plan()
    assert plan.bytes <= 0.9 * free.bytes
    assert plan.seconds >= free.seconds * (1 - 1e-9)
    with pytest.raises(ValueError, match="no pipeline of 2 stages was found that fits in 1000 B") as raised:
        planner({"pp": 2}, micro_batches=4, memory_limit_bytes=1000).plan()
    smallest = raised.value.smallest_bytes  # type: ignore[attr-defined]
    assert 1000 < smallest <= 2 * free.bytes, "of a device, and not of all"


def test_what_is_searched_within_a_limit_is_estimated_to_keep_it() -> None:
    """Near an assignment, and among all options."""
    made, request = on_stages(4), Request(cluster=CLUSTER)
    look, *_ = made.pipelines._looks(made.in_time(4), request, None, math.inf)
    for allowed in (made.pipelines._near(look), None):
        (found,) = made.pipelines._within(look, request, 0.8 * look.bytes, allowed)
        assert look.seconds <= found.seconds * (1 + 1e-9) and found.bytes <= 0.8 * look.bytes


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))).square().mean()


def test_batch_norm_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="norm needs all micro-batches of a step at once"):
        autopar.plan(Normed(), {"pp": 2}, (torch.zeros(8, 8),), micro_batches=2, cluster=CLUSTER)


class Outputs(nn.Module):
    def __init__(self, given: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.given = nn.Linear(8, 8), nn.Linear(8, 8), given

    def forward(self, x: torch.Tensor) -> Any:
        return self.given(self.last(self.first(x).tanh()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda y: (y, y.square().mean()), "output[1]), or return the others detached"),
        (lambda y: {"a": y, "b": y.square().mean()}, 'output["b"]), or return the others detached'),
        (lambda y: y.mean(0), "output.mean())"),
        (lambda y: {"loss": y.mean().reshape(1)}, 'output["loss"].mean())'),
    ],
)
def test_a_model_whose_loss_nobody_named_is_refused(given: Callable[[torch.Tensor], Any], said: str) -> None:
    said = rf"begins backward from one number, the loss, .*\(loss_fn=lambda output: {re.escape(said)}$"
    with pytest.raises(ValueError, match=said):
        autopar.plan(Outputs(given), {"pp": 2}, (torch.zeros(8, 8),), micro_batches=2, cluster=CLUSTER)


def test_a_stage_may_have_nothing_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, pins = Outputs(lambda y: y.square().mean()), {"first": {"pp": 1}}
    plan = autopar.plan(model, {"pp": 2}, (torch.zeros(8, 8),), micro_batches=2, cluster=CLUSTER, constraints=pins)
    assert plan.pipeline.stages[0].forward_seconds == 0 and "begins with" in str(plan)
    assert "1 of the 2 stages on pp have nothing to do" in caplog.text


def test_options_that_a_given_plan_contradicts_are_an_error() -> None:
    _, plan = planned()
    plan.training.check_asked(Request(micro_batches=plan.training.micro_batches))
    with pytest.raises(ValueError, match="micro_batches is 3, and the plan that was given is for 4"):
        plan.training.check_asked(Request(micro_batches=3))


@pytest.mark.parametrize(
    ("mesh", "options", "said"),
    [
        ({"pp": 2}, {"micro_batches": 100}, "has 8 samples: give at most 8"),
        ({"pp": 100}, {"micro_batches": 2}, "can be cut into 60 pieces"),
        ({"dp": 2}, {"micro_batches": "auto"}, "the mesh has no axis of stages"),
        ({"dp": 2}, {"schedule": "1f1b"}, "the mesh has no axis of stages"),
        ({"pp": 2}, {"schedule": "1f2b"}, "did you mean '1f1b'"),
        ({"pp": 2}, {"micro_batches": "some"}, "or, on a mesh with an axis of stages, 'auto'"),
        ({"pp": 2}, {"schedule": None}, "unknown schedule None; known: auto, gpipe, "),
        ({"pp": 2}, {"pipeline": "stages"}, "and the mesh has pp: give its outermost"),
        ({"pp": 2}, {"constraints": {"lm_head": {"pp": 1.0}}}, "on an axis of stages the number of one, such as 0"),
        ({"dp": 2, "pp": 2}, {}, "make it the outermost"),
        ({"pp": 2}, {"cost": "volume"}, "whose prices are 'analytical'"),
        ({"pp": 2}, {"cost": "profiled"}, "whose prices are 'analytical'"),
        ({"pp": 2}, {"schedule": "zb-v", "constraints": {"transformer.h.2": {"pp": 1}}}, "puts several stages on a"),
        ({"pp": 2}, {"micro_batches": 2, "constraints": {"transformer.h.2": {"pp": 2}}}, "is no stage: give 0 to 1"),
        ({"pp": 2}, {"micro_batches": 2, "constraints": {"transformer.hh": {"pp": 1}}}, "names no module of forward"),
        (
            {"pp": 3},
            {"micro_batches": 2, "constraints": {"transformer.h.2": {"pp": 0}, "transformer.h.0": {"pp": "1"}}},
            "which comes first in forward",
        ),
    ],
)
def test_what_is_refused(mesh: dict[str, int], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        planner(mesh, **options).plan()


def test_an_axis_of_stages_has_any_name() -> None:
    plan = planner({"st": 2, "dp": 2}, micro_batches=2, pipeline="st", schedule="1f1b").plan()
    assert plan.pipeline.axis == "st"


def test_a_planner_on_another_mesh_knows_its_stages() -> None:
    """As `compare` and `fit` ask, mesh after mesh."""
    flat, mesh = planner({"dp": 4}, micro_batches=2), {"pp": 2, "dp": 2}
    staged = flat.on(mesh, flat.cluster)
    plans = [replace(each.plan(), solve_seconds=0.0) for each in (staged, planner(mesh, micro_batches=2))]
    assert plans[0].pipeline is not None and plans[0] == plans[1]
    back = staged.on({"dp": 4}, staged.cluster)
    assert back.axis == "" and back.cluster == flat.cluster and back.training == flat.training


def test_an_axis_that_only_looks_like_one_of_stages(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        assert planner({"PP": 2}).axis == ""
    assert "axis 'PP' has no stages" in caplog.text
    caplog.clear()
    assert planner({"PP": 2}, pipeline="PP").axis == "PP"
    assert "has no stages" not in caplog.text


def test_an_axis_of_one_rank_is_none() -> None:
    assert planner({"pp": 1, "dp": 2}, solver="ddp").plan().pipeline is None


def test_a_batch_is_as_long_as_most_inputs() -> None:
    """A mask of places, or a table of them, may come first; of equally many, the first input says."""
    assert samples([(8, 8), (4, 8), (4,)]) == 4
    assert samples([(4, 8), (8, 8)]) == 4 and samples([(8, 8), (4, 8)]) == 8
    assert samples([(), ()]) == samples([]) == 1
