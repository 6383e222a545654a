"""The setting of a search space: what options are judged by, the cache of what they mean, and what a rank's share of
an operator takes under a choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.cluster.collectives import collective_seconds
from autopar.cluster.machine import Cluster
from autopar.cost.optimizers import Optimizer
from autopar.cost.redistribute import Acquired, Redistributor
from autopar.ir.graph import CAST, WAIT, TensorMeta
from autopar.ir.layout import Layout, Shape, local_meta
from autopar.ir.program import COLLECTIVES
from autopar.ir.rewrite import input_and_output_metas
from autopar.ops.emit import Emission, expands, fillings, local_program, local_shapes
from autopar.ops.rule import Call, OpRule

from .choices import SiteChoice
from .sites import Option, Site
from .tables import MovedKind


@dataclass(slots=True, eq=False)
class Memo:
    """What choices mean, as far as anybody asked, in the setting that it is `of`."""

    of: Any = None
    options: dict[str, dict[SiteChoice, Option | None]] = field(default_factory=dict)
    """Key of a site -> choice -> what it means, or None if it is not legal."""
    layouts: dict[tuple[int, SiteChoice], tuple[tuple[Layout, ...], tuple[Layout, ...]] | None] = field(
        default_factory=dict
    )
    """(form of an op, choice) -> the layouts of operands and results, or None if they are not legal."""
    local_seconds: dict[tuple[int, tuple[bool, ...], SiteChoice], float] = field(default_factory=dict)
    """(form of an op, its operands with zeros as padding, choice) -> seconds of the local work."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What options are judged by: the mesh, the machine, the optimizer and the tensors."""

    mesh: Shape
    cluster: Cluster
    optimizer: Optimizer
    redistributor: Redistributor
    metas: Mapping[str, TensorMeta]
    micro_batches: int = 1
    """Calls of a step, whose gradients are added up and reduced once."""
    holds: bool = False
    """Whether what forward gathers of parameters is kept from one micro-batch to the next."""
    reduced_in: torch.dtype | None = None
    """The dtype in which gradients of parameters are reduced, if not that in which they are computed."""
    memo: Memo = field(default_factory=Memo, repr=False)

    def __post_init__(self) -> None:
        """A setting derived from another one keeps its memo where all that it depends on is the same."""
        machine, training = (self.cluster.device, self.redistributor.links), (self.micro_batches, self.reduced_in)
        of = self.mesh, machine, self.optimizer, self.metas, training
        if self.memo.of != of:
            object.__setattr__(self, "memo", Memo(of=of))

    @property
    def has_own_reductions(self) -> bool:
        """Whether gradients of parameters are reduced less often than others, or in a dtype of their own."""
        return self.micro_batches > 1 or self.reduced_in is not None

    def reduced(self, moved: MovedKind) -> MovedKind:
        """What is moved of a tensor: gradients of parameters in the dtype in which they are reduced."""
        if self.reduced_in is None or not moved.is_gradient:
            return moved
        meta, before = TensorMeta(moved.meta.shape, self.reduced_in), moved.meta.dtype
        return moved._replace(meta=meta, cast_from=None if before == self.reduced_in else before)

    def times(
        self, moved: MovedKind, phase: Sequence[Acquired], wanted: Sequence[tuple[Layout, bool]], *, late: bool
    ) -> tuple[int, ...]:
        """How often in a step each layout of a tensor is acquired, in backward alone if `late`: in each micro-batch,
        but for gradients of parameters, and for what is held: all that forward reads, and what that comes from."""
        if moved.is_gradient or self.micro_batches == 1:
            return (1,) * len(phase)
        held: set[Layout] = set()
        if self.holds and moved.is_parameter and not late:
            held.update(layout for layout, backward in wanted if not backward)
            for item in reversed(phase):
                held.update([item.source] if item.layout in held else [])
        return tuple(1 if item.layout in held else self.micro_batches for item in phase)

    def acquired_seconds(
        self, moved: MovedKind, phases: Sequence[Sequence[Acquired]], wanted: Sequence[tuple[Layout, bool]]
    ) -> float:
        """In a step, of all phases in which a tensor is acquired."""
        seconds = 0.0
        for late, phase in enumerate(phases):
            times = self.times(moved, phase, wanted, late=bool(late))
            seconds += sum(n * item.route.seconds for n, item in zip(times, phase, strict=True))
        return seconds + self.reduction_cast_seconds(moved, phases)

    def reduction_cast_seconds(self, moved: MovedKind, phases: Sequence[Sequence[Acquired]]) -> float:
        """Of the casts of a gradient before its reductions."""
        if moved.cast_from is None:
            return 0.0
        steps = [item.route.steps[0] for phase in phases for item in phase if item.route.steps]
        layouts = dict.fromkeys(step.before for step in steps if step.kind in COLLECTIVES)
        wide = [local_meta(moved.meta, layout, self.mesh) for layout in layouts]
        return sum(_cast(self, TensorMeta(meta.shape, moved.cast_from), meta) for meta in wide)


