"""The operands of an instruction as its kernel needs them.

The contract belongs to the operator and not to the program: there is no instruction for it. Only a run shows how a
tensor lies in memory (a tangent as the user's loss made it, a result as its kernel did), and passes cut, join and
repeat instructions, which a copy that stands before one of them would have to follow. Whatever runs an operator of a
program gives it operands that `needed_by` made; that costs nothing where they lie right. `liveness` counts the copies.

Of operators that nothing is known of, every operand is made contiguous, except for views and those that torch tags
pointwise: these read strides. `benchmarks/strides.py` shows which kernels of the table do not.
"""

from collections.abc import Mapping
from typing import Any

import torch

from autopar.ir.graph import overload, parameters, schema
from autopar.ops.template import tensor_arguments

from .registry import RULES
from .strides import Given, contiguous


def needed_by(op: str) -> Mapping[str, Given]:
    """The arguments of an op, by name, whose strides matter to its kernel -> what makes them right."""
    entry = RULES.get(op)
    if entry is not None:
        return entry.strides
    aliases = any(argument.alias_info is not None for argument in schema(op).arguments)
    if torch.Tag.pointwise in overload(op).tags or aliases:  # type: ignore[attr-defined]
        return {}
    return dict.fromkeys(tensor_arguments(op), contiguous)


def given(op: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call as the kernel of the op needs them."""
    needs = needed_by(op)
    if not needs:
        return args, kwargs
    names = [parameter.name for parameter in parameters(op)][: len(args)]
    made = [applied(needs[name], value) if name in needs else value for name, value in zip(names, args, strict=True)]
    return made, {name: applied(needs[name], value) if name in needs else value for name, value in kwargs.items()}


def applied(make: Given, value: Any) -> Any:
    """An argument with its tensors made right: a tensor, a list of them, or what is no tensor."""
    if isinstance(value, torch.Tensor):
        return make(value)
    return [applied(make, item) for item in value] if isinstance(value, (list, tuple)) else value
