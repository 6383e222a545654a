"""autopar: a graph compiler that parallelizes PyTorch models over a device mesh."""

from autopar.api import compare, parallelize, plan
from autopar.cluster.library import CLUSTERS, read_cluster
from autopar.cluster.machine import Cluster, Device, Level
from autopar.ops.oracle import check_rule
from autopar.ops.registry import register_rule
from autopar.planning.plan import Plan
from autopar.report.comparison import Comparison
from autopar.report.simulation import Simulation, simulate

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
