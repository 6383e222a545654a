"""Items: what a step of a rank consists of, as far as a site says.

A problem adds up the items of every option, and the account lists those of the options that were taken, so that what
is searched is what is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from autopar.cluster.collectives import collective_seconds
from autopar.cost.redistribute import RouteStep
from autopar.ir.graph import CAST, WAIT, TensorMeta
from autopar.ir.layout import Layout, local_meta
from autopar.ir.rewrite import input_and_output_metas
from autopar.ops.emit import expands, fillings, local_program, local_shapes
from autopar.ops.rule import Call, OpRule, call_of, fullest
from autopar.ops.rules import rule_of

from .choices import SiteChoice
from .collapse import from_root
from .operator_layouts import splits_of
from .setting import Setting
from .sites import Option, Site

COMPUTE, OPTIMIZER, COPIES, ROUTE = "compute", "optimizer", "copies", "route"
PARAMETERS, GRADIENTS, STATES, ACTIVATIONS = "parameters", "gradients", "states", "activations"


class Item(NamedTuple):
    """`seconds` that pass `times` in a step, or `bytes` that are kept between forward and backward. `kind` says what
    for: one of the names above, or a kind of collective, on a mesh `axis`, whose larger side has `sent_bytes`. A route
    consists of its `steps`, which travel in a bucket if it is `bucketed`."""

    kind: str
    seconds: float = 0.0
    bytes: float = 0
    times: int = 1
    axis: int = -1
    sent_bytes: int = 0
    steps: tuple[RouteStep, ...] = ()
    bucketed: bool = False


def total(items: Iterable[Item]) -> tuple[float, float]:
    """Seconds and bytes."""
    seconds, size = 0.0, 0.0
    for item in items:
        seconds += item.times * item.seconds
        size += item.bytes
    return seconds, size


def operand_layouts(setting: Setting, site: Site, option: Option) -> tuple[Layout, ...]:
    """Layouts of an operator's operands, as it reads them."""
    layouts = (from_root(r.alias.steps, at, setting.mesh) for r, at in zip(site.reads, option.reads, strict=True))
    return tuple(layout for layout in layouts if layout is not None)


def parameter_items(setting: Setting, site: Site, layout: Layout) -> Iterator[Item]:
    """The items of a parameter at rest: its bytes with those of its gradient and of the optimizer's states, the
    optimizer's step, and the casts of a step: each time that it is used, and of its gradient at the end."""
    assert site.meta is not None
    local, optimizer = local_meta(site.meta, layout, setting.mesh), setting.optimizer
    used = TensorMeta(local.shape, setting.metas[site.makes[0]].dtype)
    yield Item(PARAMETERS, bytes=local.bytes)
    if site.reads:
        yield Item(GRADIENTS, bytes=local.bytes * (setting.in_flight == 1))
        yield Item(STATES, bytes=optimizer.bytes(local))
        yield Item(OPTIMIZER, optimizer.seconds(setting.cluster.device, [local]))
    casts = 0.0
    if used != local:
        yield Item(ACTIVATIONS, bytes=used.bytes)
        casts = setting.micro_batches * cast_seconds(setting, local, used)
    reduced = TensorMeta(local.shape, setting.reduced_in or used.dtype)
    if site.reads and reduced != local:
        casts += cast_seconds(setting, reduced, local)
    yield Item(COMPUTE, casts)


def cast_seconds(setting: Setting, source: TensorMeta, result: TensorMeta) -> float:
    return setting.cluster.device.operator_seconds(CAST, [source], [result], 0.0)


def operator_items(
    setting: Setting,
    site: Site,
    rule: OpRule | None,
    operands: tuple[Layout, ...],
    results: tuple[Layout, ...],
    choice: SiteChoice,
) -> Iterator[Item]:
    """The items of a rank's share of an operator, in the order of its local program: by the roofline, arithmetic or
    memory, whichever is slower. An expansion consists of its own operators and collectives. A message that travels
    while they run, as in a ring, costs what the rank waits for it, and at least what it takes of the processors."""
    call, device = site.call, setting.cluster.device
    assert call is not None
    splits = splits_of(rule, choice) if rule is not None else ()
    if rule is None or not (expands(rule, splits) or fillings(call, rule, operands, site.zeros)):
        yield Item(COMPUTE, _whole_seconds(setting, call, rule, operands, results, choice))
        return
    op, emission = call.node.op, local_program(call, rule, splits, operands, results, setting.mesh, site.zeros)
    share = _share(setting, rule, choice) / max(1, sum(i.op == op for i in emission.instructions))
    clock, free, links = 0.0, dict[int, float](), setting.redistributor.links
    underway: dict[str, tuple[float, Item]] = {}
    for instruction in emission.instructions:
        inputs, outputs = input_and_output_metas(instruction, emission.metas)
        if kind := instruction.collective:
            largest, axis = max(meta.bytes for meta in (*inputs, *outputs)), instruction.args[-1]
            item = Item(kind, collective_seconds(kind, largest, links[axis]), axis=axis, sent_bytes=largest)
            begin = max(clock, free.get(axis, 0.0))
            underway[instruction.outputs[0]], free[axis] = (begin, item), begin + item.seconds
            continue
        if instruction.op == WAIT:
            begin, item = underway[instruction.inputs[0]]
            item = item._replace(
                seconds=max(item.seconds + (begin - clock), item.seconds * links[item.axis].compute_share)
            )
        else:
            work = _work(rule, share if instruction.op == op else 0.0)
            if instruction.op == op and rule.routing is None:
                # as much as the busiest rank, and what a mask hides is computed, too
                local = rule_of(call_of(instruction, emission.metas))
                work = _work(local, 1.0) if local is not None else work
            item = Item(COMPUTE, device.operator_seconds(instruction.op, inputs, outputs, *work))
        clock += item.seconds
        yield item


def _whole_seconds(
    setting: Setting,
    call: Call,
    rule: OpRule | None,
    operands: tuple[Layout, ...],
    results: tuple[Layout, ...],
    choice: SiteChoice,
) -> float:
    """Of an operator that runs on shards as it is."""
    device, op = setting.cluster.device, call.node.op
    shapes = zip(local_shapes(call, operands, results, setting.mesh), (call.inputs, call.outputs), strict=True)
    inputs, outputs = (
        [TensorMeta(shape, m.dtype) for shape, m in zip(of, metas, strict=True) if shape is not None and m is not None]
        for of, metas in shapes
    )
    if rule is not None and rule.moves_nothing:
        return device.view_seconds(op, inputs, outputs)
    work = (0.0, 0.0) if rule is None else _work(rule, _share(setting, rule, choice))
    return device.operator_seconds(op, inputs, outputs, *work)


def _work(rule: OpRule, share: float) -> tuple[float, float]:
    """The arithmetic of a part of an operator, and the bytes that its kernel moves inside."""
    return rule.flops * share, rule.inside_bytes * share


def _share(setting: Setting, rule: OpRule, choice: SiteChoice) -> float:
    """The part of an operator's work that one rank does, on padding too."""
    share = 1.0
    for axis, on_axis in enumerate(choice.axes):
        if on_axis.splits or on_axis.routes:
            share *= max(1.0, on_axis.period / rule.factors[on_axis.factor].size) / setting.mesh[axis]
            if on_axis.routes or (rule.routing is not None and on_axis.factor == rule.routing.experts):
                share *= fullest(setting.load, setting.mesh[axis])
    return share
