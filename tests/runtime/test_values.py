"""A program's values are values: what the caller, an optimizer or the next step writes changes nothing else, and a
gradient that cannot be computed is an error."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from generator_programs import one_rank
from models import assert_close, whole
from ranks import run
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrizations import weight_norm

import autopar
from autopar.passes.capture.errors import CaptureError
from autopar.passes.capture.leaves import same_value
from autopar.passes.capture.trace import capture
from autopar.runtime.agreement import digest
from autopar.runtime.module import ParallelModule

SIZE = 4
X = torch.linspace(-1, 1, SIZE * SIZE, dtype=torch.float64).reshape(SIZE, SIZE)


def parallel(model: nn.Module, *args: Any, solver: str = "fsdp", **options: Any) -> ParallelModule:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("a",))
    return autopar.parallelize(copy.deepcopy(model), mesh, args, solver=solver, **options)


class Weighted(nn.Module):
    """A weight, and three buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.float64))
        for number, name in enumerate("abc", 1):
            self.register_buffer(name, torch.full((SIZE, SIZE), float(number), dtype=torch.float64))


# -------------------------------------------------------------------------------------------------- outputs


class Everything(Weighted):
    """Outputs that are clones, views and new values of all there is."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        before = self.a.clone()
        self.a.add_(1)
        y = x @ self.w
        return {
            "y": y, "same": y, "row": y[0], "before": before, "after": self.a, "untouched": self.b.t().clone(),
            "constant": torch.tensor([1.0, 2.0]), "weight": self.w, "weight.t": self.w.t(),
            "input": x, "clone": x.clone(), "once": x * 1,
        }  # fmt: skip


def written_outputs() -> None:
    model, x = Everything(), X.clone()
    module, beside = parallel(model, x), copy.deepcopy(model)
    for path in copy.deepcopy(model)(x):
        given, _ = module(x), beside(x)
        with torch.no_grad():
            (given[path].to_local() if hasattr(given[path], "to_local") else given[path]).fill_(77.0)
        if path in ("after", "weight", "weight.t"):  # eager's model changes, and the module says so once
            name = "a" if path == "after" else "w"
            with pytest.raises(ValueError, match=f"output.{path}, which .* eager returns the memory of {name} there"):
                module(x)
        others = [other for other, value in given.items() if other != path and (whole(value) == 77).any()]
        assert not others, f"{path} shares memory with {others}"
        expected, found = beside(x), module(x)
        for other, value in expected.items():
            assert_close(whole(found[other]), value.detach(), f"{other} after a write into {path}", 1e-12)
    assert torch.equal(x, X)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_write_into_an_output_changes_nothing_else(ranks: int) -> None:
    run(ranks, written_outputs)


class Staged(nn.Module):
    """Features, and what is computed of them."""

    def __init__(self, outputs: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.features, self.outputs = nn.Linear(SIZE, SIZE, dtype=torch.float64), outputs
        self.table = torch.ones(SIZE, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.outputs(self, self.features(x))


LOOKS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda output: output.retain_grad(),
    lambda output: output.register_hook(lambda gradient: 2 * gradient),
)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    "outputs",
    [
        lambda module, h: (h, h.square()),
        lambda module, h: (h, {"of": h.relu().exp() + 1}),
        lambda module, h: (h, h[0]),
        lambda module, h: (h, h),
        lambda module, h: (h.clone(), h.mul(2).chunk(2), h) and (h, h.clone()),
    ],
)
def test_a_hook_of_an_output_that_gradients_pass_within_the_program_is_refused(
    outputs: Callable[[Any, Any], Any], look: Callable[[torch.Tensor], Any]
) -> None:
    """In eager it sees them. Where none passes, it is as in eager."""
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        model = Staged(outputs)
        module = autopar.parallelize(copy.deepcopy(model), mesh, (X,))
        first, *others = torch.utils._pytree.tree_leaves(module(X))
        look(first)
        with pytest.raises(
            ValueError, match=r"output\.0 has a hook or retain_grad\(\), and part of its gradient comes"
        ):
            (first.sum() + others[0].sum()).backward()
        found = []
        for each in (model, module):
            first, *others = torch.utils._pytree.tree_leaves(each(X))
            look(first)
            (first * X).sum().backward()
            found.append((first.grad if first.retains_grad else None, whole(each.features.weight.grad)))
        (seen, gradient), (also_seen, same) = found
        assert seen is also_seen is None or torch.equal(seen, also_seen)
        assert torch.allclose(gradient, same)


ASKED: dict[str, tuple[bool, Callable[..., Any]]] = {
    "of both": (False, lambda module, h, of: torch.autograd.grad((h + of).sum(), h)),
    "of what is computed of it": (False, lambda module, h, of: torch.autograd.grad(of.sum(), h, allow_unused=True)),
    "beside a parameter": (False, lambda module, h, of: torch.autograd.grad((h + of).sum(), [h, *module.parameters()])),
    "as an edge": (False, lambda module, h, of: torch.autograd.grad((h * of).sum(), get_gradient_edge(h))),
    "after another": (
        False,
        lambda module, h, of: (
            torch.autograd.grad(h.sum(), h, retain_graph=True),
            torch.autograd.grad((h * of).sum(), h),
        ),
    ),
    "into .grad": (False, lambda module, h, of: (h + of).sum().backward(inputs=[h])),
    "of it alone": (True, lambda module, h, of: torch.autograd.grad(h.square().sum(), h)),
    "of it alone, as an edge": (
        True,
        lambda module, h, of: torch.autograd.grad(h.square().sum(), get_gradient_edge(h)),
    ),
    "of it alone, into .grad": (True, lambda module, h, of: (h.square().sum().backward(inputs=h), h.grad)[1:]),
    "of what was written": (True, lambda module, h, of: torch.autograd.grad((h.mul_(2) + of).sum(), h)),
    "of the other": (True, lambda module, h, of: torch.autograd.grad((h + of).square().sum(), of)),
    "of parameters": (True, lambda module, h, of: torch.autograd.grad((h * of).sum(), list(module.parameters()))),
    "of parameters, from outputs": (
        True,
        lambda module, h, of: torch.autograd.grad([h, of], list(module.parameters()), [torch.ones_like(of)] * 2),
    ),
    "of parameters, into .grad": (
        True,
        lambda module, h, of: (
            h.backward(torch.ones_like(of), inputs=list(module.parameters())),
            *(p.grad for p in module.parameters()),
        )[1:],
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_gradients_asked_of_an_output_are_those_of_eager_or_refused(case: str) -> None:
    """`torch.autograd.grad` of an output, of which another is computed within the program."""
    right, ask = ASKED[case]
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        model = Staged(lambda module, h: (h, h.exp()))
        module = autopar.parallelize(copy.deepcopy(model), mesh, (X,))
        if not right:
            with pytest.raises(ValueError, match=r"output\.0 .*, and part of its gradient comes from output\.1"):
                ask(module, *module(X))
            return
        for ours, eager in zip(ask(module, *module(X)), ask(model, *model(X)), strict=True):
            assert torch.allclose(whole(ours), eager)


def asked_of_split_outputs() -> dict[str, str]:
    """What comes of each case where no rank has a whole output."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    model = Staged(lambda module, h: (h, h.exp()))
    module = autopar.parallelize(copy.deepcopy(model), mesh, (X,), solver="fsdp")
    h, of = module(X)
    of.to_local().sum().backward()
    found = {"not asked": repr(h)}
    for case, (right, ask) in ASKED.items():
        module.zero_grad(), model.zero_grad()
        try:
            ours = ask(module, *module(X))
        except ValueError as error:
            found[case] = str(error)
            continue
        for got, eager in zip(ours, ask(model, *model(X)), strict=True):
            assert right and torch.allclose(whole(got), eager), case
    return found


