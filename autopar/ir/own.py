"""autopar's own operators: functions of Python under a name of torch's dispatcher."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""An operator -> the function that it is: programs call that, and pay no dispatcher."""


def define(schemas: Mapping[Callable[..., Any], str]) -> None:
    """Registers functions with torch, each by its name and with its schema."""
    for function, schema in schemas.items():
        torch.library.define(f"autopar::{function.__name__}", schema)
        torch.library.impl(f"autopar::{function.__name__}", "CompositeExplicitAutograd", function)
        FUNCTIONS[f"autopar.{function.__name__}.default"] = function
