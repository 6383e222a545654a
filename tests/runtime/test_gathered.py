"""A parallel module's model on one device again: whole values, the model's own methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import whole
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

VOCABULARY = 32
IDS = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}


def causal(kind: str) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":  # its weights of input and output are tied
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, bos_token_id=0, eos_token_id=None,
            )
        )  # fmt: skip
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, eos_token_id=None, tie_word_embeddings=False,
        )
    )  # fmt: skip


def trained(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        model(**BATCH, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def tokens(model: Any, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(IDS[:2], max_new_tokens=8, pad_token_id=0, **options)
    return found


def generated(kind: str, solver: str) -> None:
    expected = trained(causal(kind)).eval()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    example = {**BATCH, "use_cache": False}
    parallel = trained(autopar.parallelize(causal(kind), mesh, kwargs=example, solver=solver))
    alone = parallel.gathered()
    assert type(alone) is type(expected) and alone.training
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(value, whole(parallel.state_dict()[name]), rtol=0, atol=0)
        torch.testing.assert_close(value, expected.state_dict()[name])
    assert len({id(p) for p in alone.parameters()}) == len([*expected.parameters()])
    assert torch.equal(tokens(alone.eval()), tokens(expected))
    torch.manual_seed(3)
    sampled = tokens(alone, do_sample=True)
    torch.manual_seed(3)
    assert torch.equal(sampled, tokens(expected, do_sample=True))
    # nothing is shared with the parallel module
    before = whole(next(parallel.parameters()).detach()).clone()
    alone.to(torch.float64)
    with torch.no_grad():
        for p in alone.parameters():
            p.zero_()
    assert torch.equal(whole(next(parallel.parameters()).detach()), before)
    assert parallel.training and not alone.training


@pytest.mark.parametrize(("kind", "solver"), [("llama", "megatron"), ("llama", "fsdp"), ("gpt2", "megatron")])
def test_generate_gives_the_tokens_of_one_device(kind: str, solver: str) -> None:
    run(2, generated, kind, solver)


def on_meta() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    parallel = autopar.parallelize(model, mesh, (torch.ones(2, 4),), loss_fn=torch.mean, solver="fsdp")
    with pytest.raises(ValueError, match="weight is on meta, and has no value: call materialize"):
        parallel.gathered()


def test_values_on_meta_are_refused() -> None:
    run(2, on_meta)