def test_gradients_asked_of_split_outputs_are_those_of_eager_or_refused() -> None:
    """An output that nobody looks at is not gathered for it."""
    for found in run(2, asked_of_split_outputs):
        assert "of which this rank holds" in found.pop("not asked")
        assert {case for case, said in found.items() if "output.0" in said} == {
            case for case, (right, _) in ASKED.items() if not right
        }


def test_outputs_that_are_watched_are_saved_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        module = autopar.parallelize(Staged(lambda module, h: (h, h.exp())), mesh, (X,))
        before = len(recwarn)
        torch.save(module(X), io.BytesIO())
        assert len(recwarn) == before


@pytest.mark.parametrize("case", ASKED)
def test_gradients_asked_of_outputs_that_are_cut_back(case: str) -> None:
    """To the length of a batch, which is not that of the program."""
    right, ask = ASKED[case]
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        model, x = Staged(lambda module, h: (h, h.exp())), torch.ones(2, 3, SIZE, dtype=torch.float64)
        padding = autopar.Padding(values={"x": 0.0})
        module = autopar.parallelize(copy.deepcopy(model), mesh, (x,), lengths=(4, 8), padding=padding)
        if not right:
            with pytest.raises(ValueError, match=r"output\.0 .*, and part of its gradient comes from output\.1"):
                ask(module, *module(x))
            return
        for ours, eager in zip(ask(module, *module(x)), ask(model, *model(x)), strict=True):
            assert ours.shape == eager.shape and torch.allclose(whole(ours), eager)
        h, of = module(x)
        h.retain_grad()
        h.square().sum().backward()
        assert torch.equal(h.grad, 2 * h.detach()) and of.shape == h.shape


