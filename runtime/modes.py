"""Programs for the modes that a parallel module is called in after it was planned in one.

A captured graph holds one mode: which modules train (dropout, batch norm, whatever reads `self.training`), which
parameters take gradients, whether any do, and what autocast casts. A call in another mode, such as evaluation
between epochs, needs another graph. It is captured when it is first needed, from a copy of the model that has
shapes and no values, and planned with every parameter where it is, so that nothing is moved or held twice. Where a
program that there is computes the same, and maybe gradients that the mode does not ask for, nothing is planned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster.machine import Cluster
from autopar.ir.layout import Layout
from autopar.ir.program import Program
from autopar.passes.capture.captured import Captured, NothingTrainedError
from autopar.passes.capture.fakes import skeleton
from autopar.planning.meshes import mesh_of
from autopar.planning.planner import Planner, captured_for_planning

from .agree import all_equal, on_first_rank, together
from .verify import whole
from .versions import Mode, serves

logger = logging.getLogger("autopar")


class Modes:
    """Captures, plans and writes a program for a mode, on all ranks together."""

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        mesh: DeviceMesh,
        at_rest: Mapping[str, Layout],
        *,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        cluster: str | Cluster | None,
    ) -> None:
        self.model, self.captured, self.mesh, self.at_rest = skeleton(model), captured, mesh, at_rest
        self.loss_fn, self.cluster = loss_fn, cluster

    def __call__(
        self, mode: Mode, model: nn.Module, known: Sequence[Captured], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[Captured, Program | int]:
        """The step as it is captured in this mode from `model`, whose attributes may have changed, and from the
        `inputs` of a call, and its program, or which of the `known` ones has a program that serves it.

        Raises ValueError, the same on every rank, where the model cannot be captured in this mode, or the
        ranks call it in different ones."""
        all_equal(
            mode,
            self.mesh,
            "the ranks call the module in different modes: call train(), eval(), requires_grad_() and autocast() alike",
        )
        self.model = skeleton(model)
        for module, training in zip(self.model.modules(), mode.training, strict=True):
            module.training = training
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in mode.trainable)
        # Python may read values of inputs: a DTensor is gathered, on all ranks alike
        given = {path: whole(tensor) for path, tensor in inputs.items()}
        planner = found = program = None
        with together(self.mesh, ValueError):
            kind = self.mesh.device_type
            cast = torch.autocast(kind, dtype=mode.autocast, enabled=mode.autocast is not None)
            with torch.inference_mode(False), torch.set_grad_enabled(mode.gradients), cast:
                args, kwargs = self._example(given)
                captured = self._captured(args, kwargs)
                found = next((i for i, other in enumerate(known) if serves(other, captured)), None)
                if found is None:
                    planner = Planner(
                        self.model, mesh_of(self.mesh), args, kwargs,
                        loss_fn=self.loss_fn, cluster=self.cluster, device_type=kind, captured=captured,
                    )  # fmt: skip
        all_equal(
            found, self.mesh, f"the ranks captured different models for {mode}: give every rank the same versions"
        )
        logger.info("captured again, for %s%s", mode, "" if found is None else ", which a program that there is serves")
        if found is not None:
            return captured, found
        assert planner is not None
        find = planner.assignment_at
        assignment = on_first_rank(lambda: find(self.at_rest), self.mesh)
        with together(self.mesh, ValueError):
            program = planner.writer.written(assignment)
        assert program is not None
        return planner.captured, program

    def _captured(self, args: Any, kwargs: Any) -> Captured:
        def again() -> Captured:
            kind = self.mesh.device_type
            return captured_for_planning(self.model, args, kwargs, loss_fn=self.loss_fn, device_type=kind)

        try:
            return again()
        except NothingTrainedError:  # a mode need not train what the module does
            self.model.requires_grad_(False)
            return again()

    def _example(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """The inputs of a call, as those that the model was captured with."""
        differentiated = {o.target for o in self.captured.graph.outputs if o.role == "gradient"}
        leaves = [
            leaf.constant if leaf.meta is None else inputs[leaf.path].requires_grad_(leaf.path in differentiated)
            for leaf in self.captured.input_leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.captured.input_spec)
        return args, kwargs
