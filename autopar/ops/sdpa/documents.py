"""Attention within documents: a query sees the keys whose document has the number of its own.

The numbers are compared for some queries at a time, so that there is never a mask of all scores. On a CPU those read no
keys before the first or behind the last whose number is between theirs: of documents in a row, most keys.
"""

import math
from collections.abc import Iterator

import torch

from . import composed
from .call import Attending, Band

LEAST = 32
"""Queries that are computed at a time, however many keys there are."""


def rows_at_a_time(batch: int, queries: int, keys: int, device_type: str) -> int:
    """How many queries are compared with all keys at a time."""
    return min(queries, max(LEAST, composed.scores_at_a_time(device_type) // (batch * keys)))


def masked_bands(
    query: torch.Tensor, key: torch.Tensor, call: Attending, offset: int
) -> Iterator[tuple[Band, torch.Tensor]]:
    """Some queries and the keys that they read, one after the other, with a mask [batch or 1, 1, queries, keys]."""
    assert call.documents
    of_queries, of_keys = call.documents
    queries, keys, device = query.shape[2], key.shape[2], query.device.type
    step = rows_at_a_time(len(query), queries, keys, device)
    for first in range(0, queries, step):
        start, last = 0, min(first + step, queries)
        end = max(0, last + offset) if call.causal else keys
        ours, theirs = of_queries[:, first:last], of_keys[:, :end]
        if device == "cpu":
            least, most = ours.aminmax()
            (met,) = torch.where(((theirs >= least) & (theirs <= most)).any(0))
            start, end = (int(met[0]), int(met[-1]) + 1) if len(met) else (0, 0)
        if start < end:
            hidden = ours.unsqueeze(2) != theirs[:, None, start:end]
            if call.causal:
                hidden |= torch.ones_like(hidden[0]).triu_(first + offset - start + 1)
            mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, -math.inf)
            del hidden
            yield Band(first, start, end, False, last), mask.unsqueeze(1)
            del mask  # lest it is there beside the next one