def operator_seconds(
    setting: Setting,
    site: Site,
    rule: OpRule | None,
    splits: tuple[tuple[str, tuple[int, ...]], ...],
    operands: tuple[Layout, ...],
    results: tuple[Layout, ...],
    choice: SiteChoice,
) -> float:
    """Roofline of the local op: arithmetic or memory, whichever is slower; an expansion costs what
    its own program does, collectives included."""
    call = site.call
    assert call is not None
    device = setting.cluster.device
    if rule is not None and (expands(rule, splits) or fillings(call, rule, operands, site.zeros)):
        emission = local_program(call, rule, splits, operands, results, setting.mesh, site.zeros)
        return emission_seconds(setting, emission, call, rule, choice)
    if rule is not None and rule.moves_nothing and device.operators is None:
        return device.seconds_per_op
    inputs, outputs = local_shapes(call, operands, results, setting.mesh)
    local_operands = [TensorMeta(shape, m.dtype) for shape, m in zip(inputs, call.inputs, strict=True)]
    local_results = [
        TensorMeta(shape, m.dtype)
        for shape, m in zip(outputs, call.outputs, strict=True)
        if shape is not None and m is not None
    ]
    if rule is not None and rule.moves_nothing:
        return device.view_seconds(call.node.op, local_operands, local_results)
    if rule is None:
        return device.operator_seconds(call.node.op, local_operands, local_results, 0.0)
    share = _share(setting, rule, choice)
    work = rule.flops * share, rule.inside_bytes * share
    return device.operator_seconds(call.node.op, local_operands, local_results, *work)


def _share(setting: Setting, rule: OpRule, choice: SiteChoice) -> float:
    """The part of an operator's work that one rank does, on padding too."""
    share = 1.0
    for axis, on_axis in enumerate(choice.axes):
        if on_axis.splits or on_axis.routes:
            share *= max(1.0, on_axis.period / rule.factors[on_axis.factor].size) / setting.mesh[axis]
    return share


def used_of(setting: Setting, site: Site, layout: Layout) -> TensorMeta | None:
    """A rank's part of a parameter at rest as it is cast to be used; None where it is used as it is."""
    used = setting.metas[site.makes[0]]
    return None if site.meta is None or used.dtype == site.meta.dtype else local_meta(used, layout, setting.mesh)


def cast_seconds(setting: Setting, local: TensorMeta, used: TensorMeta | None, trained: bool) -> float:
    """Of the casts of a parameter in a step, each time that it is used, and of its gradient at the end."""
    seconds = 0.0 if used is None else setting.micro_batches * _cast(setting, local, used)
    reduced = setting.reduced_in or (used or local).dtype
    if trained and reduced != local.dtype:
        seconds += _cast(setting, TensorMeta(local.shape, reduced), local)
    return seconds


def _cast(setting: Setting, source: TensorMeta, result: TensorMeta) -> float:
    return setting.cluster.device.operator_seconds(CAST, [source], [result], 0.0)


def emission_seconds(setting: Setting, emission: Emission, call: Call, rule: OpRule, choice: SiteChoice) -> float:
    """Seconds of an expansion's local program: its ops bound by memory, but for the op itself, which may be
    bound by arithmetic; its collectives by links."""
    device = setting.cluster.device
    itself = [instruction for instruction in emission.instructions if instruction.op == call.node.op]
    share = _share(setting, rule, choice) / max(1, len(itself))
    seconds = 0.0
    for instruction in emission.instructions:
        operands, results = input_and_output_metas(instruction, emission.metas)
        if kind := instruction.collective:
            largest = max(meta.bytes for meta in (*operands, *results))
            seconds += collective_seconds(kind, largest, setting.redistributor.links[instruction.args[-1]])
        elif instruction.op != WAIT:
            own = share if instruction.op == call.node.op else 0.0
            work = rule.flops * own, rule.inside_bytes * own
            seconds += device.operator_seconds(instruction.op, operands, results, *work)
    return seconds
