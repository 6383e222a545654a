"""autopar: a graph compiler that parallelizes PyTorch models over a device mesh."""

from .api import Comparison, compare, parallelize, plan
from .cluster import Cluster, Device, Level
from .clusters import CLUSTERS, read_cluster
from .ops.oracle import check_rule
from .ops.registry import register_rule
from .plan import Plan
from .simulation import Simulation, simulate

__all__ = [
    "CLUSTERS",
    "Cluster",
    "Comparison",
    "Device",
    "Level",
    "Plan",
    "Simulation",
    "check_rule",
    "compare",
    "parallelize",
    "plan",
    "read_cluster",
    "register_rule",
    "simulate",
]
