"""Plans as scripts of other libraries: what these compute, send and hold on ranks, and what a script cannot say."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import ranks
import torch
from models import gpt2, llama, tokens
from scripts import Ran, Task, trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.planning.foreign import COLUMN, ROW, Style, presets_within
from autopar.planning.planner import Planner
from autopar.report.libraries import Export

SPLIT = {
    "embed_tokens": "embedding_rowwise", "*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise",
    "*.o_proj": "rowwise", "*.gate_proj": "colwise", "*.up_proj": "colwise", "*.down_proj": "rowwise",
    "lm_head": "colwise_gather_output", "layers.*": "free_full_weight",
}  # fmt: skip
"""Tensor parallel within FSDP: what transformers does to a Llama where both are asked for."""


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(64, (8, 16), generator=generator)
    return {"input_ids": ids, "labels": ids.roll(1, 0)}


def a_llama() -> tuple[nn.Module, Callable[[int], dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    return llama(layers=3, vocab_size=64, hidden_size=64, intermediate_size=96), batch


def export(task: Task, to: str, within: Any) -> Export:
    model, example = task()
    planner = Planner(model, {"dp": 2, "tp": 2}, kwargs=example(0))
    plan = planner.plan(within=within)
    return plan.answering(lambda: planner).export(to)


FEATURES = SPLIT | {"embed_tokens": "embedding_colwise"}


@pytest.mark.parametrize(
    ("to", "within"),
    [
        ("parallelize_module", SPLIT), ("transformers", SPLIT), ("fsdp2", "fsdp2"), ("parallelize_module", FEATURES),
        ("transformers", FEATURES),
    ],
)  # fmt: skip
def test_scripts_train_as_one_process(to: str, within: Any) -> None:
    """And send and hold what the plan says."""
    written = export(a_llama, to, within)
    assert not written.missing
    found: list[Ran] = ranks.run(4, trained, written.script, a_llama)
    assert max(ran.loss for ran in found) < 1e-5
    assert max(ran.parameter for ran in found) < 1e-5
    sent = sum(c.bytes for c in written.plan.account.collectives)
    # transformers gathers the embedding and the head by themselves, and the one again that autopar keeps
    assert found[0].sent_bytes == pytest.approx(sent, rel=0.1)
    assert max(ran.peak_bytes for ran in found) == pytest.approx(written.plan.bytes, rel=0.1)


def test_a_script_is_read_again() -> None:
    """What was exported is a plan of another library, and is priced as the plan that it is of."""
    written = export(a_llama, "parallelize_module", SPLIT)
    names = {node.module for node in ast.walk(ast.parse(written.script)) if isinstance(node, ast.ImportFrom)}
    assert not any("autopar" in str(name) for name in names)
    again = export(a_llama, "parallelize_module", dict_of(written.script))
    assert again.plan.parameters == written.plan.parameters
    assert again.plan.seconds == pytest.approx(written.plan.seconds)


def dict_of(script: str) -> dict[str, str]:
    """The dictionaries of a script as one."""
    found: dict[str, Any] = {}
    for node in ast.parse(script).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) != "MESH":
            pairs = zip(node.value.keys, node.value.values, strict=True)
            found |= {ast.literal_eval(key): ast.unparse(value) for key, value in pairs if key is not None}
    return {name: WORDS.get(text, text) for name, text in found.items()}


WORDS: dict[str, Any] = {
    "ColwiseParallel()": "colwise",
    "ColwiseParallel(output_layouts=Replicate())": "colwise_gather_output",
    "RowwiseParallel()": "rowwise",
    "RowwiseParallel(input_layouts=Replicate())": "rowwise",
    "{'reshard_after_forward': True}": {"reshard_after_forward": True},
    "{'reshard_after_forward': False}": {"reshard_after_forward": False},
}


def ours() -> list[tuple[float, float]]:
    """Losses of our module under such a plan, beside one process: steps, in another mode, and with other rows."""
    (model, example), (whole, _) = a_llama(), a_llama()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = autopar.parallelize(model, mesh, kwargs=example(0), within=SPLIT)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (module, whole)]
    losses = []
    for step, rows in ((0, 8), (1, 8), (2, 4)):
        inputs = {name: tensor[:rows] for name, tensor in example(step).items()}
        both = [each(**inputs).loss for each in (module, whole)]
        for loss, optimizer in zip(both, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append((float(both[0].detach()), float(both[1].detach())))
    with torch.no_grad():
        losses.append((float(module.eval()(**example(3)).loss), float(whole.eval()(**example(3)).loss)))
    return losses


def test_our_module_trains_such_a_plan() -> None:
    """In which FSDP shards what tensor parallelism has split."""
    for ran in ranks.run(4, ours):
        assert [mine for mine, _ in ran] == pytest.approx([expected for _, expected in ran], abs=1e-6)


@pytest.mark.parametrize("to", ["fsdp2", "parallelize_module", "transformers", "torchtitan"])
def test_what_a_library_cannot_say_is_named(to: str) -> None:
    """Of Megatron's plan with sequence parallelism: then the script is of what the library can say."""
    model, example = a_llama()
    planner = Planner(model, {"dp": 2, "tp": 2}, kwargs=example(0), cluster="dgx-a100")
    plan = planner.plan(solver="megatron_sp").answering(lambda: planner)
    written = plan.export(to)
    named = "\n".join(written.missing)
    assert "model.layers.*.post_attention_layernorm: all_gather on tp" in named
    assert "model.layers.*.mlp.down_proj.weight: rests S(1) on tp" in named
    assert written.plan.within == to
    assert all(line in written.script for line in written.missing)
    ast.parse(written.script)


