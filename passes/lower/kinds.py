"""Kinds of instructions that lowerings tell apart."""

from __future__ import annotations

from autopar.ir.graph import CONTIGUOUS, PERMUTE, RESHAPE

LAYOUT = frozenset({CONTIGUOUS, PERMUTE, RESHAPE, "aten.select.int"})
"""Local ops of one tensor that codegen puts around collectives."""

SCATTERED = ("reduce_scatter", "all_to_all")
"""Kinds that send an equal part of dim 0 to each rank."""

REDUCED = ("all_reduce", "reduce_scatter", "all_gather")
"""Kinds that a reduction over several axes is made of."""

GATHERED = ("all_gather", "all_to_all")
"""Kinds whose result has a part from each rank along dim 0."""
