"""A mixture of experts of Hugging Face (Mixtral), written for one device, and trained on a 2 x 2 mesh of gloo ranks.

    torchrun --standalone --nproc-per-node 4 examples/moe.py

The plan says where the experts live: split by expert, with tokens that travel to them, or within. At the end the same
model is trained on one process with plain PyTorch, and the two are compared.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from training import Batch, compare
from transformers import MixtralConfig, MixtralForCausalLM


class Loss(nn.Module):
    """A model of Hugging Face that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


def mixtral(hidden: int, layers: int, experts: int) -> nn.Module:
    """The same on every rank; the loss includes that of the router, which spreads tokens over the experts."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        output_router_logits=True,
        max_position_embeddings=512,
        use_cache=False,
    )
    return Loss(MixtralForCausalLM(config))


def batches(steps: int, batch: int, length: int) -> list[Batch]:
    """Sequences that count upwards in steps of their own. The same on every rank."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(steps):
        start, stride = (torch.randint(1, 17, (batch, 1), generator=generator) for _ in "ab")
        ids = (start + stride * torch.arange(length)) % 256
        made.append({"input_ids": ids, "labels": ids})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small mixture of experts on a 2 x 2 mesh of gloo ranks.")
    parser.add_argument("--steps", type=int, default=20, help="at least 2")
    parser.add_argument("--batch", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--sequence", type=int, default=32, help="tokens in a sequence")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--solver", default="dp", help="dp, ilp, or a preset: ddp, fsdp, megatron, megatron_sp")
    options = parser.parse_args()
    model = mixtral(options.hidden, options.layers, options.experts)
    compare(model, batches(options.steps, options.batch, options.sequence), options.solver)


if __name__ == "__main__":
    main()
