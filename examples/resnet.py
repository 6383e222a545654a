"""A ResNet of basic blocks (He et al. 2016), written for one device, and trained on a 2 x 2 mesh of gloo ranks.

    torchrun --standalone --nproc-per-node 4 examples/resnet.py

At the end the same model is trained on one process with plain PyTorch, and the two are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from training import Batch, compare


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with batch norm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Images [batch, 3, height, width] and labels [batch] to the mean cross-entropy. `blocks` counts the basic blocks
    of each stage; a stage has twice the channels of the one before, and half the height and width."""

    def __init__(self, blocks: Sequence[int] = (2, 2, 2), width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        layers: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            outputs = width * 2**stage
            for block in range(count):
                layers.append(BasicBlock(inputs, outputs, stride=2 if stage and not block else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.norm(self.stem(images))))
        x = self.average(self.blocks(x)).flatten(1)
        return F.cross_entropy(self.head(x), labels)


def batches(steps: int, batch: int, size: int, classes: int = 10) -> list[Batch]:
    """Random images: a pattern for each class, under noise. The same on every rank."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(classes, 3, size, size, generator=generator)
    made = []
    for _ in range(steps):
        labels = torch.randint(classes, (batch,), generator=generator)
        noise = torch.randn(batch, 3, size, size, generator=generator)
        made.append({"images": patterns[labels] + noise, "labels": labels})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small ResNet on a 2 x 2 mesh of gloo ranks.")
    parser.add_argument("--steps", type=int, default=20, help="at least 2")
    parser.add_argument("--batch", type=int, default=32, help="images in the global batch")
    parser.add_argument("--size", type=int, default=64, help="height and width of an image")
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 2, 2], help="basic blocks of each stage")
    parser.add_argument("--solver", default="auto", help="auto, dp, ilp, or a preset: ddp, fsdp, megatron, megatron_sp")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = ResNet(options.blocks, options.width)
    compare(model, batches(options.steps, options.batch, options.size), options.solver)


if __name__ == "__main__":
    main()
