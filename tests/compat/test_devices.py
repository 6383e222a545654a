"""One graph for every device: what is captured names none, and its programs run on a GPU that is not here."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
import zoo
from ranks import run
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.compat.autocast import autocast_of
from autopar.compat.devices import ON_CPU_ALONE, ON_CUDA_ALONE, devices_of
from autopar.compat.distributed import local_tensor, make_dtensor
from autopar.compat.quick_fakes import quick_fakes
from autopar.compat.redistributing import full_tensor, redistributed
from autopar.compat.tensors import memory_of
from autopar.ir.graph import JointGraph
from autopar.passes.capture.trace import capture
from autopar.planning.capturing import captured_for_planning
from autopar.planning.plan import graph_digest as digest
from autopar.planning.planner import Planner
from autopar.planning.request import Request
from autopar.testing.devices import KERNELS, DeviceFakes, run_on_fakes

MESH = {"dp": 2, "tp": 2}


# ---- what is bound to a device -------------------------------------------------------------------


def kernels() -> Iterator[tuple[str, bool, bool]]:
    """(operator, whether it has a kernel on a CPU, on CUDA) of those in torch's own list that one of them has."""
    import torchgen
    from torchgen.gen import parse_native_yaml
    from torchgen.model import DispatchKey

    folder = Path(torchgen.__file__).parent / "packaged/ATen/native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    functions = {str(f.func.name): f for f in parsed.native_functions}
    for name, function in functions.items():
        if (
            function.has_composite_implicit_autograd_kernel
            or function.has_composite_explicit_autograd_kernel
            or function.has_composite_explicit_autograd_non_functional_kernel
        ):
            continue
        real = functions[str(function.structured_delegate)] if function.structured_delegate else function
        here = [parsed.backend_indices[key].has_kernel(real) for key in (DispatchKey.CPU, DispatchKey.CUDA)]
        if any(here):
            yield name, *here


TORCHS_OWN = ("_test_", "_foobar", "_make_dep_token", "_functional_assert_async")
"""Operators of torch's tests and tracers."""


def test_the_lists_of_kernels_are_torchs() -> None:
    for name, on_cpu, on_cuda in kernels():
        base = name.partition(".")[0]
        if on_cpu != on_cuda and not base.startswith(TORCHS_OWN) and not name.endswith("out"):
            op = f"aten.{name}" if "." in name else f"aten.{name}.default"
            assert devices_of(op) == {"cpu" if on_cpu else "cuda"}, name
    both = {name.partition(".")[0] for name, *on in kernels() if all(on)}
    assert not both & {name for name in (*ON_CPU_ALONE, *ON_CUDA_ALONE) if "." not in name}


def check_graph(graph: JointGraph) -> None:
    bound = {node.op for node in graph.nodes if devices_of(node.op) != {"cpu", "cuda"}}
    assert not bound, f"the graph holds {bound}, which one device alone has"
    named = {v for node in graph.nodes for _, v in node.kwargs if isinstance(v, torch.device)}
    assert named <= {torch.device("cpu")}


# ---- programs on a GPU that is not here ------------------------------------------------------------


