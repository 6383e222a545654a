"""Masks that are made from nothing: what is proved of them, and that they are made where they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from models import Case, assert_same, eager, simulated
from torch import nn

from autopar.ir.graph import JointGraph, Node
from autopar.ops.rule import call_of
from autopar.ops.rules import rule_of
from autopar.ops.sdpa import ATTENTION
from autopar.passes.capture.trace import capture
from autopar.passes.codegen.program import codegen
from autopar.passes.masks import without_masks
from autopar.passes.masks.known import KnownValues
from autopar.passes.space.choices import SiteChoice
from autopar.planning.capturing import captured_for_planning
from autopar.planning.planner import Planner
from autopar.testing.plans import random_assignment

BATCH, LENGTH = 4, 8
SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "use_cache": False,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip


class Attends(nn.Module):
    """Attention under a mask of truth values [batch or 1, 1, queries, keys], in two layers."""

    def __init__(self, mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.mask = mask

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = self.mask(lengths)
        for layer in self.project:
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2)
        return x.square().mean()


def places() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]


def causal(lengths: torch.Tensor) -> torch.Tensor:
    rows, columns = places()
    return (columns <= rows)[None, None]


def turned(lengths: torch.Tensor) -> torch.Tensor:
    rows, columns = places()
    return (rows >= columns).expand(BATCH, 1, LENGTH, LENGTH)


def strict(lengths: torch.Tensor) -> torch.Tensor:
    rows, columns = places()
    return (columns < rows + 1)[None, None]


def lower(lengths: torch.Tensor) -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]


def packed(lengths: torch.Tensor) -> torch.Tensor:
    """Documents that begin where positions do not go on: here it is one."""
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    starts = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return causal(lengths) & (starts[:, None, :, None] == starts[:, None, None, :])


def one_less(lengths: torch.Tensor) -> torch.Tensor:
    rows, columns = places()
    return ((columns < rows) | (rows == 0))[None, None]


def window(lengths: torch.Tensor) -> torch.Tensor:
    rows, columns = places()
    return causal(lengths) & (columns > rows - 3)[None, None]


def two_documents(lengths: torch.Tensor) -> torch.Tensor:
    document = torch.arange(LENGTH) // 4
    return causal(lengths) & (document[:, None] == document[None, :])[None, None]


def padding(lengths: torch.Tensor) -> torch.Tensor:
    return (torch.arange(LENGTH) < lengths[:, None])[:, None, None, :].expand(BATCH, 1, LENGTH, LENGTH)


def causal_and_padding(lengths: torch.Tensor) -> torch.Tensor:
    return causal(lengths) & padding(lengths)


def left_padding(lengths: torch.Tensor) -> torch.Tensor:
    """The first queries see no key."""
    return causal(lengths) & (torch.arange(LENGTH) >= LENGTH - lengths[:, None])[:, None, None, :]


def window_and_padding(lengths: torch.Tensor) -> torch.Tensor:
    return window(lengths) & padding(lengths)


def either(lengths: torch.Tensor) -> torch.Tensor:
    """A prefix that all see."""
    return causal(lengths) | (torch.arange(LENGTH) < lengths[:, None])[:, None, None, :]


MASKS: dict[Callable[[torch.Tensor], torch.Tensor], tuple[bool, tuple[int, ...] | None]] = {
    causal: (True, None),
    turned: (True, None),
    strict: (True, None),
    lower: (True, None),
    packed: (True, None),
    one_less: (False, (1, 1, LENGTH, LENGTH)),
    window: (True, (1, 1, LENGTH, LENGTH)),
    two_documents: (True, None),
    padding: (False, (BATCH, 1, 1, LENGTH)),
    causal_and_padding: (True, (BATCH, 1, 1, LENGTH)),
    left_padding: (True, (BATCH, 1, 1, LENGTH)),
    window_and_padding: (True, (BATCH, 1, LENGTH, LENGTH)),
    either: (False, (BATCH, 1, LENGTH, LENGTH)),
}
"""Mask -> whether the calls are causal, and the shape of the mask that is left."""


def example(step: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(step)
    x = torch.randn(BATCH, LENGTH, 8, dtype=torch.float64)
    return (x, torch.tensor([8, 3, 5, 1])), {}


def calls(graph: JointGraph) -> list[Node]:
    return [node for node in graph.nodes if node.op == ATTENTION]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_what_is_known_of_a_mask_is_an_argument(mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    is_causal, shape = MASKS[mask]
    graph = captured_for_planning(Attends(mask).double(), *example()).graph
    for node in calls(graph):
        left = call_of(node, graph.metas).argument("attn_mask")
        assert dict(node.kwargs).get("is_causal", False) == is_causal
        assert (None if left is None else graph.metas[left.name].shape) == shape


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_what_is_known_of_a_mask_is_true(mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Of every value of the graph that is known, and of every mask of which the visible keys are."""
    graph = capture(Attends(mask).double(), *example()).graph
    known, run = KnownValues(graph, rule_of), values(graph)
    seen = 0
    for name, value in run.items():
        if (guess := known.value(name)) is not None:
            assert torch.equal(guess, value), name
        if (visible := known.visible(name)) is not None:
            keys = torch.arange(value.shape[-1])
            spans = (keys >= visible.first[..., None]) & (keys < visible.end[..., None])
            assert torch.equal(spans.broadcast_to(value.shape), value), name
            seen += 1
    assert seen or mask in (one_less, padding, lower)