def test_outputs_that_go_their_own_ways_are_hooked_as_in_eager() -> None:
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        model = Staged(lambda module, h: (h.sin(), h.detach().cos() * h.cos(), module.table))
        found = []
        for each in (autopar.parallelize(copy.deepcopy(model), mesh, (X,)), model):
            outputs = each(X)[:2]
            for look in LOOKS:
                look(outputs[0])
            sum(output.sum() for output in outputs).backward()
            found.append((outputs[0].grad, whole(each.features.weight.grad)))
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one, other)


def test_an_output_in_the_memory_of_any_tensor_of_the_model_is_not_written() -> None:
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        model = Staged(lambda module, h: (h, module.table.view(2, -1), torch.zeros(2)))
        module = autopar.parallelize(model, mesh, (X,))
        module(X)[2].add_(1)
        module(X)[1].add_(1)
        with pytest.raises(
            ValueError, match=r"output\.1, .* written in place: eager returns the memory of table there"
        ):
            module(X)


@pytest.mark.parametrize("way", [torch.conj, lambda x: x.T.conj().T, lambda x: x.conj().imag])
def test_an_input_that_conjugates_what_it_reads(way: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def outputs(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return h.square().mean()

    class Complex(Staged):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sign = 1 if (x.imag if x.is_complex() else x)[0, 0] > 0 else -2
            return super().forward(sign * (x.real + 2 * x.imag if x.is_complex() else x))

    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        model, x = Complex(outputs), way(torch.complex(X, X.flip(0)))
        module = autopar.parallelize(copy.deepcopy(model), mesh, (x,))
        for each in (module, model):
            each(x).backward()
        assert torch.allclose(whole(module.features.weight.grad), model.features.weight.grad)


# -------------------------------------------------------------------------------------------------- buffers


class Turn(Weighted):
    """Buffers that take one another's values, each by a way of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "replaced":
            self.a, self.b, self.c = self.c, self.a, self.b
        elif self.way == "written":
            first = self.a.clone()
            self.a.copy_(self.b)
            self.b.copy_(self.c)
            self.c.copy_(first)
        else:
            kept = self.a.clone()
            with torch.no_grad():
                self.a.lerp_(x.detach().mean() * self.b, 0.5)
            return (x @ (self.w * kept.t())).square().sum()
        return (x @ self.w * self.a.clone()).square().sum()


def turned() -> None:
    """Steps in sequence, two forwards before two backwards, and another mode in between."""
    for way in ("replaced", "written", "averaged"):
        model = Turn(way)
        module, beside = parallel(model, X), copy.deepcopy(model)
        for modes in ("tt", "te", "et"):
            for each in (module, beside):
                losses = []
                for mode in modes:
                    each.train(mode == "t")
                    losses.append(each(X + len(losses)))
                each.zero_grad()
                for loss in reversed(losses):
                    loss.backward()
            assert_close(whole(module.w.grad), beside.w.grad, f"gradient, {way} {modes}", 1e-12)
            for name in "abc":
                assert_close(whole(getattr(module, name)), getattr(beside, name), f"{name}, {way} {modes}", 1e-12)


def test_buffers_that_are_written_between_forward_and_backward() -> None:
    run(2, turned)


def test_a_clone_of_a_buffer_is_an_operator() -> None:
    graph = capture(Everything(), (X,)).graph
    assert sum(node.op == "aten.clone.default" for node in graph.nodes) >= 3
    assert len({o.name for o in graph.outputs if o.target in ("output.before", "output.after")}) == 2


def test_a_buffer_that_would_be_differentiated_is_refused() -> None:
    class Memory(Weighted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b.mul_(0.5).add_(x @ self.w)
            return (x @ self.w).sum()

    with pytest.raises(CaptureError, match=r"writes what requires a gradient into buffer b,.*write value\.detach\(\)"):
        capture(Memory(), (X,))


def given_its_buffer() -> None:
    module = parallel(Turn("written"), X)
    with pytest.raises(ValueError, match=r"input args\.0 lies in the memory of buffer b, which forward writes"):
        module(module.b)


def test_a_buffer_as_an_input() -> None:
    run(2, given_its_buffer)


# ------------------------------------------------------------------------------------------------- gradients


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor
    chosen: torch.Tensor
    plain: torch.Tensor


class Head(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(self.w.detach().flip(0).clone())

    def forward(self, x: torch.Tensor) -> Output:
        h = x @ self.w
        y = torch.tanh(h @ self.v)
        return Output(loss=y.square().mean(), logits=y, hidden=h, chosen=y.argmax(1), plain=x * 2)


def double(module: nn.Module, output: Output) -> None:
    (g,) = torch.autograd.grad(output.loss, module.w, create_graph=True)
    g.square().sum().backward()


def written_weight(module: nn.Module, output: Output) -> None:
    with torch.no_grad():
        module.v.add_(1)
    output.loss.backward()


def stepped(module: nn.Module, output: Output) -> None:
    output.loss.backward(retain_graph=True)
    torch.optim.AdamW(module.parameters(), lr=0.1).step()
    output.loss.backward()


def observed(module: nn.Module, output: Output) -> None:
    output.logits.retain_grad()
    output.loss.backward()


LOST = r"a gradient reaches output\.logits, and the program differentiates output\.loss alone: pass .* loss_fn="
REFUSED: dict[str, tuple[Callable[[nn.Module, Output], None], str]] = {
    "loss and logits": (lambda m, o: (o.loss + whole(o.logits).sum()).backward(), LOST),
    "logits": (lambda m, o: o.logits.sum().backward(), LOST),
    "retained": (observed, r"output\.logits has a hook or retain_grad\(\), and part of its gradient comes from"),
    "double backward": (double, "gradients of a parallel module cannot be differentiated again: compute a penalty"),
    "written weight": (written_weight, r"parameter v was written between forward and backward"),
    "an optimizer's step": (stepped, r"parameter \w was written between forward and backward"),
}


def refused(name: str) -> None:
    step, message = REFUSED[name]
    module = parallel(Head(), X, solver="ddp")
    with pytest.raises(ValueError, match=message):
        step(module, module(X))
    module.zero_grad()
    module(X).loss.backward()
    beside = Head()
    beside.load_state_dict({name: whole(value) for name, value in module.state_dict().items()})
    beside(X).loss.backward()
    assert_close(whole(module.w.grad), beside.w.grad, "the next gradient", 1e-12)


def all_refused() -> None:
    for name in REFUSED:
        refused(name)


def test_gradients_that_are_refused() -> None:
    run(2, all_refused)


def given_other_data() -> None:
    module, beside = parallel(Turn("written"), X), Turn("written")
    for each in (module, beside, copy.deepcopy(module)):
        each.w.data.mul_(0.5)
        each(X)
    assert_close(whole(module.w).detach(), beside.w.detach(), "written in place")
    module.w.data = module.w.data * 0.5
    with pytest.raises(ValueError, match=r"parameter w was given other \.data, which a DTensor does not take over"):
        module(X)
    copy.deepcopy(module)(X)


def test_data_that_is_replaced() -> None:
    run(2, given_other_data)


class Registering(nn.Module):
    """Two layers that share a weight, one without a bias, a norm and a buffer, of which one is looked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(2))
        self.plain, self.norm = (
            nn.Linear(SIZE, SIZE, False, dtype=torch.float64),
            nn.LayerNorm(SIZE, dtype=torch.float64),
        )
        self.down.weight = self.up.weight
        self.register_buffer("shift", torch.zeros(SIZE, dtype=torch.float64))
        self.register_buffer("unread", torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.plain(self.down(self.up(x)).tanh()) + self.shift)
        return (x * getattr(self, "gain", 1.0)).exp().mean()


def of_other_placement(m: Any) -> None:
    at_rest, mesh = m.norm.weight.placements, m.norm.weight.device_mesh
    other = [Replicate() if p.is_shard() else Shard(0) for p in at_rest]
    m.norm.weight = nn.Parameter(distribute_tensor(whole(m.norm.weight.detach()) * 2, mesh, other))


def both_names(m: Any) -> None:
    m.up.weight = m.down.weight = nn.Parameter(m.up.weight.detach() * 2)


REPLACED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "placed otherwise": (of_other_placement, "parameter norm.weight was replaced after parallelize by a DTensor"),
    "plain": (lambda m: setattr(m.up, "bias", nn.Parameter(torch.ones(SIZE))), "up.bias was replaced .* a plain"),
    "another dtype": (lambda m: setattr(m.up, "bias", nn.Parameter(m.up.bias.detach().float())), "of float32 placed"),
    "tied": (lambda m: setattr(m.up, "bias", m.down.bias), "parameter up.bias was tied to down.bias after parallelize"),
    "untied": (lambda m: setattr(m.down, "weight", nn.Parameter(m.up.weight.detach())), "were one tensor, and are two"),
    "no bias": (lambda m: setattr(m.up, "bias", None), "parameter up.bias is gone since parallelize"),
    "a new bias": (lambda m: setattr(m.plain, "bias", nn.Parameter(torch.ones(SIZE))), "plain.bias, which was None,"),
    "a parametrization": (lambda m: weight_norm(m.plain), "parameter plain.weight is gone"),
    "a buffer gone": (lambda m: delattr(m, "shift"), "buffer shift is gone"),
    "a buffer of another shape": (lambda m: setattr(m, "shift", torch.ones(1)), "replaced .* a plain tensor .1. of"),
    "what forward looks for": (lambda m: m.register_buffer("gain", torch.ones(())), "gain was registered after"),
    "a module, then another mode": (lambda m: setattr(m.eval(), "norm", nn.Identity()), "module norm was replaced"),
}  # fmt: skip

