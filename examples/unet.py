"""A U-Net (Ronneberger et al. 2015; attention-free, as in Par4D), written for one device, and trained to remove noise
on a 2 x 2 mesh of gloo ranks.

    torchrun --standalone --nproc-per-node 4 examples/unet.py

At the end the same model is trained on one process with plain PyTorch, and the two are compared.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from training import Batch, compare

GROUPS = 4


def norm_of(kind: str, channels: int) -> nn.Module:
    return nn.GroupNorm(GROUPS, channels) if kind == "group" else nn.BatchNorm2d(channels)


class Block(nn.Module):
    """Two 3 x 3 convolutions, each with a norm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm1 = norm_of(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = norm_of(norm, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(y))) + self.shortcut(x)


class UNet(nn.Module):
    """Noisy and clean images [batch, 3, height, width] to the mean square of what noise is left.

    `channels` are those of each level; the next one has half the height and width. `norm` is "group" or "batch", `down`
    "conv" (strided) or "pool", `up` "conv" (transposed), "nearest" or "bilinear".
    """

    def __init__(
        self, channels: Sequence[int] = (16, 32, 64), norm: str = "group", down: str = "conv", up: str = "conv"
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels[0], 3, padding=1)
        self.encoder, self.down, self.up, self.decoder = (nn.ModuleList() for _ in range(4))
        for here, below in itertools.pairwise(channels):
            self.encoder.append(Block(here, here, norm))
            strided = nn.Conv2d(here, below, 3, stride=2, padding=1)
            pooled = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(here, below, 1))
            self.down.append(strided if down == "conv" else pooled)
            transposed = nn.ConvTranspose2d(below, here, 4, stride=2, padding=1)
            mode = "nearest" if up == "conv" else up
            resampled = nn.Sequential(nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(below, here, 1))
            self.up.append(transposed if up == "conv" else resampled)
            self.decoder.append(Block(2 * here, here, norm))
        self.middle = Block(channels[-1], channels[-1], norm)
        self.head = nn.Conv2d(channels[0], 3, 1)

    def forward(self, noisy: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        x = self.stem(noisy)
        skipped = []
        for block, down in zip(self.encoder, self.down, strict=True):
            x = block(x)
            skipped.append(x)
            x = down(x)
        x = self.middle(x)
        for block, up, skip in reversed(list(zip(self.decoder, self.up, skipped, strict=True))):
            x = block(torch.cat([up(x), skip], dim=1))
        return F.mse_loss(noisy - self.head(x), clean)


def batches(steps: int, batch: int, size: int) -> list[Batch]:
    """Waves of random frequency, with noise and without. The same on every rank."""
    generator = torch.Generator().manual_seed(1)
    line = torch.linspace(0, 6, size)
    made = []
    for _ in range(steps):
        frequency = torch.rand(batch, 3, 2, 1, generator=generator) * 2
        clean = torch.sin(frequency[:, :, :1] * line[:, None] + frequency[:, :, 1:] * line)
        made.append({"noisy": clean + 0.5 * torch.randn(clean.shape, generator=generator), "clean": clean})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small U-Net on a 2 x 2 mesh of gloo ranks.")
    parser.add_argument("--steps", type=int, default=20, help="at least 2")
    parser.add_argument("--batch", type=int, default=8, help="images in the global batch")
    parser.add_argument("--size", type=int, default=32, help="height and width of an image")
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 32, 64], help="channels of each level")
    parser.add_argument("--norm", choices=["group", "batch"], default="group")
    parser.add_argument("--down", choices=["conv", "pool"], default="conv", help="strided convolution, or max pool")
    up = "transposed convolution, or upsample"
    parser.add_argument("--up", choices=["conv", "nearest", "bilinear"], default="conv", help=up)
    parser.add_argument("--solver", default="auto", help="auto, dp, ilp, or a preset: ddp, fsdp, megatron, megatron_sp")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = UNet(options.channels, options.norm, options.down, options.up)
    compare(model, batches(options.steps, options.batch, options.size), options.solver)


if __name__ == "__main__":
    main()
