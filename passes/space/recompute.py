"""Recompute: what a copy of a repeated segment recomputes in backward, where it keeps nothing but its borders.

A choice for each copy (activation checkpointing): its forward, or as much of it as backward needs, runs once more, with
the collectives in it, from the borders, parameters and inputs that are there. Random masks come out the same, being
functions of a key and of global indices.
"""

from .sites import Region


def recomputed(region: Region) -> frozenset[str]:
    """Names of the operators of a segment's forward that backward needs something of, itself or through others."""
    makers = {
        root: site
        for site in region.sites.values()
        if site.kind == "op" and not site.backward and not site.made
        for root in site.makes
    }
    waiting = [read.alias.root for site in region.sites.values() for read in site.reads if read.backward]
    names: set[str] = set()
    while waiting:
        site = makers.get(waiting.pop())
        if site is not None and site.name not in names:
            names.add(site.name)
            waiting += [read.alias.root for read in site.reads]
    return frozenset(names)


def reacquired(region: Region) -> frozenset[str]:
    """Roots that are brought to the layouts of their readers again: what is recomputed, and the forward borders on
    the left, of which only what crosses is kept."""
    again = recomputed(region)
    roots = {root for name in again for root in region.sites[name].makes if root}
    entering = (s.name for s in region.sites.values() if s.kind == "border" and not s.backward and not s.reads)
    return frozenset(roots.union(entering))
