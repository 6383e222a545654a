"""Steps: what few copies of a layer tell of the step and the peak of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from autopar.cli.loading import load
from autopar.planning.planner import Planner
from autopar.planning.request import Gathers
from autopar.planning.steps import BUCKETS, EXACT, NEAR, PARTED
from autopar.testing.plans import random_assignment

STILL = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)

WIDE = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8}

CONFIGS: Mapping[str, dict[str, Any]] = {
    "GPT2Config": {"n_layer": 8, **STILL, "n_embd": 512, "n_head": 8, "bos_token_id": 0, "eos_token_id": 0},
    "LlamaConfig": {**WIDE, "intermediate_size": 1408},
    "MixtralConfig": {**WIDE, "intermediate_size": 1024, "num_key_value_heads": 8, "num_local_experts": 8},
    "BertConfig": {**WIDE, "intermediate_size": 2048},
}


@cache
def planner(config: str, micro_batches: int = 1) -> Planner:
    model = load(f"hf:{config}", {"vocab_size": 8192, **CONFIGS[config]}, batch=64, sequence=128, dtype="bfloat16")
    of = model.model, {"a": 2, "b": 2}, model.args, model.kwargs
    return Planner(*of, cluster="dgx-h100", micro_batches=micro_batches)


@pytest.mark.parametrize(("bucket_bytes", "step", "peak"), [(1, 0.01, 0.001), (BUCKETS[0], 0.03, 0.03)])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("config", CONFIGS)
def test_an_estimate_from_few_copies_is_near_what_the_program_of_all_says(
    config: str, seed: int, bucket_bytes: int, step: float, peak: float
) -> None:
    """Of a random plan in which layers are alike: nearly exactly where every collective travels alone. Buckets that
    reach across layers are others among few layers."""
    made = planner(config)
    assignment = random_assignment(made.space, seed, alike=True)
    exact, near, quick = (made.evaluate(assignment, how, buckets=(bucket_bytes,)) for how in (EXACT, NEAR, PARTED))
    assert quick.seconds == pytest.approx(exact.seconds, rel=step)
    assert near.bytes == pytest.approx(exact.bytes, rel=peak)
    assert exact.bytes == exact.peak.bytes and not (near.is_exact or quick.is_exact)


@pytest.mark.parametrize(
    ("config", "count", "gathers"),
    [("LlamaConfig", 4, "each"), ("LlamaConfig", 2, "once"), ("MixtralConfig", 4, "once")],
)
def test_the_peak_of_several_micro_batches_is_told_by_few_copies(config: str, count: int, gathers: Gathers) -> None:
    """Gradients of all copies wait, and what forward gathers is held of all."""
    made = planner(config, count).gathering(gathers)
    assignment = random_assignment(made.space, 1, alike=True)
    near, exact = (made.evaluate(assignment, how) for how in (NEAR, EXACT))
    assert near.bytes == pytest.approx(exact.bytes, rel=0.025) and not near.is_exact


def test_an_estimate_is_made_once_and_is_exact_where_no_copy_is_left_out() -> None:
    """With the largest buckets that keep a limit, as far as it is known which these are."""
    made = planner("LlamaConfig")
    alike, mixed = (random_assignment(made.space, 0, alike=alike) for alike in (True, False))
    assert made.evaluate(mixed, NEAR) is made.evaluate(mixed, PARTED) is made.evaluate(mixed)
    exact = made.evaluate(alike)
    assert exact.bucket_bytes == BUCKETS[0] and made.evaluate(alike, limit=exact.bytes).bucket_bytes == BUCKETS[0]
    least = made.evaluate(alike, buckets=BUCKETS[-1:])
    within = made.evaluate(alike, limit=least.bytes)
    assert within is made.evaluate(alike, buckets=(within.bucket_bytes,)) and within.bytes <= least.bytes < exact.bytes
    assert made.evaluate(alike, NEAR, limit=1.0).bytes <= made.evaluate(alike, NEAR).bytes
