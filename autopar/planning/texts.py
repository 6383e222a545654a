"""Numbers, lists and tables as people read them."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def listed(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def starred(name: str) -> str:
    """A name with `*` for the numbers of layers in it: "model.layers.*.mlp"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def together(names: Sequence[str]) -> str:
    """One name for several that differ in numbers: with `*` for these, or the first and the last where numbers come
    first, as in containers without names ("0.0 to 3.2")."""
    pattern = starred(names[0])
    if len(names) == 1:
        return names[0]
    return f"{names[0]} to {names[-1]}" if pattern.startswith("*") else pattern


def called(names: Sequence[str]) -> str:
    """What equal modules are called; one that differs has the name of those that it is one of."""
    return together(names) if starred(names[0]).startswith("*") else starred(names[0])


def module_of(name: str) -> str:
    """The module that has what is called so, such as a parameter; "" for the model's own."""
    return name.rpartition(".")[0]


def around(name: str) -> Iterator[str]:
    """A name and those of the modules in which it lies, the innermost first; the last one is ""."""
    yield name
    while name:
        name = module_of(name)
        yield name


def layer_of(module: str) -> str:
    """The innermost numbered module in which one lies; "" if it lies in none."""
    return next((name for name in around(module) if name.rpartition(".")[2].isdigit()), "")


def pattern(names: Sequence[str]) -> str:
    """One name for several of as many parts, with `*` for the parts in which they differ; else the first of them."""
    split = [name.split(".") for name in names]
    if len(set(map(len, split))) > 1:
        return names[0]
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*split, strict=True))


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in their order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def by_reason(refused: Iterable[tuple[str, str, str]]) -> list[tuple[list[str], str]]:
    """Names and why there is no plan of each, those of one reason together: of a solver or preset, its name here, and
    its reason."""
    alike: dict[str, dict[str, str]] = {}
    for solver, name, reason in refused:
        alike.setdefault(reason.replace(f"preset {solver!r}", "the preset"), {})[name] = reason
    return [(list(own), shared if len(own) > 1 else next(iter(own.values()))) for shared, own in alike.items()]


def pairs(named: Mapping[str, object]) -> str:
    """Names, each with what is said of it: "torch 2.8.0, transformers 4.57.1"."""
    return ", ".join(f"{name} {text}" for name, text in named.items())


def mesh_words(mesh: Mapping[str, int], between: str = ",") -> str:
    """As `--mesh` takes it, or with something else `between` the axes."""
    return between.join(f"{axis}={size}" for axis, size in mesh.items())


def short_seconds(value: float) -> str:
    """With three digits, for pages that are read at a glance."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value * 1e6)} us"


def left_text(seconds: float) -> str:
    """How long the rest of some work takes, roughly."""
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {max(1.0, seconds):.0f} s left"


def signed(difference: float, text: Callable[[float], str]) -> str:
    """A difference with its sign; "same" for none."""
    if abs(difference) < 1e-9:
        return "same"
    return ("+" if difference > 0 else "-") + text(abs(difference))


def digits(value: float) -> str:
    """Three digits, or all of those before the point."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _binary(value: float) -> tuple[str, int]:
    return next(
        ((unit, 2**power) for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if value >= 2**power), ("B", 1)
    )


def bytes_text(value: float, *, up: bool = False) -> str:
    """With two digits after the point. `up` rounds up: the text then works as a limit."""
    unit, size = _binary(value)
    places = 100 if size > 1 else 1
    shown = math.ceil(value / size * places) / places if up else value / size
    return f"{shown:.2f} {unit}" if size > 1 else f"{shown:.0f} B"


def short_bytes(value: float) -> str:
    """With three digits, for pages that are read at a glance."""
    unit, size = _binary(value)
    return f"{digits(value / size)} {unit}" if size > 1 else f"{value:.0f} B"


def _rate(value: float) -> str:
    return f"{short_bytes(value)}/s"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _part(value: float) -> str:
    return f"{value:.1%}"


UNITS: Mapping[str, Callable[[float], str]] = {
    "seconds": short_seconds,
    "bytes": short_bytes,
    "bytes_per_second": _rate,
    "per_second": digits,
    "count": _count,
    "devices": _count,
    "part": _part,
    "MFU": _part,
}
"""The units that names of figures end in, and how people read them."""
