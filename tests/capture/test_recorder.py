"""The recorded step is what eager does: its own Python, autograd's own engine, whatever forward does with them.

Each net trains three steps in eager and as its captured graph, and everything is compared: loss, every gradient (and
which parameters have one), every buffer, every parameter.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from generator_programs import one_rank
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.ir.graph import Node, Ref, overload
from autopar.ops.lockstep import run
from autopar.passes.capture.captured import Captured
from autopar.passes.capture.errors import CaptureError
from autopar.passes.capture.repeat import alike
from autopar.passes.capture.trace import capture
from autopar.testing import check

X = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def bare() -> None:
    """The input as no forward has seen it."""
    X.requires_grad_(False)
    X.grad = None


class Net(nn.Module):
    """Layers for a forward that is given."""

    def __init__(self, forward: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.norm, self.lstm = nn.BatchNorm1d(6), nn.LSTM(6, 6, 2)
        self.register_buffer("kept", torch.zeros(6))
        self.function = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def frozen_by_turns(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.c.requires_grad_(False)
    fooled = -m.c(m.a(x).tanh()).mean()
    m.c.requires_grad_(True)
    return fooled + m.c(m.a(x).tanh().detach()).square().mean()


def first_order(m: Net, x: torch.Tensor) -> torch.Tensor:
    (g,) = torch.autograd.grad(F.gelu(m.a(x)).square().mean(), m.a.weight)
    return F.linear(x, m.a.weight - 0.1 * g, m.a.bias).square().mean()


def second_order(m: Net, x: torch.Tensor) -> torch.Tensor:
    (g,) = torch.autograd.grad(m.a(x).tanh().square().mean(), m.a.weight, create_graph=True)
    return F.linear(x, m.a.weight - 0.1 * g, m.a.bias).square().mean()


def penalty(m: Net, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    y = m.c(m.a(x).tanh())
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (g.norm(dim=1) - 1).square().mean() + y.mean()


def greedy(m: Net, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    h.square().mean().backward(retain_graph=True)
    return m.c(h.detach()).square().mean() + h.mean()


class Again(torch.autograd.Function):
    """Runs a layer again in backward, by an engine of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


