"""autopar: a graph compiler that parallelizes PyTorch models over a device mesh."""

from .api import Comparison, compare, parallelize, plan
from .cluster import CLUSTERS, Cluster, Device, Level
from .ops.oracle import check_rule
from .ops.registry import register_rule
from .plan import Plan

__all__ = [
    "CLUSTERS",
    "Cluster",
    "Comparison",
    "Device",
    "Level",
    "Plan",
    "check_rule",
    "compare",
    "parallelize",
    "plan",
    "register_rule",
]
