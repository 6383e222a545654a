"""Orders of elimination: greedy min-fill, weighted by the sizes of the nodes."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

FILL_WEIGHTS = (0.5, 0.0, 0.25, 1.0)
"""How much a table's own size counts beside the fill that it makes, in the orders that are tried."""

RANDOM_ORDERS = 4
"""Orders with disturbed keys that are tried where those are hard."""

EASY_ENTRIES = 20_000_000
"""No further order is looked for where one makes fewer entries than this in all its tables."""

HOPELESS_ENTRIES = 500_000_000
"""Nor where one makes more: others are better by small factors."""


def elimination_order(sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], keep: set[int]) -> list[int]:
    """The best of a few greedy min-fill orders, by the total size of their tables. Deterministic."""
    generator = random.Random(0)
    even = [1.0] * len(sizes)
    best: tuple[float, list[int]] | None = None
    for attempt in range(len(FILL_WEIGHTS) + RANDOM_ORDERS):
        disturbed = attempt >= len(FILL_WEIGHTS)
        factors = [1 + 0.6 * generator.random() for _ in sizes] if disturbed else even
        found = greedy_order(sizes, scopes, keep, FILL_WEIGHTS[attempt % len(FILL_WEIGHTS)], factors)
        if best is None or found[0] < best[0]:
            best = found
        if best[0] < EASY_ENTRIES or best[0] > HOPELESS_ENTRIES:
            break
    assert best is not None
    return best[1]


def greedy_order(
    sizes: Sequence[int],
    scopes: Sequence[tuple[int, ...]],
    keep: set[int],
    share: float,
    factors: Sequence[float],
    most: float = math.inf,
) -> tuple[float, list[int]]:
    """Total entries of all tables, and the order: the node first whose elimination joins the least
    that was not joined before (weighted by sizes, and by `factors`). Nodes whose tables would have more than
    `most` entries are passed over."""
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for node in scope:
            near[node].update(scope)
    for node, others in enumerate(near):
        others.discard(node)
    logs = [math.log2(size) for size in sizes]
    log_of = logs.__getitem__

    def weight(node: int) -> float:
        return logs[node] + sum(map(log_of, near[node]))

    def key(node: int) -> float:
        fill = 0.0
        for a in near[node]:
            missing = near[node] - near[a]
            if len(missing) > 1:  # more than itself
                fill += logs[a] * (sum(map(log_of, missing)) - logs[a])
        return round((fill / 2 + share * weight(node)) * factors[node], 6)

    keys = {node: key(node) for node in range(len(sizes)) if node not in keep}
    heap = [(value, node) for node, value in keys.items()]
    heapq.heapify(heap)
    total, order = 0.0, []
    while heap:
        value, node = heapq.heappop(heap)
        if keys.get(node) != value:
            continue
        del keys[node]
        if weight(node) > math.log2(most):
            continue
        order.append(node)
        total += 2 ** weight(node)
        neighbours = near[node]
        touched = set(neighbours)
        for other in neighbours:
            near[other] |= neighbours
            near[other] -= {node, other}
        for other in neighbours:
            touched |= near[other]
        for other in sorted(touched & keys.keys()):
            changed = key(other)
            if changed != keys[other]:
                keys[other] = changed
                heapq.heappush(heap, (changed, other))
    return total, order