def made_again(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.c(Again.apply(m.a(x).tanh(), m.b)).square().mean()


class Watched(torch.autograd.Function):
    """Keeps the largest gradient in a buffer, and scales by it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.kept.copy_(torch.maximum(ctx.kept * 0.9, gradient.abs().amax(0)))
        return gradient / (1 + ctx.kept), None


def watched(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.c(Watched.apply(m.a(x), m.kept)).square().mean()


def overwritten(m: Net, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    nn.init.constant_(m.c.bias, 0.1)
    held = y.new_empty(5, 6)
    held[:, :3], held[:, 3:] = y[:, :3], y[:, 3:] * 2
    held.view(-1)[::2].mul_(3)
    held.t()[1:4].diagonal().add_(1)
    turned = y * 1
    turned.transpose_(0, 1).mul_(0.5)
    return m.c(held).square().mean() + turned.t().view(-1).cumsum(0).mean()


def hooked(m: Net, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    h.register_hook(lambda g: g * 2 + h.detach())
    k = h.tanh()
    k.grad_fn.register_prehook(lambda gs: tuple(-g for g in gs))
    return m.c(k).mean()


def transformed(m: Net, x: torch.Tensor) -> torch.Tensor:
    rows = torch.func.vmap(lambda r: m.a(r).tanh().sum())(x).mean()
    slopes = torch.func.jacrev(lambda r: m.a(r).tanh())(x[0]).square().sum()
    sizes = torch.tensor([2, 4])
    parts = torch.func.grad(lambda r: sum(i * part.cos().sum() for i, part in enumerate(r.split(sizes.tolist()))))(x[2])
    return rows + slopes + (parts * torch.func.grad(lambda r: m.b(r).sin().sum())(x[1])).square().sum()


def forward_mode(m: Net, x: torch.Tensor) -> torch.Tensor:
    along = torch.func.jvp(m.a, (x,), (x.cos(),))[1].square().mean()
    slopes = torch.func.jacfwd(lambda r: m.a(r).tanh())(x[0]).square().sum()
    with torch.autograd.forward_ad.dual_level():
        dual = m.c(torch.autograd.forward_ad.make_dual(x, x.sin()))
        tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
    # tangents that are known to be zero, of parameters
    normed = torch.func.jvp(lambda r: F.layer_norm(r, (6,), m.kept, m.b.bias).tanh(), (x,), (x.cos(),))[1]
    hessians = torch.vmap(torch.func.hessian(lambda r: m.b(r).tanh().sum()))(x)
    return along + slopes + hessians.square().mean() + normed.square().mean() + tangent.square().mean()


def checkpointed(m: Net, x: torch.Tensor) -> torch.Tensor:
    h = checkpoint(lambda z: m.a(z).tanh(), x.clone().requires_grad_(), use_reentrant=True)
    return m.c(checkpoint(lambda z: checkpoint(m.b, z, use_reentrant=False).tanh(), h, use_reentrant=False)).mean()


def counted_again(m: Net, x: torch.Tensor) -> torch.Tensor:
    """What the second run of a checkpoint does besides: it counts once more, and norms once more."""
    hooks: list[torch.Tensor] = []
    h = m.a(x)

    def inner(z: torch.Tensor) -> torch.Tensor:
        m.kept += 1
        y = m.norm(z).tanh()
        if y.requires_grad:  # the first run of a reentrant one has no gradients
            y.register_hook(hooks.append)
            h.register_hook(lambda g: g * (2 if hooks else 0.5))
        return y * m.kept

    outer = checkpoint(lambda z: checkpoint(inner, z.sin(), use_reentrant=False).tanh(), h, use_reentrant=False)
    return m.c(checkpoint(inner, outer, use_reentrant=True)).square().mean()


def normed_again(m: Net, x: torch.Tensor) -> torch.Tensor:
    """The second run draws what the first one drew: in training no norm reads its running statistics."""

    def inner(z: torch.Tensor) -> torch.Tensor:
        return F.dropout(m.norm(z), 0.3).tanh()

    return m.c(checkpoint(inner, m.a(x), use_reentrant=False) + checkpoint(inner, m.b(x), use_reentrant=True)).mean()


def averaged_again(m: Net, x: torch.Tensor) -> torch.Tensor:
    """A run that ends once it has what was saved, as soon as the norm does."""
    m.norm.momentum = None  # type: ignore[assignment]
    return m.c(checkpoint(lambda z: m.norm(m.b(z)), m.a(x).tanh(), use_reentrant=False)).square().mean()


def asking_for_gradients(m: Net, x: torch.Tensor) -> torch.Tensor:
    """Of an input, which the next call is given without."""
    return m.c(checkpoint(lambda z: m.a(z).tanh(), x.requires_grad_(), use_reentrant=True)).square().mean()


@torch.jit.script  # type: ignore[untyped-decorator]
def activation(x, w):  # type: ignore[no-untyped-def]
    return torch.sin(x) * w


def scripted(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.c(activation(m.a(x), m.b.bias)).square().mean()


def in_backward(m: Net, x: torch.Tensor) -> torch.Tensor:
    """Backward calls what forward may: attention, tensors of lists of tensors."""

    class Attends(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
            return z.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            rows = g[None, None]
            return F.scaled_dot_product_attention(rows, rows, rows)[0, 0] * torch.tensor([g.sum()])

    return m.c(Attends.apply(m.a(x))).square().mean()


def normed(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.kept = m.kept * 0.9 + m.a(x).detach().mean(0)
    return m.c(F.relu(m.norm(m.a(x)), inplace=True) - m.kept).square().mean()


def recurrent(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.c(m.lstm(x[:, None])[0]).square().mean()


def complex_numbers(m: Net, x: torch.Tensor) -> torch.Tensor:
    turned = torch.fft.rfft(m.a(x)) * torch.exp(1j * torch.arange(4.0, dtype=torch.float64))
    return torch.fft.irfft(turned, n=6).square().mean()


def packed(m: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        return m.c(m.a(x).tanh()).square().mean()


def offloaded(m: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        y = m.a(x)
        attended = F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])[0, 0]
        return m.c(attended + m.lstm(y[:, None])[0][:, 0] * y.sigmoid().prod(1, keepdim=True)).square().mean()


def scaled_for_backward(m: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.75 if t.is_floating_point() else t, lambda t: t):
        y = m.norm(F.layer_norm(m.a(x), (6,))).cumprod(1).softmax(1)
        y = y * checkpoint(lambda z: z.exp().prod(1, keepdim=True), y, use_reentrant=False)
        return m.c(y + torch.linalg.det((y @ y.t() + torch.eye(5).double())[:4, :4])).square().mean()


def determinants(m: Net, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x) @ m.b(x).t() + 3 * torch.eye(5, dtype=x.dtype)
    (g,) = torch.autograd.grad(torch.linalg.det(y), y, create_graph=True)
    return torch.linalg.det(y.mT / 5) + torch.linalg.slogdet(y[:3, :3])[1] + (g / 100).square().sum()


def through_data(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.b.weight.data.clamp_(-0.1, 0.1)
    return m.b(m.a(x).tanh()).square().mean()


def an_old_alias(m: Net, x: torch.Tensor) -> torch.Tensor:
    old = m.a.weight.detach()
    m.a.weight.data = m.a.weight.data * 0.5
    return (m.a(x) * old.sum()).square().mean()


def rounded_for_one_product(m: Net, x: torch.Tensor) -> torch.Tensor:
    kept = m.a.weight.data
    m.a.weight.data = torch.round(kept * 8) / 8
    y = m.a(x)
    m.a.weight.data = kept
    return m.a(y).square().mean()


def swapped(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.a.weight.data, m.b.weight.data = m.b.weight.data, m.a.weight.data
    return m.b(m.a(x).tanh()).square().mean()


def clipped(m: Net, x: torch.Tensor) -> torch.Tensor:
    for parameter in m.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)
    return m.b(m.a(x)).square().mean()


def written_since(m: Net, x: torch.Tensor) -> torch.Tensor:
    new = m.a.weight.detach() * 0.9
    m.a.weight.data = new
    new.add_(0.01)
    return m.a(x).square().mean()


def a_buffer_set(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.kept.set_(m.kept * 0.5 + x.detach().mean(0))
    return (m.a(x) * m.kept).square().mean()


FORWARDS = (
    an_old_alias, rounded_for_one_product, swapped, clipped, written_since, a_buffer_set,
    frozen_by_turns, first_order, second_order, penalty, greedy, made_again, watched, overwritten, hooked, transformed,
    checkpointed, asking_for_gradients, counted_again, in_backward, normed, recurrent, complex_numbers, packed,
    through_data,
)  # fmt: skip


def net(forward: Callable[[Net, torch.Tensor], torch.Tensor]) -> Net:
    torch.manual_seed(0)
    return Net(forward).double()


def replayed(captured: Captured, held: dict[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor | None]:
    """What the graph makes of parameters, buffers and the example input, by role and target."""
    graph = captured.graph
    given = {**held, **captured.constants, "args.0": X}
    values = {i.name: torch.ones(()).double() if i.role == "tangent" else given[i.target] for i in graph.inputs}
    with torch.no_grad():
        for node in graph.nodes:
            run(node, (), {(): values})
    return {(o.role, o.target): None if o.name is None else values[o.name].clone() for o in graph.outputs}


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_a_recorded_step_is_what_eager_does_bit_by_bit(forward: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
    model = net(forward)
    captured = capture(model, (X,))
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    made = replayed(captured, {name: x.detach().clone() for name, x in held.items()})
    eager = copy.deepcopy(model)
    loss = eager(X)
    loss.backward()
    assert torch.equal(made["output", "output"], loss.detach())  # type: ignore[arg-type]
    for name, p in eager.named_parameters():
        gradient = made.get(("gradient", name))
        assert (gradient is None) == (p.grad is None), name
        assert p.grad is None or torch.equal(gradient, p.grad), name  # type: ignore[arg-type]
        written = made.get(("update", name), made.get(("mutation", name), held[name].detach()))
        assert torch.equal(written, p.detach()), name  # type: ignore[arg-type]
    for name, b in eager.named_buffers():
        assert torch.equal(made.get(("update", name), made.get(("mutation", name), held[name])), b), name  # type: ignore[arg-type]


ANOTHER_FORMULA = (
    lambda m, y: y.prod(),
    lambda m, y: y.prod(1).sum(),
    lambda m, y: torch.autograd.grad(y.cumprod(1).sum(), y, create_graph=True)[0].square().sum(),
    lambda m, y: F.scaled_dot_product_attention(y[None], y[None], y[None]).sum(),
    lambda m, y: F.multi_head_attention_forward(
        y[:, None], y[:, None], y[:, None], 6, 2, m.lstm.weight_ih_l0[:18], None, None, None, False, 0.0,
        m.b.weight, None, need_weights=False,
    )[0].square().sum(),
    lambda m, y: F.multilabel_margin_loss(y, torch.tensor([[1, 2, -1, 0, 0, 0]] * 5)),
    lambda m, y: F.ctc_loss(y[:, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])),
    lambda m, y: torch.cond(y.sum() > 0, lambda z: z.sin() * z, lambda z: z.cos() * z.exp(), (y,)).sum(),
    lambda m, y: m.lstm(y[:, None])[0].square().sum(),
)  # fmt: skip


@pytest.mark.parametrize("operator", ANOTHER_FORMULA)
def test_hooks_may_not_change_what_another_formula_reads(operator: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
    """Where a program's gradient is not computed from what eager saves, the line is named; a copy changes nothing."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return operator(m, y)

    pack: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    capture(net(forward), (X,))
    pack = lambda t: t * 0.5 if t.is_floating_point() else t  # noqa: E731
    with pytest.raises(CaptureError, match=r"hooks change what is saved for backward \(.*test_recorder\.py:\d+ in"):
        capture(net(forward), (X,))


def test_hooks_of_one_saved_tensor_may_not_either() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x).prod(1)
        y.grad_fn._raw_saved_self.register_hooks(lambda t: t * 2, lambda t: t)
        return y.sum()

    with pytest.raises(CaptureError, match="hooks change what is saved for backward"):
        capture(net(forward), (X,))