def test_a_precision_is_named() -> None:
    """The library has options of its own for it, in the hands of its user."""
    model, example = a_llama()
    precision = autopar.Precision(param_dtype=torch.bfloat16)
    planner = Planner(model, {"dp": 2}, kwargs=example(0), cluster="dgx-a100", precision=precision)
    written = planner.plan(within="fsdp2").answering(lambda: planner).export("fsdp2")
    assert written.missing == ("the model: its precision, which the library's own options say",)


class Own(nn.Module):
    """Attention that says how many heads there are, which a rank's shard has not, beside an MLP that runs on any."""

    def __init__(self, fixed: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.heads = 4 if fixed else -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).view(*x.shape[:2], self.heads, 8).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = x + self.o(mixed)
        return (y + self.down(nn.functional.gelu(self.up(y)))).square().mean()


@pytest.mark.parametrize("fixed", [True, False])
def test_python_that_does_not_run_on_shards(fixed: bool) -> None:
    planner = Planner(Own(fixed), {"tp": 4}, (torch.randn(4, 64, 32),), cluster="dgx-a100")
    split = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise", "up": "colwise", "down": "rowwise"}
    said = planner.plan(within=split).answering(lambda: planner).export("parallelize_module")
    assert said.missing == (
        tuple(f"{name}: its Python does not run on shards" for name in sorted(split)) if fixed else ()
    )


class Merged(Own):
    """The same, and nothing fails: what lacks of the heads is taken from the sequence, and put back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).view(len(x), -1, 4, 8).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:2], -1)
        return (x + self.o(mixed)).square().mean()


def test_views_that_take_other_dims_for_what_lacks() -> None:
    planner = Planner(Merged(), {"tp": 4}, (torch.randn(4, 64, 32),))
    split = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
    written = planner.plan(within=split).answering(lambda: planner).export("parallelize_module")
    assert written.missing == tuple(f"{name}: its Python does not run on shards" for name in sorted(split))


class Fused(nn.Module):
    """One product is three, of which a rank's columns in a row are no part of each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (-1, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o(mixed).square().mean()


def test_columns_are_in_one_piece() -> None:
    planner = Planner(Fused(), {"tp": 4}, (torch.randn(4, 64, 32),))
    plan = planner.plan(within={"qkv": "colwise", "o": "rowwise"}).answering(lambda: planner)
    assert plan.parameters["qkv.weight"].at_rest == ("S(0)",)
    written = plan.export("parallelize_module")
    assert '"qkv": ColwiseParallel()' not in written.script


