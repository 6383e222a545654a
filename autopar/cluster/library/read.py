"""Reads a cluster from a TOML file: a device and levels of links from the outermost in, each figure with its source.

`docs/clusters.md` explains the keys; `KEYS` lists them, and the reader checks them.
"""

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from autopar.cluster.links import ALGORITHMS, KINDS, Measured, Names
from autopar.cluster.machine import TOPOLOGIES, Cluster, Device, Groups, Level
from autopar.files import cut, is_number, text_of

BASIC = ("ring", "pairwise", "message")
"""Algorithms that work on any links."""

BASIC_OF: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(KINDS, frozenset({"ring"})),
    "reduce_scatter": frozenset({"ring", "pairwise"}),
    "all_to_all": frozenset({"pairwise"}),
    "exchange": frozenset({"pairwise"}),
    "shift": frozenset({"message"}),
}
"""Kind -> those that do it."""


@dataclass(frozen=True, slots=True)
class Key:
    """`kind` is text, flag, count, rate (above 0), seconds or amount (0 or more), part (above 0, at most 1), share
    (from 0 to 1), links (a rate or a matrix of rates), rates (a table of them), curve, topology, algorithms, parts or
    latencies (one, or a table of them by kind of collective), times (curves of seconds by kind). `write` is an
    example."""

    kind: str
    write: str
    required: bool = True
    figure: bool = True
    """Whether the `source` table says where it is from."""


KEYS: Mapping[str, Mapping[str, Key]] = {
    "cluster": {
        "name": Key("text", 'name = "our-cluster"', figure=False),
        "devices": Key("count", "devices = 16", figure=False),
        "source": Key("text", 'source = "who says what this cluster is"', figure=False),
        "algorithms": Key("algorithms", 'algorithms = ["ring", "pairwise", "message"]', required=False, figure=False),
        "step_range": Key("range", "step_range = [0.9, 1.15]", required=False, figure=False),
    },
    "device": {
        "name": Key("text", 'name = "A100 SXM 80GB"', figure=False),
        "flops_per_second": Key("rates", "flops_per_second = { bfloat16 = 312e12, float32 = 19.5e12 }"),
        "has_peak": Key("flag", "has_peak = false", required=False, figure=False),
        "efficiency": Key("curve", "efficiency = [[1e9, 0.5], [1e12, 0.8]]", required=False),
        "memory_bytes": Key("rate", "memory_bytes = 80e9", required=False),
        "reserved_bytes": Key("amount", "reserved_bytes = 6e9", required=False),
        "memory_bytes_per_second": Key("rate", "memory_bytes_per_second = 2.0e12"),
        "memory_efficiency": Key("part or by size", "memory_efficiency = 0.8", required=False),
        "seconds_per_op": Key("seconds", "seconds_per_op = 4e-6"),
        "operator_ratios": Key("amounts", 'operator_ratios = { "aten.silu.default" = 2.1 }', required=False),
        "memory_bytes_per_link_byte": Key("amount", "memory_bytes_per_link_byte = 2", required=False),
        "fused_part": Key("share", "fused_part = 0.5", required=False),
        "spread": Key("share", "spread = 0.02", required=False),
    },
    "level": {
        "name": Key("text", 'name = "network"', figure=False),
        "size": Key("count", "size = 8", figure=False),
        "topology": Key("topology", 'topology = "switch"', figure=False),
        "bytes_per_second": Key("links", "bytes_per_second = 25e9"),
        "group_bytes_per_second": Key("rate", "group_bytes_per_second = 25e9"),
        "efficiency": Key("parts", "efficiency = 0.9", required=False),
        "devices_per_link": Key("count", "devices_per_link = 1", required=False),
        "latency_seconds": Key("latencies", "latency_seconds = 5e-6"),
        "launch_seconds": Key("seconds", "launch_seconds = 10e-6", required=False),
        "overlap": Key("share", "overlap = 0.5", required=False),
        "compute_share": Key("share", "compute_share = 0.2", required=False),
    },
    "groups": {
        "ranks": Key("count", "ranks = 2", figure=False),
        "stride": Key("count", "stride = 1", figure=False),
        "seconds": Key("times", "seconds = { all_reduce = [[1024, 1e-3], [1048576, 2e-2]] }"),
    },
}


