"""What of a plan other libraries can express: a style for each module, units whose parameters are sharded together, and
what stands in neither."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from traceback import walk_tb
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.compat.dispatch import Watching
from autopar.compat.neutral import unlogged_fakes
from autopar.compat.quick_fakes import quick_fakes
from autopar.ir.layout import Shape, Split, local_shape, reshape_layout
from autopar.passes.space.choices import REGATHER
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space

from .account import parameter_layouts, placements, sources
from .description import texts
from .foreign import COLUMN, GATHERED, PLAIN, ROW, Style, dims_of
from .options import taken
from .presets import Preset, tensor_axis
from .presets.context import Context
from .provenance import ModelFacts, kind_of
from .searches import Searches
from .texts import called, grouped, layer_of, module_of, starred

T = TypeVar("T")

APART = 0.1
"""The part of a layer from which on a module gathers for itself where it keeps what the layer does not, or the reverse:
smaller ones would add collectives and save nothing."""

SCALAR_BYTES = 8
"""Counts and sums of a loss are no larger, and each library leaves them to its user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressed:
    """Of axes for modules ("tensor"), for parameters in shards ("shard") and for copies of them ("replicate") the
    `sizes`, the outermost first. The style of each module that has one on the first of these, and the dim along which
    modules without split weights are handed shards (`along`); `units` of modules that gather together, again in
    backward (True) or not. `missing`: what a library cannot say, by module."""

    sizes: Mapping[str, int]
    styles: Mapping[str, Style]
    along: Mapping[str, int]
    units: Mapping[str, bool]
    missing: tuple[str, ...]

    @property
    def named(self) -> dict[str, Style]:
        """Names and styles, as such a plan would be read."""
        units = {name: replace(self.styles.get(name, PLAIN), reshards=again) for name, again in self.units.items()}
        return {**self.styles, **units} or {"": PLAIN}

    def refused(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[str]:
        """Modules whose Python does not run on a rank's shards, by what it does to fakes: those beside which it fails,
        and all with styles where it does something else than on one device."""
        refused: set[str] = set()
        whole = _run(model, {}, self.sizes["tensor"], args, kwargs) if self.styles else None
        while styles := {module: style for module, style in self.styles.items() if module not in refused}:
            ran = _run(model, styles, self.sizes["tensor"], args, kwargs)
            if whole is not None and ran.is_part(whole, self.sizes["tensor"]):
                break
            beside = None if ran.failed is None else starred(module_of(ran.failed))
            refused |= {module for module in styles if starred(module_of(module)) == beside} or {*styles}
        return refused


def expressed(
    preset: Preset, searches: Searches, assignment: Assignment, facts: ModelFacts, kinds: Collection[str]
) -> Expressed:
    """An assignment as a library says it that can express what the preset leaves, and splits such `kinds` of
    parameters."""
    space = searches.space
    axis = tensor_axis(space) if preset.tensor is not None else -1
    styles: dict[str, Style] = {}
    reshards: dict[str, bool] = {}
    sizes = Counter[str]()
    shards: set[int] = set()
    gathered, along = _split(space, assignment, axis) if axis >= 0 else (set[str](), dict[str, int]())
    for name, at_rest, _, policy in parameter_layouts(space, assignment):
        module, meta = module_of(name), space.graph.metas[space.graph.parameters[name]]
        shards |= {a for a, placement in enumerate(at_rest) if isinstance(placement, Split)}
        reshards.setdefault(module, policy == REGATHER)
        sizes[module] += meta.bytes
        if axis >= 0 and facts.kinds[name] in kinds and isinstance(split := at_rest[axis], Split):
            by_column = dims_of(COLUMN, facts.kinds[name], meta.shape) == split.dim
            is_whole = name in gathered or facts.kinds[name] == "embedding"
            styles[module] = (GATHERED if is_whole else COLUMN) if by_column else ROW
    along = {
        module: dim
        for name, dim in along.items()
        if (module := module_of(name)) not in styles
        and not any(other.startswith(f"{module}.") or not module for other in reshards)
    }
    roles = ["tensor" if a == axis else "shard" if a in shards else "replicate" for a, _ in enumerate(space.mesh)]
    order = ("replicate", "shard", "tensor") if roles[0] != "tensor" else ("tensor", "replicate", "shard")
    ranks = {role: math.prod(n for at, n in zip(roles, space.mesh, strict=True) if at == role) for role in order}
    shared = {*map(module_of, facts.shared)}
    return Expressed(
        sizes=ranks,
        styles=styles,
        along=along,
        units=_units(reshards, sizes, shared) if ranks["replicate"] * ranks["shard"] > 1 else {},
        missing=tuple(_missing(preset, searches, assignment, axis, styles, along)),
    )


def _split(space: Space, assignment: Assignment, axis: int) -> tuple[set[str], dict[str, int]]:
    """The parameters whose product is split on an axis and is read whole; and the dim of what each parameter makes that
    is split there."""
    names = {value: name for name, value in space.graph.parameters.items()}
    makers: dict[tuple[int, str], list[str]] = {}
    gathered, along = set[str](), dict[str, int]()
    for number, (region, decisions, rename) in enumerate(placements(space, assignment)):
        for site in region.sites.values():
            if site.kind != "op" or site.backward:
                continue
            option = space.decided(site, decisions[site.name])
            for read, layout in zip(site.reads, option.reads, strict=True):
                root = read.alias.root
                if not isinstance(layout[axis], Split):
                    gathered.update(makers.get((number, root), ()))
                if (name := names.get(rename.get(root, root))) and isinstance(made := option.makes[0][axis], Split):
                    makers.setdefault((number, site.makes[0]), []).append(name)
                    along[name] = made.dim
    return gathered, along


def _units(reshards: Mapping[str, bool], sizes: Mapping[str, int], shared: Collection[str]) -> dict[str, bool]:
    """Units, the innermost first: each repeated layer, modules that are not as most of theirs is and are no small part
    of it, and the model, to which parameters with several names belong."""
    shared = {layer_of(module) for module in shared}
    home = {module: "" if layer_of(module) in shared else layer_of(module) for module in reshards}
    whole, again = Counter[str](), Counter[str]()
    for module, layer in home.items():
        whole[layer] += sizes[module]
        again[layer] += sizes[module] * reshards[module]
    most = {layer: 2 * again[layer] >= whole[layer] for layer in whole}
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
        told |= (
            {pattern: of[names[0]]} if len({of[name] for name in names}) == 1 else {name: of[name] for name in names}
        )
    return told


def _missing(
    preset: Preset,
    searches: Searches,
    assignment: Assignment,
    axis: int,
    styles: Collection[str],
    along: Collection[str],
) -> Iterator[str]:
    """What the preset does not leave, and what travels between modules, each with its module."""
    space, allowed, context = searches.space, searches.preset(preset), Context(searches.space, searches.blocks())
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
            may = module_of(context.parameters[of[traffic.root]]) in along
        else:
            weights = [context.parameter_of(maker.reads[p].alias.root) for p in context.weights_of(maker)]
            may = any(module_of(name) in styles for name in weights) or traffic.root in context.weight_gradients
        if not may:
            where = "between layers" if maker.kind == "border" else maker.module
            found.append((where, f"{traffic.kind} on {traffic.axis}"))
    for alike in grouped((starred(at), (at, what)) for at, what in found).values():
        kinds = ", ".join(dict.fromkeys(what for _, what in alike if what)) or "splits of its operators"
        yield f"{called([*dict.fromkeys(at for at, _ in alike)]) or 'the model'}: {kinds}"


class _Run(Watching):  # type: ignore[no-untyped-call]
    """What a model's Python does that may depend on sizes: which operators work element by element, with the numbers in
    them; the shapes before and after each view; and those of the model's outputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[object, Sequence[Any], Shape, Shape]] = []
        self.failed: str | None = None
        """The innermost module whose Python failed, if any did."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise in getattr(func, "tags", ()):
            numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, (int, float))]
            self.calls.append((func, numbers, (), ()))
        elif func in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            self.calls.append((func, (), tuple(args[0].shape), tuple(result.shape)))
        return result

    def is_part(self, whole: _Run, ranks: int) -> bool:
        """Whether this, on the shards of one of so many ranks, is a part of what the whole model does."""
        return (self.failed, len(self.calls)) == (None, len(whole.calls)) and all(
            mine[:2] == its[:2] and _is_part(*mine[2:], *its[2:], ranks)
            for mine, its in zip(self.calls, whole.calls, strict=True)
        )


