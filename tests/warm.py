"""Imported by the fork server of `ranks`: what every rank would else import and initialise for itself."""

import importlib.util

import pytest  # noqa: F401
import torch
import torch.distributed.tensor

from autopar.planning.planner import Planner


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            use_cache=False,
        )
    )


if torch.version.cuda is None:  # a capture asks for devices, and who forks afterwards has none
    torch.set_num_threads(1)
    if importlib.util.find_spec("transformers") is None:
        Planner(torch.nn.Linear(2, 2), {"a": 2}, (torch.ones(2, 2),)).plan(solver="ddp")
    else:
        ids = torch.ones(2, 2, dtype=torch.int64)
        Planner(llama(), {"a": 2}, (), {"input_ids": ids, "labels": ids}).plan(solver="ddp")
