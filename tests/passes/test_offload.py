"""What is kept for backward may wait in the host's memory: the same numbers, fewer bytes, and a step that says what the
host's link costs."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import models
import plans
import pytest
import torch
from models import assert_close, assert_same, case, eager, simulated, whole
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cluster.library import named_cluster
from autopar.cluster.machine import Cluster
from autopar.cost.liveness import Memory
from autopar.cost.memory import peak
from autopar.cost.optimizers import OPTIMIZERS
from autopar.cost.streams import timeline
from autopar.ir.program import Program
from autopar.ir.text import parsed_program, text_of
from autopar.ops.host import FROM_HOST, TO_HOST
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.passes.lower.compact import compact
from autopar.passes.lower.lowering import Target
from autopar.passes.lower.offload import Offload, host_bytes
from autopar.planning.training import named_optimizer

planner = models.planners(case)


def linked(bytes_per_second: float | None = 50e9, cluster: str = "dgx-h100") -> Cluster:
    """A cluster whose devices copy to their hosts at that rate."""
    found = named_cluster(cluster)
    return replace(found, device=replace(found.device, host_bytes_per_second=bytes_per_second))


def products(layers: int = 4, size: int = 2048) -> Program:
    """Products whose operands backward reads, the last one first."""
    meta = f"float32[{size}, {size}]"
    lines = [f"h{k + 1} = aten.mm.default(h{k}, w)" for k in range(layers)]
    back = [f"g = aten.mm.default(t, h{layers - 1})"]
    back += [
        f"g{k} = aten.mm.default(h{k}, {'g' if k == layers - 2 else f'g{k + 1}'})" for k in range(layers - 2, 0, -1)
    ]
    text = (
        f"""
        mesh dp=1
        w = parameter w: {meta} R
        h0 = input x: {meta} R
        t = tangent t: {meta} R

        forward
        """
        + "\n        ".join(lines)
        + """

        backward
        """
        + "\n        ".join(back)
        + f"""

        output y = h{layers}: {meta} R
        gradient w = g1: {meta} R
        """
    )
    return parsed_program(text)


def copies(program: Program) -> tuple[list[str], list[str]]:
    """The values that leave, in order, and in that of their return."""
    sent = [i.inputs[0] for i in program.forward if i.op == TO_HOST]
    return sent, [i.inputs[0].partition("_host")[0] for i in program.backward if i.op == FROM_HOST]


def offloaded(program: Program, size: int, cluster: Cluster | None = None) -> Program:
    return Offload(size)(program, Target(cluster=cluster or linked()))


@pytest.mark.parametrize(("values", "sent"), [(0, []), (1, ["h1"]), (2, ["h1", "h2"]), (9, ["h1", "h2", "h3"])])
def test_the_oldest_leave_and_come_back_last(values: int, sent: list[str]) -> None:
    given = products()
    made = offloaded(given, values * given.metas["h1"].bytes)
    assert copies(made) == (sent, sent[::-1])
    assert parsed_program(text_of(made)) == made
    assert [name.partition("_host")[0] for name in made.saved] == list(given.saved)


@pytest.mark.parametrize(("rate", "most"), [(2e12, 2), (1e9, 7)])
def test_a_copy_is_waited_for_once_the_link_has_had_the_time(rate: float, most: int) -> None:
    """What it reads is let go then, and not sooner; one back starts as late as may be."""
    made = offloaded(products(8), 1 << 40, linked(rate))
    for half, op in ((made.forward, TO_HOST), (made.backward, FROM_HOST)):
        under_way, numbers = set[str](), list[int]()
        for node in half:
            under_way |= {*node.outputs} if node.op == op else set()
            under_way -= {*node.inputs} if node.op == "collective.wait" else set()
            numbers.append(len(under_way))
        assert (max(numbers), numbers[-1]) == (most, 0)


def test_memory_on_the_host_is_not_the_devices() -> None:
    given = products(8)
    size = given.metas["h1"].bytes
    none = OPTIMIZERS["sgd"]
    before = peak(given, none, "cuda")
    after = peak(offloaded(given, 1 << 40), none, "cuda")
    assert (before.activations, after.activations) == (7 * size, 0)
    assert after.bytes <= before.bytes - 4 * size  # what is under way is there


def test_the_link_hides_behind_products_or_shows() -> None:
    given = products(8)
    plain = timeline(given, linked()).seconds
    for rate, factor in ((5e12, 1.0), (1e9, 3.0)):
        step = timeline(offloaded(given, 1 << 40, linked(rate)), linked(rate))
        sent = 2 * 7 * given.metas["h1"].bytes / rate
        assert step.seconds >= max(plain, 0.9 * sent if factor > 1 else 0)
        assert step.seconds == pytest.approx(plain, rel=0.02) if factor == 1 else step.exposed_seconds > 0.5 * sent
        (row,) = [row for row in step.communication if row.kind == "to_host"]
        assert (row.axis, row.count, row.bytes) == ("host", 7, 7 * given.metas["h1"].bytes)
        assert "host" in step.axes


def test_a_cluster_that_does_not_say_its_rate_is_asked_for_it() -> None:
    with pytest.raises(ValueError, match=r"nothing says how quickly .* copies to its host: give host_bytes_per_second"):
        timeline(offloaded(products(), 1 << 40, linked(None)), linked(None))


@pytest.mark.parametrize("name", ["gpt2", "gpt2 of odd sizes", "llama of 4 layers", "mlp with outputs"])
@pytest.mark.parametrize("seed", range(2))
def test_programs_compute_the_same(name: str, seed: int) -> None:
    """Of random plans, with all that can leave: what is sent is no value that another one shares, or a caller holds."""
    made = planner(name, {"dp": 2, "tp": 2})
    plain = compact(bucket(codegen(made.space, plans.random_assignment(made.space, seed=seed))))
    program = offloaded(plain, 1 << 40)
    sent, back = copies(program)
    assert sent and sorted(sent) == sorted(back)
    assert_same(simulated(program, made.captured, case(name)), eager(case(name)))
    memory = Memory.of(plain, plain.forward)
    outside = {o.name for o in plain.outputs} | {i.name for i in plain.inputs}
    for value in sent:
        others = {*plain.saved, *outside} - {value}
        assert memory.storages[value][0] not in {memory.storages[o][0] for o in others if o in memory.storages}


class Tower(nn.Module):
    """Layers whose hidden values are most of what is kept."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_a_plan_within_a_limit_takes_the_host_where_the_step_is_shorter(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, x = Tower(1024, 6), torch.empty(32, 1024, 1024)
    free = autopar.plan(model, {"dp": 2}, (x,), cluster=linked())
    for part in (0.85, 0.5):
        limit = part * free.bytes
        asked = {"cluster": linked(), "memory_limit_bytes": limit}
        without = autopar.plan(model, {"dp": 2}, (x,), **asked)
        plan = autopar.plan(model, {"dp": 2}, (x,), **asked, offload=True)
        assert plan.seconds < without.seconds and plan.bytes <= limit
        assert plan.offload_bytes and f"offload{{bytes={plan.offload_bytes}}}" in plan.rewrites
        assert "host's memory" in str(plan) and "×to_host" in str(plan)
        # the program says the same again
        program = plan.program()
        assert program.digest == plan.program(plan.rewrites).digest
        assert plan.planner.timeline(plan).exposed_seconds == pytest.approx(plan.exposed_seconds)
        plan.save(tmp_path / "plan.json")
        again = autopar.read_plan(tmp_path / "plan.json", model, (x,), cluster=linked())
        assert (again.offload_bytes, again.seconds, again.bytes) == (plan.offload_bytes, plan.seconds, plan.bytes)
        assert again.program().digest == program.digest
    slow = autopar.plan(model, {"dp": 2}, (x,), cluster=linked(1e9), memory_limit_bytes=0.85 * free.bytes, offload=True)
    assert not slow.offload_bytes  # making again is quicker there
    roomy = autopar.plan(model, {"dp": 2}, (x,), cluster=linked(), memory_limit_bytes=1.1 * free.bytes, offload=True)
    assert not roomy.offload_bytes and roomy.seconds == pytest.approx(free.seconds)


