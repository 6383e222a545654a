"""How tensors lie in memory makes no difference: kernels are given operands as they read them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Case, assert_same, eager, perturbed, simulated
from plans import random_assignment
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.ops.contract import needed_by
from autopar.ops.oracle import RuleError, laid_out
from autopar.passes.capture.errors import CaptureError
from autopar.passes.capture.trace import capture
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.passes.lower.chunk import CHUNKING
from autopar.passes.lower.overlap import overlap
from autopar.passes.lower.slice import SLICING
from autopar.planning.planner import Planner
from autopar.runtime.simulate import simulate_step


class Layers(nn.Module):
    """A product, and a function of it with layers of its own."""

    def __init__(self, function: Callable[..., torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layers)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x), *self.layers)


def cubes(x: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient differs from element to element."""
    return x.pow(3).mean()


def waves(x: torch.Tensor) -> torch.Tensor:
    """Complex numbers."""
    return torch.complex(x, x.sin())


def whole_numbers(x: torch.Tensor) -> torch.Tensor:
    """Of 0 to 7."""
    return (x.detach().abs() * 4).long().clamp(0, 7)


def windows(x: torch.Tensor) -> torch.Tensor:
    """Columns of an image, and back."""
    columns = F.unfold(x[:, None], (3, 2), padding=1, stride=(2, 1)).sin()
    return F.fold(columns, (6, 8), (3, 2), padding=1, stride=(2, 1))


def attention(x: torch.Tensor) -> torch.Tensor:
    """Of heads that stand last."""
    heads = x.unflatten(2, (4, 2)).transpose(2, 3).permute(0, 3, 1, 2)
    return F.scaled_dot_product_attention(heads, heads.sin(), heads.cos(), is_causal=True)


def restrided(x: torch.Tensor) -> torch.Tensor:
    """The same, with a stride of its dim of size 1 that means nothing."""
    return x.as_strided((4, 1, 8), (8, 99, 1))


def turned(x: torch.Tensor) -> torch.Tensor:
    """The transpose, by addresses."""
    return x.as_strided((4, 8, 6), (48, 1, 8))


def weighted(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


MODELS: Mapping[str, tuple[Callable[..., torch.Tensor], Callable[[], list[nn.Module]]]] = {
    "group norm of a permuted view": (lambda x, norm: cubes(norm(x.mT)), lambda: [nn.GroupNorm(4, 8)]),
    "batch norm of a permuted view": (
        lambda x, norm: cubes(norm(x.mT.unsqueeze(2)).permute(0, 3, 2, 1).sin()), lambda: [nn.BatchNorm2d(8)]),
    "layer norm of a permuted view": (lambda x, norm: cubes(norm(x.mT).mT.sin()), lambda: [nn.LayerNorm(6)]),
    "layer norm over all dims": (lambda x, norm: cubes(norm(x)), lambda: [nn.LayerNorm((4, 6, 8))]),
    "attention of a permuted view": (lambda x: cubes(attention(x)), list),
    "bags": (
        lambda x, bag: cubes(bag(whole_numbers(x)[..., 0]) * x[:, 0]), lambda: [nn.EmbeddingBag(8, 8, mode="mean")]),
    "weight norm": (lambda x, layer: cubes(layer(x)), lambda: [weighted(nn.Linear(8, 12))]),
    "a convolution padded wider than the map": (
        lambda x, layer: cubes(layer(x[:, :4].mT)), lambda: [nn.Conv1d(8, 8, 3, padding=6, dilation=6)]),
    "columns": (lambda x: cubes(windows(x)), list),
    "gates": (lambda x: cubes(F.glu(x) * F.glu(x.mT).mean(1)[:, None, :1]), list),
    "logarithms of sigmoids": (lambda x: cubes(F.logsigmoid(x)), list),
    "transforms": (lambda x: cubes(torch.fft.fft(torch.fft.fft(x, dim=2), dim=1).real), list),
    "real transforms": (
        lambda x: cubes(torch.fft.irfft2(torch.fft.rfft2(x) * waves(x[0, :, :5]), s=(6, 8))), list),
    "a transform of conjugates": (lambda x: cubes(torch.fft.hfft(waves(x))), list),
    "conjugates": (lambda x: cubes((waves(x).conj() @ waves(x.cos()).mT).imag), list),
    "complex constants": (lambda x: cubes((waves(x) * torch.tensor(1 + 2j) * (2 - 1j)).abs()), list),
    "covariances": (
        lambda x: cubes(torch.cov(x.flatten(0, 1).T, aweights=x.detach()[..., 0].abs().flatten())), list),
    "correlations": (lambda x: cubes(torch.corrcoef(x.flatten(0, 1).T)), list),
    "counts": (
        lambda x: cubes(x.mean((0, 1)) * torch.bincount(whole_numbers(x).flatten(), minlength=8)), list),
    "views by address": (
        lambda x: cubes(restrided(x[:, :1].contiguous()) + turned(x).mT),
        list),
    "a part by address": (lambda x: cubes(x.as_strided((4, 3, 8), (48, 8, 1))), list),
}  # fmt: skip
MESHES = ({"a": 2, "b": 2}, {"a": 3}, {"a": 2, "b": 3})


def case(name: str, rows: int = 4) -> Case:
    torch.manual_seed(0)
    function, layers = MODELS[name]
    x = torch.randn(rows, 6, 8, dtype=torch.float64)
    return perturbed(Case(model=Layers(function, *layers()).double(), batch=lambda step: ((x,), {})))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_one_device(name: str) -> None:
    """Under FSDP and random plans, whole and with slices and chunks forced on, on one of several meshes."""
    made = case(name)
    expected = eager(made)
    planner = Planner(made.model, MESHES[list(MODELS).index(name) % len(MESHES)], made.args)
    assert not planner.space.without_rule or name == "bags"
    assignments = [planner.assignment(planner.plan(solver="fsdp", cost="serial"))]
    assignments += [random_assignment(planner.space, seed) for seed in range(3)]
    for assignment in assignments:
        program = bucket(codegen(planner.space, assignment))
        for lowered in (program, SLICING.everywhere(program, 2), CHUNKING.everywhere(overlap(program), 3)):
            assert_same(simulated(lowered, planner.captured, made), expected, 1e-9)


@pytest.mark.parametrize("way", range(1, 7))
def test_incoming_gradients_of_any_strides(way: int) -> None:
    """A loss outside gives gradients as it makes them: permuted, with channels last, every second element."""
    torch.manual_seed(0)
    norm = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)
    ).double()
    x, tangent = torch.randn(2, 4, 4, 6, dtype=torch.float64), torch.randn(2, 8, 4, 6, dtype=torch.float64)
    expected = torch.autograd.grad(norm(x), list(norm.parameters()), tangent)
    planner = Planner(norm, {"a": 2, "b": 2}, (x,))
    held = {**dict(norm.named_parameters()), **dict(norm.named_buffers())}
    for seed in range(3):
        program = bucket(codegen(planner.space, random_assignment(planner.space, seed)))
        (output,) = (i.target for i in program.inputs if i.role == "tangent")
        (given,) = (i.target for i in program.inputs if i.role == "input")
        found = simulate_step(program, held, {given: x}, {output: laid_out(tangent, way)}).gradients
        for (name, _), gradient in zip(norm.named_parameters(), expected, strict=True):
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-9)