def test_what_is_saved_may_be_written_where_hooks_keep_it() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = m.a(x).exp()
            result = y[:, :3].prod(1).sum()
            with torch.no_grad():
                y[:, places].mul_(2.0)
            return result

    places = slice(3, 6)
    capture(net(forward), (X,))
    places = slice(2, 4)
    with pytest.raises(CaptureError, match=r"forward writes what an operator keeps for its backward \(.* before that"):
        capture(net(forward), (X,))


CLOSE = (forward_mode, normed_again, averaged_again, offloaded, scaled_for_backward, determinants)
"""Right but for the last bit."""

# the caller's input, of which forward asks a gradient, gets one in eager alone
TRAINED = [forward for forward in FORWARDS if forward is not asking_for_gradients]


@pytest.mark.parametrize("forward", (scripted, *TRAINED, *CLOSE), ids=lambda f: f.__name__)
def test_programs_of_recorded_steps_train_as_eager_does(forward: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
    result = check(net(forward), {"a": 2}, (X,), steps=3, plans=2)
    assert result.equal, result


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_is_drawn(kind: type[nn.Module]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(6, 5, 3, dropout=0.5, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)[0].square().mean()

    torch.manual_seed(0)
    model = Recurrent()
    x = torch.randn(2, 4, 6)
    graph = capture(model, (x,)).graph
    assert sum("bernoulli" in node.op for node in graph.nodes) == 2
    assert not any("bernoulli" in node.op for node in capture(model.eval(), (x,)).graph.nodes)
    result = check(model.train(), {"a": 2}, (x,), steps=2)
    assert result.equal, result


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_again_what_it_drew_or_what_comes_next(alike: bool, reentrant: bool) -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        def inner(z: torch.Tensor) -> torch.Tensor:
            return F.dropout(z * torch.rand_like(z), 0.3).tanh()

        return m.c(checkpoint(inner, m.a(x), use_reentrant=reentrant, preserve_rng_state=alike)).square().mean()

    graph = capture(net(forward), (X,)).graph
    draws = sum(torch.Tag.nondeterministic_seeded in overload(node.op).tags for node in graph.nodes)  # type: ignore[attr-defined]
    assert draws == (2 if alike else 4)
    result = check(net(forward), {"a": 2}, (X,), steps=3, plans=2)
    assert result.equal, result


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_that_are_registered_before_are_recorded() -> None:
    model = net(lambda m, x: m.c(m.a(x).tanh()).mean())
    model.a.weight.register_hook(lambda g: g * 3)
    model.a.register_full_backward_hook(lambda module, gi, go: (None if gi[0] is None else gi[0] * 2,))
    model.c.register_full_backward_pre_hook(lambda module, go: (go[0] * 2,))
    captured = capture(model, (X,))
    held = {name: p.detach().clone() for name, p in (*model.named_parameters(), *model.named_buffers())}
    made = replayed(captured, held)
    model(X).backward()
    assert torch.equal(made["gradient", "a.weight"], model.a.weight.grad)  # type: ignore[arg-type]
    assert torch.equal(made["gradient", "c.weight"], model.c.weight.grad)  # type: ignore[arg-type]


def test_the_second_recording_finds_what_no_account_sees(tmp_path: Path) -> None:
    """Both lines are named at which two calls part."""
    file = os.open(tmp_path / "count", os.O_RDWR | os.O_CREAT)
    os.pwrite(file, b"1.0", 0)

    def counts(m: Net, x: torch.Tensor) -> torch.Tensor:
        count = float(os.pread(file, 3, 0))
        os.pwrite(file, str(count + 1).encode(), 0)
        return m.a(x).mul(count).mean()

    first, second = (rf"aten\.mul\.Tensor with {n}\.0 \(.*test_recorder\.py:\d+ in counts\)" for n in (1, 2))
    with pytest.raises(CaptureError, match=f"{first} in the first call, and {second} in the second"):
        capture(net(counts), (X,))
    os.close(file)


def test_gradients_that_nobody_would_ask_for_are_refused() -> None:
    def alone(m: Net, x: torch.Tensor) -> torch.Tensor:
        loss = m.c(m.a(x)).square().mean()
        loss.backward()
        return loss.detach()

    with pytest.raises(CaptureError, match=r"gradients of a\.weight, .* by a backward\(\) of its own"):
        capture(net(alone), (X,))


def caught(m: Net, x: torch.Tensor) -> torch.Tensor:
    try:
        return m.a(x[:, :3]).mean()
    except RuntimeError:
        return m.a(x).mean()


WRONG: dict[str, Callable[[Net, torch.Tensor], Any]] = {
    "an unknown keyword": lambda m, x: m.a(x, nonsense=1),
    "an unknown attribute": lambda m, x: m.nonsense(x),
    "an error of its own": lambda m, x: [][1],
    "a shape of a product": lambda m, x: m.a(x[:, :3]).mean(),
    "a shape of a sum": lambda m, x: (x + x[:, :3]).mean(),
    "a view": lambda m, x: x.view(7, 7).mean(),
    "a concatenation": lambda m, x: torch.cat([x, x[:, :3]]).mean(),
    "a loss": lambda m, x: F.cross_entropy(m.a(x), torch.zeros(3, dtype=torch.long)),
    "a convolution": lambda m, x: F.conv1d(x, torch.ones(2, 3, 1, dtype=x.dtype)).mean(),
    "dtypes of a product": lambda m, x: m.a(x.half()).mean(),
    "dtypes of a convolution": lambda m, x: F.conv1d(x[None], torch.ones(2, len(x), 1, dtype=torch.half)).mean(),
    "dtypes of matrices": lambda m, x: (x.half() @ m.a.weight).mean(),
}


@pytest.mark.parametrize("forward", WRONG.values(), ids=WRONG)
def test_an_error_of_the_model_is_that_of_eager(forward: Callable[[Net, torch.Tensor], Any]) -> None:
    with pytest.raises(Exception) as eager:
        net(forward)(X)
    with pytest.raises(type(eager.value)) as raised:
        autopar.plan(net(forward), {"a": 2}, (X,))
    assert str(raised.value) == str(eager.value)
    frames = traceback.extract_tb(raised.tb)
    assert {frame.filename for frame in frames} == {__file__}, "the person's own frames alone"
    assert frames[-1].lineno == forward.__code__.co_firstlineno


def test_two_parameters_in_one_memory_are_refused() -> None:
    def shared(m: Net, x: torch.Tensor) -> torch.Tensor:
        m.a.weight.data = m.b.weight.data
        return m.b(m.a(x)).mean()

    with pytest.raises(CaptureError, match=r"leaves b\.weight in the memory of a\.weight"):
        capture(net(shared), (X,))


HELD = torch.ones(6, dtype=torch.float64)


def test_memory_of_what_is_not_the_models_is_not_replaced() -> None:
    def held(m: Net, x: torch.Tensor) -> torch.Tensor:
        HELD.data = HELD * 2
        return m.a(x * HELD).mean()

    def given(m: Net, x: torch.Tensor) -> torch.Tensor:
        x.data = x * 2
        return m.a(x).mean()

    def shared(m: Net, x: torch.Tensor) -> torch.Tensor:
        m.a.bias.data = HELD
        return m.a(x).mean()

    messages = {held: "writes .*HELD in place", given: r"writes input args\.0 in place", shared: "change together"}
    for forward, message in messages.items():
        with pytest.raises(CaptureError, match=message):
            capture(net(forward), (X,))
    assert torch.equal(HELD, torch.ones(6, dtype=torch.float64))


def test_an_error_that_the_model_catches_is_none() -> None:
    assert check(net(caught), {"a": 2}, (X,)).equal


class Holding(nn.Module):
    """Functions that hold on to the model: hooks, a forward that was replaced, a weak reference, a gradient's hook."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale, self.seen, self.mask = 1.0, dict[str, torch.Tensor](), None
        self.a.register_forward_hook(lambda module, args, out: out * self.scale if self.training else out)
        self.a.register_forward_hook(self.keep)
        plain = self.b.forward
        self.b.forward = lambda x: plain(x).tanh() + x * self.mask
        self.b.parent = weakref.ref(self)
        self.listed = [lambda: self.scale]
        self.a.weight.register_hook(lambda gradient, model=self: gradient * model.scale)

    def keep(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.seen["a"] = out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = x[:, :1]
        y = self.b(self.a(x)) * self.listed[0]()
        assert self.b.parent() is self
        return y.square().mean() + self.seen["a"].abs().mean()


def test_what_a_person_holds_stays_theirs() -> None:
    """A function of the model reads a list of functions that hold on to the model: the list is the person's."""
    model = net(lambda m, x: m.a(x).mean())
    functions: list[Callable[[], float]] = [lambda: float(model.training)]
    held, first = functions, functions[0]
    model.a.register_forward_hook(lambda module, args, out: out * held[0]())
    capture(model, (X,))
    assert functions[0] is first


def test_what_holds_on_to_the_model_holds_on_to_what_runs() -> None:
    torch.manual_seed(0)
    eager, given = (Holding().double() for _ in range(2))
    given.load_state_dict(eager.state_dict())

    def decayed(model: Holding) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda loss: loss + 0.1 * model.b.weight.square().sum()

    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        parallel = autopar.parallelize(given, mesh, (X,), loss_fn=decayed(given), verify=9)
        vars(parallel)["applies_loss_fn"] = True
        for step in range(4):
            for model in (eager, parallel):
                model.train(step != 2)
                model.scale = 1.0 + step
                model.zero_grad()
            expected, found = decayed(eager)(eager(X)), parallel(X)
            expected.backward()
            found.backward()
            assert torch.allclose(expected, found), step
            for (name, p), q in zip(eager.named_parameters(), parallel.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad.full_tensor(), 1e-10, 1e-12), (step, name)  # type: ignore


def test_a_second_backward_would_add_once_more_what_forward_does_once() -> None:
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        for forward in (greedy, watched):
            loss = autopar.parallelize(net(forward), mesh, (X,))(X)
            loss.backward(retain_graph=True)
            with pytest.raises(ValueError, match=r"backward\(\) runs a second time on one call"):
                loss.backward()


def test_a_call_without_backward_loses_no_gradients_of_forwards_own() -> None:
    with one_rank():
        parallel = autopar.parallelize(net(greedy), init_device_mesh("cpu", (1,), mesh_dim_names=("a",)), (X,))
        loss = parallel(X) + parallel(X).detach()
        with pytest.raises(ValueError, match=r"backward\(\) never ran on what an earlier call returned"):
            loss.backward()
        parallel(X).backward()


@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_grad_takes_no_gradient_of_a_backward_within(inside: str) -> None:
    """In eager it goes to `.grad`, whoever asks for the others."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            ctx.function = function
            ctx.save_for_backward(z)
            return function(z)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            z = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                ctx.function(z).backward(gradient)
            return z.grad, None

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        if inside == "forward":
            m.b(y.detach()).square().mean().backward()
        return m.c(Again.apply(y, m.b) if inside == "backward" else y).square().mean()

    model = net(forward)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, (X,))
        for module in (model, parallel):
            module(X).backward()
        for name, parameter in parallel.named_parameters():
            expected = model.get_parameter(name).grad
            assert (parameter.grad is None) == (expected is None), name
            assert expected is None or torch.equal(parameter.grad.full_tensor(), expected), name  # type: ignore
        with pytest.raises(ValueError, match=r"something else than \.grad takes the gradient of b\.weight"):
            torch.autograd.grad(parallel(X), [*parallel.parameters()], allow_unused=True)


def test_anomaly_detection_looks_at_gradients_of_a_parallel_module() -> None:
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        parallel = autopar.parallelize(net(lambda m, x: m.c(m.a(x).tanh()).square().mean()), mesh, (X,))
        with torch.autograd.set_detect_anomaly(True):
            parallel(X).backward()
            with torch.no_grad():
                parallel.a.weight.fill_(torch.nan)
            with pytest.raises(RuntimeError, match="returned nan values"):
                parallel(X).backward()


def test_hooks_of_gradients_see_one_call_at_a_time() -> None:
    """And stay when the module is captured again."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 6), 1.0
            self.layer.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).mul(self.scale).square().mean()

    torch.manual_seed(0)
    model = Scaled().double()
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        parallel = autopar.parallelize(model, mesh, (X,), verify=1)
        for scale in (1.0, 2.0):
            for module in (model, parallel):
                module.scale = scale
                module(X).backward()
        assert torch.equal(parallel.layer.weight.grad.full_tensor(), model.layer.weight.grad)  # type: ignore
        with pytest.raises(ValueError, match=r"one backward\(\) runs through two calls, and hooks wait"):
            (parallel(X) + parallel(2 * X)).backward()
        for module in (model, parallel):  # a penalty on others is nobody's concern
            module.zero_grad()
            (module(X) + module.layer.bias.square().sum()).backward()
        for name in ("weight", "bias"):
            found, expected = getattr(parallel.layer, name).grad, getattr(model.layer, name).grad
            assert torch.equal(found.full_tensor(), expected)
        weight = parallel.layer.weight
        penalties: tuple[Callable[[], Any], ...] = (
            lambda: (parallel(X) + weight.square().sum()).backward(),
            lambda: weight.square().sum().backward(),
            lambda: torch.autograd.grad(parallel(X) + weight.square().sum(), weight),
            lambda: torch.autograd.grad(weight.square().sum(), weight),
        )
        for penalty in penalties:
            with pytest.raises(ValueError, match=r"a part of the gradient of layer\.weight comes from elsewhere"):
                penalty()
        (found,) = torch.autograd.grad(parallel(X), weight)
        assert torch.equal(found.full_tensor(), torch.autograd.grad(model(X), model.layer.weight)[0])  # type: ignore
        for module in (model, parallel):
            module.zero_grad()
            module(X).backward()
        assert torch.equal(parallel.layer.weight.grad.full_tensor(), model.layer.weight.grad)  # type: ignore


def _attended(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*[x[:, None]] * 3).sin().sum()


SLOPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grad": torch.func.grad(_attended),
    "grad of vmap": torch.func.grad(lambda x: torch.vmap(_attended)(x[None]).sum()),
    "vmap of grad": lambda x: torch.vmap(torch.func.grad(_attended))(x[None])[0],
    "grad of two vmaps": torch.func.grad(lambda x: torch.vmap(torch.vmap(_attended))(x[None, None]).sum()),
    "grad of what vmap closes over": torch.func.grad(lambda x: torch.vmap(lambda y: _attended(x * y))(x[0]).sum()),
}


