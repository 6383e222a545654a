"""Trainer, Accelerate and Lightning train a parallel module as they train a model on one process: accumulation,
clipping, evaluation, autocast, checkpoints that are resumed on another mesh."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import whole
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.compat.lazy import computation_of

accelerate = pytest.importorskip("accelerate")
sys.path.append(str(Path(__file__).parents[2] / "examples"))

VOCABULARY = 67


def as_torchrun(ranks: bool) -> None:
    """What torchrun tells its processes, or nothing."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    if ranks:
        os.environ.update(zip(names, (rank, rank, size, size, "127.0.0.1", "29577"), strict=True))
    else:
        dist.destroy_process_group()


def mesh_of(shape: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


# -- transformers


def examples(count: int) -> list[dict[str, torch.Tensor]]:
    """Each with another number of labels."""
    ids = torch.randint(VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(count))
    return [{"input_ids": row, "labels": row.where(torch.arange(8) >= i % 5, -100)} for i, row in enumerate(ids)]


TRAINED, EVALUATED = 38, 7
"""Examples: of the last batch, there are 2 in training and 3 in evaluation, not 4."""


def arguments(folder: Path, steps: int, bf16: bool, rows: int = 4) -> Any:
    """`rows` of a micro-batch, of which as many make a step as 16 examples need."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=rows, per_device_eval_batch_size=4, max_steps=steps,
        bf16=bf16, gradient_accumulation_steps=16 // rows, learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.5,
        warmup_steps=2, eval_strategy="steps", eval_steps=steps // 2, save_steps=steps // 2, logging_steps=1,
        use_cpu=True, report_to=[], disable_tqdm=True, log_level="error",
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


Trained = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def history(trainer: Any) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "eval_loss", "learning_rate", "epoch")
    return [{name: float(entry[name]) for name in kept if name in entry} for entry in trainer.state.log_history]


def trained_alone(folder: Path, steps: int = 6, bf16: bool = True, rows: int = 4) -> Trained:
    as_torchrun(False)
    from transformers import Trainer

    args: Any = arguments(folder, steps, bf16, rows)
    data: Any = {"train_dataset": examples(TRAINED), "eval_dataset": examples(EVALUATED)}
    trainer = Trainer(llama(), args, **data)
    trainer.train()
    return history(trainer), {name: p.detach() for name, p in trainer.model.named_parameters()}


def trained(folder: Path, steps: int = 6, bf16: bool = True, others: tuple[str, ...] = ("fsdp",)) -> list[Trained]:
    """In one go under fsdp, and resumed half way with each of other plans."""
    as_torchrun(True)
    from autopar.integrations.transformers import Trainer

    said: list[str] = []
    logging.getLogger("autopar").addFilter(lambda record: said.append(record.getMessage()) or True)
    batch = examples(TRAINED)[:4]
    example = {name: torch.stack([each[name] for each in batch]) for name in batch[0]}
    example["num_items_in_batch"] = torch.tensor(1.0)
    found = []
    checkpoint = str(folder / "whole" / f"checkpoint-{steps // 2}")
    for solver, resume in (("fsdp", None), *((other, checkpoint) for other in others)):
        args = arguments(folder / (f"resumed with {solver}" if resume else "whole"), steps, bf16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            model = autopar.parallelize(llama(), mesh_of((2,)), kwargs=example, solver=solver)
        trainer = Trainer(model, args, train_dataset=examples(TRAINED), eval_dataset=examples(EVALUATED))
        trainer.train(resume_from_checkpoint=resume)
        found.append((history(trainer), {name: whole(p.detach()) for name, p in model.named_parameters()}))
    assert not any("captured and planned again" in line for line in said)
    return found


def assert_same(found: Trained, expected: Trained, tolerance: float) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        assert one == pytest.approx(other, rel=tolerance)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=tolerance)


def test_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers.trainer")  # which ranks inherit
    expected = run(1, trained_alone, tmp_path / "alone")[0]
    found = run(2, trained, tmp_path)
    assert found[0][0][0] == found[1][0][0]
    in_one_go, again = found[0]
    assert_same(in_one_go, expected, 2e-3)  # of bfloat16
    assert_same(again, in_one_go, 0.0)


def refused() -> None:
    import transformers

    from autopar.integrations.transformers import Trainer

    with pytest.raises(ValueError, match=r"model is a Linear: give what autopar\.parallelize returns"):
        Trainer(nn.Linear(2, 2))
    assert issubclass(Trainer, transformers.Trainer)
    from autopar.integrations.accelerate import Accelerator

    with pytest.raises(ValueError, match="there are 2 ranks, and Accelerate sees 1: start them with torchrun"):
        Accelerator(cpu=True)


def test_what_they_refuse() -> None:
    run(2, refused)


# -- Accelerate


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def looped(accelerator: Any, model: nn.Module, folder: Path, epochs: range) -> list[float]:
    """A loop as Accelerate's pages have it, with a smaller last batch and an evaluation each epoch. The state is saved
    after the first epoch, and loaded where that is past."""
    data = torch.utils.data.TensorDataset(torch.randn(22, 6, generator=torch.Generator().manual_seed(1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    evaluated: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data.tensors[0][:7]), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    evaluated = accelerator.prepare(evaluated)
    if epochs.start:
        accelerator.load_state(folder)
    found = []
    for epoch in epochs:
        loader.set_epoch(epoch)
        model.train()
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = accelerator.gather(model(x)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append(float(accelerator.gather_for_metrics(loss.detach().reshape(1)).mean()))
        model.eval()
        losses = []
        for (x,) in evaluated:  # a batch's mean counts for each of its samples
            with torch.no_grad():
                loss = accelerator.gather(model(x)).square().mean()
            losses.append(accelerator.gather_for_metrics(loss.repeat(4)))
            assert accelerator.gather_for_metrics([*x.tolist()]) == x.tolist()
        found.append(float(torch.cat(losses).mean()))
        assert len(torch.cat(losses)) == 7
        if epoch == 0:
            accelerator.save_state(folder)
    return found


def precision(bf16: bool) -> Any:
    return {"mixed_precision": "bf16" if bf16 else "no", "gradient_accumulation_steps": 4, "cpu": True}


def accelerated_alone(folder: Path, epochs: int = 3, bf16: bool = False) -> list[float]:
    as_torchrun(False)
    return looped(accelerate.Accelerator(**precision(bf16)), network(), folder, range(epochs))


def accelerated(folder: Path, mesh: tuple[int, ...], solver: str, epochs: range, bf16: bool = False) -> list[float]:
    as_torchrun(True)
    from autopar.integrations.accelerate import Accelerator

    accelerator = Accelerator(**precision(bf16))
    with accelerator.autocast():
        model = autopar.parallelize(network(), mesh_of(mesh), (torch.zeros(4, 6),), solver=solver)
    return looped(accelerator, model, folder, epochs)


def test_accelerate(tmp_path: Path) -> None:
    expected = run(1, accelerated_alone, tmp_path / "alone")[0]
    found = run(2, accelerated, tmp_path / "state", (2,), "fsdp", range(3))[0]
    assert found == pytest.approx(expected, rel=1e-5)
    resumed = run(4, accelerated, tmp_path / "state", (2, 2), "megatron", range(1, 3))[0]
    assert resumed == pytest.approx(expected[-len(resumed) :], rel=1e-5) and len(resumed) == len(expected) * 2 // 3


# -- Lightning


Fitted = tuple[dict[str, float], dict[str, torch.Tensor], str]


def fitted(folder: Path, ranks: int, epochs: int, resume: str | None = None, bf16: bool = False) -> Fitted:
    as_torchrun(ranks > 1)
    import train_lightning

    precision = "bf16-mixed" if bf16 else "32-true"
    model, trainer = train_lightning.Classifier("fsdp"), train_lightning.trainer(folder, ranks, epochs, precision)
    trainer.fit(model, train_lightning.loader(8), train_lightning.loader(2), ckpt_path=resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    values = {name: whole(p.detach()) for name, p in model.network.named_parameters()}
    checkpoints: Any = trainer.checkpoint_callback
    return metrics, values, checkpoints.best_model_path


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    expected = run(1, fitted, tmp_path / "alone", 1, 4)[0]
    checkpoint = run(2, fitted, tmp_path / "first", 2, 2)[0][2]
    metrics, values, _ = run(2, fitted, tmp_path / "second", 2, 4, checkpoint)[0]
    assert metrics == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[1].items():
        torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5)


def reduced_after_each_backward(folder: Path) -> list[bool]:
    as_torchrun(True)
    import train_lightning

    model, trainer = train_lightning.Classifier("fsdp"), train_lightning.trainer(folder, 2, 1)
    found: list[bool] = []
    reduced = lambda p: p.grad is not None and computation_of(p.grad) is None  # noqa: E731
    model.on_after_backward = lambda: found.append(any(map(reduced, model.parameters())))  # type: ignore[method-assign]
    trainer.fit(model, train_lightning.loader(8))
    return found


def test_lightning_reduces_once_a_step(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    found = run(2, reduced_after_each_backward, tmp_path)
    assert found == [[False, False, False, True] * 2] * 2
