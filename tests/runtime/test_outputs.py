"""What people do with outputs that no rank has whole: gradients are those of eager, or asking for them is an error."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import whole
from ranks import outcomes, run
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autopar

SIZE = 4
X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, SIZE).sin()
V = torch.linspace(0, 2, 32, dtype=torch.float64).reshape(8, SIZE).cos()

Case = Callable[[nn.Module, torch.Tensor], Any]
"""Something done with a module and its input; what it returns is compared, with the gradients of both."""


class Square(torch.autograd.Function):
    """Takes outputs without asking them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Watched(nn.Module):
    """A layer with a hook that takes its input through a function of autograd's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
        self.register_full_backward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(2))
    return nn.Sequential(next(layers), nn.Tanh(), next(layers))


def done(*steps: Any) -> Any:
    """What the last of these gave."""
    return steps[-1]


def kept(y: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor], times: int = 1) -> torch.Tensor | None:
    y.retain_grad()
    for left in reversed(range(times)):
        loss(y).backward(retain_graph=left > 0)
    return y.grad


def in_inference(y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return y.mean()


def within_inference(module: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        y = module(X)
        return y.add_(1).mean() + y.sum()


def leaf(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    with torch.no_grad():
        y = module(x)
    y.requires_grad_()
    (Square.apply(y) + y).sum().backward()
    return y.grad


def seen(y: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    y.register_hook(lambda gradient: factor * gradient)
    return y


def chained(module: nn.Module, x: torch.Tensor, look: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
    h = module(x)
    return look(h, module(h))


def penalty(y: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), y, create_graph=True)
    return gradient.square().sum()


grad = torch.autograd.grad

RIGHT: dict[str, Case] = {
    "parameters from an output": lambda m, x: grad(m(x), list(m.parameters()), V),
    "parameters from an output, backward": lambda m, x: m(x).backward(V, inputs=list(m.parameters())),
    "an output and parameters": lambda m, x: (lambda y: y.square().sum().backward(inputs=[y, *m.parameters()]))(m(x)),
    "unread ones, as zeros": lambda m, x: grad(x.sum(), [m(x), x, V.clone().requires_grad_()], materialize_grads=True),
    "metrics first, within inference_mode": lambda m, x: (
        lambda y: done(in_inference(y), (y.square().mean() + m(2 * x).mean()).backward())
    )(m(x)),
    "a function of what was written": lambda m, x: Square.apply(m(x).mul_(3)).sum().backward(),
    "a function of what is hooked": lambda m, x: Square.apply(seen(m(x))).sum().backward(),
    "a function of what keeps its gradient": lambda m, x: kept(m(x), lambda y: Square.apply(y).sum()),
    "a function of what is asked for": lambda m, x: (lambda y: grad(Square.apply(y).sum(), y))(m(x)),
    "a function of a leaf": leaf,
    "a function of what was detached": lambda m, x: (
        lambda y: (lambda total: (Square.apply(y.detach_()) + total).sum().backward())(y.sum())
    )(m(x)),
    "checkpoints of what was written": lambda m, x: (
        checkpoint(torch.sin, m(x).mul_(3), use_reentrant=True).sum().backward()
    ),
    "a hooked layer of what was written": lambda m, x: Watched()(m(x).mul_(3)).sum().backward(),
    "a hook after a second call": lambda m, x: chained(m, x, lambda h, y: done(seen(h), y.square().sum().backward())),
    "a gradient kept after a second call": lambda m, x: chained(m, x, lambda h, y: kept(h, lambda h: (h + y).sum())),
    "asked for after a second call": lambda m, x: chained(m, x, lambda h, y: grad((y + h).sum(), h)),
    "asked for through a second call": lambda m, x: chained(m, x, lambda h, y: grad(y.sum(), h)),
    "into .grad after a second call": lambda m, x: chained(
        m, x, lambda h, y: done((y + h).sum().backward(inputs=[h]), h.grad)
    ),
    "gradients that add up": lambda m, x: kept(m(x), lambda y: y.square().sum(), times=2),
    "kept, then hooked": lambda m, x: (lambda y: (y.retain_grad(), seen(y), y.square().sum().backward(), y.grad)[-1])(
        m(x)
    ),
    "into .grad, then on": lambda m, x: (
        lambda y, loss: (loss(y).backward(inputs=[y, y], retain_graph=True), loss(y).backward(), y.grad)[-1]
    )(m(x), lambda y: y.square().sum()),
    "kept, then come, then written": lambda m, x: (lambda y: (kept(y, lambda y: y.sum(), 2), y.mul_(2), y.grad)[-1])(
        m(x)
    ),
    "of a batch": lambda m, x: (lambda y: grad(y.square(), y, torch.stack([V, V]), is_grads_batched=True))(m(x)),
    "within inference_mode": lambda m, x: within_inference(m),
    "kept, then written": lambda m, x: kept(m(x), lambda y: y.mul_(3).square().sum()),
    "hooked, then written, then hooked": lambda m, x: seen(seen(m(x)).mul_(3), 5.0).square().sum().backward(),
    "asked for once written": lambda m, x: (lambda y: grad(Square.apply(y).sum() + y.sum(), y))(m(x).mul_(3)),
    "a penalty on its gradient": lambda m, x: penalty(m(x)).backward(),
    "a second derivative of a loss": lambda m, x: (lambda y: grad(penalty(y), y))(m(x)),
}

functional = torch.autograd.functional


def dual(module: nn.Module, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x.detach(), V))).tangent


def twice(module: nn.Module, x: torch.Tensor, inputs: Any) -> Any:
    (gradient,) = grad(module(x).square().sum(), x, create_graph=True)
    return gradient.square().sum().backward(inputs=inputs)


AGAIN: dict[str, Case] = {
    "hessian": lambda m, x: functional.hessian(lambda x: m(x).square().sum(), x),
    "hvp": lambda m, x: functional.hvp(lambda x: m(x).square().sum(), x, V),
    "jvp": lambda m, x: functional.jvp(m, x, V),
    "a gradient's gradient": lambda m, x: twice(m, x, [x]),
    "a gradient's gradient of parameters": lambda m, x: twice(m, x, list(m.parameters())),
    "forward-mode": dual,
}
"""Second derivatives, which are refused by name."""


class Dirty(torch.autograd.Function):
    """Writes what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


