"""Min-plus products and powers of matrices: chains of identical problems.

All matrices carry a leading axis of prices: [price, left border state, right border state].
"""

from __future__ import annotations

import numpy as np

from .arrays import Floats, Ints

_BLOCK_ENTRIES = 4_000_000


def product(first: Floats, second: Floats) -> tuple[Floats, Ints]:
    """c[k, l, r] = min over m of first[k, l, m] + second[k, m, r], and the lowest m that attains it."""
    prices, rows, inner = first.shape
    columns = second.shape[2]
    result = np.empty((prices, rows, columns))
    middle = np.empty((prices, rows, columns), dtype=np.int64)
    block = max(1, _BLOCK_ENTRIES // max(1, prices * inner * columns))
    turned = second.transpose(0, 2, 1)[:, None]
    for start in range(0, rows, block):
        total = first[:, start : start + block, None, :] + turned
        best = total.argmin(axis=-1)
        middle[:, start : start + block] = best
        result[:, start : start + block] = np.take_along_axis(total, best[..., None], axis=-1)[..., 0]
    return result, middle


class Powers:
    """The min-plus powers of one square matrix by repeated squaring.

    The squares are shared by all counts that are asked for; `products` counts the matrix products
    made so far. The powers are those of [price, left, right] matrices, each price by itself.
    """

    def __init__(self, matrix: Floats) -> None:
        self.products = 0
        self._squares: list[Floats] = [matrix]
        self._square_middles: list[Ints] = []
        self._powers: dict[int, Floats] = {1: matrix}
        self._middles: dict[int, Ints] = {}

    def matrix(self, count: int) -> Floats:
        """The matrix of `count` copies in a row; count >= 1."""
        if count not in self._powers:
            high = count.bit_length() - 1
            while len(self._squares) <= high:
                square, middle = product(self._squares[-1], self._squares[-1])
                self.products += 1
                self._squares.append(square)
                self._square_middles.append(middle)
            rest = count - (1 << high)
            if rest == 0:
                self._powers[count] = self._squares[high]
                self._middles[count] = self._square_middles[high - 1]
            else:
                self._powers[count], self._middles[count] = product(self._squares[high], self.matrix(rest))
                self.products += 1
        return self._powers[count]

    def path(self, count: int, price: int, left: int, right: int) -> list[int]:
        """The count + 1 border states of the cheapest chain of `count` copies from `left` to `right`."""
        self.matrix(count)
        path = [left]
        pending = [(count, left, right)]
        while pending:
            length, start, end = pending.pop()
            if length == 1:
                path.append(end)
                continue
            high = length.bit_length() - 1
            head = 1 << high if length != 1 << high else 1 << (high - 1)
            middles = self._square_middles[high - 1] if length == 1 << high else self._middles[length]
            middle = int(middles[price, start, end])
            pending.append((length - head, middle, end))
            pending.append((head, start, middle))
        return path
