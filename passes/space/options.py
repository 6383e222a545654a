"""Options: what a choice means at a site, or None where it is not legal."""

from dataclasses import replace

from autopar.ir.graph import TensorMeta
from autopar.ir.layout import PARTIAL, REPLICATE, Layout, Split, is_chunked, is_legal, nest

from .choices import REPLICATED, SiteChoice
from .collapse import from_root, to_root
from .items import operator_items, parameter_items, total
from .operator_layouts import operator_layouts
from .setting import Setting
from .sites import Option, Site


def _stored_layout(setting: Setting, meta: TensorMeta, choice: SiteChoice) -> Layout | None:
    """The layout of a stored value (parameter, input, border, output) from its choices per axis."""
    placements = [
        Split(on.factor, on.period) if on.splits else PARTIAL if on.is_partial else REPLICATE for on in choice.axes
    ]
    layout = nest(tuple(placements), setting.mesh)
    return layout if is_legal(meta.shape, layout, setting.mesh) else None


def _stored_option(setting: Setting, site: Site, choice: SiteChoice) -> Option | None:
    assert site.meta is not None
    layout = _stored_layout(setting, site.meta, choice)
    if layout is None:
        return None
    if site.kind in ("parameter", "output") and not is_chunked(site.meta.shape, layout, setting.mesh):
        return None
    reads = []
    for read in site.reads:
        root = to_root(read.alias.steps, layout, setting.mesh)
        if root is None or not is_legal(setting.metas[read.alias.root].shape, root, setting.mesh):
            return None
        reads.append(root)
    seconds, size = total(parameter_items(setting, site, layout)) if site.kind == "parameter" else (0.0, 0.0)
    return Option(choice=choice, reads=tuple(reads), makes=(layout,) * len(site.makes), seconds=seconds, bytes=size)


def _unsplit_option(setting: Setting, site: Site, choice: SiteChoice) -> Option | None:
    return _stored_option(setting, site, choice) if _is_unsplit(site, choice) else None


def _is_unsplit(site: Site, choice: SiteChoice) -> bool:
    """Whether nothing is split, but by micro-batches where these may."""
    return all(on_axis == REPLICATED for on_axis in choice.axes[site.in_time :])


def _replicated_option(setting: Setting, site: Site, choice: SiteChoice) -> Option | None:
    """The only option of an op without a rule."""
    if not _is_unsplit(site, choice):
        return None
    replicated = (REPLICATE,) * len(setting.mesh)
    reads, makes = (replicated,) * len(site.reads), (replicated,) * len(site.makes)
    seconds, _ = total(operator_items(setting, site, None, reads, makes, choice))
    return Option(choice=choice, reads=reads, makes=makes, seconds=seconds, bytes=0.0)


def _op_option(setting: Setting, site: Site, choice: SiteChoice) -> Option | None:
    """What is made where it is read is priced there."""
    if site.in_time and not _is_unsplit(site, choice):
        return None
    option = operator_option(setting, site, choice)
    return replace(option, seconds=0.0) if option is not None and site.made else option


def operator_option(setting: Setting, site: Site, choice: SiteChoice) -> Option | None:
    call, rule, mesh = site.call, site.rule, setting.mesh
    assert call is not None
    if rule is None:
        return _replicated_option(setting, site, choice)
    memo = setting.memo
    if (site.form, choice) not in memo.layouts:
        memo.layouts[site.form, choice] = operator_layouts(call, rule, choice, mesh, setting.load)
    layouts = memo.layouts[site.form, choice]
    if layouts is None:
        return None
    operands, results = layouts
    reads = []
    for read, operand in zip(site.reads, operands, strict=True):
        root = to_root(read.alias.steps, operand, mesh)
        if root is None or not is_legal(setting.metas[read.alias.root].shape, root, mesh):
            return None
        # a view of the global dims must also be a view of the local dims
        if from_root(read.alias.steps, root, mesh) != operand:
            return None
        reads.append(root)
    key = site.form, site.zeros, choice
    if key not in memo.local_seconds:
        memo.local_seconds[key], _ = total(operator_items(setting, site, rule, operands, results, choice))
    return Option(choice=choice, reads=tuple(reads), makes=results, seconds=memo.local_seconds[key], bytes=0.0)


OPTION = {
    "op": _op_option,
    "parameter": _stored_option,
    "input": _stored_option,
    "output": _stored_option,
    "border": _stored_option,
    "buffer": _unsplit_option,
    "tangent": _unsplit_option,
    "seed": _unsplit_option,
    "shared": _unsplit_option,
}
"""Kind of a site -> the function that says what a choice means there."""