def test_what_fits_nowhere_else_fits_with_the_host() -> None:
    with torch.device("meta"):
        model, x = Tower(1024, 6), torch.empty(32, 1024, 1024)
    with pytest.raises(ValueError, match="no plan fits") as raised:
        autopar.plan(model, {"dp": 2}, (x,), cluster=linked(), memory_limit_bytes=1.8e9)
    assert "offload" in str(raised.value)
    plan = autopar.plan(model, {"dp": 2}, (x,), cluster=linked(), memory_limit_bytes=1.8e9, offload=True)
    assert plan.bytes <= 1.8e9


def test_a_host_holds_no_more_than_it_has() -> None:
    """Of pinned memory each value takes a power of two; states of the optimizer lie there, too."""
    given = products(8, size=1500)
    made = offloaded(given, 1 << 40)
    assert host_bytes(given, OPTIMIZERS["adamw"]) == 0
    assert host_bytes(made, OPTIMIZERS["adamw"]) == 7 * (16 << 20)  # of 1,500 x 1,500 x 4 bytes each
    on_host = named_optimizer("adamw_on_host")
    assert host_bytes(made, on_host) == 7 * (16 << 20) + 2 * given.metas["w"].bytes
    with torch.device("meta"):
        model, x = Tower(1024, 6), torch.empty(32, 1024, 1024)
    cluster = linked()
    small = replace(cluster, device=replace(cluster.device, host_memory_bytes=1e9))
    with pytest.raises(ValueError, match=r"no plan fits .* With offload a rank would need .* GiB of its host's memory"):
        autopar.plan(model, {"dp": 2}, (x,), cluster=small, memory_limit_bytes=1.8e9, offload=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": 1}, "offload is 1 .*True .* or False"),
        ({"offload": True, "cluster": "v100-nvlink"}, "host_bytes_per_second"),
        ({"offload": True, "cluster": linked(), "cost": "profiled"}, "offload does not go with cost='profiled'"),
        ({"offload": True, "cluster": linked(), "within": "fsdp2"}, "offload does not go with within='fsdp2'"),
    ],
)
def test_what_does_not_go_with_it_says_so(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autopar.plan(models.mlp(), {"dp": 2}, models.vectors(0)[0], loss_fn=models.mean_square, **options)


def trained(compiled: bool, micro_batches: int) -> int:
    torch.manual_seed(0)
    beside = models.llama(2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    given = models.tokens(0)[1]
    options = {"compile": compiled, "micro_batches": micro_batches}
    plan = autopar.plan(beside, {"dp": 2}, kwargs=given, cluster=linked(), **options)
    plan = replace(plan, offload_bytes=1 << 40)
    module = autopar.parallelize(copy.deepcopy(beside), mesh, kwargs=given, plan=plan, **options)
    optimizers = [models.adamw(module), models.adamw(beside)]
    for step in range(2 * micro_batches):
        batch = models.tokens(step)[1]
        found, expected = module(**batch).loss, beside(**batch).loss
        assert_close(whole(found), expected.detach(), f"loss of step {step}")
        found.backward(), expected.backward()
        if step % micro_batches == micro_batches - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for (name, p), q in zip(module.named_parameters(), beside.parameters(), strict=True):
        assert_close(whole(p), q, name)
    return sum(node.op == TO_HOST for node in module.program.forward)


@pytest.mark.parametrize(("compiled", "micro_batches"), [(False, 1), (True, 1), (False, 2)])
def test_ranks_train_as_one_process_does(compiled: bool, micro_batches: int) -> None:
    assert all(count > 4 for count in run(2, trained, compiled, micro_batches))


def test_nothing_is_sent_where_nothing_is_kept() -> None:
    given = products()
    assert offloaded(given, 0) is given
    forward_only = replace(given, backward=(), saved=(), outputs=given.outputs[:1], inputs=given.inputs[:2])
    assert offloaded(forward_only, 1 << 40) is forward_only
    assert math.isfinite(timeline(forward_only, linked(None)).seconds)
