"""What operators' dims mean, and how an op runs on shards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from autopar.ir.graph import Ref, overload
from autopar.ir.layout import Layout, Shape

from .expansions import LocalCall
from .local import Arguments
from .registry import RULES
from .rule import Call, Emitter, Factor, OpRule, parameters

__all__ = ["Call", "Emitter", "Factor", "OpRule", "expand", "localize", "needs_no_rule", "rule_of"]


def rule_of(call: Call) -> OpRule | None:
    """The op's rule for these shapes and arguments, or None if there is none: the op is then
    replicated, never guessed. Ops that read no tensor have a rule without factors."""
    entry = RULES.get(call.node.op)
    if entry is not None:
        return entry.rule(call)
    if needs_no_rule(call.node.op):
        whole = tuple((None,) * len(meta.shape) if meta else () for meta in call.outputs)
        inputs = tuple((None,) * len(meta.shape) for meta in call.inputs)
        return OpRule(factors=(), inputs=inputs, outputs=whole)
    return None


@cache
def needs_no_rule(op: str) -> bool:
    """Whether replicating the op is all there is to know: it reads no tensor and draws no random
    numbers (arange, full), or it makes nothing (assertions)."""
    function = overload(op)
    results = function._schema.returns  # type: ignore[attr-defined]
    reads = any("Tensor" in parameter.type for parameter in parameters(op))
    random = torch.Tag.nondeterministic_seeded in function.tags  # type: ignore[attr-defined]
    return not results or not (reads or random)


def localize(
    call: Call,
    local_inputs: tuple[Shape, ...],
    local_outputs: tuple[Shape | None, ...],
    results: tuple[Layout, ...],
    mesh: Shape,
) -> Arguments:
    """The node's args and kwargs (as in `Node`) for operands and results of these local shapes:
    sizes, offsets and counts rewritten. `results` are the layouts of the latter."""
    entry = RULES.get(call.node.op)
    if entry is None:
        return call.node.args, call.node.kwargs
    args, kwargs = entry.local(call, local_inputs, local_outputs)
    return args, (*kwargs, *entry.place(call, results, mesh).items()) if entry.place else kwargs


def expand(
    emitter: Emitter,
    call: Call,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    splits: Mapping[str, tuple[int, ...]],
    operands: tuple[Layout, ...],
    results: tuple[Layout, ...],
    local_outputs: tuple[Shape | None, ...],
) -> tuple[Ref | None, ...]:
    """Emit the local program of an op of which a factor that `expands` is split.

    `args` and `kwargs` are localised and refer to local values. `splits` names all factors of the op
    that are split, with the mesh axes that split each, outermost first. `operands` and `results` are the
    layouts of what the op reads and makes. Returns the local results.
    """
    entry = RULES.get(call.node.op)
    expansion = entry.expand if entry else None
    assert expansion is not None, f"{call.node.op} has no expansion"
    return expansion(emitter, LocalCall(call, args, kwargs, splits, operands, results, local_outputs))
