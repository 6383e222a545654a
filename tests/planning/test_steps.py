"""Steps: what few copies of a layer tell of the step and the peak of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from autopar.cli.loading import load
from autopar.planning.planner import Planner
from autopar.planning.steps import NEAR, QUICK
from autopar.testing.plans import random_assignment

LAYERS = 8

STILL = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)

CONFIGS: Mapping[str, dict[str, Any]] = {
    "GPT2Config": {"n_layer": LAYERS, **STILL, "n_embd": 512, "n_head": 8, "bos_token_id": 0, "eos_token_id": 0},
    "LlamaConfig": {
        "num_hidden_layers": LAYERS,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
    },
}


@cache
def planner(config: str) -> Planner:
    model = load(f"hf:{config}", {"vocab_size": 8192, **CONFIGS[config]}, batch=64, sequence=128, dtype="bfloat16")
    return Planner(model.model, {"a": 2, "b": 2}, model.args, model.kwargs, cluster="dgx-h100")


@pytest.mark.parametrize("config", CONFIGS)
def test_an_estimate_from_few_copies_is_near_what_the_program_of_all_says(config: str) -> None:
    """Of a random plan in which layers are alike. A bucket that reaches across more layers than the few differs."""
    assignment, evaluate = random_assignment(planner(config).space, 1, alike=True), planner(config).evaluate
    exact = evaluate(assignment)
    assert evaluate(assignment, QUICK).seconds == pytest.approx(exact.seconds, rel=0.03)
    assert evaluate(assignment, NEAR).bytes == pytest.approx(exact.bytes, rel=0.05)
