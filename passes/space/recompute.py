"""Recompute: what a copy of a repeated segment recomputes in backward, where it keeps nothing but its borders.

A choice for each copy (activation checkpointing): its forward, or as much of it as backward needs, runs once more, with
the collectives in it, from the borders, parameters and inputs that are there. Random masks come out the same, being
functions of a key and of global indices.
"""

from .sites import Recomputed, Region


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
    return Recomputed(frozenset(again), frozenset(roots.union(entering)))
