"""Checkpoints run their function twice: what the second run computes again is what the first one did."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.compat.dispatch import Again
from autopar.ir.graph import Node
from autopar.ir.rewrite import reading
from autopar.ops.normalization import STATISTICS
from autopar.ops.randomness import FILLS, may_draw

from .errors import CaptureError
from .recorder import Geometry


def without_recomputed(
    nodes: Sequence[Node], again: Mapping[str, Again], values: Mapping[str, Geometry]
) -> tuple[list[Node], dict[str, str]]:
    """Nodes without those of a checkpoint's second run that compute what was computed before, and the names that stand
    for theirs. What the second run does besides, such as counting in a buffer once more, stays.

    Random operators compute the same where the run draws what the first one drew: one by one, in order. Where autograd
    differentiates the second run, its numbers are those of the first. Raises CaptureError where a run draws for other
    values what the first one drew for its own.
    """
    same: dict[str, str] = {}
    alike: dict[str, str] = {}  # values that are equal to an earlier one, for which that stands in keys
    kept: list[Node] = []
    made: dict[Any, list[int]] = {}
    norms: dict[Any, tuple[str, ...]] = {}
    counts: Counter[Any] = Counter()
    for given in nodes:
        node, run = reading(given, same), again.get(given.name)
        operands = tuple(alike.get(name, name) for name in node.inputs)
        random = may_draw(node.op)
        key: Any = (node.form, operands)
        if node.op in FILLS:
            key = (node.form, values[operands[0]].meta)
        before = made.setdefault(key, [])
        if run is not None and (run.draws_alike or not random):
            here = [i for i in before if kept[i].region == node.region]
            place = counts[run.run, key]
            counts[run.run, key] += 1
            places = here[place : place + 1] or ([] if random else here or before)
            if places:
                first = kept[places[0]]
                same.update((name, old) for name, old in zip(node.outputs, first.outputs, strict=True) if name)
                if run.is_differentiated and places[0] in here:
                    kept[places[0]] = replace(first, sequence=node.sequence)
                continue
            if random:
                raise CaptureError(
                    f"a checkpoint runs its function again in backward, where {node.op} of "
                    f"{node.module or 'the model'} draws for other values what it drew in forward: leave out of the "
                    f"checkpoint what changes these values (a buffer that it counts up), or pass "
                    f"preserve_rng_state=False"
                )
        if node.op in STATISTICS:
            kept_apart, count = STATISTICS[node.op]
            read = replace(node, args=tuple(None if k in kept_apart else x for k, x in enumerate(node.args)))
            outputs = norms.setdefault((read.form, tuple(alike.get(name, name) for name in read.inputs)), node.outputs)
            alike.update(zip(node.outputs[:count], outputs[:count], strict=True))
        if node.op in _PASSES_ON:
            alike[node.name] = operands[0]
        elif before and not random:
            alike.update(zip(node.outputs, kept[before[0]].outputs, strict=True))
        before.append(len(kept))
        kept.append(node)
    return kept, same


_PASSES_ON = frozenset({"aten.detach.default", "aten.alias.default"})
