"""The start of a descent by ParallelBlocks (CFP Algorithm 1): data parallel on the slower axes, split blocks on the
fastest.

A descent frees one axis at a time, so its end depends on what the first axes choose while the others are still
replicated. Before any solve, blocks show what a model splits without communication, layer after layer.
"""

from collections.abc import Sequence

from autopar.ir.layout import Split
from autopar.passes.blocks.block import Blocks
from autopar.passes.space.choices import SiteChoice
from autopar.passes.space.propagation import Propagation, Reached, reached
from autopar.passes.space.sites import Site
from autopar.passes.space.space import Space

from .options import Options


def split_blocks(space: Space, sites: Sequence[Site], blocks: Blocks, ranks: int) -> Reached:
    """Where the splits of blocks travel on an axis. Block after block, one that no earlier split reaches splits the
    first dim of its contractions' results that batch and sequence do not split. A split that ends in the sum of a block
    is that block's, so that rows of the next weight follow columns of this one."""
    by_name = {site.name: site for site in sites}
    inputs = [site for site in sites if site.kind == "input" and site.meta and site.meta.shape]
    rows = reached(
        space,
        ranks,
        [(s.name, Split(dim, size)) for s in inputs if s.meta for dim, size in enumerate(s.meta.shape[:2])],
    )
    splits = Propagation(space, ranks)
    for block in blocks.blocks:
        for contraction in block.merged:
            node = space.graph.nodes[contraction]
            site = by_name.get(node.name)
            if site is None or site.rule is None or splits.seeds[site.key]:
                continue
            by_rows = {site.rule.factors[number].name for number, _ in rows.factors.get(site.key, {})}
            for dim in block.dims:
                if dim.dim is not None and dim.factor not in by_rows and dim.count % ranks == 0:
                    splits.digit(node.name, Split(dim.dim, dim.block * dim.count))
                    break
    return Reached(splits.seeds, splits.digits)


def by_blocks(options: Options, blocks: Blocks, axis: int) -> dict[str, list[SiteChoice]]:
    """Every site splits by the batch on all axes but one, on which operators split as their blocks do."""
    space = options.space
    travel = split_blocks(space, list(options.sites.values()), blocks, space.mesh[axis])
    chosen = {}
    for name, (choice,) in options.batch(without=axis).items():
        site = options.sites[name]
        for part in travel.choices(site) if site.kind == "op" else ():
            split = choice.on(axis, part)
            if part in options.offered(site, axis) and space.option(site, split) is not None:
                choice = split
                break
        chosen[name] = [choice]
    return chosen
