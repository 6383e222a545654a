"""A parallel module loads state_dicts as its model does: hooks, extra state and overrides count as on one device. Names
are those that the model has without what torch puts around modules."""

from __future__ import annotations

import functools
import gc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import whole
from ranks import run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.module import ParallelModule

X = torch.arange(32.0).reshape(4, 8).sin()


class Net(nn.Module):
    """Rows that two ranks hold unevenly. `log` says what its hooks were called with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Linear(9, 8)
        self.log: list[Any] = []
        self.set_up()

    def set_up(self) -> None:
        """What a kind of model has besides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.norm(self.up(x)).tanh()).square().mean()
        return made


class Joins(Net):
    """Its files of old have the rows of `up` apart."""

    def set_up(self) -> None:
        self._register_load_state_dict_pre_hook(self.join)

    def join(self, values: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.log.append("join")
        if prefix + "first.weight" in values:
            for key in ("weight", "bias"):
                parts = (values.pop(f"{prefix}{half}.{key}") for half in ("first", "second"))
                values[f"{prefix}up.{key}"] = torch.cat([*parts])


class ChildRenames(Net):
    def set_up(self) -> None:
        def rename(module: nn.Module, values: dict[str, Any], prefix: str, *rest: Any) -> None:
            if prefix + "kernel" in values:
                values[prefix + "weight"] = values.pop(prefix + "kernel").t()
            self.log.append(prefix)

        self.down.register_load_state_dict_pre_hook(rename)


class Notes(Net):
    """Hooks after loading, one of which changes what is missing, and hooks of saving."""

    def set_up(self) -> None:
        self.register_load_state_dict_post_hook(functools.partial(self.note, "root"))
        self.up.register_load_state_dict_post_hook(lambda module, keys: self.log.append(keys.missing_keys[:]))
        self.register_state_dict_pre_hook(lambda module, prefix, keeps: self.log.append(prefix))

    def note(self, what: str, module: nn.Module, keys: Any) -> None:
        self.log.append(what)
        keys.missing_keys[:] = [name for name in keys.missing_keys if "bias" not in name]


class Extra(Net):
    def set_up(self) -> None:
        class Counts(nn.Linear):
            calls = 1

            def get_extra_state(self) -> Any:
                return {"calls": self.calls}

            def set_extra_state(self, state: Any) -> None:
                self.calls = state["calls"] + 1

        self.up = Counts(8, 9)

    def get_extra_state(self) -> Any:
        return getattr(self, "extra", torch.ones(2))

    def set_extra_state(self, state: Any) -> None:
        self.extra = state + 1


class Overrides(Net):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict(("net." + name, value) for name, value in super().state_dict(*args, **kwargs).items())

    def load_state_dict(self, values: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict({name.removeprefix("net."): x for name, x in values.items()}, strict)


class ChildWrites(Net):
    """One child writes its values itself, another one has new parameters."""

    def set_up(self) -> None:
        class Writes(nn.Linear):
            def _load_from_state_dict(self, values: Any, prefix: str, *rest: Any) -> None:
                with torch.no_grad():
                    self.weight.copy_(values[prefix + "weight"])
                    self.bias.data.copy_(values[prefix + "bias"])

        class Replaces(nn.Linear):
            def _load_from_state_dict(self, values: Any, prefix: str, *rest: Any) -> None:
                self.weight, self.bias = (nn.Parameter(values[prefix + key]) for key in ("weight", "bias"))

        self.up, self.down = Writes(8, 9), Replaces(9, 8)


KINDS: tuple[type[Net], ...] = (Net, Joins, ChildRenames, Notes, Extra, Overrides, ChildWrites)


def other_values(kind: type[Net]) -> dict[str, Any]:
    model = kind()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    return dict(model.state_dict())


def old(kind: type[Net]) -> dict[str, Any]:
    """A file of an earlier version of the model."""
    values = other_values(kind)
    if kind is Joins:
        for key in ("weight", "bias"):
            values["first." + key], values["second." + key] = values.pop("up." + key).split([4, 5])
    if kind is ChildRenames:
        values["down.kernel"] = values.pop("down.weight").t().contiguous()
    return values


def lacking(kind: type[Net]) -> dict[str, Any]:
    key = "net.norm.bias" if kind is Overrides else "norm.bias"
    return {name: value for name, value in other_values(kind).items() if name != key} | {"junk": torch.ones(1)}


def misshapen(kind: type[Net]) -> dict[str, Any]:
    return other_values(kind) | {"net.norm.bias" if kind is Overrides else "norm.bias": torch.ones(3)}


def parallel(model: nn.Module, solver: str = "fsdp", **options: Any) -> ParallelModule:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    return autopar.parallelize(model, mesh, (X,), solver=solver, **options)


def seen(model: Any, loads: nn.Module, given: dict[str, Any]) -> list[Any]:
    """What loading returns or raises, what the model has and saves then, and what it computes."""
    model.log.clear()
    try:
        said = str(loads.load_state_dict(given))
    except (RuntimeError, TypeError) as error:
        said = f"{type(error).__name__} {error}"
    values = {name: whole(x) if isinstance(x, torch.Tensor) else x for name, x in model.state_dict().items()}
    attributes = (model.log, getattr(model, "extra", None), getattr(model.up, "calls", None))
    return [said, str(values), str(attributes), round(float(whole(model.eval()(X))), 6)]


def loaded(kind: type[Net]) -> None:
    alone, module = kind(), parallel(kind())
    gc.collect()
    for source in (other_values, old, lacking, misshapen):
        assert seen(module, module, source(kind)) == seen(alone, alone, source(kind)), source
    # and within another module, as Lightning has it
    outer, beside = nn.ModuleList([module]), nn.ModuleList([alone])
    values = {f"0.{name.removeprefix('net.')}": value for name, value in other_values(kind).items()}
    assert seen(module, outer, values) == seen(alone, beside, values)
    assert outer.state_dict().keys() == beside.state_dict().keys()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_values_are_loaded_as_on_the_model(kind: type[Net]) -> None:
    run(2, loaded, kind)


def in_other_forms() -> None:
    model, module = Net(), parallel(Net())
    for change in (torch.Tensor.double, torch.Tensor.bfloat16, lambda x: (10 * x).long()):
        values = {name: change(value) for name, value in other_values(Net).items()}
        model.load_state_dict(values), module.load_state_dict(values)
        for name, value in model.state_dict().items():
            assert torch.equal(whole(module.state_dict()[name]), value)
    # DTensors of another plan
    other = parallel(Net(), "ddp")
    other.load_state_dict(module.state_dict())
    assert torch.equal(whole(other.up.weight), whole(module.up.weight))
    # in a part of the module
    values = {name: value + 1 for name, value in model.up.state_dict().items()}
    module.up.load_state_dict(values)
    assert torch.equal(whole(module.up.weight), values["weight"])
    # hooks that are registered on the module
    module.register_load_state_dict_pre_hook(lambda m, values, *rest: values.update({"up.bias": torch.ones(9)}))
    module.load_state_dict(other_values(Net))
    assert torch.equal(whole(module.up.bias), torch.ones(9))
    # what one rank lacks, all refuse
    values = other_values(Net)
    if torch.distributed.get_rank():
        del values["down.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"down.bias"'):
        other.load_state_dict(values)


def test_values_may_have_other_dtypes_and_placements() -> None:
    run(2, in_other_forms)


class Tied(Net):
    def set_up(self) -> None:
        self.again = nn.Linear(8, 9)
        self.again.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.norm(self.up(x) + self.again(x)).tanh()).square().mean()
        return made


def assigned() -> None:
    with torch.device("meta"):
        empty = Tied()
    module, values = parallel(empty), Tied().state_dict()
    with pytest.warns(UserWarning, match="which is a no-op"):
        module.load_state_dict(values)
    assert module.up.weight.is_meta
    module.load_state_dict({name: value.double() for name, value in values.items()}, assign=True)
    assert module.again.weight is module.up.weight and module.up.weight.dtype == torch.float32
    assert all(torch.equal(whole(x), values[name]) for name, x in module.state_dict().items())
    module(X).backward()
    assert module.up.weight.grad is not None


def test_assigned_values_fill_a_model_on_meta() -> None:
    run(2, assigned)


# -- what torch puts around modules


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def children(around: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        for name in ("up", "norm", "down"):
            setattr(model, name, around(getattr(model, name)))
        return model

    return change


AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpointed children": children(checkpoint_wrapper),
    "compiled children": children(compiled),
    "both": children(lambda module: checkpoint_wrapper(compiled(module))),
    "both, the other way": lambda model: compiled(children(lambda module: compiled(checkpoint_wrapper(module)))(model)),
    "a checkpointed model": checkpoint_wrapper,
    "a compiled model": compiled,
}


def named(around: str, kind: type[Net]) -> None:
    plain, wrapped, values = kind(), AROUND[around](kind()), other_values(kind)
    module = parallel(AROUND[around](kind()))
    assert module.state_dict().keys() == plain.state_dict().keys()
    assert module.state_dict()._metadata == plain.state_dict()._metadata
    for source in (values, wrapped.state_dict()):
        expected = [*source.values()]
        module.load_state_dict(source)
        found = [whole(value) for value in module.state_dict().values()]
        assert all(map(torch.equal, found, expected))
    assert get_model_state_dict(module).keys() == get_model_state_dict(plain).keys()
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (module, plain)]
    states, beside = map(get_optimizer_state_dict, (module, plain), optimizers)
    assert states["state"].keys() == beside["state"].keys()
    plain.load_state_dict({name: whole(value) for name, value in module.state_dict().items()})
    assert whole(module(X)).item() == pytest.approx(plain(X).item(), rel=1e-5)
    assert module.gathered().train()(X).item() == pytest.approx(plain(X).item(), rel=1e-5)


@pytest.fixture(scope="module")
def compiles() -> None:
    """What PyTorch imports for its first compiled module, ranks inherit."""
    compiled(nn.Linear(1, 1))(torch.ones(1, 1))


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("around", AROUND)
def test_names_are_those_of_the_model_without_wrappers(around: str) -> None:
    run(2, named, around, Tied if "children" in around else Net)


def called() -> None:
    """Hooks of a wrapper run, and a compiled module that is called alone has the values of the parallel one."""
    plain, model = Net(), Net()
    model.up = compiled(model.up)
    for each in (plain, model):
        each.up.register_forward_hook(lambda module, inputs, output: 2 * output)
    model.down.compile(backend="eager")
    module = parallel(compiled(model), verify=1)
    assert whole(module(X)).item() == pytest.approx(plain(X).item(), rel=1e-5)
    with torch.no_grad():
        for each in (module, plain):
            each.up.weight.add_(1.0), each.down.weight.add_(1.0)
    h = torch.ones(4, 9)
    torch.testing.assert_close(module.up(X), plain.up(X))
    torch.testing.assert_close(module.down(h), plain.down(h))
    assert autopar.plan(model, {"a": 4}, (X,)).digest == autopar.plan(compiled(model), {"a": 4}, (X,)).digest


@pytest.mark.usefixtures("compiles")
def test_a_compiled_module_is_what_it_wraps() -> None:
    run(2, called)
