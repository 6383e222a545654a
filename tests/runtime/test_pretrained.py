"""Directories of Hugging Face, read and written part by part, whatever the plan; and buffers that no file holds."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import whole
from ranks import run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate as TorchReplicate

import autopar
from autopar.ir.layout import Layout, Replicate, Shape, Split
from autopar.runtime.boxes import boxes, is_owner
from autopar.runtime.load import INDEX
from autopar.runtime.module import ParallelModule
from autopar.runtime.placements import local_slice, unpadded
from autopar.runtime.save import _write_box

safetensors = pytest.importorskip("safetensors.torch")

IDS = torch.arange(12) % 11


class Net(nn.Module):
    """Tied weights, a scalar, a tensor of three dims, bfloat16, integers, and a buffer that is not saved."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 6), nn.BatchNorm1d(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale, self.kernel = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(7, 6, 3))
        self.narrow = nn.Parameter(torch.randn(6, 5).bfloat16())
        self.first = first
        self.register_buffer("positions", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.positions.copy_(torch.arange(self.first, self.first + 6))
            self.scale.fill_(9.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(ids)) * self.scale + self.positions
        h = h + torch.einsum("oik,bi->b", self.kernel, h)[:, None] + (h.bfloat16() @ self.narrow).float().sum(1, True)
        made: torch.Tensor = self.head(h)
        return made


def parallel(mesh: tuple[int, ...], solver: str, model: nn.Module | None = None) -> ParallelModule:
    if model is None:
        with torch.device("meta"):
            model = Net(first=3)
    axes = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
    return autopar.parallelize(model, axes, (IDS,), loss_fn=lambda y: y.square().mean(), solver=solver)


@cache
def values() -> dict[str, torch.Tensor]:
    """Of a model that has seen a batch, under the names that files have."""
    torch.manual_seed(1)
    model = Net()
    model(IDS)
    return {name: value for name, value in model.state_dict().items() if name != "head.weight"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights in three files, with an index."""
    names = list(values())
    mapping = {name: f"model-{number % 3 + 1:05}-of-00003.safetensors" for number, name in enumerate(names)}
    for file in set(mapping.values()):
        held = {name: value for name, value in values().items() if mapping[name] == file}
        safetensors.save_file(held, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    safetensors.save_file({"embed.weight": torch.ones(11, 6)}, tmp_path / "consolidated.safetensors")  # of another kind
    return tmp_path


def read_and_written(folder: Path, first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    for number, (source, made) in enumerate(((folder, parallel(*first)), (folder / "0", parallel(*second)))):
        made.load_pretrained(source)
        assert torch.equal(made.positions, torch.arange(3.0, 9.0)) and made.head.weight is made.embed.weight
        for name, value in made.state_dict().items():
            assert torch.equal(whole(value), values().get(name, values()["embed.weight"])), name
        made.save_pretrained(folder / str(number), max_file_bytes=250 if number else 10**9)
    before = {name: id(value) for name, value in made.named_parameters()}
    made(IDS).backward()
    made.load_pretrained(folder / "1")
    assert before == {name: id(value) for name, value in made.named_parameters()}
    assert all(torch.equal(whole(p.detach()), values()[name]) for name, p in made.named_parameters())


@pytest.mark.parametrize(
    ("first", "second"),
    [(((3,), "fsdp"), ((3,), "ddp")), (((2, 2), "atp"), ((4,), "fsdp"))],
    ids=["uneven shards", "two axes"],
)
def test_what_is_read_and_written_is_the_same_for_any_plan(
    folder: Path, first: tuple[Any, ...], second: tuple[Any, ...]
) -> None:
    run(math.prod(first[0]), read_and_written, folder, first, second)
    assert [path.name for path in (folder / "0").iterdir() if "model" in path.name] == ["model.safetensors"]
    several = sorted((folder / "1").glob("*.safetensors"))
    assert len(several) > 2 and (folder / "1" / INDEX).exists()
    for files in ([folder / "0" / "model.safetensors"], several):
        written = {name: value for file in files for name, value in safetensors.load_file(file).items()}
        assert written.keys() == values().keys()
        assert all(torch.equal(value, values()[name]) for name, value in written.items())
    assert autopar.Plan.load(folder / "0" / "autopar_plan.json").solver == first[1]


def test_boxes_are_what_a_rank_holds(tmp_path: Path) -> None:
    """Also where an axis takes scattered pieces, and where the last rank holds less."""
    cases: list[tuple[Shape, Layout, Shape]] = [
        ((7, 3), (Split(0, 8), Replicate()), (4, 2)),
        ((24, 6), (Split(0, 6), Split(1, 6)), (2, 3)),
        ((24, 6), (Split(0, 24), Split(0, 4)), (2, 2)),
        ((5, 8, 3), (Split(1, 4), Split(1, 8)), (2, 2)),
        ((3, 4), (Split(0, 4), Split(1, 4)), (4, 2)),
        ((), (Replicate(), Replicate()), (2, 2)),
    ]
    for number, (shape, layout, mesh) in enumerate(cases):
        value = torch.randn(shape)
        file = tmp_path / f"{number}"
        file.write_bytes(bytes(16 + value.nbytes))
        seen = torch.zeros(shape, dtype=torch.int64)
        for coordinate in itertools.product(*map(range, mesh)):
            held = unpadded(local_slice(value, layout, mesh, coordinate), shape, layout, mesh, coordinate)
            for box in boxes(shape, layout, mesh, coordinate):
                at = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(value[at], box.of(held))
                if is_owner(number, layout, mesh, coordinate):
                    seen[at] += 1
                    descriptor = os.open(file, os.O_WRONLY)
                    _write_box(descriptor, 16, shape, box, held)
                    os.close(descriptor)
        assert (seen == 1).all()
        data = bytearray(file.read_bytes()[16:])
        assert torch.equal(torch.frombuffer(data, dtype=torch.float32).reshape(shape), value)


def refusals(folder: Path) -> list[str]:
    rank, made = torch.distributed.get_rank(), parallel((2,), "fsdp")
    (folder / "empty").mkdir(exist_ok=True)
    said = []

    def refused(source: Any, **options: Any) -> None:
        with pytest.raises(ValueError) as caught:
            made.load_pretrained(source, **options)
        assert made.scale.device.type == "meta"
        said.append(str(caught.value))

    with pytest.raises(ValueError, match=r"scale is on meta, and has no value to save"):
        made.save_pretrained(folder / "out")
    refused("meta-llama/Llama-2-7b")
    refused(folder if rank else folder / "nowhere")
    refused(folder / "empty")
    for name in ("torn", "lacking", "shape", "whole numbers", "another", "no table", "differing"):
        refused(folder / name / str(rank) if name == "differing" else folder / name)
    with pytest.raises(ValueError, match="the ranks are to save to different directories"):
        made.materialize(lambda name, tensor: tensor.fill_(1))
        made.save_pretrained(folder / f"out{rank}")
    with pytest.raises(ValueError, match=r"max_file_bytes is 0"):
        made.save_pretrained(folder / "out", 0)
    return said


def test_files_that_cannot_be_right_are_one_error_on_all_ranks(folder: Path) -> None:
    held = values()
    others: dict[str, dict[str, torch.Tensor]] = {
        "torn": held,
        "shape": held | {"scale": torch.ones(2)},
        "whole numbers": held | {"narrow": torch.ones(6, 5, dtype=torch.int8)},
        "another": {"h.0.weight": torch.ones(2)},
        "differing/0": held,
        "differing/1": held | {"scale": torch.tensor(3.0)},
    }
    for name, content in others.items():
        (folder / name).mkdir(parents=True)
        safetensors.save_file(content, folder / name / "model.safetensors")
    file = folder / "torn" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for name, mapping in (("lacking", {"scale": "model-00001-of-00002.safetensors"}), ("no table", [1])):
        (folder / name).mkdir()
        (folder / name / INDEX).write_text(json.dumps({"weight_map": mapping}))
    said = run(2, refusals, folder)
    assert said[0] == said[1]
    expected = (
        "Llama-2-7b is not there: give a local directory",
        "nowhere is not there.* \\(on rank 0 of 2\\)",
        "empty has no file model.safetensors",
        "torn holds files that cannot be read as safetensors",
        "lacking lacks model-00001-of-00002.safetensors, which .* names: copy all",
        r"scale is \[2\] in .* and \[\] in the model",
        "narrow is torch.int8 .*: quantized",
        "holds h.0.weight, of which the model has none",
        "weight_map is not a table",
        "the ranks read different values for 'scale'",
    )
    for text, pattern in zip(said[0], expected, strict=True):
        assert re.search(pattern, text), text


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def partly(folder: Path) -> None:
    log = Log()
    logging.getLogger("autopar").addHandler(log)
    made = parallel((2,), "fsdp")
    with pytest.raises(ValueError, match=r"no values for scale: give files of this model, or .*init="):
        made.load_pretrained(folder)
    made.load_pretrained(folder, init=lambda name, tensor: tensor.fill_(7.0))
    assert whole(made.scale.detach()) == 7.0 and torch.equal(whole(made.narrow.detach()), values()["narrow"])
    assert any("no place for classifier.bias" in line for line in log.lines)
    torch.manual_seed(0)
    real = parallel((2,), "ddp", Net())
    real.load_pretrained(folder)
    assert whole(real.scale.detach()) == 9.0 and torch.equal(real.positions, torch.arange(6.0))
    assert any("no values for scale, which stay as they are" in line for line in log.lines)
    empty = parallel((2,), "fsdp")
    with pytest.raises(ValueError, match=r"to_empty\(device='cuda'\): the mesh is on cpu"):
        empty.to_empty(device="cuda")
    assert empty.to_empty(device="cpu") is empty
    assert torch.equal(empty.positions, torch.arange(3.0, 9.0)) and empty.kernel.device.type == "cpu"
    with torch.device("meta"):
        silent = Net()
    silent.reset_parameters = None  # type: ignore[assignment]
    parallel((2,), "fsdp", silent).to_empty()
    assert any("positions has memory without values" in line for line in log.lines)
    again = parallel((2,), "ddp")
    again.materialize(values() | {"scale": torch.tensor(2.0)})
    assert torch.equal(again.positions, torch.arange(3.0, 9.0))
    # files that torch wrote, with each rank's part apart
    tensors = {name: value for name, value in made.state_dict().items() if name != "head.weight"}
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder / "parts"), save_distributed=True))
    again.load_pretrained(folder / "parts")
    for name, value in again.state_dict().items():
        assert torch.equal(whole(value), whole(made.state_dict()[name])), name


def test_what_files_lack_and_what_they_hold_besides(folder: Path) -> None:
    held = {name: value for name, value in values().items() if name != "scale"}
    (folder / "partly").mkdir()
    safetensors.save_file(held | {"classifier.bias": torch.ones(3)}, folder / "partly" / "model.safetensors")
    run(2, partly, folder / "partly")


def losses(module: nn.Module, steps: int) -> list[float]:
    ids = torch.arange(32).reshape(4, 8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    found = []
    for _ in range(steps):
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def trained(folder: Path) -> list[float]:
    from transformers import AutoConfig, AutoModelForCausalLM

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ids = torch.arange(32).reshape(4, 8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    parallel = autopar.parallelize(model, mesh, kwargs={"input_ids": ids, "labels": ids}, solver="megatron")
    parallel.load_pretrained(folder)
    first = losses(parallel, 10)
    parallel.save_pretrained(folder / "out", max_file_bytes=10_000)
    return first + losses(parallel, 3)


def test_a_directory_of_hugging_face_is_trained_and_read_there_again(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    found = run(2, trained, tmp_path)
    expected = losses(model, 10)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(again, transformers.LlamaForCausalLM)
    expected += losses(again, 3)
    assert all(one == pytest.approx(expected, rel=1e-5) for one in found)


def joined(folder: Path) -> float:
    from transformers import MixtralConfig, MixtralForCausalLM

    ids = torch.arange(32).reshape(4, 8)
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig.from_pretrained(folder))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    parallel = autopar.parallelize(model, mesh, kwargs={"input_ids": ids, "labels": ids}, solver="fsdp")
    parallel.load_pretrained(folder)
    parallel.save_pretrained(folder / "out")
    return float(parallel(input_ids=ids, labels=ids).loss.detach())


def test_published_files_have_each_expert_apart(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.arange(32).reshape(4, 8)
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert any("experts.1.w2" in name for name in safetensors.load_file(tmp_path / "model.safetensors"))
    found = run(2, joined, tmp_path)
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "out")
    for each in (model, again):
        assert found == pytest.approx([each(input_ids=ids, labels=ids).loss.item()] * 2, rel=1e-5)


# -- what torch puts around modules, hooks, and what was added


class Wrapped(Net):
    """What `around` says is put around two modules; `kernel` has another name in files."""

    def __init__(self, around: str = "nothing") -> None:
        super().__init__()
        compiled: Any = functools.partial(torch.compile, backend="eager")
        wrap: Any = {
            "checkpoints": checkpoint_wrapper, "compiled": compiled, "both": lambda m: checkpoint_wrapper(compiled(m)),
        }.get(around, lambda module: module)  # fmt: skip
        self.norm, self.head = wrap(self.norm), wrap(self.head)
        self.register_state_dict_post_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, values: dict[str, Any], prefix: str, metadata: Any) -> None:
        values[prefix + "filter"] = values.pop(prefix + "kernel")


def within(folder: Path, around: str) -> None:
    torch.manual_seed(1)
    plain = Wrapped()
    plain(IDS)
    values = plain.state_dict()
    with torch.device("meta"):
        empty: Any = Wrapped(around)
    made = parallel((2,), "fsdp", torch.compile(empty, backend="eager") if around == "compiled" else empty)
    made.materialize({**values, "kernel": plain.kernel, "positions": plain.positions})
    made.save_pretrained(folder / around)
    saved = safetensors.load_file(folder / around / "model.safetensors")
    assert saved.keys() == values.keys() - {"head.weight"}
    assert all(torch.equal(value, values[name]) for name, value in saved.items())
    with torch.device("meta"):
        again = parallel((2,), "ddp", Wrapped(around))
    again.load_pretrained(folder / around)
    assert all(torch.equal(whole(value), values[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("around", ["nothing", "checkpoints", "compiled", "both"])
def test_files_have_all_that_the_plain_model_has_under_its_names(tmp_path: Path, around: str) -> None:
    run(2, within, tmp_path, around)


def changed(folder: Path) -> None:
    """What was added, removed or replaced after parallelize has no place in files."""

    def replace(module: Any) -> None:
        module.kernel = nn.Parameter(module.kernel.detach().redistribute(placements=[TorchReplicate()]))

    changes: dict[str, Any] = {
        "extra was added": lambda module: module.register_buffer("extra", torch.ones(2)),
        "norm.scale was added": lambda module: setattr(module.norm, "scale", nn.Parameter(torch.ones(2))),
        "scale was removed": lambda module: setattr(module, "scale", None),
        "kernel was replaced": replace,
    }
    for said, change in changes.items():
        module = parallel((2,), "fsdp", Net())
        change(module)
        with pytest.raises(ValueError, match=f"{said} after parallelize"):
            module.save_pretrained(folder / "none")
    module = parallel((2,), "fsdp", Net())
    if torch.distributed.get_rank():
        changes["extra was added"](module)
    with pytest.raises(ValueError, match=r"extra was added .*\(on rank 1 of 2\)"):
        module.save_pretrained(folder / "none")
    assert not (folder / "none").exists()


def test_a_save_that_would_leave_something_out_is_an_error_before_the_first_byte(tmp_path: Path) -> None:
    run(2, changed, tmp_path)
