"""Rules that users register for their own operators, beside autopar's rows (`rules`)."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.extensions import Table
from autopar.ir.graph import VIEWS, overload, schema

from . import table as table  # whose operators have rules already
from .expansions import Expansion
from .families import Rule, from_template
from .local import Local, unchanged
from .rule import Call, OpRule
from .rules import RULES, Entry
from .strides import needs
from .template import Dim, Operand, Template, parse, tensor_arguments


@dataclass(frozen=True, slots=True)
class Registered:
    """A user's entry, and its source: equal for equal registrations."""

    name: str
    source: tuple[object, ...]
    entry: Entry = field(compare=False)

    def __str__(self) -> str:
        rule, *options = self.source
        return f"{rule!r} with {options}"


REGISTERED = Table("rule", Registered)
"""What `register_rule` adds to."""

RULES.beside = lambda op: REGISTERED[op].entry if op in REGISTERED else None


def know(rows: Mapping[str, Entry]) -> None:
    """Plugs rows of autopar's extras in."""
    REGISTERED.know(*(Registered(op, (), entry) for op, entry in rows.items()))


def register_rule(
    op: str,
    rule: str | Rule,
    *,
    linear: Sequence[Sequence[int]] = (),
    contraction: bool = False,
    flops: Callable[[Call], float] | None = None,
    expands: Sequence[str] = (),
    even: Sequence[str] = (),
    expand: Expansion | None = None,
    local: Local = unchanged,
    contiguous: Sequence[str] | None = None,
    replace: bool = False,
) -> None:
    """Tell autopar what the dims of an operator mean, so that it can be split; without a rule it is replicated.

        autopar.register_rule("mylib::scale_rows", "m k, m -> m k", linear=[[0], [1]])

    `op` is the operator's name ("mylib::scale_rows", for another overload "mylib::scale_rows.out"). `rule` is a
    template: for each tensor argument of the op's schema, and after "->" for each result, the names of its dims.

        "m k, k n -> m n"          dims of one name are split together; a name that a result lacks is summed over
        "*i c!, c! -> *i c!"       `*i`: any number of dims; `!`: not split
        "m n, ...m n -> m n"       `...`: may come with fewer leading dims, or size 1, and is broadcast

    Or it is a function from the call to an `OpRule` (see `autopar.ops.template.assemble`), or to None to replicate.

    `linear` lists sets of tensor arguments that may come as partial sums together, the results then being partial sums:
    [[0], [1]] for a product, [[0, 1]] for a sum. `contraction` counts 2 flops for every combination of the named dims,
    as in a matrix product; `flops(call)` counts otherwise. `local(call, input_shapes, output_shapes)` gives (args,
    kwargs) for shards, where the op takes sizes. `expands` names dims of which a split needs another local program than
    the op itself, which `expand(local_call)` computes (see `autopar.ops.expansions`). `even` names dims that are
    split only into equal parts. `contiguous` names the tensor arguments that the op's kernel needs contiguous, by
    default all. Pass `contiguous=()` for a kernel that reads the strides of all of its arguments, to spare copies.

    Every rank must register the same rules, before it plans. `check_rule` proves a rule by brute force. The
    operator needs a fake implementation (`register_fake`), and an operator that its backward calls a rule of its own.

    Raises ValueError for an unknown operator, one that writes into its arguments, a template that does not fit
    its schema, and an operator that has another rule already unless it is to `replace` that one.
    """
    name = qualified(op)
    if name in RULES.rows or name in VIEWS:
        raise ValueError(f"autopar has a rule of its own for {name}, which cannot be replaced")
    if schema(name).is_mutable:
        raise ValueError(f"{name} writes into its arguments ({schema(name)}): only functional operators can be split")
    if not all(isinstance(operands, Sequence) for operands in linear):
        raise ValueError(f"linear of {name} is {linear!r}: give lists of tensor arguments, such as [[0], [1]]")
    sets = tuple(map(tuple, linear))
    count = len(tensor_arguments(name))
    for operands in sets:
        if not operands or any(not isinstance(i, int) or not 0 <= i < count for i in operands):
            raise ValueError(f"linear of {name} holds {operands}: give sets of tensor arguments, 0 to {count - 1}")
    if bool(expands) != (expand is not None) and isinstance(rule, str):
        raise ValueError(f"{name}: give `expands` (names of dims) and `expand` (their local program) together")
    if isinstance(rule, str):
        _check_template(name, rule, (*expands, *even), local is not unchanged)
        dims = {name: Dim(expands=name in expands, even=True) for name in (*expands, *even)}
        function = from_template(rule, dims, linear=sets, flops=flops, contraction=contraction)
    elif sets or expands or even or flops or contraction:
        raise ValueError(
            f"{name}: linear, expands, even, flops and contraction go with a template; an OpRule has its own"
        )
    else:
        function = rule
    arguments = tensor_arguments(name)
    needed = tuple(arguments) if contiguous is None else tuple(contiguous)
    if unknown := [repr(argument) for argument in needed if argument not in arguments]:
        raise ValueError(f"contiguous of {name} names {unknown[0]}: give some of its tensors, {', '.join(arguments)}")
    source = (rule, sets, contraction, flops, tuple(expands), tuple(even), expand, local, needed)
    entry = Entry(_checked(name, rule, function), local, expand, strides=needs(" ".join(needed)))
    REGISTERED.add(Registered(name, source, entry), replace=replace)


