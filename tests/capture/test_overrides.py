"""What capture traces in another way than it is written: the same as one device, on every plan."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import models
import plans
import pytest
import torch
import torch.nn.functional as F
from models import Case, assert_same, eager, simulated
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.passes.capture.errors import CaptureError
from autopar.passes.capture.overrides import stft
from autopar.passes.capture.trace import capture
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.planning.planner import Planner
from autopar.testing import check

Forward = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two linear layers, an average of the first, and a forward of the test's own."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 12), nn.Linear(12, 12)
        self.average = nn.Linear(16, 12).requires_grad_(False)
        self.norm = nn.BatchNorm1d(12, momentum=None)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros(()))
        self.own = [forward]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own[0](self, x).square().mean()


def net(forward: Forward, batch: torch.Tensor | None = None) -> Case:
    torch.manual_seed(0)
    given = torch.randn(8, 16, dtype=torch.float64) if batch is None else batch
    return Case(model=Net(forward).double(), batch=lambda _: ((given,), {}))


def assert_equal_to_eager(made: Case, expected: models.Step | None = None) -> None:
    """Under the solver's plan, FSDP's and a random one."""
    one = Planner(made.model, {"a": 1}, made.args, made.kwargs)
    for mesh, solvers in (({"a": 2, "b": 2}, ("dp", "fsdp")), ({"a": 3}, ("megatron",))):
        planned = one.on(mesh, None)
        programs = [planned.program(planned.plan(solver=solver, cost="serial")) for solver in solvers]
        programs.append(bucket(codegen(planned.space, plans.random_assignment(planned.space, seed=0))))
        for program in programs:
            assert_same(simulated(program, planned.captured, made), expected or eager(made), 1e-9)


# -------------------------------------------------------------------------- norms and checkpoints


def test_a_norm_without_momentum_keeps_the_plain_average() -> None:
    made = net(lambda m, x: m.norm(m.a(x)) + m.norm(m.a(2 * x)).tanh())  # two of its steps in one
    assert_equal_to_eager(made)
    made.model(*made.args)
    assert made.model.norm.num_batches_tracked == 2
    assert_equal_to_eager(made)


def reentrant(m: Net, x: torch.Tensor) -> torch.Tensor:
    h = checkpoint(lambda u: m.b(m.a(u).tanh()).tanh(), x * m.count.exp(), use_reentrant=True)
    first, second, _ = checkpoint(lambda u, v, scale: (u * v, u + scale * v, None), m.b(h), h, 2.0, use_reentrant=True)
    return first - second


def test_a_reentrant_checkpoint_is_what_it_runs() -> None:
    batch = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_equal_to_eager(net(lambda m, x: reentrant(m, m.a(x) @ m.a.weight), batch))


def test_a_reentrant_checkpoint_of_what_needs_no_gradient_has_none() -> None:
    """Its results have none, as in eager, whatever parameters it uses."""
    made = net(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True)))
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        assert "a.weight" not in eager(made).gradients
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        assert_equal_to_eager(made)


@pytest.mark.parametrize("last", [False, True])
def test_a_checkpoint_in_a_checkpoint_is_what_it_runs(last: bool) -> None:
    """The inner one saves its inputs in the outer one's hooks, which run without gradients."""

    def nested(m: Net, h: torch.Tensor, reentrant: bool) -> torch.Tensor:
        inner = lambda u: checkpoint(lambda v: m.b(v).tanh(), u, use_reentrant=False) + u  # noqa: E731
        made: torch.Tensor = checkpoint(inner, h, use_reentrant=reentrant)
        return made

    assert_equal_to_eager(net(lambda m, x: m.b(nested(m, nested(m, m.a(x), False), last))))


def test_an_lstm_in_float32_is_its_steps() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0].square().mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    found = check(Recurrent(), {"a": 2}, (torch.randn(2, 4, 4),), dtype=None)
    assert found.equal, str(found)


def test_dropout_in_a_reentrant_checkpoint_has_the_mask_that_it_has_outside() -> None:
    steps = []
    for wrap in (lambda f, h: checkpoint(f, h, use_reentrant=True), lambda f, h: f(h)):
        made = net(lambda m, x, wrap=wrap: wrap(lambda h: m.b(m.drop(h)), m.a(x)))  # type: ignore[misc]
        planned = Planner(made.model, {"a": 2}, made.args)
        steps.append(simulated(planned.program(planned.plan(solver="dp", cost="serial")), planned.captured, made))
    assert_same(steps[0], steps[1], 1e-12)


# ----------------------------------------------------------------------------- writes of parameters


