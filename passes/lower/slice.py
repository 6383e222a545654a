"""Slice: products next to a collective run in slices, so that a slice is multiplied while others travel.

A gather whose result is multiplied, and a product whose result is reduced, wait for each other. In S slices (MeshSlice
3.1, Fig. 5) the collective of slice s + 1 is under way while slice s is multiplied. Which dataflow it is follows from
what is gathered and what is reduced: both operands gathered is output-stationary, one operand gathered and the result
scattered left- or right-stationary. Along a free dim slices of the result are laid side by side; along the dim that is
summed over they are added up, and both operands are cut alike: where their shares differ, into every S-th block
(blocked slicing, Algorithm 2). S = 1 is Collective, the program as it is.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.graph import CONTIGUOUS, WAIT, Node, producers, readers
from autopar.ir.layout import Split
from autopar.ir.program import LAYOUT
from autopar.ops.rule import call_of
from autopar.ops.rules import rule_of

from .adopt import InParts, Place, Way
from .regions import Metas

SLICES = (2, 3, 4, 8)
BEFORE = ("all_gather",)
"""Collectives whose result is multiplied."""
AFTER = ("reduce_scatter", "all_reduce")
"""Collectives that reduce a product."""
FINER = (2, 4, 8)
"""Where the full share is not a period for all that is cut, these parts of it are tried."""


def places(half: Sequence[Node], metas: Metas, wanted: Container[str] | None = None) -> Iterator[Place]:
    """Products next to collectives, with the ways to slice them; of some collectives, by the names of their results, or
    of all."""
    around = Around(half, metas)
    for position, instruction in enumerate(half):
        if wanted is not None and instruction.outputs[0] not in wanted:
            continue
        if instruction.collective in BEFORE:
            ways = tuple(_gathered(around, position))
        elif instruction.collective in AFTER:
            ways = tuple(_reduced(around, position))
        else:
            continue
        if ways:
            yield Place(collective=instruction.outputs[0], ways=ways)


class Around:
    """What stands around an instruction of a half."""

    def __init__(self, half: Sequence[Node], metas: Metas) -> None:
        self.half, self.metas = half, metas
        self.producer, self.readers = producers(half), readers(half)

    def is_product(self, position: int) -> bool:
        instruction = self.half[position]
        if instruction.collective or instruction.op == WAIT or instruction.op in LAYOUT or not instruction.inputs:
            return False
        rule = rule_of(call_of(instruction, self.metas))
        return rule is not None and rule.contraction

    def wait_of(self, position: int) -> int:
        (wait,) = self.readers[self.half[position].outputs[0]]
        return wait

    def ahead(self, name: str) -> tuple[set[int], set[int]]:
        """Views and copies that lead from a value to products, and these products."""
        steps, products = set[int](), set[int]()
        for reader in self.readers.get(name, ()):
            if self.half[reader].op in LAYOUT:
                more, behind = self.ahead(self.half[reader].outputs[0])
                if behind:
                    steps |= more | {reader}
                    products |= behind
            elif self.is_product(reader):
                products.add(reader)
        return steps, products

    def back(self, name: str) -> list[int]:
        """The views and copies that lead to a value, and what these start from; the nearest first."""
        chain = []
        while name in self.producer:
            position = self.producer[name]
            chain.append(position)
            if self.half[position].op not in LAYOUT:
                break
            name = self.half[position].inputs[0]
        return chain

    def start(self, collective: int) -> set[int]:
        """A collective, and the copy of its operand that nothing else reads."""
        name = self.half[collective].inputs[0]
        copy = self.producer.get(name)
        alone = copy is not None and self.half[copy].op == CONTIGUOUS and self.readers[name] == [collective]
        return {collective, copy} if alone and copy is not None else {collective}

    def reduction(self, product: int) -> set[int]:
        """The reduction that is all that becomes of a product, with what leads there, or nothing."""
        members: set[int] = set()
        readers = self.readers.get(self.half[product].outputs[0], [])
        while len(readers) == 1 and self.half[readers[0]].op in LAYOUT:
            members.add(readers[0])
            readers = self.readers.get(self.half[readers[0]].outputs[0], [])
        if len(readers) == 1 and self.half[readers[0]].collective in AFTER:
            return members | {readers[0], self.wait_of(readers[0])}
        return set()

    def gathers(self, product: int) -> set[int]:
        """The gathers that a product's operands come from, with what leads here."""
        members: set[int] = set()
        for name in self.half[product].inputs:
            chain = self.back(name)
            if chain and self.half[chain[-1]].op == WAIT:
                collective = self.producer.get(self.half[chain[-1]].inputs[0])
                if collective is not None and self.half[collective].collective in BEFORE:
                    members |= {*chain, *self.start(collective)}
        return members


def _gathered(around: Around, position: int) -> Iterator[Way]:
    wait = around.wait_of(position)
    steps, products = around.ahead(around.half[wait].outputs[0])
    if not products:
        return
    alone = around.start(position) | {wait} | steps | products
    scattered = alone.union(*(around.reduction(p) for p in products))
    both = alone.union(*(around.gathers(p) for p in products))
    seed = around.half[min(around.start(position))].inputs[0]
    shape = around.metas[seed].shape
    for dim, size in enumerate(shape):
        if size > 1:
            for members in (both, scattered):
                for finer in (1, *FINER) if members != alone else ():
                    if size % finer == 0:
                        yield Way(members=tuple(sorted(members)), seed=seed, cut=Split(dim, size // finer))
            yield Way(members=tuple(sorted(alone)), seed=seed, cut=Split(dim, size))


def _reduced(around: Around, position: int) -> Iterator[Way]:
    wait = around.wait_of(position)
    chain = around.back(around.half[position].inputs[0])
    if not chain or not around.is_product(chain[-1]):
        return
    results = [name for p in chain for name in around.half[p].outputs if name]
    if any(len(around.readers.get(name, ())) != 1 for name in results):
        return  # another result of it, such as a weight's gradient, would stay in parts
    seed = around.half[wait].outputs[0]
    for dim, size in enumerate(around.metas[seed].shape):
        if size > 1:
            yield Way(members=tuple(sorted({position, wait, *chain})), seed=seed, cut=Split(dim, size))


@dataclass(frozen=True, kw_only=True)
class Slice(InParts):
    """Products next to a collective run in slices."""

    places = staticmethod(places)
    numbers = SLICES
    name = "slice"


SLICING = Slice()
