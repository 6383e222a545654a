"""What options are to tensors: a row says which layout an option produces of a tensor, and which set it wants.

Options with the same rows for all tensors differ in their own costs only.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .problem import Problem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


Row = tuple[int | None, int]
"""What one option is to one tensor: the layout it produces, if it is the producer, and the set it wants."""


def tensor_rows(problem: Problem) -> list[dict[int, list[Row]]]:
    """For each tensor, for each variable on it (the producer first): the row of every option."""
    result = []
    for tensor in problem.tensors:
        row: dict[int, list[Row]] = {tensor.producer: [(layout, 0) for layout in tensor.produced]}
        for consumer, masks in zip(tensor.consumers, tensor.wanted, strict=True):
            before = row.get(consumer, [(None, 0)] * len(masks))
            row[consumer] = [(layout, mask | more) for (layout, mask), more in zip(before, masks, strict=True)]
        result.append(row)
    return result


def undominated(seconds: Sequence[float], sizes: Sequence[float], rows: list[list[Row]]) -> Ints:
    """The options that no other option with the same rows everywhere matches in both seconds and bytes."""
    best: dict[tuple[Row, ...], list[int]] = {}
    for option in range(len(seconds)):
        same = best.setdefault(tuple(row[option] for row in rows), [])
        if any(seconds[o] <= seconds[option] and sizes[o] <= sizes[option] for o in same):
            continue
        same[:] = [o for o in same if not (seconds[option] <= seconds[o] and sizes[option] <= sizes[o])]
        same.append(option)
    return np.array(sorted(option for same in best.values() for option in same), dtype=np.int64)


def united(a: Row, b: Row) -> Row:
    """What two rows are to a tensor together: the layout of the one that produces, and all that is wanted."""
    return a[0] if a[0] is not None else b[0], a[1] | b[1]