def read_cluster(path: str | Path) -> Cluster:
    """The cluster that the TOML file at `path` describes.

    Raises ValueError, naming the file, the key and what to write, for a file that is missing or not TOML, a key that
    is missing or unknown, a figure that is invalid or without a source, and levels whose sizes do not multiply to
    `devices`.
    """
    text = text_of(path, f"cluster file {path}", "give the path of a TOML file")
    return parse_cluster(text, str(path))


def parse_cluster(text: str, where: str) -> Cluster:
    """The cluster that TOML text describes; `where` names it in errors."""
    try:
        data = tomllib.loads(text)
    except ValueError as error:  # TOML's own, and Python's for integers of thousands of digits
        raise ValueError(f"cluster file {where}: not TOML: {error}; correct it there") from error
    except RecursionError as error:
        raise ValueError(f"cluster file {where}: its TOML is nested too deep; write only keys of a cluster") from error
    device, levels, groups = data.pop("device", None), data.pop("level", None), data.pop("groups", [])
    if not isinstance(device, dict):
        raise ValueError(f"cluster file {where}: device is missing: write a table [device]")
    if not isinstance(levels, list) or not levels or not all(isinstance(level, dict) for level in levels):
        raise ValueError(
            f"cluster file {where}: level is missing: write a table [[level]] for each, the outermost first"
        )
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError(
            f"cluster file {where}: groups is {cut(repr(groups))}: write a table [[groups]] for each kind of groups"
        )
    top = _Table(where, "", KEYS["cluster"], data)
    parsed_levels = tuple(
        _level(_Table(where, f"level {number}, ", KEYS["level"], level)) for number, level in enumerate(levels)
    )
    cluster = Cluster(
        name=top["name"],
        device=_device(_Table(where, "device, ", KEYS["device"], device)),
        levels=parsed_levels,
        source=top["source"],
        step_range=None if (known := top.get("step_range", None)) is None else (float(known[0]), float(known[1])),
        algorithms=_names(top.get("algorithms", ALGORITHMS)),
        groups=tuple(
            _groups(_Table(where, f"groups {number}, ", KEYS["groups"], group)) for number, group in enumerate(groups)
        ),
    )
    if cluster.devices != top["devices"]:
        sizes = " x ".join(str(level.size) for level in parsed_levels)
        raise ValueError(
            f"cluster file {where}: devices = {top['devices']}, but the levels hold {sizes} = {cluster.devices}: "
            f"write devices = {cluster.devices}, or correct a level's size"
        )
    for number, measured in enumerate(cluster.groups):
        ranks, stride = measured.ranks, measured.stride
        if cluster.devices % (ranks * stride):
            raise ValueError(
                f"cluster file {where}: groups {number}, ranks = {ranks} and stride = {stride} do not divide "
                f"{cluster.devices} devices: correct one of them"
            )
    return cluster


class _Table:
    """One table of a file, checked."""

    def __init__(self, where: str, inside: str, keys: Mapping[str, Key], data: dict[str, Any]) -> None:
        self.where, self.inside, self.keys = where, inside, keys
        self.data = dict(data)
        figures = any(key.figure for key in keys.values())
        sources = self.data.pop("source", {}) if figures else {}
        if not isinstance(sources, dict):
            raise self.error(
                "source", f"= {cut(repr(sources))} is not a table: write [source] with a text for each figure"
            )
        for name in self.data:
            if name not in keys:
                raise self.error(cut(name), f"is unknown; the keys here are {', '.join(keys)}")
        for name, key in keys.items():
            if name in self.data:
                self._check(name, key, self.data[name])
                if key.figure and not str(sources.get(name, "")).strip():
                    raise self.error(name, f'has no source: write {name} = "where it is from" in the table source here')
            elif key.required:
                raise self.error(name, f"is missing: write {key.write}")
        for name in sources:
            if name not in self.data:
                raise self.error(f"source.{cut(name)}", "cites a key that is not here; remove it, or write the figure")

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def get(self, name: str, otherwise: Any) -> Any:
        return self.data.get(name, otherwise)

    def error(self, name: str, what: str) -> ValueError:
        return ValueError(f"cluster file {self.where}: {self.inside}{name} {what}")

    def _check(self, name: str, key: Key, value: Any) -> None:
        if not _VALID[key.kind](value):
            raise self.error(name, f"= {cut(repr(value))} is not {_MEANING[key.kind]}: write for example {key.write}")