TAKEN: dict[str, Callable[[Any], Any]] = {
    "placed alike": lambda m: setattr(m.norm, "weight", nn.Parameter(m.norm.weight.detach() * 2)),
    "under both names": both_names,
    "a buffer": lambda m: setattr(m, "shift", torch.ones(SIZE, dtype=torch.float64)),
    "a buffer that nobody reads": lambda m: delattr(m, "unread"),
    "a parameter that nobody reads": lambda m: setattr(m, "more", nn.Parameter(torch.ones(3))),
}


def replaced() -> None:
    for what, (change, message) in REPLACED.items():
        for rank in (0, 1) if what == "plain" else (None,):
            module = parallel(Registering(), X)
            module(X)
            if rank in (None, torch.distributed.get_rank()):
                change(module)
            for _ in range(2):
                with pytest.raises(ValueError, match=message):
                    module(X)
    for what, take in TAKEN.items():
        module, beside = parallel(Registering(), X), Registering()
        take(beside)
        wanted = beside(X)
        wanted.backward()
        for each in (module, copy.deepcopy(module)):
            each(X)
            take(each)
            loss = each(X)
            loss.backward()
            assert_close(whole(loss), wanted, what, 1e-12)
            for one, other in zip(each.parameters(), beside.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None)
                if one.grad is not None:
                    assert_close(whole(one.grad), other.grad, what, 1e-10)