class Sloped(nn.Linear):
    """Reads the slope of attention."""

    def __init__(self, how: str) -> None:
        super().__init__(8, 8)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * SLOPES[self.how](x)).square().mean()


ATTENDED = {
    "fused": lambda h: F.scaled_dot_product_attention(h[None], h[None].sin(), h[None])[0],
    "fused, masked": lambda h: F.scaled_dot_product_attention(h[None], h[None].sin(), h[None], h.new_ones(6, 6))[0],
    "composed": lambda h: F.scaled_dot_product_attention(h, h.sin(), h),
    "composed, of two widths": lambda h: F.scaled_dot_product_attention(h[None], h[None].sin(), h[None][..., :3])[0],
    "composed, dropped": lambda h: F.scaled_dot_product_attention(h[None], h.sin()[None], h[None], dropout_p=0.5)[0],
}


@pytest.mark.parametrize("how", ATTENDED)
@pytest.mark.parametrize("written", ["query", "value", "result"])
def test_attention_whose_tensors_are_written_behind_autograds_back(how: str, written: str) -> None:
    """A fused kernel reads what was written, matrix products read their own copies of queries, keys and result."""

    class Writing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            y = ATTENDED[how](h if written == "value" else h.tanh() if written == "result" else h * 1)
            (y if written == "result" else h).data.mul_(0.5)
            y = y + 0
            return (y * y.detach().cos()).mean()

    model, x = Writing(8, 8).double(), torch.randn(4, 6, 8, dtype=torch.float64)
    if written == "value" and how.startswith("composed"):
        with pytest.raises(CaptureError, match="forward writes what an operator keeps for its backward"):
            capture(model, (x,))
    else:
        assert check(model, {"a": 2}, (x,), plans=1, steps=2).equal


