"""Where a digit travels from given roots: what presets split by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.layout import Split

from .choices import AxisChoice
from .propagation import Propagation
from .sites import Site
from .space import Space


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a digit travels: the factors of operators (by key of the site), and the splits of roots."""

    factors: Mapping[str, Mapping[tuple[int, int], None]]
    splits: Mapping[str, Mapping[Split, None]]

    def choices(self, site: Site) -> tuple[AxisChoice, ...]:
        """The choices of an operator that split by the digit."""
        return tuple(AxisChoice("S", number, period) for number, period in self.factors.get(site.key, {}))


def reached(space: Space, ranks: int, starts: Sequence[tuple[str, Split]]) -> Reached:
    """Where the given splits of roots lead, along operators and views that preserve them."""
    fixpoint = Propagation(space, ranks)
    for root, split in starts:
        fixpoint.digit(root, split)
    return Reached(fixpoint.seeds, fixpoint.digits)
