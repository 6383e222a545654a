"""Checkpoints: what lies in the regions that a model's author marked is made again in backward.

As `torch.utils.checkpoint` does it: of a region, what comes in is kept, and backward runs the region's forward again,
as far as it needs something of it. In a region within a region, this holds once more: while the outer one runs again,
nothing of the inner one is kept but what comes in. Random operators read the same keys again, so that masks come out
the same.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.ir.graph import JointGraph, Node
from autopar.ir.rewrite import distinct, reading
from autopar.ir.rewriter import Rewriter

Region = tuple[int, ...]
"""The numbers of the checkpoints around a node, the outermost first."""

Copy = tuple[int, Region]
"""The index of a node of forward, and the region in which it is made again."""


def checkpoints(graph: JointGraph) -> JointGraph:
    """The graph in which backward makes again what lies in regions, and nothing knows of regions any more."""
    if not any(node.region for node in graph.nodes):
        return graph
    return _Checkpoints(graph=graph, metas=dict(graph.metas)).run()


@dataclass(eq=False, kw_only=True)
class _Checkpoints(Rewriter):
    made: dict[Copy, dict[str, str]] = field(default_factory=dict)
    """Of each copy, its results by those of the node that it makes again."""

    def run(self) -> JointGraph:
        written = {o.target for o in self.graph.outputs if o.role in ("mutation", "update")}
        overwritten = {i.name for i in self.graph.inputs if i.role in ("parameter", "buffer") and i.target in written}
        regions = self._regions(overwritten)
        middle = self.graph.first_backward
        for node in self.graph.nodes[:middle]:
            self.keep(node, region=())
        for node in self.graph.nodes[middle:]:
            names = self._again(node, None if node.sequence < 0 else node.region, regions)
            self.written.append(reading(node, names, region=()))
        return self.done()

    def _regions(self, overwritten: set[str]) -> list[Region]:
        """Where each node of forward lies. What reads a buffer that forward writes could not be made again: it lies
        outside, as if the region had given it."""
        nodes = self.graph.nodes[: self.graph.first_backward]
        return [() if overwritten.intersection(node.inputs) else node.region for node in nodes]

    def _again(self, node: Node, region: Region | None, regions: list[Region]) -> dict[str, str]:
        """What a node of backward reads in place of values of forward; what is missing of that is written."""
        wanted = self._reads(node, region, regions)
        waiting, missing = list(wanted.values()), set[Copy]()
        while waiting:
            copy = waiting.pop()
            if copy not in self.made and copy not in missing:
                missing.add(copy)
                waiting += self._reads(self.graph.nodes[copy[0]], copy[1], regions).values()
        for copy in sorted(missing):
            self._write(copy, regions)
        return {name: self.made[copy][name] for name, copy in wanted.items()}

    def _reads(self, node: Node, region: Region | None, regions: list[Region]) -> dict[str, Copy]:
        """What a node in a region reads of copies. None: a node that lies wherever its operands do."""
        copies: dict[str, Copy] = {}
        for name in node.inputs:
            index = self.graph.producer.get(name)
            if index is not None and index < len(regions):
                around = regions[index] if region is None else common(regions[index], region)
                if around:
                    copies[name] = index, around
        return copies

    def _write(self, copy: Copy, regions: list[Region]) -> None:
        node = self.graph.nodes[copy[0]]
        reads = self._reads(node, copy[1], regions)
        names = {name: self.made[other][name] for name, other in reads.items()}
        fresh: dict[str, str] = {}
        for output in filter(None, node.outputs):
            fresh[output] = distinct(f"{output}_again", self.metas)
            self.metas[fresh[output]] = self.graph.metas[output]
        self.made[copy] = fresh
        outputs = tuple(fresh.get(output, "") for output in node.outputs)
        self.written.append(reading(node, names, outputs=outputs, backward=True, serves=node.name, region=()))


def common(one: Iterable[int], other: Iterable[int]) -> Region:
    """The regions around both of two nodes."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(number for number, _ in alike)
