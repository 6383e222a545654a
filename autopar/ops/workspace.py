"""Memory that operators of our own take while they run, beside their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.ir import randomness, variates
from autopar.ir.graph import Node, TensorMeta

from .experts import DOT, MM, MM_WEIGHT, SUM

Metas = tuple[TensorMeta, ...]


def _bits(outputs: Metas, device_type: str) -> int:
    return randomness.workspace_bytes(outputs[0].numel, device_type)


WORKSPACE: Mapping[str, Callable[[Metas, Metas, str], int]] = {
    MM: lambda inputs, outputs, _: inputs[0].bytes + outputs[0].bytes,  # rows by expert, and their products
    MM_WEIGHT: lambda inputs, outputs, _: inputs[0].bytes + inputs[1].bytes,  # rows by expert
    SUM: lambda inputs, outputs, _: inputs[0].bytes,  # rows times their weights
    DOT: lambda inputs, outputs, _: inputs[0].bytes,
    # the mask is made before there is a result
    "autopar.dropout.default": lambda _, outputs, device: max(0, _bits(outputs, device) - outputs[0].bytes),
    "autopar.uniform.default": lambda _, outputs, device: _bits(outputs, device),
    "autopar.integers.default": lambda _, outputs, device: _bits(outputs, device) + outputs[0].numel * 8,
    "autopar.normal.default": lambda _, outputs, device: _bits(outputs, device) + outputs[0].numel * 8,
    "autopar.poisson.default": lambda _, outputs, device: variates.workspace_bytes(outputs[0].numel),
    "autopar.standard_gamma.default": lambda _, outputs, device: variates.workspace_bytes(outputs[0].numel),
}
"""Op -> bytes, from the local metas of its tensor operands and results, and the type of the device."""


def workspace_bytes(instruction: Node, metas: Mapping[str, TensorMeta], device_type: str) -> int:
    """Bytes that an instruction has alive at once beside what it reads and makes; 0 where nothing is known of it."""
    found = WORKSPACE.get(instruction.op)
    if found is None:
        return 0
    inputs = tuple(metas[name] for name in instruction.inputs)
    return found(inputs, tuple(metas[name] for name in instruction.outputs if name), device_type)