@pytest.mark.parametrize("operator", (*ANOTHER_FORMULA[5:8], lambda m, y: F.ctc_loss(
    y[:, None], torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
)))  # fmt: skip
def test_what_another_formula_reads_may_not_be_written(operator: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        result = operator(m, y)
        y.data.mul_(0.5)
        return result

    if operator is ANOTHER_FORMULA[6]:  # which keeps a result of its own
        assert check(net(forward), {"a": 2}, (X,), steps=2).equal
    else:
        with pytest.raises(CaptureError, match="forward writes what an operator keeps for its backward"):
            capture(net(forward), (X,))


@pytest.mark.parametrize("how", SLOPES)
def test_attention_that_a_transform_differentiates(how: str) -> None:
    model, x = Sloped(how).double(), torch.randn(4, 6, 8, dtype=torch.float64)
    assert check(model, {"a": 2}, (x,), plans=2, steps=2).equal


def test_gradients_that_forward_leaves_disabled() -> None:
    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x).sum()
            torch.set_grad_enabled(False)
            return y

    with pytest.raises(CaptureError, match="leaves gradients disabled"):
        capture(Leaving(), (torch.zeros(2, 4),))
    assert torch.is_grad_enabled()


class Shrinking(nn.Module):
    """Writes its weight before it multiplies with it."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.first, self.second, self.by = nn.Linear(4, 4), nn.Linear(4, 4), by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.second.weight.data.mul_(self.by)
        return self.second(h).square().mean()


@pytest.mark.parametrize("by", [0.9, 1.0])
def test_a_parameter_that_is_written_again_before_backward_is_refused_where_that_changes_it(by: float) -> None:
    """Eager's backward of the first call reads what the second one wrote."""
    with one_rank():
        mesh, x = init_device_mesh("cpu", (1,), mesh_dim_names=("a",)), torch.randn(3, 4)
        model = Shrinking(by)
        module = autopar.parallelize(copy.deepcopy(model), mesh, (x,))
        module(x).backward()  # one after the other is as in eager
        model(x).backward()
        module.zero_grad(), model.zero_grad()
        loss = module(x) + module(x).detach()
        if by != 1:
            with pytest.raises(ValueError, match=r"second\.weight, which forward writes and backward reads, was"):
                loss.backward()
            return
        loss.backward()
        (model(x) + model(x).detach()).backward()
        for p, q in zip(module.parameters(), model.parameters(), strict=True):
            assert torch.allclose(p.grad.full_tensor(), q.grad)