# --------------------------------------------------------------------------------------------- the contract


def unstrided(contiguous: list[str] | None) -> str:
    """An operator whose kernel reads its second argument where a contiguous one would lie."""
    name = f"autopar_test_{uuid.uuid4().hex}::scale"

    @torch.library.custom_op(name, mutates_args=())
    def op(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x * s.as_strided(s.shape, (1,))

    op.register_fake(lambda x, s: torch.empty_like(x))
    autopar.register_rule(name, "m k, k -> m k", linear=[[0]], contiguous=contiguous)
    return name


@pytest.mark.parametrize("contiguous", [None, ["s"]])
def test_an_operator_of_ones_own_is_given_what_it_needs(contiguous: list[str] | None) -> None:
    """All its tensors are contiguous, or those that it names."""
    name = unstrided(contiguous)
    assert "s" in needed_by(name.replace("::", ".") + ".default")
    assert autopar.check_rule(name, torch.randn(12, 12), torch.randn(12)).instances > 10


def test_the_oracle_finds_a_kernel_that_reads_no_strides() -> None:
    with pytest.raises(RuleError, match="the largest error is"):
        autopar.check_rule(unstrided([]), torch.randn(12, 12), torch.randn(12))


def test_a_contract_names_tensors_of_the_operator() -> None:
    with pytest.raises(ValueError, match=r"names 'y': give some of its tensors, x, s"):
        unstrided(["y"])


def test_an_operator_without_a_rule_gets_contiguous_operands_and_a_view_does_not() -> None:
    assert set(needed_by("aten._embedding_bag.default")) >= {"weight", "indices", "offsets"}
    for op in ("aten.reshape.default", "aten.permute.default", "aten.addcmul.default", "aten.mm.default"):
        assert not needed_by(op)


def test_the_peak_counts_what_the_contract_copies() -> None:
    """Group norm of a transposed view: a copy of its input while it runs."""
    from autopar.cost.liveness import Memory
    from autopar.ir.graph import Node, Ref, TensorMeta

    memory = Memory()
    memory.give("x", TensorMeta((4, 6, 8), torch.float64))
    arguments = (Ref("y"), None, None, 4, 8, 6, 2, 1e-5)
    permute = Node(op="aten.permute.default", args=(Ref("x"), (0, 2, 1)), outputs=("y",))
    norm = Node(op="aten.native_group_norm.default", args=arguments, outputs=("z", "mean", "rstd"))
    memory.local(permute)
    memory.local(norm)
    assert memory.unnamed == {id(norm): 4 * 6 * 8 * 8}


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: cubes(x.as_strided((4, 6, 4), (48, 8, 2))), "by its addresses in memory, which shards do not have"),
        (lambda x: torch.bincount(whole_numbers(x).flatten()) * x.sum(), "pass minlength=n"),
    ],
)
def test_what_has_no_static_meaning_is_refused_by_name(
    function: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Layers(function), (torch.randn(4, 6, 8),))


# ------------------------------------------------------------------------------------------------ real ranks


def gradients_on_a_rank(names: list[str]) -> list[dict[str, torch.Tensor]]:
    found: list[dict[str, torch.Tensor]] = []
    for name in names:
        made = case(name)
        module = autopar.parallelize(
            made.model, init_device_mesh("cpu", (2,), mesh_dim_names=("a",)), made.args, solver="fsdp"
        )
        loss: Any = module(*made.args)
        loss.backward()
        found.append({key: p.grad.full_tensor() for key, p in module.named_parameters()})
    return found


def test_on_real_ranks() -> None:
    names = ["batch norm of a permuted view", "conjugates"]
    for found in run(2, gradients_on_a_rank, names):
        for name, gradients in zip(names, found, strict=True):
            for key, gradient in eager(case(name)).gradients.items():
                torch.testing.assert_close(gradients[key], gradient, rtol=0, atol=1e-9)