def written_by_a_view() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    y = autopar.parallelize(model(), mesh, (X,), solver="fsdp")(X)
    y[0].mul_(3)
    with pytest.raises(ValueError, match=r"written through a view of it is given to a torch\.autograd\.Function"):
        Square.apply(y)
    y.sum()  # an operator sees it
    Square.apply(y).sum().backward()
    y = autopar.parallelize(model(), mesh, (X,), solver="fsdp")(X)
    with pytest.raises((ValueError, RuntimeError), match="dirty"):
        y.sum()
        Dirty.apply(y)
        y.sum()
    y = autopar.parallelize(model(), mesh, (X,), solver="fsdp")(X)
    squares = Square.apply(y)
    with torch.no_grad():
        y.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


def is_let_go(look: Callable[[torch.Tensor], Any], differentiate: bool) -> bool:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    x = X.clone().requires_grad_()
    y = autopar.parallelize(model(), mesh, (x,), solver="fsdp")(x)
    kept = weakref.ref(y), weakref.ref(y.grad_fn)
    look(y)
    if differentiate:
        y.square().sum().backward()
    del y
    gc.collect()
    return kept[0]() is None and kept[1]() is None


def let_go() -> list[bool]:
    looks = (
        lambda y: None,
        lambda y: y.retain_grad(),
        lambda y: y.register_hook(lambda gradient: 2 * gradient),
        lambda y: y.mul_(2),
    )
    return [is_let_go(look, differentiate) for look in looks for differentiate in (False, True)]


def test_outputs_are_let_go_with_what_backward_keeps() -> None:
    for found in run(2, let_go):
        assert all(found), found


def compared(refused: bool) -> dict[str, str]:
    """Of each case "" if it is as in eager, the error, or how it differs."""
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("a",))
    beside, x = model(), X.clone().requires_grad_()
    module = autopar.parallelize(copy.deepcopy(beside), mesh, (x,), solver="fsdp")
    found = {}
    for name, case in (AGAIN if refused else RIGHT).items():
        made = []
        for one in (module, beside):
            one.zero_grad()
            given = X.clone().requires_grad_()
            try:
                result = case(one, given)
            except ValueError as error:
                made.append(str(error))
                continue
            tensors = torch.utils._pytree.tree_leaves((result, [p.grad for p in one.parameters()], given.grad))
            made.append([None if t is None else whole(t).detach() for t in tensors])
        ours, eager = made
        if isinstance(ours, str):
            found[name] = ours
            continue
        pairs = [*zip(ours, eager, strict=True)]
        is_same = all(a is b or (a is not None and b is not None and torch.allclose(a, b)) for a, b in pairs)
        found[name] = "" if is_same else str(pairs)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_eager(ranks: int) -> None:
    for found in run(ranks, compared, False):
        assert found == dict.fromkeys(RIGHT, "")


def test_a_function_of_what_a_view_wrote_is_refused() -> None:
    run(2, written_by_a_view)


@pytest.mark.parametrize("ranks", [1, 2])
def test_second_derivatives_are_refused(ranks: int) -> None:
    for found in run(ranks, compared, True):
        for name, said in found.items():
            what = "has a tangent" if name == "forward-mode" else "cannot be differentiated again"
            assert what in said, name


class Two(nn.Module):
    """Outputs of one shape, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b = self.a(x), self.b(x)
        return {"a": a, "b": b, "loss": (a * b).sum()}


def apart(case: str) -> None:
    """Ranks that read different outputs."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("a",)), torch.distributed.get_rank()
    module = autopar.parallelize(Two(), mesh, (X,), solver="fsdp")
    for _ in range(2):  # the first call is new, and the second is not
        output = module(X)
        output["loss"].backward()
    output = module(X)
    if case == "in another order":
        for name in "ab" if rank == 0 else "ba":
            output[name].norm()
    elif case == "one rank alone, before backward":
        if rank == 0:
            output["a"].norm()
        output["loss"].backward()
    else:
        output["loss"].backward()
        if rank == 0:
            output["a"].norm()
        module(X)


