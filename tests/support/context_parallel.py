"""Context parallel as people write it: everything splits the sequence, and attention takes keys and values around in a
ring, gathers them, or goes to heads by all-to-all. Presets for `solver=`, which `autopar.register_preset` adds."""

from __future__ import annotations

from functools import partial

from autopar.ir.layout import Split
from autopar.ops.attention import RING
from autopar.passes.space.choices import KEEP, REGATHER, REPLICATED
from autopar.passes.space.reached import Reached, reached
from autopar.passes.space.sites import Site
from autopar.planning.presets import Preset, register_preset
from autopar.planning.presets.axis import AxisChoices, linear, megatron, sharded_data
from autopar.planning.presets.context import Context

FORMS = {"ring": RING, "striped": RING, "gathered": "q", "heads": "h"}
"""Preset -> the factor of attention that it splits. "striped" is a ring of a sequence that is dealt out one by one."""

AXIS = "cp"
"""The axis of the sequence. That called "tp" is tensor parallel, and all others are data parallel; parameters rest in
shards on all but "tp"."""


def along(context: Context, axis: int, striped: bool) -> Reached:
    """Where the sequence travels."""
    ranks = context.space.mesh[axis]
    if not striped:
        return context.digits(axis, "sequence")
    inputs = [site for site in context.inputs if site.meta is not None and len(site.meta.shape) > 1]
    return reached(context.space, ranks, [(site.name, Split(1, ranks)) for site in inputs])


def by_sequence(form: str, context: Context, site: Site, axis: int) -> AxisChoices:
    """The choices of a site on the axis of a sequence."""
    ranks = context.space.mesh[axis]
    if context.space.axes[axis] != AXIS or site.kind == "parameter":
        return sharded_data(context, site, axis)
    choices, digits = site.choices[ranks], along(context, axis, form == "striped")
    if site.kind == "op":
        if names := _attends(site):
            fitting = [c for c in choices if c.splits and names[c.factor] == FORMS[form]]
            return tuple(c for c in fitting if form == "heads" or (c.period == ranks) == (form == "striped"))
        return (*([c for c in digits.choices(site) if c in choices] or [REPLICATED]), *linear(site, ranks))
    if site.kind == "output":
        return choices
    kept = [c for c in choices if c.splits and Split(c.factor, c.period) in digits.splits.get(site.makes[0], {})]
    return tuple(kept or [c for c in choices if not c.splits])


def by_heads(context: Context, site: Site, axis: int) -> AxisChoices:
    """Megatron with sequence parallel, and attention by its heads."""
    names = _attends(site)
    if not names:
        return megatron(context, site, axis, by_sequence=True)
    return tuple(c for c in site.choices[context.space.mesh[axis]] if c.splits and names[c.factor] == FORMS["heads"])


def _attends(site: Site) -> list[str]:
    """The factors of attention; nothing of another operator."""
    names = [factor.name for factor in site.rule.factors] if site.rule is not None else []
    return names if RING in names else []


def register() -> None:
    """Adds the presets."""
    for form in FORMS:
        rule = partial(by_sequence, form)
        register_preset(Preset(name=form, data=rule, policies=(KEEP, REGATHER)), replace=True)
        register_preset(Preset(name=f"{form}_tp", data=rule, tensor=by_heads, policies=(KEEP, REGATHER)), replace=True)


__all__ = ["AXIS", "FORMS", "register"]