class Recurrent(nn.Module):
    """Recurrent nets, batch norm in training, convolutions of two kinds, attention, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.BatchNorm1d(8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.scale = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = self.gru(self.lstm(x)[0])[0]
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.scale(x).square().sum()


def test_what_cuda_would_fuse_is_traced_as_it_is_here() -> None:
    planner = Planner(Recurrent(), MESH, (torch.randn(4, 3, 8),))
    check_graph(planner.captured.graph)
    for solver in ("dp", "fsdp"):
        run_on_fakes(planner.program(planner.planned(Request(solver=solver))))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_programs_in_bfloat16(name: str) -> None:
    """Whose attention is flash attention there."""
    case = models.in_dtype(models.case(name), torch.bfloat16)
    planner = Planner(case.model, MESH, case.args, case.kwargs, loss_fn=case.loss_fn)
    for solver in ("fsdp", "megatron_sp"):
        run_on_fakes(planner.program(planner.planned(Request(solver=solver))))


def test_a_program_that_would_not_run_there_is_not_said_to() -> None:
    """After one that runs either, whose results it has."""
    planner = Planner(nn.Linear(4, 4), {"dp": 2}, (torch.randn(4, 4),))
    program = planner.program(planner.plan(solver="ddp"))
    fakes = DeviceFakes()
    fakes.run(program)
    product = next(i for i in program.forward if i.op == "aten.addmm.default")
    others = {
        "kernel": replace(product, op="aten._upsample_lanczos2d_aa.default"),
        "says": replace(product, op="aten.mm.default", args=product.args[1:]),
    }
    others["says"] = replace(others["says"], outputs=product.outputs, args=(product.args[1], product.args[1]))
    for what, other in others.items():
        forward = tuple(other if i is product else i for i in program.forward)
        with pytest.raises(ValueError, match=r"on cuda, .*" + ("no such kernel" if what == "kernel" else "")):
            fakes.run(replace(program, forward=forward))


def test_a_reshaped_fake_lies_as_a_tensor_does() -> None:
    """Views among them, and copies; torch gives dims of size 1 other strides where it reshapes fakes by itself."""
    real = torch.arange(48.0).reshape(2, 3, 8)
    tensors = (real, real.permute(2, 0, 1), real[:, 1:, ::2], real[:, :1].expand(2, 3, 8))
    views = 0
    for tensor in tensors:
        for shape in ((-1,), (2, -1), (1, tensor.numel()), (-1, 4, 2)):
            expected = tensor.reshape(shape)
            with quick_fakes(), torch.no_grad():
                fake = torch.empty(48, device="cuda").as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                found = KERNELS["aten.reshape.default"](fake, shape)
            is_view = memory_of(expected) == memory_of(tensor)
            assert is_view == (memory_of(found) == memory_of(fake))
            assert (found.shape, found.stride()) == (expected.shape, expected.stride())
            assert found.storage_offset() == expected.storage_offset() and found.is_cuda
            views += is_view
    assert 0 < views < 4 * len(tensors)


# ---- the same graph wherever it is captured --------------------------------------------------------

TEN = ("GPT-2", "Qwen3", "BERT", "T5", "ViT", "Mixtral", "Mamba", "Whisper", "CLIP", "examples/resnet.py")


@pytest.mark.parametrize("name", TEN)
def test_a_laptops_graph_is_the_clusters(name: str) -> None:
    case = zoo.case(name, 1)
    laptop = captured_for_planning(case.model, case.args, case.kwargs, loss_fn=case.loss_fn)
    cluster = captured_for_planning(case.model, case.args, case.kwargs, loss_fn=case.loss_fn, device_type="cuda")
    check_graph(laptop.graph)
    assert digest(laptop.graph) == digest(cluster.graph)


def on_fake_cuda(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are fakes on a GPU."""
    memo: dict[int, Any] = {}
    with FakeTensorMode():
        for tensor in (*model.parameters(), *model.buffers()):
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
            memo[id(tensor)] = nn.Parameter(fake) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(model, memo)


def test_a_model_on_a_gpu_has_the_same_graph() -> None:
    case = models.case("llama")
    here = capture(case.model, case.args, case.kwargs).graph
    there = on_fake_cuda(case.model)
    assert next(there.parameters()).is_cuda
    assert digest(capture(there, case.args, case.kwargs).graph) == digest(here)


class NamesItsDevice(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer, self.device = nn.Linear(4, 4, device="cpu"), device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(4, device=self.device) + torch.zeros(4, device=torch.device(self.device))
        x = self.layer(x.to(self.device)) + places
        x = x + torch.ones_like(x, device=self.device) + torch.arange(4) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        x = x.cuda() if self.device != "cpu" else x
        with torch.device(self.device):
            return (x + torch.full((4,), 2.0)).to(device=self.device).square().sum()


def test_a_model_that_names_its_device_is_captured_without_it() -> None:
    """On a mesh of it, that is."""
    x = torch.randn(2, 4)
    here, there = (capture(NamesItsDevice(kind), (x,), device_type=kind).graph for kind in ("cpu", "cuda"))
    check_graph(there)
    assert digest(here) == digest(there)


def test_a_device_named_by_its_number_or_by_a_type_of_tensors_is_that_of_the_trace() -> None:
    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x.to(0)).type("torch.cuda.FloatTensor")
            return (x + torch.arange(4, device=0)).square().sum()

    check_graph(capture(Numbers(), (torch.randn(2, 4),), device_type="cuda").graph)


def test_a_plan_of_a_laptop_is_taken_on_the_cluster() -> None:
    case = models.case("gpt2")
    plan = autopar.plan(case.model, MESH, case.args, case.kwargs, cluster="dgx-h100", solver="dp")
    there = Planner(case.model, MESH, case.args, case.kwargs, request=Request(cluster="dgx-h100", device_type="cuda"))
    there.check(plan)
    run_on_fakes(there.program(plan))


