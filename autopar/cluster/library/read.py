"""Reads a cluster from a TOML file: a device and levels of links from the outermost in, each figure with its source.

`docs/clusters.md` explains the keys, which are the fields of `cluster.machine`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from autopar.cluster.links import ALGORITHMS, Algorithms
from autopar.cluster.machine import Cluster, Device, Groups, Level, Range
from autopar.files import reading, text_of, toml_of
from autopar.files.kinds import Name, Size
from autopar.files.typed import read

UNCITED = ("name", "source", "has_peak", "size", "topology", "ranks", "stride")
"""Keys that are no figures: nothing says where they are from."""


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """A cluster as its file has it."""

    name: Name
    devices: Size
    source: Name
    device: Annotated[Device, Meta(description="a table [device]")]
    level: Annotated[
        tuple[Level, ...], Meta(min_length=1, description="a table [[level]] for each, the outermost first")
    ]
    groups: tuple[Groups, ...] = ()
    algorithms: Algorithms = ALGORITHMS
    step_range: Range | None = None


def read_cluster(path: str | Path) -> Cluster:
    """The cluster that the TOML file at `path` describes.

    Raises ValueError, naming the file, the key and what belongs there, for a file that is missing or not TOML, a key
    that is missing or unknown, a figure that is invalid or without a source, and levels whose sizes do not multiply to
    `devices`.
    """
    with reading(f"cluster file {path}", "give the path of a TOML file"):
        text = text_of(path)
    return parse_cluster(text, str(path))


def parse_cluster(text: str, where: str) -> Cluster:
    """The cluster that TOML text describes; `where` names it in errors."""
    with reading(f"cluster file {where}", "correct it there"):
        data = toml_of(text)
        file = read(ClusterFile, data)
        _check_sources("device", data["device"])
        for name in ("level", "groups"):
            for number, table in enumerate(data.get(name, ())):
                _check_sources(f"{name}[{number}]", table)
        cluster = Cluster(
            name=file.name,
            device=_reached(file.device),
            levels=tuple(map(_widened, file.level)),
            source=file.source,
            algorithms=file.algorithms,
            groups=file.groups,
            step_range=file.step_range,
        )
        if cluster.devices != file.devices:
            sizes = " x ".join(str(level.size) for level in cluster.levels)
            raise ValueError(
                f"devices is {file.devices}, but the levels hold {sizes} = {cluster.devices}: write devices = "
                f"{cluster.devices}, or correct a level's size"
            )
        return cluster


def _check_sources(where: str, table: Mapping[str, Any]) -> None:
    """Raises ValueError for a figure of a table without a source, and for a source without its figure."""
    sources = table.get("source", {})
    for name in table:
        if name not in UNCITED and name not in sources:
            raise ValueError(f'{where}.{name} has no source: write {name} = "where it is from" in its table source')
    for name in sources:
        if name not in table:
            raise ValueError(f"{where}.source.{name} cites a key that is not here: remove it, or write the figure")


def _reached(device: Device) -> Device:
    """The device with the rate that it reaches, where it reaches one part of it."""
    part = device.memory_efficiency
    if isinstance(part, tuple):
        return device
    rate = device.memory_bytes_per_second * part
    return replace(device, memory_bytes_per_second=rate, memory_efficiency=((1.0, 1.0),))


def _widened(level: Level) -> Level:
    """The level with the rates that collectives reach, where all reach one part of them."""
    part, rates = level.efficiency, level.bytes_per_second
    if isinstance(part, Mapping) or isinstance(level.latency_seconds, Mapping):
        return level
    every = tuple(tuple(rate * part for rate in row) for row in rates) if isinstance(rates, tuple) else rates * part
    group = level.group_bytes_per_second * part
    return replace(level, bytes_per_second=every, group_bytes_per_second=group, efficiency=1.0)
