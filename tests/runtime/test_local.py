"""Local batches: what a DistributedSampler's slice gives on each rank trains as the global batch does on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import assert_close, whole
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

import autopar

ROWS, LENGTH, WORDS = 8, 4, 12
IDS = torch.randint(WORDS, (20, LENGTH), generator=torch.Generator().manual_seed(0))
DATA = [{"ids": row, "labels": row.roll(-1)} for row in IDS]
SCALE = torch.linspace(0.5, 2, WORDS)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(
        self, ids: torch.Tensor, scale: torch.Tensor, labels: torch.Tensor | None = None, mask: Any = None
    ) -> Any:
        logits = self.head(torch.tanh(self.embed(ids))) * scale
        if mask is not None:
            logits = logits * mask[..., None]
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


CONSTRAINTS: dict[str, dict[str, dict[str, str]]] = {
    "alike": {"ids": {"a": "S(0)", "b": "R"}, "labels": {"a": "S(0)", "b": "R"}},
    "apart": {"ids": {"a": "S(0)", "b": "R"}, "labels": {"a": "R", "b": "S(0)"}},
    "lengths": {"ids": {"a": "S(1)", "b": "R"}, "labels": {"a": "S(1)", "b": "R"}},
}
"""One way and another in which a plan may split the two inputs."""

SIZES = {"alike": 2, "apart": 4, "lengths": 1}


def epoch(way: str) -> None:
    """An epoch with a last batch that is smaller, and evaluations without labels."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    example = {"ids": IDS[:ROWS], "labels": IDS[:ROWS], "scale": SCALE}
    beside = Tagger()
    module = autopar.parallelize(Tagger(), mesh, kwargs=example, constraints=CONSTRAINTS[way])
    size = module.data_size
    assert size == SIZES[way]
    sampler: Any = DistributedSampler(DATA, num_replicas=size, rank=module.data_rank, shuffle=False)  # type: ignore[arg-type]
    wholes = DataLoader(DATA, batch_size=ROWS)  # type: ignore[arg-type, var-annotated]
    parts = DataLoader(DATA, batch_size=ROWS // size, sampler=sampler)  # type: ignore[arg-type, var-annotated]
    for part, given in zip(parts, wholes, strict=True):
        sharded = module.shard_batch({**part, "scale": SCALE})
        assert isinstance(sharded["ids"], DTensor) == (size > 1) and not isinstance(sharded["scale"], DTensor)
        loss, expected = module(**sharded), beside(**given, scale=SCALE)
        assert_close(whole(loss), expected.detach(), "loss")
        loss.backward(), expected.backward()
        if way != "apart":
            continue
        with torch.no_grad():
            mask = (part["ids"] > 2).float()
            ids, scale, kept = module.shard_batch((part["ids"], SCALE, mask))
            logits = whole(module(ids, scale, mask=kept))
            inputs = torch.cat([whole(ids)]) if size > 1 else part["ids"]
            assert_close(logits, beside(inputs, SCALE, mask=(inputs > 2).float()), "logits")
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for name, parameter in beside.named_parameters():
        assert_close(whole(gradients[name]), parameter.grad, f"gradient of {name}")


@pytest.mark.parametrize("way", CONSTRAINTS)
def test_an_epoch_of_a_distributed_sampler(way: str) -> None:
    run(4, epoch, way)


WRONG = {
    "unequal parts": r"ranks 0, 1: .*ids int64\[6, 4\].*ranks 2, 3: .*ids int64\[8, 4\]",
    "same part": "input kwargs.ids differs between ranks",
    "unequal inputs": "different numbers of rows: kwargs.ids has 3, kwargs.labels has 2",
    "no batch": "no input of kwargs.words int64",
}


def wrong() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    example = {"ids": IDS[:ROWS], "labels": IDS[:ROWS], "scale": SCALE}
    module = autopar.parallelize(Tagger(), mesh, kwargs=example, constraints=CONSTRAINTS["alike"])
    for what, message in WRONG.items():
        rows = 4 if what == "unequal parts" and module.data_rank else 3
        ids = IDS[module.data_rank :][:rows] + (what == "same part" and torch.distributed.get_rank() == 3)
        batch: Any = {"ids": ids, "labels": ids, "scale": SCALE}
        if what == "unequal inputs":
            batch["labels"] = ids[:2]
        if what == "no batch":
            batch = {"words": ids}
        with pytest.raises(ValueError, match=message):
            module(**module.shard_batch(batch))


def test_local_batches_that_are_refused() -> None:
    run(4, wrong)
