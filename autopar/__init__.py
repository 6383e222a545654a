"""autopar: a graph compiler that parallelizes PyTorch models over a device mesh."""

from autopar.api import compare, parallelize, plan
from autopar.cluster.library import CLUSTERS, read_cluster, register_cluster
from autopar.cluster.machine import Cluster, Device, Level
from autopar.ops.oracle import check_rule
from autopar.ops.registry import register_rule
from autopar.passes import register_lowering
from autopar.passes.lower.lowering import Lowering
from autopar.planning.costs import CostMode, register_cost
from autopar.planning.plan import Plan
from autopar.planning.presets import Preset, register_preset
from autopar.report.comparison import Comparison
from autopar.report.simulation import Simulation, simulate
from autopar.runtime.clip import clip_grad_norm_
from autopar.solve import Solver, register_solver

__all__ = [
    "CLUSTERS",
    "Cluster",
    "Comparison",
    "CostMode",
    "Device",
    "Level",
    "Lowering",
    "Plan",
    "Preset",
    "Simulation",
    "Solver",
    "check_rule",
    "clip_grad_norm_",
    "compare",
    "parallelize",
    "plan",
    "read_cluster",
    "register_cluster",
    "register_cost",
    "register_lowering",
    "register_preset",
    "register_rule",
    "register_solver",
    "simulate",
]