def test_what_is_replaced_after_parallelize_is_read_right_or_refused() -> None:
    run(2, replaced)


def again(module: nn.Module, output: Output) -> None:
    output.loss.backward(retain_graph=True)
    output.loss.backward()


def by_grad(module: nn.Module, output: Output) -> None:
    module.w.grad, module.v.grad = torch.autograd.grad(output.loss, [module.w, module.v])


def hooked(module: nn.Module, output: Output) -> None:
    output.loss.register_hook(lambda g: g * 5)
    (3 * output.loss).backward(create_graph=True)


def halved(module: nn.Module, output: Output) -> None:
    output.loss.div_(2)
    output.plain.mul_(3)
    output.loss.backward()


def served() -> None:
    model = Head()
    module = parallel(model, X)
    for step in (again, by_grad, hooked, halved):
        beside = copy.deepcopy(model)
        for each in (module, beside):
            each.zero_grad()
            output = each(X)
            assert output.logits.requires_grad and not output.plain.requires_grad and not output.chosen.requires_grad
            step(each, output)
        for name, parameter in beside.named_parameters():
            assert_close(
                whole(module.get_parameter(name).grad).detach(), parameter.grad, f"{step.__name__} {name}", 1e-12
            )


@pytest.mark.filterwarnings("ignore:Using backward")
def test_backward_in_other_ways() -> None:
    run(2, served)


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, SIZE, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).square().sum()