class Averaging(nn.Module):
    """Keeps a buffer that its gradients read."""

    def __init__(self, write: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(4, 4), write
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self)
        return (self.linear(x) * self.scale).square().mean() + (x * (self.scale * 2)).mean()


@pytest.mark.parametrize(
    ("write", "refused"),
    [
        (lambda module: module.scale.data.mul_(0.9), True),
        (lambda module: setattr(module.scale, "data", module.scale * 0.9), True),
        (lambda module: module.scale.data.view(2, 2)[0].add_(1), True),
        (lambda module: module.scale.data.clamp_(-2, 2), False),
        (lambda module: setattr(module, "scale", module.scale * 0.9), False),  # eager keeps the first one
    ],
)
def test_a_buffer_that_is_written_again_before_backward_is_refused_where_that_changes_it(
    write: Callable[[nn.Module], Any], refused: bool
) -> None:
    with one_rank():
        mesh, model = init_device_mesh("cpu", (1,), mesh_dim_names=("a",)), Averaging(write)
        x, y = torch.randn(2, 3, 4)
        module = autopar.parallelize(copy.deepcopy(model), mesh, (x,))
        loss = module(x) + module(y)
        if refused:
            with pytest.raises(ValueError, match="scale, which forward writes and backward reads, was written again"):
                loss.backward()
            return
        loss.backward()
        (model(x) + model(y)).backward()
        for p, q in zip(module.parameters(), model.parameters(), strict=True):
            assert torch.allclose(p.grad.full_tensor(), q.grad)


