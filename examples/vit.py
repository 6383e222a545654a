"""A vision transformer of Hugging Face, written for one device, and trained to name colours on a 2 x 2 mesh of gloo
ranks.

    torchrun --standalone --nproc-per-node 4 examples/vit.py

At the end the same model is trained on one process with plain PyTorch, and the two are compared.
"""

from __future__ import annotations

import argparse

import torch
from moe import Loss
from torch import nn
from training import Batch, compare
from transformers import ViTConfig, ViTForImageClassification

CLASSES = 8


def vit(size: int, hidden: int, layers: int) -> nn.Module:
    """Patches of 8 x 8; the same on every rank. Dropout is 0, since plain PyTorch would draw other numbers."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=size,
        patch_size=8,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Loss(ViTForImageClassification(config))


def batches(steps: int, batch: int, size: int) -> list[Batch]:
    """Noise in which each of the three colours is strong or weak: eight classes. The same on every rank."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(steps):
        labels = torch.randint(CLASSES, (batch,), generator=generator)
        strong = (labels[:, None] // torch.tensor([1, 2, 4])) % 2
        images = torch.randn(batch, 3, size, size, generator=generator) + strong[:, :, None, None]
        made.append({"pixel_values": images, "labels": labels})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small vision transformer on a 2 x 2 mesh of gloo ranks.")
    parser.add_argument("--steps", type=int, default=20, help="at least 2")
    parser.add_argument("--batch", type=int, default=16, help="images in the global batch")
    parser.add_argument("--size", type=int, default=32, help="height and width of an image")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--solver", default="dp", help="dp, ilp, or a preset: ddp, fsdp, megatron, megatron_sp")
    options = parser.parse_args()
    model = vit(options.size, options.hidden, options.layers)
    compare(model, batches(options.steps, options.batch, options.size), options.solver)


if __name__ == "__main__":
    main()
