"""What is known about operators: rows of a table into which files of rows plug themselves (`core`, `table`), as do the
rules of users (`registry`), and the questions that every step asks of it.

What the dims of an operator mean is a fact about that operator, the same for every model, mesh and rank, and every step
of the flow (segments, blocks, space, codegen, the oracle) must use the same rule. So it is no argument of a plan.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from autopar.ir.graph import overload, parameters, schema
from autopar.ir.layout import Layout, Shape

from .expansions import Expansion, LocalCall
from .families import Rule
from .local import Arguments, Local, Place, unchanged
from .rule import Call, OpRule
from .strides import Preparation
from .template import unsplit


@dataclass(frozen=True, slots=True)
class Entry:
    """All facts about an op. `strides` names the arguments that its kernel reads without their strides, each with the
    function that lays it out for the kernel."""

    rule: Rule
    local: Local = unchanged
    expand: Expansion | None = None
    place: Place | None = None
    strides: Mapping[str, Preparation] = field(default_factory=dict)


def aten(names: str, entry: Entry) -> dict[str, Entry]:
    """The same entry for ATen ops; ".default" may be left out."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": entry for name in names.split()}


class Rules:
    """Rows by "namespace.name.overload": autopar's, and beside them those of users."""

    def __init__(self) -> None:
        self.rows: dict[str, Entry] = {}
        self.beside: Callable[[str], Entry | None] = lambda op: None

    def know(self, rows: Mapping[str, Entry]) -> None:
        """Plugs rows in. Raises ValueError for an operator that has one."""
        if twice := self.rows.keys() & rows.keys():
            raise ValueError(f"there is a row of {', '.join(sorted(twice))} already: an operator has one")
        self.rows.update(rows)

    def get(self, op: str) -> Entry | None:
        """The entry of an operator, or None."""
        return self.rows.get(op) or self.beside(op)


RULES = Rules()


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


def expand(local: LocalCall) -> tuple[Tensor | None, ...]:
    """Trace the local program of an op of which a factor that `expands` is split; the local results."""
    entry = RULES.get(local.call.node.op)
    expansion = entry.expand if entry else None
    assert expansion is not None, f"{local.call.node.op} has no expansion"
    results = expansion(local)
    return results if isinstance(results, tuple) else (results,)