class Normed(nn.Module):
    """A batch norm in training, whose backward reads nothing of what it counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().mean()


def test_a_batch_norm_counts_in_several_calls_before_one_backward() -> None:
    with one_rank():
        mesh, model = init_device_mesh("cpu", (1,), mesh_dim_names=("a",)), Normed()
        x, y = torch.randn(2, 3, 4)
        module = autopar.parallelize(copy.deepcopy(model), mesh, (x,))
        for each in (module, model):
            loss = each(x) - each(y)
            each.norm.running_mean.data.zero_()
            loss.backward()
        for p, q in zip(module.parameters(), model.parameters(), strict=True):
            assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6)
        for p, q in zip(module.buffers(), model.buffers(), strict=True):
            assert torch.allclose(p, q)


class Noting(nn.Module):
    """Keeps numbers in what is no buffer."""

    def __init__(self, write: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(4, 4), write
        self.note, self.array = torch.ones(4), numpy.ones(4, dtype=numpy.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self)
        return self.linear(x) * self.note + torch.from_numpy(self.array)


@pytest.mark.parametrize(
    "write",
    [
        lambda module: module.note.mul_(0.9),
        lambda module: module.note.data.mul_(0.9),
        lambda module: module.note.detach().view(2, 2)[0].add_(1),
        lambda module: module.note.unsqueeze(0).data.t()[1:].copy_(torch.zeros(3, 1)),
        lambda module: torch.from_numpy(module.array).mul_(2),
        lambda module: torch.as_tensor(module.array)[1:].mul_(2),
    ],
)
def test_a_write_through_a_view_of_what_is_no_buffer_is_refused(write: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(CaptureError, match="in place, which is no buffer of the model"):
        capture(Noting(write), (torch.randn(3, 4),))
    module = Noting(lambda module: torch.as_tensor(module.array.tolist()).mul_(2))  # what forward makes is its own
    assert capture(module, (torch.randn(3, 4),)).graph.nodes


class Sparse(nn.Module):
    """Holds tensors that are not strided."""

    def __init__(self, read: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read
        self.adjacent, self.rows = torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()

    def forward(self, x: torch.Tensor) -> Any:
        return self.read(self, self.linear(x))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    "read",
    [
        lambda module, h: torch.sparse.mm(module.adjacent, h),
        lambda module, h: module.rows @ h,
        lambda module, h: h * module.adjacent._nnz(),
        lambda module, h: h * module.rows.values(),
        lambda module, h: h @ module.adjacent.to_dense(),
        lambda module, h: h * float(module.adjacent.sum()),
    ],
)
def test_a_sparse_tensor_is_refused_where_forward_reads_it(read: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    assert capture(Sparse(lambda _, h: h), (torch.randn(4, 4),)).graph.nodes
    with pytest.raises(CaptureError, match=r"sparse tensor.*dense"):
        capture(Sparse(read), (torch.randn(4, 4),))


class Enabling(nn.Linear):
    """Has gradients whatever the caller says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(True)
        return super().forward(x).square().mean()


