"""Writes a cluster as the text of a TOML file."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields

from autopar.cluster.machine import Cluster, Device, Groups, Level
from autopar.files.kinds import NOT_IN_FILES

from .read import UNCITED

WRITTEN = {Device: ("efficiency",), Level: ("topology", "devices_per_link", "launch_seconds", "overlap"), Groups: ()}
"""Fields that are written where they are as by default, too."""


def cluster_toml(cluster: Cluster, source: str, comment: str = "") -> str:
    """The text that `read_cluster` reads back as the same cluster. `source` is the source of every figure, `comment`
    goes on top."""
    lines = [f"# {line}" for line in comment.splitlines()]
    for name in ("name", "devices", "source", "algorithms", "step_range"):
        if (value := getattr(cluster, name)) is not None:
            lines.append(f"{name} = {_value(value)}")
    lines += _table("[device]", cluster.device, source)
    for level in cluster.levels:
        lines += _table("[[level]]", level, source)
    for groups in cluster.groups:
        lines += _table("[[groups]]", groups, source)
    return "\n".join(lines) + "\n"


def _table(header: str, table: Device | Level | Groups, source: str) -> Iterator[str]:
    always = WRITTEN[type(table)]
    figures = {
        f.name: value
        for f in fields(table)
        if f.name != "source" and f.metadata != NOT_IN_FILES
        if (value := getattr(table, f.name)) not in (f.default, {}) or f.name in always
    }
    cited = {key: source for key in figures if key not in UNCITED}
    for head, lines in ((header, figures), (f"[{header.strip('[]')}.source]", cited)):
        yield from ("", head, *(f"{key} = {_value(value)}" for key, value in lines.items()))


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value)


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() else json.dumps(key)
