"""The setting of a search space: what options are judged by, and the cache of what they mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.cluster.machine import Cluster
from autopar.cost.optimizers import Optimizer
from autopar.cost.redistribute import Redistributor
from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Layout, Shape
from autopar.ops.rule import Load

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
    micro_batches: int = 1
    """Calls of a step, whose gradients are added up and reduced once."""
    holds: bool = False
    """Whether what forward gathers of parameters is kept from one micro-batch to the next."""
    in_flight: int = 1
    """Micro-batches between their forward and their backward. With several, what forward gathers and keeps is gathered
    once a step, and gradients are added up as they are before they are reduced."""
    reduced_in: torch.dtype | None = None
    """The dtype in which gradients of parameters are reduced, if not that in which they are computed."""
    load: Load = ()
    """How rows fall on experts."""
    memo: Memo = field(default_factory=Memo, repr=False)

    def __post_init__(self) -> None:
        """A setting derived from another one keeps its memo where all that it depends on is the same."""
        machine = self.cluster.device, self.redistributor.links
        training = self.micro_batches, self.reduced_in, self.in_flight
        of = self.mesh, machine, self.optimizer, self.metas, training, self.load
        if self.memo.of != of:
            object.__setattr__(self, "memo", Memo(of=of))

    @property
    def has_own_reductions(self) -> bool:
        """Whether gradients of parameters are reduced less often than others, or in a dtype of their own."""
        return self.micro_batches > 1 or self.reduced_in is not None