def qualified(op: str) -> str:
    """ "mylib::scale_rows" as "mylib.scale_rows.default", which is returned as it is.

    Raises ValueError for a malformed name, and an operator that is not registered with torch.
    """
    if not isinstance(op, str) or not re.fullmatch(r"\w+(::|\.)\w+(\.\w+)?", op):
        raise ValueError(f"{op!r} is no operator's name: give one like 'mylib::scale_rows' or 'aten.mm.default'")
    name = op.replace("::", ".")
    name = name if name.count(".") == 2 else f"{name}.default"
    try:
        overload(name)
    except AttributeError as error:
        raise ValueError(
            f"there is no operator {op!r}: register it with torch.library first, or correct the name"
        ) from error
    return name


_TOKEN = re.compile(r"\*?[A-Za-z_]\w*!?|1")


def _check_template(name: str, text: str, expands: tuple[str, ...], rewrites: bool) -> None:
    """Raises ValueError for a malformed template, or one that does not fit the op's schema."""

    def complain(what: str) -> ValueError:
        return ValueError(f"the rule {text!r} of {name}: {what}")

    if text.count("->") != 1:
        raise complain("write operands, one '->', and results, like 'm k, k n -> m n'")
    sides = [side.split(",") for side in text.split("->")]
    for operand in (o.strip() for side in sides for o in side):
        tokens = operand.removeprefix("...").split()
        for token in tokens:
            if not _TOKEN.fullmatch(token):
                raise complain(
                    f"{token!r} is no dim: dims are names, '*names', names with '!', or 1, with spaces between"
                )
        names = [t.strip("*!") for t in tokens if t != "1"]
        if len(set(names)) < len(names):
            raise complain(
                f"{operand!r} has a name twice: mark dims that cannot be split with '!', under names of their own"
            )
        if sum(t.startswith("*") for t in tokens) > 1:
            raise complain(f"{operand!r} has two parts of any number of dims, and may have one")
    arguments, returns = tensor_arguments(name), schema(name).returns
    if len(sides[0]) != len(arguments):
        raise complain(f"it has {len(sides[0])} operands, and the op {len(arguments)} tensors ({', '.join(arguments)})")
    if any(str(r.type) != "Tensor" for r in returns):
        raise complain(
            f"the op does not return tensors one by one ({schema(name)}): give a function in place of a text"
        )
    if len(sides[1]) != len(returns):
        raise complain(f"it has {len(sides[1])} results, and the op {len(returns)}")
    template = parse(text)
    read, written = _names(template.inputs), _names(template.outputs)
    if unknown := [e for e in expands if e not in read]:
        raise complain(f"expands names {unknown[0]!r}, which no operand has")
    if (new := sorted(written - read)) and not rewrites:
        raise complain(
            f"no operand has {new[0]!r}, so nothing says how a rank computes its part of it: mark it '!', "
            f"or say with `local` which arguments the op takes then"
        )


def _names(operands: Sequence[Operand]) -> set[str]:
    """Names of dims that may be split."""
    names: set[str] = set()
    for operand in operands:
        names.update(n for n in (*operand.left, *operand.right) if n)
        if operand.variadic and not operand.unsplit:
            names.add(operand.variadic)
    return names


def _checked(name: str, source: str | Rule, rule: Rule) -> Rule:
    """The rule, with a ValueError where it does not fit a call."""
    shown = repr(source) if isinstance(source, str) else f"returned by {getattr(source, '__name__', source)}"
    template = parse(source) if isinstance(source, str) else None

    def checked(call: Call) -> OpRule | None:
        if template is not None and (misfit := _misfit(template, call)):
            raise ValueError(f"the rule {shown} of {name} does not fit {call.node}: {misfit}")
        op_rule = rule(call)
        if op_rule is not None and (wrong := _wrong(op_rule, call)):
            raise ValueError(f"the rule of {name}, {shown}, does not fit {call.node}: {wrong}")
        return op_rule

    return checked


def _misfit(template: Template, call: Call) -> str:
    """Where the ranks of a call's tensors differ from the template, or ""."""
    given = [*zip(template.operands(call), call.inputs, strict=True)]
    given += [(o, m) for o, m in zip(template.outputs, call.outputs, strict=True) if m is not None]
    for operand, meta in given:
        fixed, rank = len(operand.left) + len(operand.right), len(meta.shape)
        if (rank < fixed and not operand.broadcast) or (rank > fixed and operand.variadic is None):
            return (
                f"it has {fixed} dims for {meta}: write '*name' for any number of dims, or give a function of the call"
            )
    return ""


def _wrong(rule: object, call: Call) -> str:
    """What about a rule does not fit its call, or ""."""
    if not isinstance(rule, OpRule):
        return f"it is a {type(rule).__name__}: return an OpRule, or None to replicate"
    for dims, metas, what in ((rule.inputs, call.inputs, "operand"), (rule.outputs, call.outputs, "result")):
        if len(dims) != len(metas):
            return f"it has {len(dims)} {what}s, and the call {len(metas)}"
        for i, (carried, meta) in enumerate(zip(dims, metas, strict=True)):
            if meta is not None and len(carried) != len(meta.shape):
                return f"it has {len(carried)} dims for {what} {i}, which is {meta}"
            if any(f is not None and not 0 <= f < len(rule.factors) for f in carried):
                return f"{what} {i} carries {carried}, and there are {len(rule.factors)} factors"
    if any(len(f.reductions) != len(call.outputs) for f in rule.factors):
        return f"give each factor {len(call.outputs)} reductions, one for each result ('' for none)"
    return ""
