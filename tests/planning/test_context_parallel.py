"""Of a long sequence the search finds what nobody writes shorter by hand."""

from __future__ import annotations

from pathlib import Path

import torch
from context_parallel import FORMS, register
from models import llama

from autopar.extensions import scoped
from autopar.planning.planner import Planner

LINKS = Path(__file__).parents[2] / "benchmarks/lab"
TOKENS = 4096


def test_no_form_by_hand_is_shorter() -> None:
    """On slow links, where a ring hides what travels; and a mask of a sequence that is dealt out hides no work."""
    model = llama(
        layers=1, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=TOKENS
    )
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    first = Planner(model, {"cp": 2}, (), {"input_ids": ids, "labels": ids}, optimizer="sgd")
    for links in ("2x1", "2x1-slow"):
        planner = first.on({"cp": 2}, str(LINKS / f"{links}.toml"))
        found = planner.plan().seconds
        with scoped():
            register()
            by_hand = {form: planner.plan(solver=form).seconds for form in FORMS}
        assert found <= min(by_hand.values()), (links, by_hand)
