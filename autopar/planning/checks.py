"""Checks of what callers give, before anything else happens: a ValueError says what is wrong, and what to give."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.compat.devices import devices_of
from autopar.ir.graph import JointGraph

from .request import shown

WIDE_AXES_MOST = 5
"""The most axes of two ranks or more, since an operator's choices on all of them together are enumerated."""

RANKS_MOST = 2**20


def check_model(model: Any, args: Any, kwargs: Any, loss_fn: Any) -> None:
    """Raises ValueError for what is no model, or no inputs of one."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {shown(model)}: give an nn.Module")
    if isinstance(args, (str, bytes, torch.Tensor)) or not isinstance(args, Sequence):
        raise ValueError(f"args is {shown(args)}: give a tuple of the model's positional inputs, such as (x,)")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise ValueError(f"kwargs is {shown(kwargs)}: give the model's keyword inputs by name, or None")
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"loss_fn is {shown(loss_fn)}: give a function of the model's output, or None")


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


def check_kernels(graph: JointGraph, device_type: str) -> None:
    """Raises ValueError for an operator that the device has no kernel for: eager would not run there either."""
    missing = {node.op: node.module for node in graph.nodes if device_type not in devices_of(node.op)}
    if missing:
        shown = "; ".join(f"{op} in {module or 'the model'}" for op, module in missing.items())
        raise ValueError(
            f"torch has no kernel on {device_type} for {shown}: replace it in the model, or plan for another device"
        )
