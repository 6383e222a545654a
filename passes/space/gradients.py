"""Gradients of parameters, up to their reduction: what the micro-batches of a step reduce once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autopar.ops.kinds import ADD

from .sites import Region, Site


def gradients_of(regions: Iterable[Region]) -> frozenset[str]:
    """`_gradients_of` all of these."""
    return frozenset(root for region in regions for root in _gradients_of(region))


def _gradients_of(region: Region) -> Iterator[str]:
    """Roots of a region that only parameters read, whose gradients they are, and sums of two of the same dtype that are
    such a root themselves. (As `passes.lower.accumulate` takes them: the sum of what is reduced is the reduced sum.)"""
    readers: dict[str, list[Site]] = {}
    makers: dict[str, Site] = {}
    for site in region.sites.values():
        makers.update((root, site) for root in site.makes if root)
        for read in site.reads:
            readers.setdefault(read.alias.root, []).append(site)
    known: set[str] = set()

    def ends(site: Site) -> bool:
        return site.kind == "parameter" or (_adds(site) and known.issuperset(filter(None, site.makes)))

    waiting = [root for site in region.sites.values() if site.kind == "parameter" for root in _read(site)]
    while waiting:
        root = waiting.pop()
        maker = makers.get(root)
        if root not in known and maker is not None and maker.backward and all(map(ends, readers[root])):
            known.add(root)
            waiting += _read(maker) if _adds(maker) else ()
    yield from known


def _read(site: Site) -> list[str]:
    return [read.alias.root for read in site.reads]


def _adds(site: Site) -> bool:
    node, call = site.node, site.call
    if node is None or call is None or node.op != ADD or node.kwargs or len(call.inputs) != 2:
        return False
    return len({meta.dtype for meta in (*call.inputs, call.output)}) == 1
