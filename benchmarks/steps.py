"""A step of a tiny model of `transformers` in eager PyTorch: the first class, size and batch with which it trains."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import batches
import models
import tiny
import torch
import transformers
from torch.utils import _pytree as pytree

Row = dict[str, Any]

TOLERANCE = 1e-5
SEED = 5
EAGER_SECONDS = 45.0
"""What finding a size that trains may take, less than a process has in all."""
LARGEST_PARAMETERS = 25_000_000


@dataclass(frozen=True, kw_only=True)
class Trains:
    """A model that trains a step, and how it was made."""

    case: Any
    expected: Any
    random: bool
    how: Row


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def training(architecture: Any, errors: list[str]) -> Iterator[Trains]:
    """Sizes, classes and batches with which a step trains, the most wanted first."""
    ends = time.perf_counter() + EAGER_SECONDS
    default = transformers.models.auto.configuration_auto.CONFIG_MAPPING[architecture.name]
    for head, batch in architecture.classes:
        for scale, rules in enumerate(tiny.SCALES):
            for dtype in (torch.float64, torch.float32):
                if time.perf_counter() > ends:
                    return
                how = {"class": head, "batch": batch, "scale": scale, "dtype": str(dtype).removeprefix("torch.")}
                try:
                    config = tiny.Shrinking(rules=rules).config(default())
                    yield from _steps(getattr(transformers, head), config, dtype, batch, how, errors, ends)
                except Exception as error:
                    errors.append(f"{head}, scale {scale}, {how['dtype']}: {described(error)[:300]}{_line(error)}")
                    if isinstance(error, MemoryError):
                        return


def _line(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({last.filename}:{last.lineno})"


def _steps(
    head: Any, config: Any, dtype: Any, batch: str, how: Row, errors: list[str], ends: float
) -> Iterator[Trains]:
    def failed(error: Exception) -> None:
        errors.append(f"{how['class']}, scale {how['scale']}, {how['dtype']}: {described(error)[:300]}{_line(error)}")

    with torch.device("meta"):
        count = _parameters(head, config)
    if count > LARGEST_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    model = _still(head(config).to(dtype)).train()
    for kwargs in _batches(model, dtype, batch, failed):
        if time.perf_counter() > ends:
            return
        loss_fn = _squares if batch == tiny.WITHOUT_LOSS else None
        case = models.Case(model=model, batch=lambda step, kwargs=kwargs: ((), dict(kwargs)), loss_fn=loss_fn)
        try:
            if loss_fn is None:
                with torch.no_grad():
                    if getattr(model(**kwargs), "loss", None) is None:
                        raise ValueError("its output has no loss")
            models.perturbed(case)
            torch.manual_seed(SEED)
            expected = models.eager(case)
            torch.manual_seed(SEED + 1)
            other = models.eager(case)
            gradients = expected.gradients.values()
            if not all(g.isfinite().all() for g in gradients) or not any(g.any() for g in gradients):
                raise ValueError("its gradients are zero or not finite")
        except Exception as error:
            failed(error)
            continue
        random = any(not d <= TOLERANCE for d in models.differences(other, expected).values())
        yield Trains(case=case, expected=expected, random=random, how={**how, "parameters": count, "random": random})


def _batches(
    model: Any, dtype: torch.dtype, batch: str, failed: Callable[[Exception], None]
) -> Iterator[batches.Batch]:
    for turned in (False, True):
        try:
            yield from batches.Batches(model, dtype, turned).of(batch)
        except Exception as error:
            failed(error)


def _parameters(head: Any, config: Any) -> int:
    """How many, if the class can be built without them; 0 otherwise."""
    try:
        return sum(p.numel() for p in head(config).parameters())
    except (NotImplementedError, RuntimeError):
        return 0


def _still(model: Any) -> Any:
    """The model with every dropout at 0."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if "Dropout" in type(module).__name__ and hasattr(module, "p"):
            module.p = 0.0
    return model


def _squares(output: Any) -> Any:
    """The mean squares of all that is differentiable in an output."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum()