def test_a_gradient_that_forward_enables_under_no_grad_is_refused_where_it_is_asked_for() -> None:
    with one_rank():
        mesh, x = init_device_mesh("cpu", (1,), mesh_dim_names=("a",)), torch.randn(3, 4)
        model = Enabling(4, 4)
        module = autopar.parallelize(copy.deepcopy(model), mesh, (x,))
        with torch.no_grad():
            before = module(x)
            assert torch.allclose(before, model(x))
        loss = module(x) * before.detach()
        loss.backward()
        with pytest.raises(
            ValueError, match=r"a gradient of output is asked for.*call the module without torch.no_gra"
        ):
            (module(x) * before).backward()


class Scaling(nn.Module):
    """Scales by numbers that a function gives."""

    def __init__(self, scale: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.scale, self.note = nn.Linear(4, 4).double(), scale, torch.ones(4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale(self, x)).square().mean()


def _written(array: Any, value: float = 3.0) -> None:
    array[..., :1] = value


def _of_scratch(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    scratch, scale = numpy.ones(4), torch.zeros(4, dtype=torch.float64)
    for i in range(3):
        _written(scratch, i)
        scale = scale + torch.from_numpy(scratch)
    return scale


def _of_range(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(4.0, dtype=torch.float64)
    _written(steps[1:].numpy())
    return steps


def _of_a_number(module: nn.Module, x: torch.Tensor) -> float:
    steps = torch.arange(4.0)
    _written(steps.numpy())
    return float(steps.sum())


def _of_bytes(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    memory = bytearray(numpy.ones(4).tobytes())
    scale = torch.frombuffer(memory, dtype=torch.float64)
    twice = scale * 2
    memory[:8] = numpy.zeros(1).tobytes()
    return twice


@pytest.mark.parametrize(
    "scale",
    [
        lambda module, x: _written(module.note.numpy()) or module.note,
        lambda module, x: _written(numpy.asarray(module.note.detach())) or module.note,
        lambda module, x: module.note * (_written(module.note.numpy()) or 1),
        lambda module, x: _written(x.numpy()) or 1,
        _of_scratch,
        _of_range,
        _of_a_number,
        _of_bytes,
    ],
)
def test_a_write_into_an_array_on_the_memory_of_a_tensor_is_refused(scale: Callable[[Any, Any], Any]) -> None:
    """Eager's tensor would change with it."""
    x = X[:, :4].contiguous()
    with pytest.raises(CaptureError, match="writes an array on the memory of a tensor"):
        capture(Scaling(scale), (x,))


def _of_an_array(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    array = torch.arange(4.0, dtype=torch.float64).numpy()
    array += 1
    return torch.from_numpy(array)


@pytest.mark.parametrize(
    "scale",
    [
        _of_an_array,
        lambda module, x: torch.from_numpy(module.note.numpy() * 2),
        lambda module, x: torch.tensor(x.numpy().mean(0)),
    ],
)
def test_an_array_that_no_tensor_shares_when_it_is_read_may_be_written(scale: Callable[[Any, Any], Any]) -> None:
    with one_rank():
        mesh, x = init_device_mesh("cpu", (1,), mesh_dim_names=("a",)), X[:, :4].contiguous()
        model = Scaling(scale)
        assert torch.allclose(autopar.parallelize(copy.deepcopy(model), mesh, (x,))(x), model(x))


NUMBERS = st.sampled_from(
    [0, 1, True, False, 0.0, -0.0, 1.0, math.nan, 1j, None, "x", torch.float32, Ref("a"), Ref("b")]
)
ARGUMENTS = st.lists(
    st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3), max_size=2
)
NODES = st.builds(
    lambda op, args, kwargs, output: Node(op=op, args=tuple(args), kwargs=tuple(kwargs.items()), outputs=(output,)),
    st.sampled_from(["aten.add.Tensor", "aten.mul.Tensor"]),
    ARGUMENTS,
    st.dictionaries(st.just("alpha"), NUMBERS, max_size=1),
    st.sampled_from(["x", "y"]),
)


@given(NODES, NODES)
@example(*(Node(op="aten.mul.Tensor", args=(Ref("a"), k), outputs=("x",)) for k in (1, True)))
@example(*(Node(op="aten.mul.Tensor", args=(Ref("a"), k), outputs=("x",)) for k in (0.0, -0.0)))
@example(*(Node(op="aten.mul.Tensor", args=(Ref("a"), float("nan")), outputs=("x",)) for _ in range(2)))
def test_nodes_are_alike_whose_forms_and_names_are_equal(a: Node, b: Node) -> None:
    for one, other in ((a, b), (a, a), (a, dataclasses.replace(a))):
        equal = (one.form, one.inputs, one.outputs) == (other.form, other.inputs, other.outputs)
        assert alike(one, other) == equal
