"""Writes a cluster as the text of a TOML file."""

import json
from collections.abc import Iterable, Mapping

from autopar.cluster.links import KINDS
from autopar.cluster.machine import Cluster, Device, Level


def cluster_toml(cluster: Cluster, source: str, comment: str = "") -> str:
    """The text that `read_cluster` reads back as the same cluster. `source` is the source of every figure, `comment`
    goes on top."""
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [
        f"name = {_value(cluster.name)}",
        f"devices = {cluster.devices}",
        f"source = {_value(cluster.source)}",
        f"algorithms = {_value(_names(cluster))}",
    ]
    if cluster.step_range is not None:
        lines.append(f"step_range = {_value(list(cluster.step_range))}")
    lines += ["", *_table("[device]", _device(cluster.device), source)]
    for level in cluster.levels:
        lines += ["", *_table("[[level]]", _level(level), source)]
    for groups in cluster.groups:
        curves = {kind: [list(point) for point in curve] for kind, curve in groups.seconds}
        figures = {"ranks": groups.ranks, "stride": groups.stride, "seconds": curves}
        lines += ["", *_table("[[groups]]", figures, source)]
    return "\n".join(lines) + "\n"


def _names(cluster: Cluster) -> object:
    if all(isinstance(entry, str) for entry in cluster.algorithms):
        return list(cluster.algorithms)
    return {entry[0]: list(entry[1]) for entry in cluster.algorithms}


def _device(device: Device) -> dict[str, object]:
    figures: dict[str, object] = {
        "name": device.name,
        "flops_per_second": dict(device.flops_per_second),
        "efficiency": [list(point) for point in device.efficiency],
        "memory_bytes_per_second": device.memory_bytes_per_second,
        "seconds_per_op": device.seconds_per_op,
    }
    if not device.has_peak:
        figures["has_peak"] = False
    if device.memory_bytes is not None:
        figures["memory_bytes"] = device.memory_bytes
    if device.reserved_bytes is not None:
        figures["reserved_bytes"] = device.reserved_bytes
    if device.memory_efficiency != ((1.0, 1.0),):
        figures["memory_efficiency"] = [list(point) for point in device.memory_efficiency]
    if device.ratios:
        figures["operator_ratios"] = dict(device.ratios)
    for name in ("memory_bytes_per_link_byte", "fused_part", "spread"):
        if value := getattr(device, name):
            figures[name] = value
    return figures


def _level(level: Level) -> dict[str, object]:
    links = level.bytes_per_second
    figures: dict[str, object] = {
        "name": level.name,
        "size": level.size,
        "topology": level.topology,
        "bytes_per_second": [list(row) for row in links] if isinstance(links, tuple) else links,
        "group_bytes_per_second": level.group_bytes_per_second,
        "devices_per_link": level.devices_per_link,
        "latency_seconds": level.latency_seconds,
        "launch_seconds": level.launch_seconds,
        "overlap": level.overlap,
    }
    if level.compute_share:
        figures["compute_share"] = level.compute_share
    if level.measured:
        by_kind = {measured.kind: measured for measured in level.measured}
        figures["efficiency"] = {kind: by_kind[kind].efficiency for kind in KINDS}
        figures["latency_seconds"] = {kind: by_kind[kind].latency_seconds for kind in KINDS}
    return figures


_NO_FIGURES = ("name", "has_peak", "size", "topology", "ranks", "stride")


def _table(header: str, figures: Mapping[str, object], source: str) -> Iterable[str]:
    yield header
    for key, value in figures.items():
        yield f"{key} = {_value(value)}"
    yield ""
    yield f"[{header.strip('[]')}.source]"
    for key in figures:
        if key not in _NO_FIGURES:
            yield f"{key} = {_value(source)}"


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() else json.dumps(key)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value)
