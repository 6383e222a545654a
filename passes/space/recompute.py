"""Recompute: what a copy of a repeated segment recomputes in backward, where it keeps nothing but its borders.

A choice for each copy (activation checkpointing): its forward, or as much of it as backward needs, runs once more, with
the collectives in it, from the borders, parameters and inputs that are there. Random masks come out the same, being
functions of a key and of global indices.
"""

from collections.abc import Sequence

from autopar.solve.problem import Tensor, Variable

from .sites import Recomputed, Region

SWITCH = "recompute"
"""The variable of a body that says whether a copy is recomputed in backward."""


class Recomputable(Recomputed):
    """As a choice: a copy that is recomputed reads some tensors in forward and again in backward, and acquires them
    twice; one that is not acquires them once."""

    __slots__ = ()

    def switched(self, variables: Sequence[Variable]) -> tuple[Sequence[Variable], Sequence[Tensor]]:
        switch = Variable(name=SWITCH, options=("no", "yes"), seconds=(0.0, 0.0), bytes=(0.0, 0.0))
        numbers = [number for number, variable in enumerate(variables) if variable.name in self.operators]
        return (switch,), [_twice(variables[number], number, len(variables)) for number in numbers]


def recomputed(region: Region) -> Recomputed:
    """The operators of a segment's forward that backward needs something of, itself or through others; and the roots
    that are brought to the layouts of their readers again: what is recomputed, and the forward borders on the left, of
    which only what crosses is kept. Nothing, if no operator can be recomputed."""
    makers = {
        root: site
        for site in region.sites.values()
        if site.kind == "op" and not site.backward and not site.made
        for root in site.makes
    }
    waiting = [read.alias.root for site in region.sites.values() for read in site.reads if read.backward]
    again: set[str] = set()
    while waiting:
        site = makers.get(waiting.pop())
        if site is not None and site.name not in again:
            again.add(site.name)
            waiting += [read.alias.root for read in site.reads]
    if not again:
        return Recomputed()
    roots = {root for name in again for root in region.sites[name].makes if root}
    entering = (s.name for s in region.sites.values() if s.kind == "border" and not s.backward and not s.reads)
    return Recomputable(frozenset(again), frozenset(roots.union(entering)))


def _twice(variable: Variable, number: int, switch: int) -> Tensor:
    """What an operator costs once more where the copy is recomputed, as a tensor between it and the switch."""
    seconds: dict[float, int] = {}
    codes = tuple(seconds.setdefault(of_option, len(seconds)) for of_option in variable.seconds)
    costs = {(code, again): (again * one, 0.0) for one, code in seconds.items() for again in (0, 1)}
    return Tensor(
        name=f"{variable.name} again",
        producer=number,
        produced=codes,
        consumers=(switch,),
        wanted=((0, 1),),
        costs=costs,
    )