class Scaled(nn.Module):
    """It runs on shards, and computes with their size."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.up, self.down, self.fixed = nn.Linear(32, 64), nn.Linear(64, 32), fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return self.down(y * (64 if self.fixed else y.shape[-1]) ** -0.5).square().mean()


@pytest.mark.parametrize("fixed", [True, False])
def test_python_that_computes_with_the_size_of_a_shard(fixed: bool) -> None:
    """Nothing fails there, and everything would be wrong."""
    planner = Planner(Scaled(fixed), {"tp": 4}, (torch.randn(4, 64, 32),))
    plan = planner.plan(within={"up": "colwise", "down": "rowwise"}).answering(lambda: planner)
    assert bool(plan.export("parallelize_module").missing) is not fixed


class Gate(nn.Module):
    """A gate that is whole multiplies what is split: its gradient is a sum over ranks, which no style takes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 1), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.gate(x)).square().mean()


class Bare(nn.Module):
    """A parameter of its own acts on what modules in it have split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(32, 64), nn.Linear(64, 32), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.scale).square().mean()


@pytest.mark.parametrize("kind", [Gate, Bare])
def test_gradients_that_are_sums_over_ranks(kind: type[nn.Module]) -> None:
    planner = Planner(kind(), {"tp": 4}, (torch.randn(4, 64, 32),))
    plan = planner.plan(within={"up": "colwise", "down": "rowwise"}).answering(lambda: planner)
    assert plan.parameters["up.weight"].at_rest == ("S(0)",)
    assert any(" on tp" in line for line in plan.export("parallelize_module").missing)


def test_statistics_of_a_batch_are_named() -> None:
    """autopar's norms see the whole batch, which those of FSDP2 do not, however few channels there are."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 1))
    planner = Planner(model, {"dp": 2}, (torch.randn(8, 3, 8, 8),), loss_fn=lambda y: y.square().mean())
    written = planner.plan(solver="fsdp").answering(lambda: planner).export("fsdp2")
    assert [line for line in written.missing if line.startswith("1: ")] == ["1: all_reduce on dp"]


class Twins(nn.Module):
    """Two heads of one name, of which the loss sees one split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(32, 64), nn.Linear(64, 32)
        self.aux = nn.ModuleDict({"up": nn.Linear(32, 64), "head": nn.Linear(64, 32)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = self.aux["head"](nn.functional.gelu(self.aux["up"](x)))
        return (self.head(nn.functional.gelu(self.up(x))) + other).square().mean()


def test_names_of_a_plan_of_ours_are_whole() -> None:
    """ "head" is no other head, and a module may have a style and be a unit of its own."""
    planner = Planner(Twins(), {"dp": 2, "tp": 2}, (torch.randn(4, 64, 32),))
    named = {"up": COLUMN, "head": replace(ROW, reshards=True), "": Style(reshards=False)}
    (preset,) = presets_within(named, planner.space, planner.facts)
    assert isinstance(preset.tensor, partial)
    dims = preset.tensor.keywords["styles"].dims
    assert {name: dims[f"{name}.weight"] for name in ("up", "head", "aux.up", "aux.head")} == {
        "up": (0,), "head": (1,), "aux.up": (None,), "aux.head": (None,),
    }  # fmt: skip


def test_a_model_whose_layers_no_style_serves() -> None:
    """GPT-2's layers are no nn.Linear: they are sharded at rest alone, and its head shares the embedding's weight."""
    model = gpt2(layers=2)
    plan = autopar.plan(model, {"dp": 2, "tp": 2}, kwargs=tokens(0)[1], within="parallelize_module", cluster="dgx-a100")
    script = plan.export("parallelize_module").script
    assert "STYLES = {}" in script
    assert '"transformer.h.*"' in script and '"transformer.wte"' not in script


def test_what_is_no_library() -> None:
    model, example = a_llama()
    plan = autopar.plan(model, {"dp": 2}, kwargs=example(0), within="fsdp2")
    with pytest.raises(ValueError, match=r"unknown library 'fsdp'.*fsdp2"):
        plan.export("fsdp")
    own = Planner(Own(), {"dp": 2}, (torch.randn(4, 64, 32),))
    with pytest.raises(ValueError, match="Own is no model of transformers: export it to parallelize_module"):
        own.plan(within="fsdp2").answering(lambda: own).export("transformers")
    with pytest.raises(ValueError, match="read without its model"):
        autopar.Plan.from_json(plan.to_json()).export("fsdp2")
