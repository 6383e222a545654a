"""Presets: the plans that people write by hand, and those of papers, as restrictions of the search space.

A preset says which options each site may take, and the solver picks among them. So a preset is never a second
implementation of anything.

- `ddp`: every operator that can split the batch does; parameters are replicated.
- `fsdp`: the same, with parameters sharded at rest, gathered before use, and again in backward.
- `megatron`: every contraction with a weight splits a dim of it, attention its heads, embedding and head the
  vocabulary; the residual stream is replicated.
- `megatron_sp`: the same, with norms and residual stream split by sequence.
- `atp` (ATP 3.2): on two axes, every product with a weight splits its rows on one and its columns on the other,
  row-first or column-first; values between products are split by features on one of them, attention by heads on both.
- `par4d` (Par4D III): the same on axes x and y, attention by heads on one of them; on an axis z batch and
  weights at rest are split, which are gathered before use, and kept for backward or gathered again.
- `meshslice` (MeshSlice 2.3): on two axes, rows and columns, all matrices are split both ways at rest, activations by
  batch on one and by features on the other. Of the three matrices of a product one stays; of the others,
  operands are gathered and the result is scattered.

Axes by name, or else by place: `megatron` takes the axis called "tp", "tensor", "model" or "mp", or the last one. The
three of papers take the axes with a name of `GRID_AXIS_NAMES`, or the last two that are not called as
`DATA_AXIS_NAMES` are; "z", or without any such name the third last, is z. All other axes are data parallel.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

from autopar.extensions import Table
from autopar.passes.blocks.block import Blocks
from autopar.passes.space.choices import KEEP, NO_POLICY, REGATHER, REPLICATED, AxisChoice, Policy, SiteChoice
from autopar.passes.space.problem import Allowed
from autopar.passes.space.sites import Site, joined_sites
from autopar.passes.space.space import Space
from autopar.solve.solvers import SOLVERS

from .axis import AxisChoices, data, megatron, sharded_data, sharded_matrices
from .context import Context
from .grid import Tiers, stationary, tensor

TENSOR_AXIS_NAMES = ("tp", "tensor", "model", "mp")
GRID_AXIS_NAMES = (*TENSOR_AXIS_NAMES, "tp1", "tp2", "x", "y", "row", "rows", "col", "cols", "column", "columns")
DATA_AXIS_NAMES = ("dp", "data", "ddp", "fsdp", "batch", "replica")
Z_AXIS_NAMES = ("z",)

AxisRule = Callable[[Context, Site, int], AxisChoices]
GridRule = Callable[[Context, Site, tuple[int, ...]], Tiers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a site may choose on the axes of each role. `name` is what `solver=` names.

    `data` and `tensor` are functions from a context, a site and an axis to its choices, for an axis that splits the
    batch and for one that splits the model. `grid` is one from all tensor axes to choices of them together, and `z`
    one for a third axis, along which parameters rest in shards. `policies` say whether backward keeps what forward
    gathered ("keep") or gathers it again ("regather").
    """

    name: str
    data: AxisRule = data
    tensor: AxisRule | None = None
    grid: GridRule | None = None
    z: AxisRule | None = None
    policies: tuple[Policy, ...] = (KEEP,)

    def __post_init__(self) -> None:
        if not self.policies or not {KEEP, REGATHER}.issuperset(self.policies):
            raise ValueError(
                f"preset {self.name!r}: policies are {self.policies!r}: give {KEEP!r}, {REGATHER!r}, or both"
            )


PRESETS = Table(
    "preset",
    Preset,
    (
        Preset(name="ddp"),
        Preset(name="fsdp", data=sharded_data, policies=(REGATHER,)),
        Preset(name="megatron", tensor=partial(megatron, by_sequence=False)),
        Preset(name="megatron_sp", tensor=partial(megatron, by_sequence=True)),
        Preset(name="atp", grid=partial(tensor, scatters_heads=True)),
        Preset(name="par4d", grid=partial(tensor, scatters_heads=False), z=sharded_matrices, policies=(KEEP, REGATHER)),
        Preset(name="meshslice", grid=stationary, policies=(REGATHER,)),
    ),
    functions=("data", "tensor", "grid", "z"),
    beside=SOLVERS,
)


def register_preset(preset: Preset, *, replace: bool = False) -> None:
    """Adds a `preset` for `solver=` to name; the default plan is never slower than its plan. Raises ValueError for an
    invalid preset, and for a name that is taken unless it is to `replace` that one."""
    PRESETS.add(preset, replace=replace)