def looked_up() -> None:
    ids = torch.tensor([1, 2, 2, 5])
    module, beside = parallel(Looked(), ids), Looked()
    for each in (module, beside):
        each(ids).backward()
    gradient = beside.table.weight.grad
    assert gradient is not None
    assert_close(whole(module.table.weight.grad), gradient.to_dense(), "gradient of the table")


def test_a_sparse_gradient_is_dense() -> None:
    run(2, looked_up)


# ----------------------------------------------------------------------------------------------------- NaN


class Filled(Weighted):
    def forward(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.nan_to_num((x * fill + self.a), 0.5) @ self.w


def no_numbers() -> None:
    model, x, nan = Filled(), X.clone(), float("nan")
    x[0, 0], model.a[1, 1] = nan, nan
    with torch.no_grad():
        model.w[2, 2] = nan
    module = parallel(model, x, nan)
    assert torch.equal(whole(module(x, nan)).isnan(), model(x, nan).isnan())
    for fill in (1.0, nan, -0.0, 0.0):  # each is another constant; the program of NaN is there already
        assert_close(whole(module(x, fill)).nan_to_num(7.0), model(x, fill).nan_to_num(7.0), f"filled with {fill}")
    assert len(vars(module)["_versions"].versions) == 4


def test_what_is_no_number() -> None:
    run(2, no_numbers)
    assert same_value(float("nan"), float("nan")) and same_value(complex("nan"), complex("nan"))
    assert not same_value(0.0, -0.0) and not same_value(1, True) and not same_value(1.0, 1)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.bool]
)
def test_a_digest_sees_every_element_and_its_place(dtype: torch.dtype) -> None:
    x = (torch.arange(300_001) % 97).to(dtype)
    assert digest(x) == digest(x.clone()) == digest(torch.stack([x, x], 1)[:, 0])
    assert digest(x) != digest(x.flip(0))
    for place in (0, 1, 150_000, 300_000):
        y = x.clone()
        y[place] = 1 - y[place] if dtype != torch.bool else ~y[place]
        assert digest(x) != digest(y), place
    assert digest(torch.empty(0, dtype=dtype)) == digest(torch.empty(0, dtype=dtype))
