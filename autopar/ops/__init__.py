"""What operators' dims mean, and how an op runs on shards."""

from functools import cache

import torch

from autopar.ir.graph import overload, parameters, schema
from autopar.ir.layout import Layout, Shape

from .expansions import LocalCall, Results
from .local import Arguments
from .registry import RULES
from .rule import Call, Emitter, Factor, OpRule
from .template import unsplit

__all__ = ["Call", "Emitter", "Factor", "OpRule", "expand", "localize", "needs_no_rule", "rule_of"]


def rule_of(call: Call) -> OpRule | None:
    """The op's rule for these shapes and arguments, or None if there is none: the op is then
    replicated, never guessed. Ops that read no tensor have a rule without factors."""
    entry = RULES.get(call.node.op)
    if entry is not None:
        return entry.rule(call)
    if needs_no_rule(call.node.op):
        return unsplit(call)
    return None


@cache
def needs_no_rule(op: str) -> bool:
    """Whether the op can simply be replicated: it reads no tensor and draws no random numbers (arange, full), or it
    returns nothing (assertions)."""
    reads = any("Tensor" in parameter.type for parameter in parameters(op))
    random = torch.Tag.nondeterministic_seeded in overload(op).tags  # type: ignore[attr-defined]
    return not schema(op).returns or not (reads or random)


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


def expand(emitter: Emitter, local: LocalCall) -> Results:
    """Emit the local program of an op of which a factor that `expands` is split; the local results."""
    entry = RULES.get(local.call.node.op)
    expansion = entry.expand if entry else None
    assert expansion is not None, f"{local.call.node.op} has no expansion"
    return expansion(emitter, local)