def clipped(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.a.weight.data.clamp_(-0.1, 0.1)
    return m.b(m.a(x))


def averaged(m: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for mean, p in zip(m.average.parameters(), m.a.parameters(), strict=True):
            mean.mul_(0.9).add_(p, alpha=0.1)
    return m.b(m.a(x)) - m.average(x)


def averaged_as_lists(m: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch._foreach_lerp_(list(m.average.parameters()), list(m.a.parameters()), 0.1)
    return m.b(m.a(x)) - m.average(x)


def read_before_and_after(m: Net, x: torch.Tensor) -> torch.Tensor:
    before = m.b(m.a(x)).detach()
    with torch.no_grad():
        m.b.weight.mul_(0.5)
        m.b.bias[2:5] = 1.0
    return m.b(m.a(x)) * before


def normalised(m: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.a.weight.copy_(m.a.weight / m.a.weight.norm(dim=1, keepdim=True))
    return m.a(x)


def assigned(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.a.weight.data = m.a.weight.data.flip(0) * x.data.mean()
    return m.a(x)


def part_of_it(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.a.weight.data.view(-1)[:5].fill_(1.0)
    m.a.bias.detach().zero_()
    return m.a(x)


def written_last(m: Net, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    with torch.no_grad():
        m.a.weight.sub_(h.mean(0).unsqueeze(1) * 0.1)
    return h


WRITES = (clipped, averaged, averaged_as_lists, read_before_and_after, normalised, assigned, part_of_it, written_last)


@pytest.mark.parametrize("forward", WRITES, ids=lambda f: f.__name__)
def test_a_write_of_a_parameter_is_a_result(forward: Forward) -> None:
    """What is read before it is the old value, and after it the new one; the gradient is that of what was read."""
    made = net(forward)
    written = [o.target for o in capture(made.model, made.args).graph.outputs if o.role == "mutation"]
    assert written and set(written) <= dict(made.model.named_parameters()).keys()
    assert_equal_to_eager(made)


def test_a_tied_parameter_is_written_once() -> None:
    made = net(lambda m, x: clipped(m, x) + m.average(x))
    made.model.average.weight = made.model.a.weight
    assert_equal_to_eager(made)


def test_the_data_of_a_parameter_keeps_its_shape() -> None:
    def reshaped(m: Net, x: torch.Tensor) -> torch.Tensor:
        m.a.weight.data = torch.ones(3, dtype=x.dtype)
        return m.a(x)

    made = net(reshaped)
    with pytest.raises(CaptureError, match=r"sets a tensor of torch.float64 \[12, 16\] to torch.float64 \[3\]"):
        capture(made.model, made.args)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.spectral_norm(nn.Linear(16, 12))
        self.b = parametrizations.spectral_norm(nn.Linear(12, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()).square().mean()


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning", "ignore:.*spectral_norm.*:FutureWarning")
def test_spectral_norms_train() -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 16, dtype=torch.float64)
    assert_equal_to_eager(Case(model=Spectral().double(), batch=lambda _: ((batch,), {})))


def trained(mesh: tuple[int, ...] | None, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of four steps, on ranks or as PyTorch runs it."""
    made = net(next(f for f in WRITES if f.__name__ == name))
    module: nn.Module = made.model
    if mesh is not None:
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
        module = autopar.parallelize(made.model, device_mesh, made.args, solver="fsdp")
    losses = models.train(module, torch.optim.SGD(module.parameters(), lr=0.1), made, range(4))
    return losses, {key: models.whole(p.detach()).clone() for key, p in module.named_parameters()}


@pytest.mark.parametrize("name", ["clipped", "averaged", "read_before_and_after"])
def test_ranks_write_their_parts(name: str) -> None:
    losses, parameters = trained(None, name)
    for found_losses, found in run(3, trained, (3,), name):
        assert found_losses == pytest.approx(losses, rel=1e-9)
        for key, parameter in parameters.items():
            torch.testing.assert_close(found[key], parameter, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------- control flow


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_both_branches_run_and_one_is_selected(sign: float) -> None:
    """The other is not defined here: its results and gradients are NaN, and count for nothing."""

    def branching(m: Net, x: torch.Tensor) -> torch.Tensor:
        undefined = lambda h: (m.b(h) - m.b(h)).sqrt() / (h - h)  # noqa: E731
        defined = lambda h: m.b(h).exp()  # noqa: E731
        branches = (defined, undefined) if sign > 0 else (undefined, defined)
        inner = torch.cond(x.sum() * sign > -1e9 * sign, *branches, (m.a(x),))
        return torch.cond(inner.mean() > 0, lambda h: h * 2, lambda h: h.sin(), (inner,))

    assert_equal_to_eager(net(branching))


def test_branches_of_other_shapes_are_refused() -> None:
    made = net(lambda m, x: torch.cond(x.sum() > 0, lambda h: h[:2].clone(), lambda h: h.clone(), (m.a(x),)))
    with pytest.raises(CaptureError, match="cannot be captured"):
        capture(made.model, made.args)


def test_loops_on_data_are_refused_by_name() -> None:
    from torch._higher_order_ops import while_loop

    def looping(m: Net, x: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda h: h.sum() < 9, lambda h: (h * 2,), (m.a(x),))[0]

    made = net(looping)
    with pytest.raises(CaptureError, match="control flow that depends on data, torch's while_loop"):
        capture(made.model, made.args)


LISTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numbers": lambda h: torch.tensor([h.detach().sum(), h.detach().max()], dtype=h.dtype).sum(),
    "mixed": lambda h: torch.tensor([[h[0, 0], 1.5], (h.mean(), 2)], dtype=torch.float64).prod(),
    "as a tensor": lambda h: torch.as_tensor([h.sum()]).squeeze(),
    "constants by name": lambda h: torch.tensor(data=[1.5, 2.0], dtype=h.dtype).sum() + h.new_tensor(data=3.0),
    "new": lambda h: h.new_tensor([h.sum(), True]).sum(),
}

# ---------------------------------------------------------------------------------------------- CTC


class Speech(nn.Module):
    """A CTC head, with labels picked by a mask: the lengths are the mask's own, or others."""

    def __init__(self, pick: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.head, self.pick = nn.Linear(5, 7), [pick]

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        targets, lengths = self.pick[0](labels, labels > 0)
        frames = torch.full((x.shape[0],), x.shape[1])
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets, frames, lengths, zero_infinity=True)


PICKS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "masked_select": lambda labels, mask: (labels.masked_select(mask), mask.sum(-1)),
    "an index": lambda labels, mask: (labels[mask].to(torch.int32).long(), mask.sum(dim=1).to(torch.int32)),
    "lengths of others": lambda labels, mask: (torch.masked_select(labels, mask), mask.long().flip(0).sum(-1)),
}


def speech(pick: str, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 12, 5, dtype=torch.float64, generator=generator)
    labels = torch.randint(-2, 7, (6, 4), generator=generator)  # holes, and some rows without any
    torch.manual_seed(0)
    return Case(model=Speech(PICKS[pick]).double(), batch=lambda _: ((x, labels), {}))


@pytest.mark.parametrize("pick", PICKS)
def test_labels_that_a_mask_picks(pick: str) -> None:
    assert_equal_to_eager(speech(pick))
    one, other = speech(pick), speech(pick, seed=1)
    planned = Planner(one.model, {"a": 2}, one.args)  # captured with other labels than it runs on
    found = simulated(planned.program(planned.plan(solver="dp", cost="serial")), planned.captured, other)
    assert_same(found, eager(other), 1e-9)


def test_labels_that_nobody_knows_and_something_else_reads_are_refused() -> None:
    made = speech("masked_select")

    def pick(labels: torch.Tensor, mask: torch.Tensor) -> Any:
        drawn = mask & (torch.rand(()) > -1)
        return labels[drawn] * labels[drawn].sum().sign(), mask.sum(-1)

    made.model.pick = [pick]
    with pytest.raises(CaptureError, match="makes a tensor whose shape depends on the data"):
        capture(made.model, made.args)


@pytest.mark.parametrize("build", LISTS)
def test_a_tensor_made_of_a_list_of_tensors_holds_their_numbers(build: str) -> None:
    """And no gradient reaches them."""
    assert_equal_to_eager(net(lambda m, x: m.b(m.a(x)) * LISTS[build](m.a(x))))


FRAMES: dict[str, dict[str, Any]] = {
    "of a window": {"window": torch.hann_window(8, dtype=torch.float64)},
    "of a narrow window": {"window": torch.hann_window(6, dtype=torch.float64), "win_length": 6, "hop_length": 3},
    "without a window": {"win_length": 5, "normalized": True, "pad_mode": "constant"},
    "both sides": {"center": False, "onesided": False},
}


@pytest.mark.filterwarnings("ignore:A window was not provided")
@pytest.mark.parametrize("x", [torch.linspace(-1, 2, 40).double().cos(), torch.randn(3, 41).double()], ids=["1", "2"])
@pytest.mark.parametrize("frames", FRAMES)
def test_frames_in_memory_are_windows(x: torch.Tensor, frames: str) -> None:
    expected = torch.stft(x, 8, return_complex=True, **FRAMES[frames])
    torch.testing.assert_close(stft(x, 8, return_complex=True, **FRAMES[frames]), expected, rtol=1e-12, atol=1e-12)


def test_spectra_train() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(8, dtype=x.dtype)
        spectra = torch.stft(m.a(x), 8, window=window, return_complex=True)
        return m.b(torch.istft(spectra * 0.5, 8, window=window)).tanh() + spectra.abs().mean()

    assert_equal_to_eager(net(forward))


# ---------------------------------------------------------------------------------------- constants


def largest(lengths: torch.Tensor) -> int:
    return int((lengths * 2).max()) - 3


def written(m: Net, x: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(4)
    numbers[1:].add_(5)
    return m.a(x)[: numbers.min().item() + 1]


NUMBERS: dict[str, Forward] = {
    "that are written": written,
    "of a range": lambda m, x: m.a(x)[: torch.arange(4).sum().item()],
    "of a shape": lambda m, x: m.a(x)[: torch.tensor(x.shape)[0].item() - 2],
    "one by one": lambda m, x: torch.cat([m.a(x) * r.item() for r in torch.linspace(0.1, 0.5, 3)]),
    "in a list": lambda m, x: torch.cat([m.a(x) * r for r in torch.linspace(0.1, 0.5, 3).tolist()]),
    "of the model's constant": lambda m, x: m.a(x)[: largest(LENGTHS)] if bool((LENGTHS > 1).all()) else x,
}
LENGTHS = torch.tensor([2, 4])
NUMBERS |= {
    "as text": lambda m, x: m.a(x)[: len(f"{LENGTHS.float().mean():.3f}{torch.ones(2)}") - 13],
    "through dlpack": lambda m, x: m.a(x) * torch.from_dlpack(torch.ones(12)),
}


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_constants_are_known(number: str) -> None:
    made = net(NUMBERS[number])
    planned = Planner(made.model, {"a": 2}, made.args)
    found = simulated(planned.program(planned.plan(solver="dp", cost="serial")), planned.captured, made)
    assert_same(found, eager(made), 1e-9)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.a(x)[: m.count.long().item()],
        lambda m, x: m.a(x)[: torch.randint(1, 3, ()).item()],
    ],
    ids=["a buffer", "drawn"],
)
def test_numbers_of_data_are_refused(forward: Forward) -> None:
    made = net(forward)
    with pytest.raises(CaptureError, match=r"depends on the data .*test_overrides.py:\d+|cannot be captured"):
        capture(made.model, made.args)


torch.save(torch.ones(12), FILE := io.BytesIO())


OF_PYTHON: dict[str, tuple[Forward, str]] = {
    "text": (lambda m, x: m.a(x) * len(str(m.a.weight)), "reads the values of a tensor"),
    "text of a list": (lambda m, x: m.a(x) * len(f"{[m.count]}"), "reads the values of a tensor"),
    "a number in a line": (lambda m, x: m.a(x) * len(f"{m.count:.4f}"), "reads the values of a tensor"),
    "numpy": (lambda m, x: m.a(x) * m.count.numpy(), "reads the values of a tensor"),
    "dlpack": (lambda m, x: m.a(x) * torch.from_dlpack(m.count), "reads the values of a tensor"),
    "a capsule": (lambda m, x: m.a(x) * torch.from_dlpack(torch.to_dlpack(m.count)), "reads the values of a tensor"),
    "a copy": (lambda m, x: m.a(x) + copy.copy(m.a.bias), "pickles or copies a tensor"),
    "pickle": (lambda m, x: m.a(x) + len(pickle.dumps(m.a.bias)), "pickles or copies a tensor"),
    "an address": (lambda m, x: m.a(x) if m.count.data_ptr() else x, "asks where a tensor lies in memory"),
    "shared memory": (lambda m, x: m.a(x) * m.count.share_memory_(), "asks where a tensor lies in memory"),
    "a storage": (lambda m, x: m.a(x) * x.new_empty(0).set_(m.count.untyped_storage()), "reads a tensor's storage"),
    "a file": (lambda m, x: m.a(x) * torch.load(io.BytesIO(FILE.getvalue())), "bytes that forward loads"),
    "a comparison": (lambda m, x: m.a(x) if torch.allclose(m.a.bias, m.b.bias) else x, "reads a number of a tensor"),
}
"""What Python takes of tensors that no program has."""


@pytest.mark.parametrize("case", OF_PYTHON)
def test_what_python_takes_of_tensors_is_refused_by_name(case: str) -> None:
    forward, message = OF_PYTHON[case]
    made = net(forward)
    with pytest.raises(CaptureError, match=message) as raised:
        capture(made.model, made.args)
    assert "test_overrides.py:" in str(raised.value)


class Converts(nn.Module):
    """Converts a layer in forward, as routers do that compute in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer = self.layer.to(torch.float32)
        return self.layer(x.to(torch.float32)).square().sum()


def test_a_layer_that_is_converted_to_what_it_is() -> None:
    model = Converts()
    assert len(capture(model, (torch.randn(2, 4),)).graph.outputs) == 3
    with pytest.raises(ValueError, match="forward converts weight of a Linear from"):
        capture(model.double(), (torch.randn(2, 4),))
    assert next(model.parameters()).dtype == torch.float64
