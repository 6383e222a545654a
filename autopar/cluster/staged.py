"""Clusters on which a pipeline runs: the first axis of a mesh lies in time, and there are stages in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from .links import Link
from .machine import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCluster(Cluster):
    """A cluster for meshes whose first axis are micro-batches, one after the other, on so many `stages`, the outermost
    axis of the mesh of devices."""

    stages: int

    @staticmethod
    def of(cluster: Cluster, stages: int) -> StagedCluster:
        return StagedCluster(**_fields(cluster), stages=stages)

    def links(self, mesh: tuple[int, ...], order: Sequence[int] | None = None) -> tuple[Link, ...]:
        """As of any cluster; micro-batches have none, and add up."""
        in_time = Link(mesh[0], (), in_time=True)
        return in_time, *Cluster.links(self, (self.stages, *mesh[1:]), order)[1:]

    def between_stages(self, mesh: tuple[int, ...]) -> Link:
        """What goes from a stage to another sees, with micro-batches and the other axes of a mesh given."""
        return Cluster.links(self, (self.stages, *mesh[1:]))[0]


def unstaged(cluster: Cluster) -> Cluster:
    """The cluster of the devices themselves."""
    return Cluster(**_fields(cluster)) if isinstance(cluster, StagedCluster) else cluster


def _fields(cluster: Cluster) -> dict[str, Any]:
    return {f.name: getattr(cluster, f.name) for f in fields(Cluster)}
