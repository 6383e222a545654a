"""The library of clusters: those of the files in this folder, and registered ones."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from autopar.cluster.machine import Cluster
from autopar.extensions import Table, nearest

from .read import parse_cluster, read_cluster


def _library() -> Iterator[Cluster]:
    for entry in sorted(files(__name__).iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            yield parse_cluster(entry.read_text(encoding="utf-8"), entry.name)


CLUSTERS = Table("cluster", Cluster, _library())


def register_cluster(cluster: Cluster | str | Path, *, replace: bool = False) -> None:
    """Adds a cluster, or the one that a TOML file describes, so that `cluster=` can name it. Raises ValueError for a
    bad file, an object that is no cluster, and a name that reads as a file's or is taken, unless it is to `replace`
    that one."""
    row = read_cluster(cluster) if isinstance(cluster, (str, Path)) else cluster
    if isinstance(row, Cluster) and str(row.name).endswith(".toml"):
        raise ValueError(f"cluster {row.name!r} would be read as the path of a file: take another name")
    CLUSTERS.add(row, replace=replace)


def named_cluster(cluster: str | Path | Cluster | None, *, device_type: str = "cpu") -> Cluster:
    """The cluster itself, the one of that name, or the one that a TOML file describes; None gives a default for the
    device type.

    Raises ValueError for a bad file, and for a name that is neither in the library nor the path of a TOML file.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        cluster = "local" if device_type == "cpu" else "dgx-h100"
    if not isinstance(cluster, (str, Path)):
        raise ValueError(
            f"cluster is {cluster!r} ({type(cluster).__name__}): give a name ({', '.join(sorted(CLUSTERS))}), the path "
            f"of a TOML file, a Cluster, or None"
        )
    if isinstance(cluster, Path) or cluster.endswith(".toml"):
        return read_cluster(cluster)
    if cluster not in CLUSTERS:
        names, word = ", ".join(sorted(CLUSTERS)), cluster.lower()
        like = [repr(n) for n, row in CLUSTERS.items() if word and word in f"{n} {row.device.name}".lower()]
        close = f" (did you mean {' or '.join(like)}?)" if like else nearest(cluster, CLUSTERS)
        raise ValueError(
            f"unknown cluster {cluster!r}{close}; known: {names}, or give the path of a TOML file, or a Cluster"
        )
    return CLUSTERS[cluster]


__all__ = ["CLUSTERS", "named_cluster", "parse_cluster", "read_cluster", "register_cluster"]
