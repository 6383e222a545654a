"""What of a plan other libraries can express: a style for each module, units whose parameters are sharded together, and
what stands in neither."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.compat.dispatch import Watching
from autopar.compat.neutral import unlogged_fakes
from autopar.compat.quick_fakes import quick_fakes
from autopar.ir.layout import Shape, Split, local_meta
from autopar.passes.blocks.block import Blocks
from autopar.passes.space.choices import REGATHER
from autopar.passes.space.problem import Assignment
from autopar.passes.space.sites import Option, Site
from autopar.passes.space.space import Space

from .account import parameter_layouts, placements, sources
from .description import texts
from .foreign import COLUMN, GATHERED, PLAIN, ROW, Style, dims_of
from .options import taken
from .presets import Preset, allowed_by, tensor_axis
from .presets.context import Context
from .provenance import ModelFacts, kind_of
from .texts import called, grouped, layer_of, starred

T = TypeVar("T")

APART = 0.1
"""The part of a layer from which on a module gathers for itself where it keeps what the layer does not, or the reverse:
smaller ones would add collectives and save nothing."""

SCALAR_BYTES = 8
"""Counts and sums of a loss are no larger, and each library leaves them to its user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressed:
    """On the `tensor` axis ("": none) the style of each module that has one, and the dim along which modules without
    split weights are handed shards (`along`); on the `shards` axes parameters rest in shards, in `units` of modules
    that gather together, again in backward (True) or not; all `others` replicate them. `missing`: what a library
    cannot say, by module."""

    tensor: str
    styles: Mapping[str, Style]
    along: Mapping[str, int]
    shards: tuple[str, ...]
    others: tuple[str, ...]
    units: Mapping[str, bool]
    missing: tuple[str, ...]
    ranks: int
    """Those of the tensor axis."""

    @property
    def named(self) -> dict[str, Style]:
        """Names and styles, as such a plan would be read."""
        units = {name: replace(self.styles.get(name, PLAIN), reshards=again) for name, again in self.units.items()}
        return {**self.styles, **units} or {"": PLAIN}

    def refused(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[str]:
        """Modules whose Python does not run on a rank's shards, by what it does to fakes: those beside which it fails,
        and all with styles where it does something else than on one device."""
        refused: set[str] = set()
        failed: list[str] = []
        whole = _seen(model, {}, self.ranks, args, kwargs, failed) if self.styles else None
        while styles := {module: style for module, style in self.styles.items() if module not in refused}:
            seen = None if whole is None else _seen(model, styles, self.ranks, args, kwargs, failed)
            if seen is not None and whole is not None and seen.same(whole):
                break
            beside = {starred(name.rpartition(".")[0]) for name in failed[:1]} if seen is None else set()
            refused |= {module for module in styles if starred(module.rpartition(".")[0]) in beside} or {*styles}
        return refused


def expressed(
    preset: Preset,
    space: Space,
    blocks: Blocks,
    assignment: Assignment,
    facts: ModelFacts,
    kinds: Collection[str],
) -> Expressed:
    """An assignment as a library says it that can express what the preset leaves, and splits such `kinds` of
    parameters."""
    axis = tensor_axis(space) if preset.tensor is not None else -1
    wide = [a for a, ranks in enumerate(space.mesh) if ranks > 1 and a != axis]
    styles: dict[str, Style] = {}
    reshards: dict[str, bool] = {}
    sizes: dict[str, int] = {}
    shards: set[int] = set()
    shared = {name.rpartition(".")[0] for pair in facts.captured.tied.items() for name in pair}
    gathered, along = _gathered(space, assignment, axis), {}
    for name, at_rest, _, policy in parameter_layouts(space, assignment):
        module, meta = name.rpartition(".")[0], space.graph.metas[space.graph.parameters[name]]
        shards |= {a for a in wide if isinstance(at_rest[a], Split)}
        reshards.setdefault(module, policy == REGATHER)
        sizes[module] = sizes.get(module, 0) + meta.bytes
        if axis >= 0 and facts.kinds[name] in kinds and isinstance(split := at_rest[axis], Split):
            by_column = dims_of(COLUMN, facts.kinds[name], meta.shape) == split.dim
            is_whole = name in gathered or facts.kinds[name] == "embedding"
            styles[module] = (GATHERED if is_whole else COLUMN) if by_column else ROW
    if axis >= 0:
        along = {name.rpartition(".")[0]: dim for name, dim in _along(space, assignment, axis)}
        along = {
            m: d
            for m, d in along.items()
            if m not in styles and not any(n.startswith(f"{m}.") or not m for n in reshards)
        }
    return Expressed(
        tensor=space.axes[axis] if axis >= 0 else "",
        styles=styles,
        along=along,
        shards=tuple(space.axes[a] for a in wide if a in shards),
        others=tuple(space.axes[a] for a in wide if a not in shards),
        units=_units(reshards, sizes, shared) if wide else {},
        missing=tuple(_missing(preset, space, blocks, assignment, axis, styles, along)),
        ranks=space.mesh[axis] if axis >= 0 else 1,
    )


def _forward(space: Space, assignment: Assignment) -> Iterator[tuple[int, Mapping[str, str], Site, Option]]:
    """The number of each copy of a region, what its parameters are called, and its operators of forward with their
    options."""
    names = {value: name for name, value in space.graph.parameters.items()}
    for number, (region, decisions, rename) in enumerate(placements(space, assignment)):
        parameters = {name: names[rename.get(name, name)] for name, s in region.sites.items() if s.kind == "parameter"}
        for site in region.sites.values():
            if site.kind == "op" and not site.backward:
                yield number, parameters, site, space.decided(site, decisions[site.name])


def _gathered(space: Space, assignment: Assignment, axis: int) -> set[str]:
    """Parameters whose product is split on an axis, and is read whole."""
    split: dict[tuple[int, str], list[str]] = {}
    whole: set[str] = set()
    for number, parameters, site, option in _forward(space, assignment) if axis >= 0 else ():
        for read, layout in zip(site.reads, option.reads, strict=True):
            whole |= {*split.get((number, read.alias.root), ())} if not isinstance(layout[axis], Split) else set()
        weights = [parameters[read.alias.root] for read in site.reads if read.alias.root in parameters]
        if weights and isinstance(option.makes[0][axis], Split):
            split[number, site.makes[0]] = weights
    return whole


def _along(space: Space, assignment: Assignment, axis: int) -> Iterator[tuple[str, int]]:
    """Parameters that are whole on an axis and act on shards there, each with the dim of these."""
    for _, parameters, site, option in _forward(space, assignment):
        choice = option.choice.axes[axis]
        for read in site.reads:
            if read.alias.root in parameters and choice.splits and site.rule is not None:
                carried = [dim for dim, factor in enumerate(site.rule.outputs[0]) if factor == choice.factor]
                yield from ((parameters[read.alias.root], dim) for dim in carried)


def unit_bytes(space: Space, assignment: Assignment) -> int:
    """What is gathered of the largest unit at once."""
    sizes: dict[str, int] = {}
    for name, _, uses, _ in parameter_layouts(space, assignment):
        meta, layer = space.graph.metas[space.graph.parameters[name]], layer_of(name)
        sizes[layer] = sizes.get(layer, 0) + max((local_meta(meta, use, space.mesh).bytes for use in uses), default=0)
    return max(sizes.values(), default=0)


def _units(reshards: Mapping[str, bool], sizes: Mapping[str, int], shared: Collection[str]) -> dict[str, bool]:
    """Units, the innermost first: each repeated layer, modules that are not as most of theirs is and are no small part
    of it, and the model, to which parameters with several names belong."""
    home = {module: "" if module in shared else layer_of(module) for module in reshards}
    home = {module: "" if layer in {layer_of(m) for m in shared} else layer for module, layer in home.items()}
    layers = grouped((home[module], module) for module in reshards)
    whole = {layer: sum(sizes[m] for m in modules) for layer, modules in layers.items()}
    again = {layer: sum(sizes[m] * reshards[m] for m in modules) for layer, modules in layers.items()}
    most = {layer: 2 * again[layer] >= whole[layer] for layer in layers}
    apart = {
        module: reshards[module]
        for module, layer in home.items()
        if reshards[module] != most[layer] and sizes[module] >= APART * whole[layer] and module not in shared
    }
    rest = most.pop("", True)
    return stars({**apart, **most}) | {"": rest}


def stars(of: Mapping[str, T]) -> dict[str, T]:
    """Names with `*` for numbers, where all that are called so are alike."""
    alike = grouped((starred(name), name) for name in of)
    told: dict[str, T] = {}
    for pattern, names in alike.items():
        values = [of[name] for name in names]
        told |= {pattern: values[0]} if all(v == values[0] for v in values) else {name: of[name] for name in names}
    return told


def _missing(
    preset: Preset,
    space: Space,
    blocks: Blocks,
    assignment: Assignment,
    axis: int,
    styles: Collection[str],
    along: Collection[str],
) -> Iterator[str]:
    """What the preset does not leave, and what travels between modules, each with its module."""
    allowed, context = allowed_by(preset, space, blocks), Context(space, blocks)
    found = [("", "layers that run again in backward")] * any(map(any, assignment.recompute))
    for name, choices in taken(space, assignment).items():
        site = context.sites[name]
        for choice in choices:
            if choice not in allowed[name] and site.kind in ("op", "parameter", "input"):
                at = context.parameters.get(name, site.module)
                rests = texts(space.decided(site, choice).makes[0], site.meta.shape, space.mesh) if site.meta else ()
                words = [f"{text} on {a}" for text, a in zip(rests, space.axes, strict=False) if text != "R"]
                found.append((at, "" if site.kind == "op" else f"rests {', '.join(words) or 'whole'}"))
    of = {read.alias.root: name for name in context.parameters for read in context.sites[name].reads}
    for traffic in sources(space, assignment):
        maker = context.making.get(traffic.root) or context.sites.get(traffic.root)
        on_tensor = space.axes.index(traffic.axis) == axis
        if maker is None or (maker.kind == "parameter" and not on_tensor):
            continue
        if not on_tensor:
            # where nothing travels in forward, backward adds up gradients of parts of the batch
            may = maker.backward or traffic.bytes <= SCALAR_BYTES * traffic.count
        elif traffic.root in of:
            may = context.parameters[of[traffic.root]].rpartition(".")[0] in along
        else:
            weights = [context.parameter_of(maker.reads[p].alias.root) for p in context.weights_of(maker)]
            may = any(name.rpartition(".")[0] in styles for name in weights) or traffic.root in context.weight_gradients
        if not may:
            where = "between layers" if maker.kind == "border" else maker.module
            found.append((where, f"{traffic.kind} on {traffic.axis}"))
    for alike in grouped((starred(at), (at, what)) for at, what in found).values():
        kinds = ", ".join(dict.fromkeys(what for _, what in alike if what)) or "splits of its operators"
        yield f"{called([*dict.fromkeys(at for at, _ in alike)]) or 'the model'}: {kinds}"


class _Seen(Watching):  # type: ignore[no-untyped-call]
    """What operators that work element by element are, with the numbers in them, which Python may take from shapes; the
    shapes before and after each view; and the model's outputs at the end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scalars: list[Any] = []
        self.views: list[tuple[Shape, Shape]] = []
        self.outputs: list[Shape] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise in getattr(func, "tags", ()):
            numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, (int, float))]
            self.scalars.append((str(func), *numbers))
        elif func in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            self.views.append((tuple(args[0].shape), tuple(result.shape)))
        return result

    def same(self, whole: _Seen) -> bool:
        """Whether this, on shards, is a part of what the whole model does."""
        views = zip(whole.views, self.views, strict=False)
        return (
            (self.scalars, self.outputs, len(self.views)) == (whole.scalars, whole.outputs, len(whole.views))
            and all(_is_part(*before, *after) for before, after in views)
        )  # fmt: skip


def _is_part(whole: Shape, viewed: Shape, part: Shape, part_viewed: Shape) -> bool:
    """Whether a view of a part is the part of the view: what is split of one dim before is split of the dim after that
    begins where it does."""
    split = [dim for dim, (all_, some) in enumerate(zip(whole, part, strict=True)) if all_ != some]
    if not split:
        return viewed == part_viewed
    (dim, *others), ranks = split, math.prod(whole) // max(1, math.prod(part))
    begins = [d for d, n in enumerate(viewed) if math.prod(viewed[:d]) == math.prod(whole[:dim]) and n > 1]
    expected = [n // ranks if d in begins[:1] else n for d, n in enumerate(viewed)]
    return not others and bool(begins) and tuple(expected) == part_viewed


def _seen(
    model: nn.Module,
    styles: Mapping[str, Style],
    ranks: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    failed: list[str],
) -> _Seen | None:
    """What a model does with one rank's shards of the parameters of these modules. None if its Python fails on them:
    then `failed` are the modules that it was in, the innermost first."""
    inside: list[str] = []
    gathered = {name: model.get_submodule(name) for name, style in styles.items() if style == GATHERED}
    wide = {name: getattr(m, "out_features", getattr(m, "embedding_dim", 0)) for name, m in gathered.items()}

    def enter(name: str) -> Any:
        return lambda *_: inside.append(name)

    def leave(name: str) -> Any:
        def hook(module: nn.Module, _: Any, output: Any) -> Any:
            inside.pop()
            return output.new_empty((*output.shape[:-1], wide[name])) if name in wide else output

        return hook

    with quick_fakes(), unlogged_fakes(), ExitStack() as hooks:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in chain(model.named_parameters(remove_duplicate=False), model.named_buffers()):
            shape, style = list(tensor.shape), styles.get(name.rpartition(".")[0], PLAIN)
            dim = dims_of(style, kind_of(model, name), tensor.shape)
            if dim is not None:
                shape[dim] = -(-shape[dim] // ranks)
            tensors[name] = torch.empty(shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        inputs = tree_map_only(torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype), (tuple(args), dict(kwargs)))
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(enter(name)).remove)
            hooks.callback(module.register_forward_hook(leave(name)).remove)
        hooks.enter_context(seen := _Seen())
        try:
            outputs = torch.func.functional_call(model, tensors, *inputs, tie_weights=False)
        except (RuntimeError, ValueError, IndexError, TypeError):  # of the model's own Python
            failed[:] = reversed(inside)
            return None
    seen.outputs = [tuple(leaf.shape) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return seen
