"""The step that is planned: a model as it is captured, and rewritten for every mesh alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.cluster.machine import Cluster
from autopar.ops.experts import loaded
from autopar.ops.rules import rule_of
from autopar.passes.capture.captured import Captured
from autopar.passes.flow import CAPTURE, CHECKPOINTS, MASKS, ROUTING, SEEDS, Flow

from .training import Training

logger = logging.getLogger("autopar")


def captured_for_planning(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    device_type: str | None = None,
    flow: Flow | None = None,
    training: Training | None = None,
) -> Captured:
    """What `capture` returns, with random operators that read keys, experts' rows in the order of tokens, attention
    without masks that are known, and, if that is asked for, what lies in checkpoints made again in backward."""
    flow = Flow() if flow is None else flow
    training = training or Training()
    asked = training.recompute == "asked"
    captured = flow.run(
        CAPTURE, model, args, kwargs,
        loss_fn=loss_fn, device_type=device_type, precision=training.precision,
    )  # fmt: skip
    used_in = {meta.dtype: None for meta in map(captured.graph.metas.__getitem__, captured.graph.parameters.values())}
    training.precision.check_narrower(*(dtype for dtype in used_in if dtype.is_floating_point))
    in_order = flow.run(ROUTING, flow.run(SEEDS, captured.graph), rule_of)
    graph = flow.run(MASKS, in_order, rule_of)
    if asked:
        if not captured.checkpoints:
            logger.warning(
                "recompute is 'asked', and %s calls torch.utils.checkpoint nowhere: nothing is made again in backward "
                "(models of Hugging Face do after gradient_checkpointing_enable() and train())",
                type(model).__name__,
            )
        graph = flow.run(CHECKPOINTS, graph)
    return replace(captured, graph=loaded(graph, training.imbalance))


def check_autocast(captured: Captured, device_type: str, cluster: Cluster, kind: str) -> None:
    """Raises ValueError where a step that was captured under autocast for one type of device is to run on another."""
    if captured.autocast is not None and kind != device_type:
        raise ValueError(
            f"the model was captured under autocast for {device_type}, and cluster {cluster.name} has {kind}, where "
            f"autocast casts other operators: plan for that cluster alone"
        )