def _is_number(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _is_rate(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_rate, value)) and value[0] <= value[1]


def _is_matrix(value: Any) -> bool:
    """Square, symmetric, no links to oneself, no negative ones, and every child linked."""
    if not isinstance(value, list) or not all(isinstance(row, list) and len(row) == len(value) for row in value):
        return False
    every = [(a, b) for a in range(len(value)) for b in range(len(value))]
    return (
        all(_is_number(value[a][b]) and value[a][b] >= 0 for a, b in every)
        and all(value[a][b] == value[b][a] and (a != b or value[a][b] == 0) for a, b in every)
        and all(any(row) for row in value)
    )


def _is_curve(value: Any) -> bool:
    """Rising sizes, parts that do not fall, and nowhere less time for more work."""
    return _is_by_size(value) and all(a[1] <= b[1] for a, b in pairwise(value))


def _is_by_size(value: Any) -> bool:
    """Rising sizes with parts, and nowhere less time for more work."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(p, list) and len(p) == 2 and all(map(_is_rate, p)) and p[1] <= 1 for p in value)
        and all(a[0] < b[0] and b[1] / a[1] <= b[0] / a[0] for a, b in pairwise(value))
    )


def _is_times(value: Any) -> bool:
    """Rising sizes, each with seconds, for some kinds of collectives."""
    return (
        isinstance(value, dict)
        and bool(value)
        and set(value) <= set(KINDS)
        and all(isinstance(curve, list) and bool(curve) for curve in value.values())
        and all(isinstance(p, list) and len(p) == 2 and all(map(_is_rate, p)) for c in value.values() for p in c)
        and all(a[0] < b[0] for curve in value.values() for a, b in pairwise(curve))
    )


def _is_names(value: Any) -> bool:
    return _is_texts(value) and set(BASIC) <= set(value) <= set(ALGORITHMS)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _by_kind(value: Any, valid: Callable[[str, Any], bool]) -> bool:
    """A table with something valid for each kind of collective."""
    return isinstance(value, dict) and set(value) == set(KINDS) and all(valid(kind, v) for kind, v in value.items())


def _does(kind: str, names: Any) -> bool:
    """Whether one of the algorithms does that kind on any links."""
    return _is_texts(names) and set(names) <= set(ALGORITHMS) and not BASIC_OF[kind].isdisjoint(names)


_VALID: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str) and bool(value.strip()),
    "flag": lambda value: isinstance(value, bool),
    "count": lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
    "rate": _is_rate,
    "seconds": lambda value: _is_number(value) and value >= 0,
    "amount": lambda value: _is_number(value) and value >= 0,
    "part": lambda value: _is_rate(value) and value <= 1,
    "share": lambda value: _is_number(value) and 0 <= value <= 1,
    "links": lambda value: _is_rate(value) or _is_matrix(value),
    "rates": lambda value: isinstance(value, dict) and bool(value) and all(map(_is_rate, value.values())),
    "curve": _is_curve,
    "part or by size": lambda value: _VALID["part"](value) or _is_by_size(value),
    "range": _is_range,
    "amounts": lambda value: isinstance(value, dict) and all(map(_is_rate, value.values())),
    "topology": lambda value: value in TOPOLOGIES,
    "algorithms": lambda value: _is_names(value) or _by_kind(value, _does),
    "parts": lambda value: _VALID["part"](value) or _by_kind(value, lambda _, part: _VALID["part"](part)),
    "times": _is_times,
    "latencies": lambda value: _VALID["seconds"](value) or _by_kind(value, lambda _, time: _VALID["seconds"](time)),
}

_MEANING = {
    "text": "a text",
    "flag": "true or false",
    "count": "a whole number above 0",
    "rate": "a number above 0",
    "seconds": "a number of seconds, 0 or more",
    "amount": "a number, 0 or more",
    "part": "a part above 0 and at most 1",
    "share": "a part from 0 to 1",
    "links": "a number above 0, or a symmetric matrix of them with 0 where there is no link",
    "rates": "a table of numbers above 0 by dtype",
    "curve": "a list of [flops, part of the peak], rising, with no less time for more flops",
    "part or by size": "a part above 0 and at most 1, or a list of [bytes, part], rising bytes with no less time for "
    "more",
    "range": "a list of two numbers above 0, the smaller first",
    "amounts": "a table of numbers above 0 by operator",
    "topology": f"one of {', '.join(TOPOLOGIES)} (a torus is one ring level for each of its dims)",
    "algorithms": f"a list of {', '.join(ALGORITHMS)}, with at least {', '.join(BASIC)}, or a table of lists by kind "
    f"({', '.join(KINDS)}), with one of {', '.join(BASIC)} that does the kind in each",
    "parts": f"a part above 0 and at most 1, or a table of them by kind ({', '.join(KINDS)})",
    "times": f"a table by kind ({', '.join(KINDS)}) of lists of [bytes, seconds], above 0, with rising bytes",
    "latencies": f"a number of seconds, 0 or more, or a table of them by kind ({', '.join(KINDS)})",
}


def _device(table: _Table) -> Device:
    reached = table.get("memory_efficiency", 1.0)
    curve = reached if isinstance(reached, list) else [[1.0, 1.0]]
    memory, reserved = table.get("memory_bytes", None), table.get("reserved_bytes", None)
    if reserved is not None and memory is None:
        raise table.error("reserved_bytes", "is of a memory_bytes that is missing: write memory_bytes, or remove it")
    if reserved is not None and reserved >= memory:
        raise table.error("reserved_bytes", f"= {reserved} leaves nothing of memory_bytes = {memory}: write less")
    return Device(
        name=table["name"],
        flops_per_second={dtype: float(rate) for dtype, rate in table["flops_per_second"].items()},
        memory_bytes=None if memory is None else float(memory),
        reserved_bytes=None if reserved is None else float(reserved),
        memory_bytes_per_second=table["memory_bytes_per_second"] * (1.0 if isinstance(reached, list) else reached),
        seconds_per_op=float(table["seconds_per_op"]),
        has_peak=table.get("has_peak", True),
        efficiency=tuple((float(size), float(part)) for size, part in table.get("efficiency", [[1.0, 1.0]])),
        memory_efficiency=tuple((float(size), float(part)) for size, part in curve),
        ratios={op: float(ratio) for op, ratio in table.get("operator_ratios", {}).items()},
        memory_bytes_per_link_byte=float(table.get("memory_bytes_per_link_byte", 0.0)),
        fused_part=float(table.get("fused_part", 0.0)),
        spread=float(table.get("spread", 0.0)),
    )


def _names(value: Any) -> Names:
    if isinstance(value, Mapping):
        return tuple((kind, tuple(names)) for kind, names in value.items())
    return tuple(value)


def _level(table: _Table) -> Level:
    given, latency = table.get("efficiency", 1.0), table["latency_seconds"]
    by_kind = isinstance(given, dict) or isinstance(latency, dict)
    part = 1.0 if by_kind else given
    links = table["bytes_per_second"]
    if isinstance(links, list):
        if table["topology"] != "full":
            raise table.error("bytes_per_second", 'is a matrix: write topology = "full", or one number for all links')
        if len(links) != table["size"]:
            raise table.error("bytes_per_second", f"has {len(links)} rows: write {table['size']}, one for each child")
        rates: float | tuple[tuple[float, ...], ...] = tuple(tuple(rate * part for rate in row) for row in links)
    else:
        rates = links * part
    return Level(
        name=table["name"],
        size=table["size"],
        topology=table["topology"],
        bytes_per_second=rates,
        group_bytes_per_second=table["group_bytes_per_second"] * part,
        latency_seconds=float(max(latency.values()) if isinstance(latency, dict) else latency),
        launch_seconds=float(table.get("launch_seconds", 0.0)),
        devices_per_link=table.get("devices_per_link", 1),
        overlap=float(table.get("overlap", 0.0)),
        compute_share=float(table.get("compute_share", 0.0)),
        measured=tuple(
            Measured(
                kind=kind,
                efficiency=float(given[kind] if isinstance(given, dict) else given),
                latency_seconds=float(latency[kind] if isinstance(latency, dict) else latency),
            )
            for kind in (KINDS if by_kind else ())
        ),
    )


def _groups(table: _Table) -> Groups:
    return Groups(
        ranks=table["ranks"],
        stride=table["stride"],
        seconds=tuple(
            (kind, tuple((int(size), float(seconds)) for size, seconds in curve))
            for kind, curve in table["seconds"].items()
        ),
    )