# ---- autocast --------------------------------------------------------------------------------------

X = torch.rand(4, 4) + 0.5
PROBES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda a, b: a @ b,
    "mv": lambda a, b: torch.mv(a, b[0]),
    "addmv": lambda a, b: torch.addmv(b[0], a, b[1]),
    "addr": lambda a, b: torch.addr(a, b[0], a[0]),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "multi_dot": lambda a, b: torch.linalg.multi_dot([a, b, a]),
    "conv1d": lambda a, b: F.conv1d(a[None], b[:, :, None]),
    "conv1d same": lambda a, b: F.conv1d(a[None], b[:, :, None], padding="same"),
    "softmax": lambda a, b: a.softmax(-1),
    "softmax to": lambda a, b: a.softmax(-1, dtype=torch.float64),
    "log_softmax": lambda a, b: F.log_softmax(a, -1),
    "sum": lambda a, b: a.sum(),
    "sum of dim": lambda a, b: a.sum(0),
    "mean": lambda a, b: a.mean(),
    "cumsum": lambda a, b: a.cumsum(0),
    "cumprod": lambda a, b: a.cumprod(0),
    "prod": lambda a, b: a.prod(),
    "exp": lambda a, b: a.exp(),
    "log": lambda a, b: a.log(),
    "pow": lambda a, b: a**2,
    "rpow": lambda a, b: 2**a,
    "pow tensors": lambda a, b: a**b,
    "rsqrt": lambda a, b: a.rsqrt(),
    "reciprocal": lambda a, b: a.reciprocal(),
    "softplus": lambda a, b: F.softplus(a),
    "gelu": lambda a, b: F.gelu(a),
    "silu": lambda a, b: F.silu(a),
    "layer_norm": lambda a, b: F.layer_norm(a, (4,)),
    "rms_norm": lambda a, b: F.rms_norm(a, (4,)),
    "group_norm": lambda a, b: F.group_norm(a, 2),
    "norm": lambda a, b: a.norm(),
    "norm of dim": lambda a, b: a.norm(dim=0),
    "vector_norm": lambda a, b: torch.linalg.vector_norm(a),
    "matrix_norm": lambda a, b: torch.linalg.matrix_norm(a),
    "logsumexp": lambda a, b: a.logsumexp(0),
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b),
    "dist": lambda a, b: torch.dist(a, b),
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "l1_loss": lambda a, b: F.l1_loss(a, b),
    "smooth_l1_loss": lambda a, b: F.smooth_l1_loss(a, b),
    "huber_loss": lambda a, b: F.huber_loss(a, b),
    "kl_div": lambda a, b: F.kl_div(a, b),
    "cross_entropy": lambda a, b: F.cross_entropy(a, b.softmax(-1)),
    "cross_entropy of labels": lambda a, b: F.cross_entropy(a, torch.zeros(4, dtype=torch.int64, device=a.device)),
    "bce": lambda a, b: F.binary_cross_entropy_with_logits(a, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "cat as they are": lambda a, b: torch.cat([a, b.to(a.dtype)]),
    "stack": lambda a, b: torch.stack([a, b.to(a.dtype)]),
    "add": lambda a, b: a + b,
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b),
    "atan2": lambda a, b: torch.atan2(a, b),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "scatter_add": lambda a, b: a.scatter_add(0, torch.zeros(1, 4, dtype=torch.int64, device=a.device), b),
    "index_put": lambda a, b: a.index_put((torch.zeros(1, dtype=torch.int64, device=a.device),), b.narrow(0, 0, 1)),
    "interpolate": lambda a, b: F.interpolate(a[None, None], scale_factor=2, mode="bilinear"),
    "interpolate nearest": lambda a, b: F.interpolate(a[None, None], scale_factor=2),
    "avg_pool": lambda a, b: F.avg_pool3d(a[None, None], 1),
    "prelu": lambda a, b: F.prelu(a, b.flatten().narrow(0, 0, 1)),
    "linear": lambda a, b: F.linear(a, b),
    "cdist": lambda a, b: torch.cdist(a, b),
    "trace": lambda a, b: a.trace(),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
}


