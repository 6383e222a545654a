"""autopar: a graph compiler that parallelizes PyTorch models over a device mesh."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import compare, parallelize, plan, read_plan
    from autopar.cluster.library import CLUSTERS, read_cluster, register_cluster
    from autopar.cluster.machine import Cluster, Device, Level
    from autopar.ir.precision import Precision
    from autopar.ops.oracle import check_rule
    from autopar.ops.registry import register_rule
    from autopar.passes.flow import register_lowering
    from autopar.passes.lower.lowering import Lowering
    from autopar.planning.costs import CostMode, register_cost
    from autopar.planning.plan import Plan
    from autopar.planning.presets import Preset, register_preset
    from autopar.report.comparison import Comparison
    from autopar.report.difference import Difference, difference
    from autopar.report.fit import Fit, fit
    from autopar.report.html import save_report
    from autopar.report.simulation import Simulation, simulate
    from autopar.runtime.attempts import init_process_group
    from autopar.runtime.checkpoints import load, save
    from autopar.runtime.clip import clip_grad_norm_
    from autopar.runtime.fx import graph_module
    from autopar.runtime.host_states import states_on_host
    from autopar.runtime.metrics import Metrics
    from autopar.runtime.padding import Padding
    from autopar.solve.schedules import Scheduler, register_schedule
    from autopar.solve.solvers import Solver, register_solver

_HERE = Path(__file__).resolve().parent
if not (_HERE / "passes").is_dir() and (_HERE.parent / "passes" / "flow.py").exists():
    # Python was started in a clone and took this folder for an installed package: the rest of it lies beside it
    __path__.append(str(_HERE.parent))

MODULES = {
    "autopar.api": ("compare", "parallelize", "plan", "read_plan"),
    "autopar.cluster.library": ("CLUSTERS", "read_cluster", "register_cluster"),
    "autopar.cluster.machine": ("Cluster", "Device", "Level"),
    "autopar.ir.precision": ("Precision",),
    "autopar.ops.oracle": ("check_rule",),
    "autopar.ops.registry": ("register_rule",),
    "autopar.passes.flow": ("register_lowering",),
    "autopar.passes.lower.lowering": ("Lowering",),
    "autopar.planning.costs": ("CostMode", "register_cost"),
    "autopar.planning.plan": ("Plan",),
    "autopar.planning.presets": ("Preset", "register_preset"),
    "autopar.report.comparison": ("Comparison",),
    "autopar.report.difference": ("Difference", "difference"),
    "autopar.report.fit": ("Fit", "fit"),
    "autopar.report.html": ("save_report",),
    "autopar.report.simulation": ("Simulation", "simulate"),
    "autopar.runtime.attempts": ("init_process_group",),
    "autopar.runtime.checkpoints": ("load", "save"),
    "autopar.runtime.clip": ("clip_grad_norm_",),
    "autopar.runtime.fx": ("graph_module",),
    "autopar.runtime.host_states": ("states_on_host",),
    "autopar.runtime.metrics": ("Metrics",),
    "autopar.runtime.padding": ("Padding",),
    "autopar.solve.schedules": ("Scheduler", "register_schedule"),
    "autopar.solve.solvers": ("Solver", "register_solver"),
}
"""Where each name is from. They are imported when they are first used, so that `autopar --help` does not wait for
PyTorch."""

MODULE_OF = {name: module for module, names in MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "extensions":
        return import_module("autopar.extensions")
    if name not in MODULE_OF:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value = getattr(import_module(MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULE_OF})


__all__ = [
    "CLUSTERS",
    "Cluster",
    "Comparison",
    "CostMode",
    "Device",
    "Difference",
    "Fit",
    "Level",
    "Lowering",
    "Metrics",
    "Padding",
    "Plan",
    "Precision",
    "Preset",
    "Scheduler",
    "Simulation",
    "Solver",
    "check_rule",
    "clip_grad_norm_",
    "compare",
    "difference",
    "fit",
    "graph_module",
    "init_process_group",
    "load",
    "parallelize",
    "plan",
    "read_cluster",
    "read_plan",
    "register_cluster",
    "register_cost",
    "register_lowering",
    "register_preset",
    "register_rule",
    "register_schedule",
    "register_solver",
    "save",
    "save_report",
    "simulate",
    "states_on_host",
]
