"""Regions that a model's author marked with `torch.utils.checkpoint`, and where the nodes of a trace lie in them."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils.checkpoint import CheckpointFunction

from .patching import patched

REGION = "autopar_region"


class Regions:
    """The regions that were entered while a model was traced: `count` of them, and those around what is traced now."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.around: tuple[int, ...] = ()
        self.count = 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Within it lies one more region; each call of a checkpoint is one of its own."""
        outside = self.around
        self.around = (*outside, next(self.numbers))
        self.count += 1
        try:
            with annotate({REGION: self.around}):
                yield
        finally:
            self.around = outside


@contextlib.contextmanager
def plain_checkpoints() -> Iterator[Regions]:
    """A checkpoint runs its function twice for memory's sake: here it runs once, within a region. Where no argument
    of a reentrant one requires a gradient, the results have none, as those of the original. One that is not reentrant
    packs what is saved in hooks, which run without gradients: the record of a checkpoint in another one would keep that
    mode for all that follows."""
    regions = Regions()

    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        wanted = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()), regions.entered():
            return function(*args)

    with (
        patched(CheckpointFunction, "apply", staticmethod(apply)),
        patched(torch.utils.checkpoint, "_checkpoint_hook", lambda frame: regions.entered()),
    ):
        yield regions


def kept_regions(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Within it nodes that are traced say in which regions they lie, if that is wanted."""
    return preserve_node_meta() if wanted else contextlib.nullcontext()


def settle_regions(module: fx.GraphModule) -> None:
    """Leave nothing but regions of what `kept_regions` keeps: the second trace has numbers of its own for the rest."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            node.meta.pop("seq_nr", None)
            kept = node.meta.pop("custom", None) or {}
            if REGION in kept:
                node.meta["custom"] = {REGION: kept[REGION]}


def region_of(node: fx.Node) -> tuple[int, ...]:
    """The numbers of the regions around a node, the outermost first."""
    return tuple((node.meta.get("custom") or {}).get(REGION, ()))