@pytest.mark.parametrize("probe", PROBES)
def test_autocast_of_cuda_casts_on_the_cpu_as_it_does_there(probe: str) -> None:
    """Compared with fakes on CUDA, which torch's own autocast casts."""
    run = PROBES[probe]
    dtypes = (torch.float32, torch.bfloat16)
    for pair in itertools.product(dtypes, dtypes):

        def result(device: str, mode: Any, pair: tuple[torch.dtype, ...] = pair) -> Any:
            with mode:
                try:
                    return run(*(torch.empty(4, 4, dtype=dtype, device=device) for dtype in pair)).dtype
                except RuntimeError as error:
                    assert "dtype" in str(error) or "scalar type" in str(error) or "same" in str(error), error
                    return "refused"

        there = result("cuda", cuda_autocast())
        with torch.autocast("cpu", torch.bfloat16), autocast_of("cuda"):
            here = result("cpu", FakeTensorMode())
        assert here == there, (probe, pair)


class Subscripts(TorchFunctionMode):
    """Indexing, without a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            x, index = args
            for dim, place in enumerate(index if isinstance(index, tuple) else (index,)):
                if place is None:
                    x = x.unsqueeze(dim)
                elif isinstance(place, int):
                    x = x.select(dim, place)
                elif place != slice(None):
                    x = x.narrow(dim, place.start or 0, place.stop)
            return x
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Autocast on CUDA, which `torch.autocast` disables where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode(), Subscripts():
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def test_a_plan_under_autocast_is_for_one_kind_of_device() -> None:
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        laptop = Planner(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), {"dp": 2}, (x,), cluster="dgx-h100")
        with pytest.raises(ValueError, match="captured under autocast for cuda, and cluster local has cpu"):
            laptop.on({"dp": 2}, "local")
        there = capture(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), (x,), device_type="cuda")
    assert digest(laptop.captured.graph) == digest(there.graph)
    assert any(
        n.op == "aten._softmax.default" and there.graph.metas[n.name].dtype == torch.float32 for n in there.graph.nodes
    )


def test_regions_for_cuda_are_traced_for_cuda() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                x = self.layer(x)
                with torch.autocast(device_type="cuda", dtype=torch.bfloat16, enabled=False):
                    x = self.layer(x.float())
                return self.layer(x).float().sum()

    graph = capture(Region(), (torch.randn(2, 4),), device_type="cuda").graph
    products = [graph.metas[n.name].dtype for n in graph.nodes if "addmm" in n.op]
    assert products == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_a_model_that_asks_whether_cuda_casts_is_answered_as_there() -> None:
    """Torch's own regions ask too, to restore what was."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_autocast_enabled("cuda")
            with torch.autocast("cuda", torch.bfloat16):
                assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
                x = self.layer(x.to(torch.get_autocast_dtype("cuda")))
            assert not torch.is_autocast_enabled()
            return x.float().sum()

    capture(Asks(), (torch.randn(2, 4),), device_type="cuda")


# ---- what is refused -------------------------------------------------------------------------------


def test_an_operator_without_a_kernel_there_is_refused_by_name() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.layer(x)
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0].square().sum()

    given = nn.Sequential(Own()), {"dp": 2}, (torch.rand(4, 2, 4, 4),)
    autopar.plan(*given)
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default in 0; "
    with pytest.raises(ValueError, match="torch has no kernel on cuda for " + re.escape(name)):
        autopar.plan(*given, cluster="dgx-h100")


class Gathering(TorchDispatchMode):
    """The devices of what DTensors all-gather within it."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.devices.append(args[0].device.type)
        return func(*args, **kwargs or {})


def gather_on_fakes(device: str) -> None:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    with quick_fakes(), Gathering() as gathering:
        local = torch.empty(6, 4, device=device)
        split = make_dtensor(local, mesh, (Shard(0), Replicate()), torch.Size((12, 4)), (4, 1))
        full = full_tensor(split)
        moved = redistributed(split, mesh, (Replicate(), Shard(1)))
        assert (full.device.type, full.shape) == (device, (12, 4))
        assert (moved.device.type, moved.placements, local_tensor(moved).shape) == (
            device, (Replicate(), Shard(1)), (12, 2)
        )  # fmt: skip
    assert set(gathering.devices) == {"cpu"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gloo_gathers_no_dtensor_from_a_gpus_memory(device: str) -> None:
    """Its all-gather for them reads a GPU's memory as if it were the host's, and that ends the process."""
    run(4, gather_on_fakes, device)