@pytest.mark.parametrize("case", ["in another order", "one rank alone, before backward", "one rank alone, at the end"])
def test_ranks_that_read_different_outputs_are_told_so(case: str) -> None:
    for outcome in outcomes(2, apart, case):
        assert "gathers it on all ranks at once" in str(outcome.error)
        assert "rank 0: gathers output.a of call 3" in str(outcome.error)


class Gathers(TorchDispatchMode):  # type: ignore[misc]
    """Counts tensors that are gathered, beside what programs send."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        self.count += "all_gather" in func.__name__
        return func(*args, **(kwargs or {}))


def gathered() -> tuple[int, int, int]:
    """Of a call, a loss that reads two of its outputs, and backward."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    module = autopar.parallelize(Two(), mesh, (X,), solver="fsdp")
    with Gathers() as call:
        outputs = module(X)
    with Gathers() as reads:
        loss = (outputs["a"] * outputs["b"]).sum() + outputs["a"].sum()
    with Gathers() as backward:
        loss.backward()
    return call.count, reads.count, backward.count


def test_an_output_that_is_read_is_gathered_once_and_its_gradient_never() -> None:
    assert run(2, gathered) == [(0, 2, 0)] * 2


NUMBERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "norm": lambda p: p.norm().item(),
    "sum": lambda p: float(p.sum()),
    "count": lambda p: int((p > 0).sum()),
    "least": lambda p: p.min().item(),
    "any": lambda p: bool((p > 0.47).any()),
    "all": lambda p: bool((p < 0.47).all()),
    "finite": lambda p: bool(p.isfinite().all()),
    "compared": lambda p: bool(p.norm() > 1),
}


def numbers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """That Python reads of each parameter, and of that of eager."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    beside = model()
    with torch.no_grad():
        next(beside.parameters())[-1, -1] = torch.inf  # in the part of one rank
    module = autopar.parallelize(copy.deepcopy(beside), mesh, (X,), solver="fsdp")

    def read(parameter: torch.Tensor) -> dict[str, Any]:
        return {name: number(parameter.detach()) for name, number in NUMBERS.items()}

    return [(read(p), read(q)) for p, q in zip(module.parameters(), beside.parameters(), strict=True)]


def test_numbers_of_parameters_are_those_of_the_whole_on_every_rank() -> None:
    for found in run(2, numbers):
        for ours, eager in found:
            assert ours == pytest.approx(eager)


class Overflows(nn.Module):
    """Outputs whose derivatives are no numbers, beside others; one of them is of all that the others are of."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above, self.beside = (nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.below(x)
        infinite = (h * 1e4).exp()
        return {"a": self.above(h).tanh(), "b": infinite, "c": infinite.log() + self.beside(h), "d": h.sum()}


LOSSES: dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]] = {
    "one": lambda out: out["a"].sum(),
    "two": lambda out: out["a"].sum() * out["d"],
    "infinite": lambda out: out["b"].sum(),
    "all but one": lambda out: out["a"].sum() + out["c"].sum() + out["d"],
    "the same again": lambda out: out["a"].sum(),
}


def unread(solver: str) -> list[tuple[str, list[torch.Tensor | None], list[torch.Tensor | None]]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    torch.manual_seed(0)
    beside = Overflows()
    module = autopar.parallelize(copy.deepcopy(beside), mesh, (X,), solver=solver)
    found = []
    for name, loss in LOSSES.items():
        for each in (module, beside):
            each.zero_grad()
            loss(each(X)).backward()
        gradients = ([None if p.grad is None else whole(p.grad) for p in m.parameters()] for m in (module, beside))
        found.append((name, *gradients))
    return found


def other_losses() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    module = autopar.parallelize(Overflows(), mesh, (X,))
    out = module(X)
    loss = out["a"].sum()
    try:
        (loss + out["d"] if mesh.get_rank() else loss).backward()
    except ValueError as error:
        return str(error)
    return ""


def test_losses_of_ranks_that_read_other_outputs_are_one_error() -> None:
    """Before any of them begins what the others do not."""
    for said in run(2, other_losses):
        assert "the losses of ranks read other outputs: let those of all ranks read the same: " in said, said
        assert "without output.b, output.c, output.d; rank 1: backward() without output.b, output.c" in said


@pytest.mark.parametrize("solver", ["ddp", "fsdp", "megatron"])
def test_an_output_that_no_loss_reads_leaves_nothing_in_gradients(solver: str) -> None:
    """Not even where its derivative is infinite, and zero times that is no number."""
    for found in run(2, unread, solver):
        for name, ours, eager in found:
            assert [g is None for g in ours] == [g is None for g in eager], name
            for one, other in zip(ours, eager, strict=True):
                if one is not None and other is not None:
                    torch.testing.assert_close(
                        one, other, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
                    )
        assert all(g is None or bool(g.isfinite().all()) for g in found[0][1])
        assert any(g is not None and not g.isfinite().all() for g in found[2][1])
