"""Packed documents as operands of attention beside a mask of scores: `python benchmarks/packed.py [--tokens N]`.

A row of documents of Llama with small layers, planned for ranks that split the sequence, and one step of a rank run by
itself: once with `position_ids` that begin again, once with the mask that says the same, [1, 1, tokens, tokens], as an
input. It prints the predicted peak of a rank, and what attention alone holds beside its operands and results.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import autopar
from autopar.ops import sdpa
from autopar.runtime.memory import peak_bytes

MIB = 1 << 20


def numbers(tokens: int, documents: int) -> torch.Tensor:
    return (torch.arange(tokens) * documents // tokens).unsqueeze(0)


def model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
                    num_key_value_heads=4, vocab_size=1024, max_position_embeddings=1 << 20, use_cache=False)
    )  # fmt: skip


def predicted(tokens: int, documents: int, ranks: int, masked: bool) -> int:
    """Peak bytes of a rank, by the solver's plan."""
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    number = numbers(tokens, documents)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if masked:
        batch["attention_mask"] = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="meta")
        batch = {name: x.to("meta") for name, x in batch.items()}
    else:
        batch["position_ids"] = torch.arange(tokens) - torch.searchsorted(number[0], number)
    with torch.device("meta"):
        made = model().to(torch.bfloat16)
    return autopar.plan(made, {"cp": ranks}, kwargs=batch, cluster="dgx-h100").bytes


def held(tokens: int, documents: int, masked: bool) -> list[int]:
    """Bytes that forward and backward of one call have beside operands and results."""
    q, k, v = (torch.randn(1, heads, tokens, 64) for heads in (4, 1, 1))
    number, named = numbers(tokens, documents), {"scale": 0.125, "is_causal": not masked}
    operands: list[Any] = [None, None, number, number]
    if masked:
        seen = (number.unsqueeze(2) == number.unsqueeze(1)).tril()
        operands = [torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf).unsqueeze(1)]
    results = sdpa.attention(q, k, v, *operands, **named)
    given = [q, k, v, *results]
    calls = (lambda: sdpa.attention(q, k, v, *operands, **named), results), (
        lambda: sdpa.attention_backward(results[0], q, k, v, *results, *operands, **named), (q, k, v)
    )  # fmt: skip
    there = sum(x.nbytes for x in given)
    return [peak_bytes(call, given, q.device) - there - sum(x.nbytes for x in made)
            + sum(x.nbytes for x in operands if x is not None) for call, made in calls]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="of the row that is planned")
    parser.add_argument("--run", type=int, default=8192, help="tokens of the call that is run")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=4)
    given = parser.parse_args()
    for masked in (False, True):
        name = "mask" if masked else "documents"
        forward, backward = held(given.run, given.documents, masked)
        print(f"{name}: one call of {given.run} tokens: {forward / MIB:.0f} and {backward / MIB:.0f} MiB", flush=True)
        peak = predicted(given.tokens, given.documents, given.ranks, masked)
        print(f"{name}: {given.tokens} tokens on {given.ranks} ranks: predicted peak {peak / MIB:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
