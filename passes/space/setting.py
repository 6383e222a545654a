"""The setting of a search space: what options are judged by, and what was worked out for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.cluster.machine import Cluster
from autopar.cost.optimizers import Optimizer
from autopar.cost.redistribute import Redistributor
from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Layout, Shape

from .choices import SiteChoice
from .sites import Option


@dataclass(slots=True, eq=False)
class Memo:
    """What choices mean, as far as anybody asked, in the setting that it is `of`."""

    of: Any = None
    options: dict[str, dict[SiteChoice, Option | None]] = field(default_factory=dict)
    """Key of a site -> choice -> what it means, or None if it is not legal."""
    layouts: dict[tuple[int, SiteChoice], tuple[tuple[Layout, ...], tuple[Layout, ...]] | None] = field(
        default_factory=dict
    )
    """(form of an op, choice) -> the layouts of operands and results, or None if they are not legal."""
    local_seconds: dict[tuple[int, tuple[bool, ...], SiteChoice], float] = field(default_factory=dict)
    """(form of an op, its operands with zeros as padding, choice) -> seconds of the local work."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What options are judged by: the mesh, the machine, the optimizer and the tensors."""

    mesh: Shape
    cluster: Cluster
    optimizer: Optimizer
    redistributor: Redistributor
    metas: Mapping[str, TensorMeta]
    memo: Memo = field(default_factory=Memo, repr=False)

    def __post_init__(self) -> None:
        """A setting that was made of another one keeps its memo where all that it depends on is the same."""
        of = self.mesh, self.cluster.device, self.optimizer, self.redistributor.links, self.metas
        if self.memo.of != of:
            object.__setattr__(self, "memo", Memo(of=of))
