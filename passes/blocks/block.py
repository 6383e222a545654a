"""What a graph's ParallelBlocks are, and what stands beside them: free groups and shared input branches."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

BranchKind = Literal["parameter", "constant"]
"""What an operand that is no activation comes from: parameters alone, or neither (mask, cos and sin)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDim:
    """One way to split a block (CFP Fig. 5a): the digit (i // block) % count of dim `dim` of its first
    contraction's result, that is with period block * count in at most `count` pieces. `dim` None is
    the sum that the contraction computes."""

    factor: str
    dim: int | None
    block: int
    count: int

    def __str__(self) -> str:
        return (
            f"{self.factor}: {self.count} x {self.block}"
            if self.dim is not None
            else f"{self.factor}: sum of {self.count}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelBlock:
    """`merged` are the contractions that it grew from (one, or several that share their input),
    `contractions` all of its forward contractions, `nodes` everything in it: backward too, and what makes operands that
    are no activations for it alone (CFP Fig. 5b)."""

    name: str
    merged: tuple[int, ...]
    contractions: tuple[int, ...]
    nodes: tuple[int, ...]
    dims: tuple[BlockDim, ...]

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.dims))
        return f"{self.name}: {len(self.contractions)} contractions, {len(self.nodes)} nodes, splits {dims or 'none'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeGroup:
    """Operators that no contraction claims, with options of their own; `reason` says why."""

    name: str
    nodes: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {len(self.nodes)} nodes, {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGroup:
    """Operators on input branches of several groups (CFP Fig. 5c): their split must suit all `readers`."""

    nodes: tuple[int, ...]
    readers: tuple[str, ...]
    kind: BranchKind

    def __str__(self) -> str:
        return f"{self.kind} of {', '.join(self.readers) or 'nobody'}: {len(self.nodes)} nodes"


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Every node of the graph is in exactly one block, free group or shared group."""

    ranks: int
    merge: bool
    blocks: tuple[ParallelBlock, ...]
    free: tuple[FreeGroup, ...]
    shared: tuple[SharedGroup, ...]

    @cached_property
    def home(self) -> dict[int, ParallelBlock | FreeGroup | SharedGroup]:
        """The group of each node."""
        groups: list[ParallelBlock | FreeGroup | SharedGroup] = [*self.blocks, *self.free, *self.shared]
        return {i: group for group in groups for i in group.nodes}

    def __str__(self) -> str:
        lines = [f"{len(self.blocks)} blocks for {self.ranks} ranks, {'merged' if self.merge else 'unmerged'}"]
        for title, groups in (("block", self.blocks), ("free", self.free), ("shared", self.shared)):
            lines += [f"{title} {group}" for group in groups]
        return "\n".join(lines)
