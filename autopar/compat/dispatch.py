"""Operators on their way through torch's dispatcher: the mode that sees them, and what they do to their operands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """That the function of a checkpoint runs again in backward: the number of the run; whether it draws the random
    numbers that it drew before; whether autograd differentiates this run, and not the first one."""

    run: int
    draws_alike: bool
    is_differentiated: bool


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of an operator writes."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that looks at operators, and at control flow, and leaves them as they are. Dynamo, which traces the
    branches of `torch.cond` in eager, works under it as without."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while a mode watches, and to say so takes longer than most of its calls


def is_product(func: Any) -> bool:
    """Whether an operator multiplies matrices, in torch's own count of work."""
    return getattr(func, "_overloadpacket", None) in flop_registry


# asked of every operator that is recorded, so looked up once
_ZEROS = aten._efficientzerotensor.default
_BATCH_NORM = aten.native_batch_norm.default
_FACTORING = aten._linalg_det.default, aten._linalg_slogdet.default


def annotated(func: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """An operator of the same results whose schema says what it writes: that of batch norm on a CPU is silent of its
    running statistics. Tangents that are known to be zero are plain zeros: fakes lose the device of others."""
    if func is _ZEROS:
        return aten.zeros.default, args
    if func is not _BATCH_NORM:
        return func, args
    x, weight, bias, mean, var, training, momentum, eps = args
    if not training:
        return aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, var, momentum, eps)
    if mean is None:
        return aten._native_batch_norm_legit.no_stats, (x, weight, bias, training, momentum, eps)
    return aten._native_batch_norm_legit.default, args


def factors_as_it_lies(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator factors a matrix that is not contiguous, where it factors the transpose of one that is, and
    its derivative reads the factors as those of the one or of the other."""
    if func not in _FACTORING:
        return False
    return not args[0].is_contiguous() and not args[0].is_complex()
