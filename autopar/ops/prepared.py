"""Arguments of a call as the kernel of its operator needs them."""

from typing import Any

import torch

from autopar.ir.graph import parameters

from .contract import needed_by
from .strides import Preparation


def prepared_arguments(op: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call as the kernel of the op needs them."""
    needs = needed_by(op)
    if not needs:
        return args, kwargs

    def prepared(name: str, value: Any) -> Any:
        return laid_out(needs[name], value) if name in needs else value

    names = [parameter.name for parameter in parameters(op)[: len(args)]]
    positional = [prepared(name, value) for name, value in zip(names, args, strict=True)]
    return positional, {name: prepared(name, value) for name, value in kwargs.items()}


def laid_out(make: Preparation, value: Any) -> Any:
    """An argument with its tensors laid out: a tensor, a list of them, or no tensor at all."""
    if isinstance(value, torch.Tensor):
        return make(value)
    return [laid_out(make, item) for item in value] if isinstance(value, (list, tuple)) else value
