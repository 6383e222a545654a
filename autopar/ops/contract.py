"""Gives kernels their operands in the memory layout that they need.

The contract belongs to the operator and not to the program: there is no instruction for it. Only a run shows how a
tensor lies in memory (a tangent comes from the user's loss, a result from its kernel), and passes cut, join and repeat
instructions, which a copy before one of them would have to follow. Whatever runs an operator of a program passes its
operands through `needed_by`, which costs nothing if they lie right. `liveness` counts the copies.

An operator without an entry gets every operand contiguous, except for views and operators that torch tags pointwise:
these read strides. `benchmarks/strides.py` shows which kernels of the table do not.
"""

from collections.abc import Mapping
from functools import cache

import torch

from autopar.ir.graph import overload, schema
from autopar.ops.template import tensor_arguments

from .rules import RULES
from .strides import Preparation, contiguous


def needed_by(op: str) -> Mapping[str, Preparation]:
    """Names of the arguments whose strides matter to the op's kernel -> what lays them out for it."""
    entry = RULES.get(op)
    return entry.strides if entry is not None else _needed_without_row(op)


@cache
def _needed_without_row(op: str) -> Mapping[str, Preparation]:
    aliases = any(argument.alias_info is not None for argument in schema(op).arguments)
    if torch.Tag.pointwise in overload(op).tags or aliases:  # type: ignore[attr-defined]
        return {}
    return dict.fromkeys(tensor_arguments(op), contiguous)
