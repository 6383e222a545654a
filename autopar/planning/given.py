"""Checks of what callers give, before anything else happens: a ValueError says what is wrong, and what to give."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.compat.devices import devices_of
from autopar.extensions import unknown
from autopar.ir.graph import JointGraph
from autopar.solve.solvers import SOLVERS

from .presets import PRESETS

WIDE_AXES_MOST = 5
"""The most axes of two ranks or more, since an operator's choices on all of them together are enumerated."""

RANKS_MOST = 2**20

HEADROOM = 0.05
"""The part of a device's memory, beyond the cluster's reserve, that plans leave free unless told otherwise."""


def check_model(model: Any, args: Any, kwargs: Any, loss_fn: Any) -> None:
    """Raises ValueError for what is no model, or no inputs of one."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {_shown(model)}: give an nn.Module")
    if isinstance(args, (str, bytes, torch.Tensor)) or not isinstance(args, Sequence):
        raise ValueError(f"args is {_shown(args)}: give a tuple of the model's positional inputs, such as (x,)")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise ValueError(f"kwargs is {_shown(kwargs)}: give the model's keyword inputs by name, or None")
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"loss_fn is {_shown(loss_fn)}: give a function of the model's output, or None")


def check_mesh(mesh_shape: Any) -> None:
    """Raises ValueError for what is no mesh, and for one that is too large to plan for."""
    if not isinstance(mesh_shape, Mapping) or not mesh_shape:
        raise ValueError(f"mesh_shape is {mesh_shape!r}: give axis names with sizes, such as {{'dp': 2, 'tp': 4}}")
    for axis, size in mesh_shape.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise ValueError(f"mesh axis name {axis!r} is no identifier")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"mesh axis {axis!r} has size {size!r}: give an integer number of ranks, at least 1")
    wide = [axis for axis, size in mesh_shape.items() if size > 1]
    if len(wide) > WIDE_AXES_MOST:
        raise ValueError(
            f"the mesh has {len(wide)} axes of two ranks or more ({', '.join(wide)}): give at most {WIDE_AXES_MOST}, "
            f"such as one for all axes that are to do alike"
        )
    if (ranks := math.prod(mesh_shape.values())) > RANKS_MOST:
        raise ValueError(f"the mesh has {ranks} ranks: give at most {RANKS_MOST}")


def check_solver(solver: Any) -> None:
    if not isinstance(solver, str) or (solver not in SOLVERS and solver not in PRESETS):
        raise ValueError(unknown("solver", solver, {"solvers": SOLVERS, "presets": PRESETS}))


def check_limit(memory_limit_bytes: Any) -> None:
    if memory_limit_bytes is None:
        return
    if isinstance(memory_limit_bytes, bool) or not isinstance(memory_limit_bytes, Real):
        raise ValueError(
            f"memory_limit_bytes is {_shown(memory_limit_bytes)}: give a number of bytes, such as 40e9, math.inf for "
            f"no limit, or None for what the device has"
        )
    if not float(memory_limit_bytes) > 0:
        raise ValueError(
            f"memory_limit_bytes is {memory_limit_bytes}: give a positive number of bytes, math.inf for no limit, or "
            f"None for what the device has"
        )


def check_headroom(headroom: Any) -> None:
    if headroom is None:
        return
    if isinstance(headroom, bool) or not isinstance(headroom, Real) or not 0.0 <= float(headroom) < 1.0:
        raise ValueError(
            f"headroom is {_shown(headroom)}: give the part of a device's memory that plans leave free, such as "
            f"{HEADROOM} (as by default), or 0"
        )


def check_effort(effort: Any) -> None:
    if effort is not None and (isinstance(effort, bool) or not isinstance(effort, (int, float)) or not effort > 0):
        raise ValueError(
            f"effort is {_shown(effort)}: give the seconds after which the search ends with the best that it has, or "
            f"None for a search that ends by itself"
        )


def check_constraints(constraints: Any) -> None:
    example = 'such as {"lm_head.weight": {"tp": "S(0)"}}'
    if constraints is None:
        return
    if not isinstance(constraints, Mapping):
        raise ValueError(f"constraints is {_shown(constraints)}: give placements on mesh axes by name, {example}")
    for pattern, placements in constraints.items():
        if not isinstance(pattern, str):
            raise ValueError(f"constraint {pattern!r} is no name: give a name or a pattern as text, {example}")
        if not isinstance(placements, Mapping):
            raise ValueError(f"constraint {pattern!r} is {_shown(placements)}: give a placement for an axis, {example}")
        for axis, text in placements.items():
            if not isinstance(axis, str) or not isinstance(text, str):
                raise ValueError(
                    f"constraint {pattern!r}: {axis!r}={text!r} is no placement: give R (replicated) or S(d) (dim "
                    f"d split) as text, {example}"
                )


def check_profiles(profiles: Any) -> None:
    if profiles is not None and not isinstance(profiles, (str, Path)):
        raise ValueError(f"profiles is {_shown(profiles)}: give the path of a profile database, or None")


def check_kernels(graph: JointGraph, device_type: str) -> None:
    """Raises ValueError for an operator that the device has no kernel for: eager would not run there either."""
    missing = {node.op: node.module for node in graph.nodes if device_type not in devices_of(node.op)}
    if missing:
        shown = "; ".join(f"{op} in {module or 'the model'}" for op, module in missing.items())
        raise ValueError(
            f"torch has no kernel on {device_type} for {shown}: replace it in the model, or plan for another device"
        )


def _shown(value: Any) -> str:
    """A value with its type, cut if it is long."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