def _is_part(part: Shape, part_viewed: Shape, whole: Shape, viewed: Shape, ranks: int) -> bool:
    """Whether a view of a part, in which one dim is split at most, is the part of the view."""
    split = [Split(dim, some * ranks) for dim, (some, size) in enumerate(zip(part, whole, strict=True)) if some != size]
    after = reshape_layout(whole, viewed, tuple(split), (ranks,) * len(split))
    return len(split) < 2 and after is not None and local_shape(viewed, after, (ranks,) * len(split)) == part_viewed


def _run(
    model: nn.Module, styles: Mapping[str, Style], ranks: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> _Run:
    """What a model does with one rank's shards of the parameters of these modules."""

    def widened(size: int, module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return output.new_empty((*output.shape[:-1], size))

    run = _Run()
    with quick_fakes(), unlogged_fakes(), ExitStack() as hooks:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in chain(model.named_parameters(remove_duplicate=False), model.named_buffers()):
            shape, style = list(tensor.shape), styles.get(module_of(name), PLAIN)
            if (dim := dims_of(style, kind_of(model, name), tensor.shape)) is not None:
                shape[dim] = -(-shape[dim] // ranks)
                if style.gathered:
                    module = model.get_submodule(module_of(name))
                    hooks.callback(module.register_forward_hook(partial(widened, tensor.shape[dim])).remove)
            tensors[name] = torch.empty(shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        inputs = tree_map_only(torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype), (tuple(args), dict(kwargs)))
        hooks.enter_context(run)
        try:
            outputs = torch.func.functional_call(model, tensors, *inputs, tie_weights=False)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # of the model's own Python
            names = {id(module): name for name, module in model.named_modules()}
            frames = [id(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__)]
            *_, run.failed = (names[frame] for frame in frames if frame in names)
            return run
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    run.calls += [("output", leaf.shape, (), ()) for leaf in leaves]
    return run