def allowed_by(preset: Preset, space: Space, blocks: Blocks) -> Allowed:
    """The options that a preset leaves to every site.

    Raises ValueError for a mesh that does not fit it, and where the model has no batch to split.
    """
    context = Context(space, blocks)
    grid = _grid_axes(space, preset.name) if preset.grid else ()
    rules = _axis_rules(space, preset, grid)
    _check_batch(context, preset, rules)
    joined = joined_sites(space.regions(), space.twins)
    allowed: dict[str, list[SiteChoice]] = {}
    for site_name, site in context.sites.items():
        policies = preset.policies if site.kind == "parameter" else NO_POLICY
        choices: list[SiteChoice] = []
        tiers = preset.grid(context, site, grid) if preset.grid is not None and grid else []
        tiers = [*tiers, [(REPLICATED,) * len(grid)]]
        for on_lines, on_grid in product(_lines(context, site, rules), tiers):
            every = (_merged(space, on_lines, dict(zip(grid, joint, strict=True))) for joint in on_grid)
            choices = [SiteChoice(axes, policy) for merged in every for axes in merged for policy in policies]
            choices = [c for c in choices if all(space.option(at, c) is not None for at in joined[site_name])]
            if not all(any(on_axis.is_partial for on_axis in c.axes) for c in choices):
                break
        allowed[site_name] = choices
    return allowed


def _lines(context: Context, site: Site, rules: Mapping[int, AxisRule]) -> list[dict[int, AxisChoices]]:
    """What the rules allow on each axis; and, for a dim with an uneven split, which may not pass through a view, the
    same or replicated."""
    first = {axis: rule(context, site, axis) for axis, rule in rules.items()}
    return [first, {axis: tuple(dict.fromkeys((*choices, REPLICATED))) for axis, choices in first.items()}]


def _merged(space: Space, lines: Mapping[int, AxisChoices], joint: Mapping[int, AxisChoice]) -> list[AxisChoices]:
    """Choices for all axes of the mesh; on axes of one rank, replicated."""
    choices = [(joint[axis],) if axis in joint else lines.get(axis, (REPLICATED,)) for axis in range(len(space.mesh))]
    return list(product(*choices))


def _axis_rules(space: Space, chosen: Preset, grid: tuple[int, ...]) -> dict[int, AxisRule]:
    """The rule of each axis of more than one rank that is not of the grid."""
    rules = {axis: chosen.data for axis in _wide(space) if axis not in grid}
    if chosen.tensor is not None:
        on = tensor_axis(space)
        rules = {axis: chosen.tensor if axis == on else rule for axis, rule in rules.items()}
    if chosen.z is not None:
        z = _z_axis(space, grid)
        rules = {axis: chosen.z if axis == z else rule for axis, rule in rules.items()}
    return rules


def _check_batch(context: Context, preset: Preset, rules: Mapping[int, AxisRule]) -> None:
    space = context.space
    split = [axis for axis, rule in rules.items() if rule in (data, sharded_data, sharded_matrices)]
    if split and context.batch < 2:
        axes = ", ".join(f"{space.axes[a]}={space.mesh[a]}" for a in split)
        raise ValueError(
            f"preset {preset.name!r} splits the batch by {math.prod(space.mesh[a] for a in split)} ({axes}), and the "
            f"batch is {context.batch}: give a batch of two or more, or a mesh without data axes"
        )


def _wide(space: Space) -> list[int]:
    return [axis for axis, ranks in enumerate(space.mesh) if ranks > 1]


def tensor_axis(space: Space) -> int:
    """The axis with a tensor-parallel name, or the last of more than one rank."""
    named = [axis for axis, name in enumerate(space.axes) if name in TENSOR_AXIS_NAMES]
    return named[0] if named else (_wide(space) or [0])[-1]


def _grid_axes(space: Space, name: str) -> tuple[int, ...]:
    """The one or two axes that split products. Raises ValueError if there is none, or too many."""
    wide = _wide(space)
    named = [axis for axis in wide if space.axes[axis] in GRID_AXIS_NAMES]
    if len(named) > 2:
        raise ValueError(
            f"preset {name!r} splits products on two axes, and {', '.join(space.axes[a] for a in named)} of the mesh "
            f"are named for that: rename all but two"
        )
    free = [axis for axis in wide if space.axes[axis] not in (*DATA_AXIS_NAMES, *Z_AXIS_NAMES)]
    if wide and not (named or free):
        raise ValueError(
            f"preset {name!r} splits products on one or two axes, and all of the mesh "
            f"({', '.join(space.axes[a] for a in wide)}) are named for data: call two of them "
            f"{', '.join(GRID_AXIS_NAMES[4:8])} or the like"
        )
    return tuple(named or free[-2:])


def _z_axis(space: Space, grid: tuple[int, ...]) -> int | None:
    """The axis called "z"; where no axis has any such name, the last one before the grid that is not for data."""
    named = [axis for axis, name in enumerate(space.axes) if name in Z_AXIS_NAMES]
    if named or any(space.axes[axis] in GRID_AXIS_NAMES for axis in grid):
        return named[0] if named else None
    free = [axis for axis in _wide(space) if axis not in grid and space.axes[axis] not in DATA_AXIS_NAMES]
    return free[-1] if free else None
