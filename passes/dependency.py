"""Dependencies: which elements of an operand an element of a result reads (CFP section 3.2).

CFP Eq. 1 and Table 1: an operator maps the indices of its output to the indices of its input by an
affine expression with floor and modulo. Maps compose along a path, and Eq. 2 says of a composed map
along which dims the input can be split, so that the output is split with it and nobody communicates.

Where an op needs a dim whole, the index is "*" (any index). That says too much for a few (a slice
reads a part of the dim), never too little: a rule knows no more of the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from autopar.ir.graph import JointGraph, Ref, TensorMeta
from autopar.ir.layout import Shape
from autopar.ops.rule import Call, OpRule

RESHAPE, PERMUTE = "aten.reshape.default", "aten.permute.default"


@dataclass(frozen=True, slots=True)
class Term:
    """coefficient * ((source // divisor) % modulus). `source` is a variable's number, or, where a
    general reshape nests them, an expression."""

    coefficient: int
    source: int | Expression
    divisor: int
    modulus: int


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of terms and a constant: the index in one dim of the input."""

    terms: tuple[Term, ...]
    constant: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineMap:
    """The elements of X[inputs] that an element of Y[outputs] depends on.

    Variable j < len(outputs) is index a_j of Y. The variables after them are free, each with its
    range in `free`: all their values are meant. `indices[i]` is the index b_i of X (CFP Eq. 1).
    """

    outputs: Shape
    inputs: Shape
    indices: tuple[Expression, ...]
    free: tuple[int, ...] = ()

    @property
    def sizes(self) -> Shape:
        """Ranges of all variables."""
        return self.outputs + self.free

    def __str__(self) -> str:
        names = [f"a{j}" for j in range(len(self.outputs))] + [f"s{j}" for j in range(len(self.free))]
        whole = {Expression((Term(1, len(self.outputs) + j, 1, size),)): size for j, size in enumerate(self.free)}
        sources = [term.source for index in self.indices for term in index.terms]
        shown: list[str] = []
        bounded: set[int] = set()
        for size, index in zip(self.inputs, self.indices, strict=True):
            if whole.get(index) == size and sources.count(index.terms[0].source) == 1:
                shown.append("*")
            else:
                shown.append(_show(index, names, self.sizes))
                bounded |= _variables(index)
        ranges = [f"0 ≤ {names[j]} < {self.sizes[j]}" for j in sorted(bounded) if j >= len(self.outputs)]
        text = f"({', '.join(names[: len(self.outputs)])}) -> ({', '.join(shown)})"
        return f"{text} : {', '.join(ranges)}" if ranges else text


def identity(shape: Shape) -> AffineMap:
    """Element-wise (CFP Table 1)."""
    indices = tuple(_variable(j, size) for j, size in enumerate(shape))
    return AffineMap(outputs=shape, inputs=shape, indices=indices)


@cache
def reshape(before: Shape, after: Shape) -> AffineMap:
    """Row-major view of X[before] as Y[after] (CFP Table 1: split and merge; Eq. 4 and 6)."""
    flat, stride = Expression(()), 1
    for j in reversed(range(len(after))):
        flat = _add(flat, _scale(_variable(j, after[j]), stride))
        stride *= after[j]
    indices, stride = [], 1
    for size in reversed(before):
        indices.append(_digit(flat, stride, size))
        stride *= size
    return AffineMap(outputs=after, inputs=before, indices=tuple(reversed(indices)))


@cache
def permute(before: Shape, order: tuple[int, ...]) -> AffineMap:
    """Y's dim d is X's dim order[d] (CFP Table 1: transpose)."""
    after = tuple(before[d] for d in order)
    indices = tuple(_variable(order.index(d), before[d]) for d in range(len(before)))
    return AffineMap(outputs=after, inputs=before, indices=indices)


@cache
def compose(first: AffineMap, second: AffineMap) -> AffineMap:
    """Y -> W from Y -> X (first) and X -> W (second). Exact: a floor of a sum stays one where its
    digits cannot be told apart."""
    assert first.inputs == second.outputs, f"{first.inputs} is not {second.outputs}"
    sizes = first.sizes + second.free
    moved = [_variable(len(first.sizes) + j, size) for j, size in enumerate(second.free)]
    values = (*first.indices, *moved)
    indices = tuple(_substitute(index, values) for index in second.indices)
    return _pruned(
        AffineMap(outputs=first.outputs, inputs=second.inputs, indices=indices, free=sizes[len(first.outputs) :])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Signatures:
    """`labels[i]` is equal for nodes of equal op, constants and metas: their rules and their maps are
    equal, whoever their operands are. `operands[i]` are node i's inputs."""

    labels: tuple[int, ...]
    operands: tuple[tuple[str, ...], ...]


def signatures(graph: JointGraph) -> Signatures:
    """Number the nodes by what they are. What repeats is then worked out once."""
    kinds: dict[TensorMeta, int] = {}
    kind = {name: kinds.setdefault(meta, len(kinds)) for name, meta in graph.metas.items()}
    known: dict[Any, int] = {}
    labels: list[int] = []
    operands: list[tuple[str, ...]] = []
    for node in graph.nodes:
        names: list[str] = []
        constants = (_constants(node.args, names), tuple([(k, _constants(v, names)) for k, v in node.kwargs]))
        metas = tuple([kind[name] for name in names]), tuple([kind[o] if o else -1 for o in node.outputs])
        labels.append(known.setdefault((node.op, node.backward, constants, metas), len(known)))
        operands.append(tuple(names))
    return Signatures(labels=tuple(labels), operands=tuple(operands))


def _constants(value: Any, names: list[str]) -> Any:
    """What of an argument is constant, hashable and told apart by type (1, 1.0 and True are not
    alike to an operator); the names of its references are appended to `names`."""
    if isinstance(value, Ref):
        names.append(value.name)
        return Ref
    if isinstance(value, tuple):
        return tuple([_constants(item, names) for item in value])
    return (value.__class__, repr(value) if isinstance(value, float) else value)


def dependency(call: Call, rule: OpRule | None) -> tuple[tuple[AffineMap | None, ...], ...]:
    """For each output (None where nobody uses it), for each tensor operand, the map from the output's
    indices to the operand's. Views are mapped from their shapes, other ops from their rule's factors;
    without a rule everything depends on everything."""
    found: list[tuple[AffineMap | None, ...]] = []
    for slot, output in enumerate(call.outputs):
        if output is None:
            found.append((None,) * len(call.inputs))
        elif call.node.op == RESHAPE:
            found.append((reshape(call.inputs[0].shape, output.shape),))
        elif call.node.op == PERMUTE:
            order = tuple(d % len(output.shape) for d in call.node.args[1])
            found.append((permute(call.inputs[0].shape, order),))
        else:
            sizes = _factor_sizes(rule) if rule else ()
            carried = rule.outputs[slot] if rule else (None,) * len(output.shape)
            found.append(
                tuple(
                    _carried(
                        output.shape, carried, meta.shape, rule.inputs[i] if rule else (None,) * len(meta.shape), sizes
                    )
                    for i, meta in enumerate(call.inputs)
                )
            )
    return tuple(found)


def _factor_sizes(rule: OpRule) -> tuple[int, ...]:
    """Sizes of the factors; 0 where dims that carry a factor are not mapped index by index. What expands is
    not computed shard by shard (an index depends on others than its own), and scaled dims differ in length."""
    scaled = {
        factor
        for several, scales in ((rule.inputs, rule.input_scales), (rule.outputs, rule.output_scales))
        for dims, factors in zip(several, scales, strict=False)
        for factor, scale in zip(dims, factors, strict=True)
        if scale != 1
    }
    return tuple(0 if factor.expands or number in scaled else factor.size for number, factor in enumerate(rule.factors))


@cache
def _carried(
    outputs: Shape, output_factors: tuple[int | None, ...], inputs: Shape, input_factors: tuple[int | None, ...],
    sizes: tuple[int, ...],
) -> AffineMap:  # fmt: skip
    """The map between dims that carry the same factor (CFP Table 1: element-wise, broadcast,
    contraction). A factor smaller than its dims repeats along them: index i of one part depends on
    index i of every part."""
    indices: list[Expression] = []
    free: list[int] = []

    def anything(size: int) -> Expression:
        free.append(size)
        return _variable(len(outputs) + len(free) - 1, size)

    for size, factor in zip(inputs, input_factors, strict=True):
        if size == 1:
            indices.append(Expression(()))
        elif factor is None or factor not in output_factors or not sizes[factor]:
            indices.append(anything(size))
        else:
            dim, period = output_factors.index(factor), sizes[factor]
            index = _digit(_variable(dim, outputs[dim]), 1, period)
            indices.append(index if size == period else _add(_scale(anything(size // period), period), index))
    return AffineMap(outputs=outputs, inputs=inputs, indices=tuple(indices), free=tuple(free))


@dataclass(frozen=True, slots=True)
class Preserved:
    """A digit of an input index that an output index still knows: (b_i // block) % count =
    (a_j // output_block) % count, with j = `output_dim`. Below it there may be anything."""

    block: int
    output_dim: int
    output_block: int
    count: int


@cache
def surviving(mapping: AffineMap) -> tuple[tuple[Preserved, ...], ...]:
    """For each input dim, the digits of its index that output indices know, outermost first."""
    return tuple(_digits(index, mapping) for index in mapping.indices)


def _digits(index: Expression, mapping: AffineMap) -> tuple[Preserved, ...]:
    found: list[Preserved] = []
    for position, term in enumerate(index.terms):
        below = Expression(index.terms[position + 1 :], index.constant)
        # not where the digits below overflow into this one, and not where the digit is free
        if isinstance(term.source, int) and term.source < len(mapping.outputs) and _largest(below) < term.coefficient:
            found.append(Preserved(term.coefficient, term.source, term.divisor, term.modulus))
    return tuple(found)


def preserved(mapping: AffineMap, ranks: int) -> tuple[Preserved | None, ...]:
    """CFP Eq. 2 for P = `ranks`: b_i = floor(a / d) * d + k, 0 <= k < d, (A / d) mod P = 0.

    For each input dim, the outermost digit of its index that an output index still knows and that
    divides among the ranks; None if there is none: splitting this dim of X would need communication
    on the way to Y. The subgraph preserves X's parallelism if none is None. Input dims that P does
    not divide could not be split to begin with; see `splittable`.
    """
    return tuple(next((p for p in digits if p.count % ranks == 0), None) for digits in surviving(mapping))


def splittable(shape: Shape, ranks: int) -> tuple[int, ...]:
    """The dims of a tensor that divide among `ranks`."""
    return tuple(d for d, size in enumerate(shape) if size % ranks == 0)


def preserves(mapping: AffineMap, ranks: int) -> bool:
    """Whether the map satisfies Eq. 2 along every dim of its input that divides among the ranks."""
    kept = preserved(mapping, ranks)
    return all(kept[d] is not None for d in splittable(mapping.inputs, ranks))


# ---- arithmetic of expressions -----------------------------------------------------------------------


def _variable(number: int, size: int) -> Expression:
    """A dim of no indices has no digits either."""
    return Expression(()) if size < 2 else Expression((Term(1, number, 1, size),))


def _scale(expression: Expression, factor: int) -> Expression:
    if not factor:
        return Expression(())
    terms = tuple(Term(t.coefficient * factor, t.source, t.divisor, t.modulus) for t in expression.terms)
    return Expression(terms, expression.constant * factor)


def _add(*expressions: Expression) -> Expression:
    """The sum in normal form: highest coefficient first, neighbouring digits of one source joined
    (d * (a // d) + a % d = a), and a nested sum that is whole again unfolded."""
    terms = [t for e in expressions for t in e.terms]
    constant = sum(e.constant for e in expressions)
    while (pair := _neighbours(terms)) is not None:
        high, low = pair
        terms.remove(high)
        terms.remove(low)
        joined = Term(low.coefficient, low.source, low.divisor, low.modulus * high.modulus)
        if isinstance(joined.source, int) or joined.divisor > 1 or joined.modulus <= _largest(joined.source):
            terms.append(joined)
        else:
            unfolded = _scale(joined.source, joined.coefficient)
            terms += unfolded.terms
            constant += unfolded.constant
    return Expression(tuple(sorted(terms, key=_order)), constant)


def _order(term: Term) -> tuple[int, str, int, int]:
    return -term.coefficient, repr(term.source), -term.divisor, term.modulus


def _neighbours(terms: Sequence[Term]) -> tuple[Term, Term] | None:
    for high in terms:
        for low in terms:
            adjacent = high.divisor == low.divisor * low.modulus and high.coefficient == low.coefficient * low.modulus
            if adjacent and high.source == low.source:
                return high, low
    return None


def _largest(expression: Expression) -> int:
    return expression.constant + sum(t.coefficient * (t.modulus - 1) for t in expression.terms)


def _digit(expression: Expression, divisor: int, modulus: int) -> Expression:
    """(expression // divisor) % modulus; nothing where a dim has no indices."""
    if not divisor or not modulus:
        return Expression(())
    high, low = _cut(expression, divisor)
    if divisor > 1 and _largest(low) >= divisor:
        return _nested(expression, divisor, modulus)
    quotient = Expression(
        tuple(Term(t.coefficient // divisor, t.source, t.divisor, t.modulus) for t in high.terms),
        high.constant // divisor,
    )
    _, low = _cut(quotient, modulus)
    if _largest(low) >= modulus:
        return _nested(expression, divisor, modulus)
    return _add(low)


def _nested(expression: Expression, divisor: int, modulus: int) -> Expression:
    """A floor or modulo of a sum whose digits overlap: general reshapes have them."""
    reach = _largest(expression) // divisor + 1
    return (
        Expression((Term(1, expression, divisor, min(modulus, reach)),)) if min(modulus, reach) > 1 else Expression(())
    )


def _cut(expression: Expression, at: int) -> tuple[Expression, Expression]:
    """The terms that are multiples of `at`, and the rest. A digit that straddles `at` is two digits."""
    high: list[Term] = []
    low: list[Term] = []
    for term in expression.terms:
        inner, uneven = divmod(at, term.coefficient)
        if term.coefficient % at == 0:
            high.append(term)
        elif uneven == 0 and inner < term.modulus and term.modulus % inner == 0:
            low.append(Term(term.coefficient, term.source, term.divisor, inner))
            high.append(Term(at, term.source, term.divisor * inner, term.modulus // inner))
        else:
            low.append(term)
    constant = expression.constant // at * at
    return Expression(tuple(high), constant), Expression(tuple(low), expression.constant - constant)


def _substitute(expression: Expression, values: Sequence[Expression]) -> Expression:
    parts = [Expression((), expression.constant)]
    for term in expression.terms:
        source = values[term.source] if isinstance(term.source, int) else _substitute(term.source, values)
        parts.append(_scale(_digit(source, term.divisor, term.modulus), term.coefficient))
    return _add(*parts)


def _variables(expression: Expression) -> set[int]:
    found: set[int] = set()
    for term in expression.terms:
        found |= {term.source} if isinstance(term.source, int) else _variables(term.source)
    return found


def _pruned(mapping: AffineMap) -> AffineMap:
    """Without free variables that no index reads, the others numbered anew, and each narrowed to
    the digits that are read."""
    used = sorted(set().union(*map(_variables, mapping.indices)) if mapping.indices else ())
    kept = [j for j in used if j >= len(mapping.outputs)]
    ranges = [mapping.sizes[j] for j in kept]
    number = {j: len(mapping.outputs) + i for i, j in enumerate(kept)}
    for i, j in enumerate(kept):
        digits = {(t.divisor, t.modulus) for e in mapping.indices for t in e.terms if t.source == j}
        nested = any(
            not isinstance(t.source, int) and j in _variables(t.source) for e in mapping.indices for t in e.terms
        )
        if len(digits) == 1 and not nested:
            ((_, ranges[i]),) = digits

    def renamed(expression: Expression) -> Expression:
        terms = []
        for t in expression.terms:
            if not isinstance(t.source, int):
                terms.append(Term(t.coefficient, renamed(t.source), t.divisor, t.modulus))
            elif t.source in number:
                fresh = number[t.source]
                narrowed = ranges[fresh - len(mapping.outputs)] != mapping.sizes[t.source]
                terms.append(Term(t.coefficient, fresh, 1 if narrowed else t.divisor, t.modulus))
            else:
                terms.append(t)
        return Expression(tuple(terms), expression.constant)

    indices = tuple(map(renamed, mapping.indices))
    return AffineMap(outputs=mapping.outputs, inputs=mapping.inputs, indices=indices, free=tuple(ranges))


def _show(expression: Expression, names: Sequence[str], sizes: Sequence[int]) -> str:
    shown = []
    for term in expression.terms:
        if isinstance(term.source, int):
            base, largest = names[term.source], sizes[term.source] - 1
        else:
            base, largest = f"({_show(term.source, names, sizes)})", _largest(term.source)
        if term.divisor > 1:
            base = f"⌊{base}/{term.divisor}⌋"
        if term.divisor * term.modulus <= largest:
            base += f"%{term.modulus}"
        shown.append(f"{term.coefficient}·{base}" if term.coefficient != 1 else base)
    if expression.constant or not shown:
        shown.append(str(expression.constant))
    return " + ".join(shown)
