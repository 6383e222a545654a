"""autopar: a graph compiler that parallelizes PyTorch models over a device mesh."""

from .api import Comparison, compare, parallelize, plan
from .cluster import CLUSTERS, Cluster, Device, Level
from .plan import Plan

__all__ = ["CLUSTERS", "Cluster", "Comparison", "Device", "Level", "Plan", "compare", "parallelize", "plan"]
