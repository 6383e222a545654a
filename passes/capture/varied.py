"""Varied: what layers read that are alike but for it, such as one of two masks.

In the record it stands in slots that read one value in one period and another in the next. Its values are from before
the run and depend on no parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

Slot = tuple[int, int]
"""(index of a node of the record, number of an operand)"""


def read_differently(operands: Sequence[Sequence[object]], begin: int, end: int, period: int) -> dict[Slot, int]:
    """What is read in the slots of nodes [begin, end) in which some periods read another value than others."""
    varied: dict[Slot, int] = {}
    for first in range(begin, min(begin + period, end)):
        for slot in range(len(operands[first])):
            read = {(i, slot): operands[i][slot] for i in range(first, end, period)}
            values = [value for value in read.values() if isinstance(value, int)]
            steps = {b - a for a, b in pairwise(values)}
            if len(values) == len(read) and not steps <= {0} and not steps <= {period}:
                varied.update(zip(read, values, strict=True))
    return varied


def shows_all(varied: Mapping[Slot, int], start: int, stop: int, period: int) -> bool:
    """Whether what is left without nodes [start, stop) reads every value that the run reads in a slot."""
    every, left = dict[Slot, set[int]](), dict[Slot, set[int]]()
    for (i, slot), value in varied.items():
        every.setdefault((i % period, slot), set()).add(value)
        if not start <= i < stop:
            left.setdefault((i % period, slot), set()).add(value)
    return every == left


def read_by_missing(
    varied: Mapping[Slot, tuple[int, ...]],
    slots: Sequence[Slot],
    period: int,
    names: Mapping[int, str],
    makers: Sequence[int | None],
    missing: range,
) -> Iterator[tuple[str, ...]]:
    """What copies that are missing read, by name, for each slot that reads `names[step]` in the copies that are there.

    `varied` is that of a `Cut`; steps are periods after those of `slots`. A slot fits if it reads, in each copy that is
    there, what this copy's value (made by the call `makers[k]`) was made of, and in two copies the same if and only if
    their values are. A value that no copy shows has the name "".
    """
    for i, slot in slots:
        read = {step: varied[i + step * period, slot] for step in names}
        name_of = {read[step]: name for step, name in names.items()}
        same = all(name_of[read[step]] == name for step, name in names.items()) and len(name_of) == len(
            {*names.values()}
        )
        if same and all(maker in made_of for maker, made_of in zip(makers, read.values(), strict=True)):
            yield tuple(name_of.get(varied[i + step * period, slot], "") for step in missing)
