"""Pins: placements of parameters and inputs that a person fixes, and modules kept off a mesh axis.

Constraints are names with placements on mesh axes: `{"lm_head.weight": {"tp": "S(0)"}, "input_ids": {"dp": "S(0)"},
"model.layers.*.self_attn": {"tp": "R"}}`. A name is that of a parameter, an input or a module, with `*` and `?` as in a
shell; a module's name stands for all that lies in it. `S(d)` splits dim d of a parameter at rest, or of an input, along
the axis, and `S(d%p)` in periods of p elements alone. `R` replicates on the axis, and no operator of a module so named
is split along it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autopar.extensions import nearest
from autopar.passes.space.choices import REPLICATED, AxisChoice
from autopar.passes.space.sites import Region, Site
from autopar.passes.space.space import Space

from .texts import around

Constraints = Mapping[str, Mapping[str, str]]
"""Pattern -> mesh axis -> "R", "S(d)" or "S(d%p)"."""

Pins = Mapping[str, Mapping[int, tuple[AxisChoice, ...]]]
"""Name of a site -> mesh axis -> the choices that constraints leave there."""


def pins(space: Space, constraints: Constraints) -> Pins:
    """What constraints leave to each site that they name.

    Raises ValueError for an invalid placement, an axis that the mesh lacks, a name that nothing has, or that only some
    copies of a repeated layer have, a split that a site does not offer, and for two constraints that contradict.
    """
    named = [
        (site, list(names_of(space, region, site))) for region in space.regions() for site in region.sites.values()
    ]
    pinned: dict[str, dict[int, tuple[AxisChoice, ...]]] = {}
    said: dict[tuple[str, int], str] = {}
    for pattern, placements in constraints.items():
        for axis_name, text in placements.items():
            constraint = _parsed(space, pattern, axis_name, text)
            sites = [site for site, copies in named if _applies(constraint, site, copies)]
            if not sites:
                raise ValueError(f"constraint {constraint} names nothing{_similar(constraint, named)}")
            axis = space.axes.index(axis_name)
            for site in sites:
                left = _left(space, constraint, site, axis)
                before = pinned.setdefault(site.name, {}).get(axis)
                both = left if before is None else tuple(c for c in left if c in before)
                if not both:
                    raise ValueError(f"constraints {said[site.name, axis]} and {constraint} contradict: {_of(site)}")
                pinned[site.name][axis] = both
                said[site.name, axis] = str(constraint)
    return pinned


@dataclass(frozen=True, slots=True)
class _Constraint:
    pattern: str
    axis: str
    text: str

    @property
    def dim(self) -> int | None:
        """None: replicated."""
        return None if self.text == "R" else int(self.text[2:-1].partition("%")[0])

    @property
    def period(self) -> int | None:
        """None: any."""
        return int(self.text[2:-1].partition("%")[2]) if "%" in self.text else None

    def __str__(self) -> str:
        return f"{self.pattern!r}: {self.axis}={self.text}"


def _parsed(space: Space, pattern: str, axis: str, text: str | int) -> _Constraint:
    if axis not in space.axes:
        raise ValueError(
            f"constraint {pattern!r} is about mesh axis {axis!r}{nearest(axis, space.axes)}, and the mesh has "
            f"{', '.join(space.axes)}"
        )
    if not isinstance(text, str) or not re.fullmatch(r"R|S\(\d+(%\d+)?\)", text):
        raise ValueError(
            f"constraint {pattern!r}: {axis}={text!r} is no placement: give R (replicated), S(d) (dim d split) or "
            f"S(d%p) (in periods of p); a number is a stage, on an axis of stages"
        )
    return _Constraint(pattern, axis, text)


def names_of(space: Space, region: Region, site: Site) -> Iterator[str]:
    """The names that people know a site by: one for each copy of a repeated layer."""
    if site.kind in ("op", "input"):
        repeat = next((r for r, body in zip(space.repeats, space.bodies, strict=True) if body is region), None)
        if repeat is None or site.node is None:
            yield site.module.removeprefix("kwargs.")
            return
        position = repeat.copies[0].index(space.graph.producer[site.name])
        yield from (space.graph.nodes[copy[position]].module for copy in repeat.copies)
    elif site.kind == "parameter":
        name_of = {value: name for name, value in space.graph.parameters.items()}
        copies = next((own for r in space.repeats for own in zip(*r.own, strict=True) if own[0] == site.name), None)
        yield from (name_of[value] for value in copies or (site.name,))


def _applies(constraint: _Constraint, site: Site, names: list[str]) -> bool:
    if constraint.dim is not None and site.kind == "op":
        return False
    hits = [matches(name, constraint.pattern) for name in names]
    if any(hits) and not all(hits):
        some = [name for name, hit in zip(names, hits, strict=True) if hit]
        raise ValueError(
            f"constraint {constraint} names {len(some)} of {len(hits)} copies of a repeated layer ({some[0]}), which "
            f"are planned together: name all of them, as with * for the number"
        )
    return any(hits)


def matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(each, pattern) for each in around(name))


def _left(space: Space, constraint: _Constraint, site: Site, axis: int) -> tuple[AxisChoice, ...]:
    if constraint.dim is None or space.mesh[axis] == 1:
        return (REPLICATED,)
    splits = [c for c in site.choices[space.mesh[axis]] if c.splits]
    left = tuple(c for c in splits if c.factor == constraint.dim and constraint.period in (None, c.period))
    if not left:
        shape = site.meta.shape if site.meta else ()
        may = {f"S({c.factor})" if constraint.period is None else f"S({c.factor}%{c.period})": None for c in splits}
        raise ValueError(
            f"constraint {constraint}: {_of(site)} of shape {tuple(shape)} can be split along "
            f"{', '.join(sorted(may)) or 'no dim'} on {space.mesh[axis]} ranks"
        )
    return left


def _of(site: Site) -> str:
    return f"{site.kind} {site.module or site.name}"


def _similar(constraint: _Constraint, named: list[tuple[Site, list[str]]]) -> str:
    """The name that was meant, or what names there are; in a pattern, numbers of layers are `*`."""
    kinds = ("parameter", "input") if constraint.dim is not None else ("parameter", "input", "op")
    names = sorted({name for site, copies in named if site.kind in kinds for name in copies if name})
    if "*" in constraint.pattern:
        names = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    modules = dict.fromkeys(each for name in names for each in around(name))
    what = "parameters and inputs" if constraint.dim is not None else "parameters, inputs and modules"
    if any(matches(name, constraint.pattern) for site, copies in named if site.kind == "op" for name in copies):
        return ": no parameter and no input lies in it, and S(d) splits those alone; R keeps a module off an axis"
    return nearest(constraint.pattern, modules) or f": {what} are called like {', '.join(names[:3])}"