def values(graph: JointGraph) -> dict[str, torch.Tensor]:
    """What the nodes of forward that depend on no input compute."""
    from autopar.passes.masks.known import _run

    there: dict[str, torch.Tensor] = {}
    for node in graph.nodes[: graph.first_backward]:
        if node.op.startswith("aten.") and there.keys() >= set(node.inputs):
            there.update(zip(node.outputs, _run(node, there), strict=True))
    return there


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_masks_are_made_where_they_are_read(mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Random plans, and the solver's, compute what the model does."""
    case = Case(model=Attends(mask).double(), batch=example)
    same_on_random_plans(case, 6)


def same_on_random_plans(case: Case, draws: int, tolerance: float = 1e-9) -> None:
    args, kwargs = case.batch(0)
    planner = Planner(case.model, {"a": 2, "b": 2}, args, kwargs)
    expected = eager(case)
    line = planner.on({"a": 4}, None)  # planned sooner
    programs = [line.program(line.plan(solver="dp", cost="serial"))]
    for seed in range(draws):
        assignment = random_assignment(planner.space, seed)
        if assignment is not None:
            programs.append(codegen(planner.space, assignment))
    assert len(programs) > draws // 2
    for program in programs:
        assert_same(simulated(program, planner.captured, case), expected, tolerance)


def hf_case(name: str, **batch: torch.Tensor) -> Case:
    torch.manual_seed(0)
    config: Any
    if name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_hidden_layers=3, num_key_value_heads=2))
    elif name == "mistral":
        config = hf.MistralConfig(**SMALL, num_hidden_layers=3, num_key_value_heads=2, sliding_window=3)
        model = hf.MistralForCausalLM(config)
    elif name == "gemma3":
        config = hf.Gemma3TextConfig(
            **SMALL, num_hidden_layers=4, num_key_value_heads=2, head_dim=8, sliding_window=3,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )  # fmt: skip
        model = hf.Gemma3ForCausalLM(config)
    elif name == "bert":
        config = hf.BertConfig(**SMALL, num_hidden_layers=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = hf.BertForMaskedLM(config)
    else:
        config = hf.T5Config(
            vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=3, num_heads=4, dropout_rate=0.0, use_cache=False,
            decoder_start_token_id=0,
        )  # fmt: skip
        model = hf.T5ForConditionalGeneration(config)
    return Case(model=model.double(), batch=lambda step: ((), batch))


@pytest.mark.parametrize(
    ("name", "masked"),
    [
        ("llama", "left"), ("mistral", "left"), ("gemma3", None), ("gemma3", "right"), ("bert", "right"),
        ("t5", "right"),
    ],
)  # fmt: skip
def test_models_with_and_without_padding(name: str, masked: str | None) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(1, 32, (BATCH, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    if masked:
        there = torch.arange(LENGTH) < torch.tensor([8, 3, 5, 6])[:, None]
        batch["attention_mask"] = (there if masked == "right" else there.flip(-1)).long()
    same_on_random_plans(hf_case(name, **batch), 2, 1e-5)  # norms and losses are in float32


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_joins_parts_is_made_where_it_is_read(ranks: int) -> None:
    """The table of rotations joins two halves. A split of it is none of the halves, of which the last ranks would have
    nothing: whatever a site that reads what is made takes, the program computes what the model does."""
    tokens = torch.randint(1, 32, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    config = hf.Qwen3Config(**SMALL, num_hidden_layers=2, num_key_value_heads=2, head_dim=4)
    batch = {"input_ids": tokens, "labels": tokens}
    case = Case(model=hf.Qwen3ForCausalLM(config).double(), batch=lambda step: ((), batch))
    planner = Planner(case.model, {"a": ranks}, (), batch)
    whole, expected, space = planner.assignment(planner.plan(solver="ddp")), eager(case), planner.space
    tried = 0
    for number, region in enumerate(space.regions(), -1):
        for site in region.sites.values():
            if site.kind != "op" or all(read.alias.root not in space.making.sites for read in site.reads):
                continue
            for choice in site.choices[ranks]:
                if str(choice) != "S3%4":
                    continue
                changed = {site.name: SiteChoice((choice,), "")}
                rest = whole.rest | changed if number < 0 else whole.rest
                copies = [[one | changed for one in of] if at == number else of for at, of in enumerate(whole.copies)]
                program = codegen(space, replace(whole, rest=rest, copies=tuple(map(tuple, copies))))
                tried += 1
                assert_same(simulated(program, planner.captured, case), expected, 1e-9)
    assert tried


@pytest.mark.parametrize("masked", [False, True])
def test_memory_falls_with_the_split_of_a_batch(masked: bool) -> None:
    """Masks of what a rank has, and not of the global batch."""
    config = hf.MistralConfig(**SMALL, num_hidden_layers=1, num_key_value_heads=2, sliding_window=64)
    peaks = []
    for batch, ranks in ((8, 2), (16, 4)):
        tokens = torch.ones(batch, 256, dtype=torch.long)
        given = {"input_ids": tokens, "labels": tokens, **({"attention_mask": tokens} if masked else {})}
        peaks.append(Planner(hf.MistralForCausalLM(config), {"a": ranks}, kwargs=given).plan(solver="dp").bytes)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_masks_are_known_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        graph = captured_for_planning(Attends(packed), (torch.empty(BATCH, LENGTH, 8), torch.empty(BATCH))).graph
    assert all(dict(node.kwargs)["is_causal"] for node in calls(graph))


def test_a_graph_without_attention_is_kept() -> None:
    graph = capture(nn.Linear(4, 4), (torch.randn(2, 4),)).graph
    assert without_masks(graph, rule_of) is graph
