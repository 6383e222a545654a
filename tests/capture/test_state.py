"""What Python does in forward besides calling operators: either the parallel module does it too, or it says by name
what it would not do."""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import decimal
import enum
import functools
import gc
import io
import itertools
import linecache
import logging
import mmap
import multiprocessing
import os
import queue
import random
import struct
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.passes.capture.errors import CaptureError
from autopar.passes.capture.ledger import Reads
from autopar.passes.capture.state import look
from autopar.passes.capture.trace import capture
from autopar.runtime.guard import Guard

WIDTH, BATCH = 4, 6


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of one rank, which is this process."""
    store: Path = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    finally:
        dist.destroy_process_group()


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


class Base(nn.Module):
    """A layer, and what a test does around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.beside(torch.tanh(self.layer(x))).square().sum()

    def beside(self, h: torch.Tensor) -> torch.Tensor:
        return h


def refusal(model: nn.Module, **options: Any) -> str:
    with pytest.raises(CaptureError) as error:
        capture(model, (batch(),), **options)
    return str(error.value)


def trained(
    model: nn.Module, steps: int = 3, change: Callable[[int, nn.Module], None] = lambda step, model: None
) -> Any:
    """The losses and parameters of some steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        change(step, model)
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [torch.tensor(losses, dtype=torch.float64), *(value.detach().clone() for value in values)]


def assert_equal(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """The parallel module trains as the model does."""
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, mesh, (batch(),))
    for ours, theirs in zip(trained(parallel, **options), trained(alone, **options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------- state, wherever it is kept


@dataclasses.dataclass
class Config:
    state: Any


class Slotted:
    __slots__ = ("state",)

    def __init__(self, state: Any) -> None:
        self.state = state


class ByProperty(Base):
    @property
    def state(self) -> Any:
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        self._state = value


STATE: Any = None
KEPT: list[Config] = []
HOLDER = types.SimpleNamespace(state=None)
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE")

Access = tuple[Callable[[], Any], Callable[[Any], None]]


def _attribute(model: Any, start: Any) -> Access:
    model.state = start
    return lambda: model.state, lambda value: setattr(model, "state", value)


def _dictionary(model: Any, start: Any) -> Access:
    model.__dict__["state"] = start
    return lambda: vars(model)["state"], lambda value: vars(model).update(state=value)


def _object(holder: Any, model: Any, start: Any) -> Access:
    model.holder = holder(start)
    return lambda: model.holder.state, lambda value: setattr(model.holder, "state", value)


def _key(kind: Any, model: Any, start: Any) -> Access:
    model.kept = kind({"state": start})
    return lambda: model.kept["state"], lambda value: model.kept.__setitem__("state", value)


def _element(kind: Any, model: Any, start: Any) -> Access:
    model.kept = [0, kind([start])]
    return lambda: model.kept[1][0], lambda value: model.kept[1].__setitem__(0, value)


def _submodule(model: Any, start: Any) -> Access:
    model.layer.state = start
    return lambda: model.layer.state, lambda value: setattr(model.layer, "state", value)


def _class(model: Any, start: Any) -> Access:
    cls = type(model)
    cls.state = start
    return lambda: cls.state, lambda value: setattr(cls, "state", value)


def _closure(model: Any, start: Any) -> Access:
    state = start

    def write(value: Any) -> None:
        nonlocal state
        state = value

    return lambda: state, write


def _default(model: Any, start: Any) -> Access:
    def access(*value: Any, kept: list[Any] = [start]) -> Any:  # noqa: B006
        kept[:] = value or kept
        return kept[0]

    return access, access


def _global(model: Any, start: Any) -> Access:
    def write(value: Any) -> None:
        global STATE
        STATE = value

    write(start)
    return lambda: STATE, write


def _global_object(model: Any, start: Any) -> Access:
    HOLDER.state = start
    return lambda: HOLDER.state, lambda value: setattr(HOLDER, "state", value)


def _context(model: Any, start: Any) -> Access:
    VARIABLE.set(start)
    return lambda: VARIABLE.get(), lambda value: VARIABLE.set(value) and None


def _weak(model: Any, start: Any) -> Access:
    KEPT.append(Config(start))
    owner = weakref.ref(KEPT[-1])
    return lambda: owner().state, lambda value: setattr(owner(), "state", value)


PLACES: dict[str, Callable[[Any, Any], Access]] = {
    "an attribute": _attribute,
    "the module's dictionary": _dictionary,
    "an attribute of a submodule": _submodule,
    "an attribute of the class": _class,
    "a dataclass": functools.partial(_object, Config),
    "an object with slots": functools.partial(_object, Slotted),
    "a namespace": functools.partial(_object, lambda start: types.SimpleNamespace(state=start)),
    "a dict": functools.partial(_key, dict),
    "an ordered dict": functools.partial(_key, collections.OrderedDict),
    "a list": functools.partial(_element, list),
    "a deque": functools.partial(_element, collections.deque),
    "a closure": _closure,
    "a default": _default,
    "a global": _global,
    "a global object": _global_object,
    "a context variable": _context,
    "a weak reference": _weak,
}

Use = Callable[[Callable[[], Any], Callable[[Any], None], torch.Tensor], torch.Tensor]


def _counts(read: Callable[[], Any], write: Callable[[Any], None], h: torch.Tensor) -> torch.Tensor:
    write(read() + 1)
    return h * read()


def _counts_unused(read: Callable[[], Any], write: Callable[[Any], None], h: torch.Tensor) -> torch.Tensor:
    write(read() + 1)
    return h


def _first(read: Callable[[], Any], write: Callable[[Any], None], h: torch.Tensor) -> torch.Tensor:
    scale = 2.0 if read() is None else 1.0
    write(1)
    return h * scale


def _recurs(read: Callable[[], Any], write: Callable[[Any], None], h: torch.Tensor) -> torch.Tensor:
    h = h if read() is None else h + read()
    write(h.detach())
    return h


def _appends(read: Callable[[], Any], write: Callable[[Any], None], h: torch.Tensor) -> torch.Tensor:
    read().append(h.detach().mean())
    return h


def _caches(read: Callable[[], Any], write: Callable[[Any], None], h: torch.Tensor) -> torch.Tensor:
    if "mean" not in read():
        read()["mean"] = h.detach().mean()
    return h - read()["mean"]


KEEPS: dict[str, tuple[Any, Use]] = {
    "counts": (0, _counts),
    "counts and does not use it": (0, _counts_unused),
    "does something else the first time": (None, _first),
    "recurs": (None, _recurs),
    "appends": ([], _appends),
    "caches what depends on the input": ({}, _caches),
}


def stateful(place: str, start: Any, use: Use) -> nn.Module:
    class Stateful(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return use(*access, h)

    class WithProperty(ByProperty):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return use(lambda: self.state, lambda value: setattr(self, "state", value), h)

    if place == "a property":
        model: nn.Module = WithProperty()
        model.state = copy.copy(start)
        return model
    model = Stateful()
    # forward runs on a copy of the model: what it does with `self` is in the functions of a holder that is copied
    if place in _OWN:
        return _own(place, start, use)
    access = PLACES[place](model, copy.copy(start))
    return model


_OWN = {"an attribute", "the module's dictionary", "an attribute of a submodule", "a dataclass", "an object with slots",
        "a namespace", "a dict", "an ordered dict", "a list", "a deque"}  # fmt: skip


def _own(place: str, start: Any, use: Use) -> nn.Module:
    """A model whose forward finds its state from `self`."""

    class Own(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return use(*_found(place, self), h)

    model = Own()
    PLACES[place](model, copy.copy(start))
    return model


def _found(place: str, model: Any) -> Access:
    """How a model reaches the state that it has in a place."""
    if place == "the module's dictionary":
        return lambda: vars(model)["state"], lambda value: vars(model).update(state=value)
    if place in ("a dict", "an ordered dict"):
        return lambda: model.kept["state"], lambda value: model.kept.__setitem__("state", value)
    if place in ("a list", "a deque"):
        return lambda: model.kept[1][0], lambda value: model.kept[1].__setitem__(0, value)
    owner = {"an attribute": lambda: model, "an attribute of a submodule": lambda: model.layer}.get(
        place, lambda: model.holder
    )
    return lambda: owner().state, lambda value: setattr(owner(), "state", value)


def turns(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Two kinds for each place, and each kind in several places: the product held, and takes a minute."""
    return [(place, kind) for i, kind in enumerate(kinds) for place in [*PLACES, "a property"][i % 3 :: 3]]


@pytest.mark.parametrize(("place", "kind"), turns(KEEPS))
def test_what_is_kept_from_one_call_for_the_next_is_refused_by_name(place: str, kind: str) -> None:
    model = stateful(place, *KEEPS[kind])
    message = refusal(model)
    assert "from one call for the next" in message and any(n in message for n in ("state", "kept", "STATE", "VARIABLE"))
    # and nothing of the user's was changed: what it says the second time is the same
    assert refusal(model) == message


def _writes(read: Callable[[], Any], write: Callable[[Any], None], h: torch.Tensor) -> torch.Tensor:
    write(h.detach())
    return h


def _writes_constants(read: Callable[[], Any], write: Callable[[Any], None], h: torch.Tensor) -> torch.Tensor:
    write(h.shape[0])
    return h * read()


def _collects(read: Callable[[], Any], write: Callable[[Any], None], h: torch.Tensor) -> torch.Tensor:
    """Losses of one call in a list that the call empties."""
    write([])
    for part in h.unbind(1):
        read().append(part.square().mean())
    return h * sum(read())


def _caches_constants(read: Callable[[], Any], write: Callable[[Any], None], h: torch.Tensor) -> torch.Tensor:
    if h.shape[1] not in read():
        read()[h.shape[1]] = torch.arange(h.shape[1], dtype=h.dtype).cos()
    return h * read()[h.shape[1]]


def _puts_back(read: Callable[[], Any], write: Callable[[Any], None], h: torch.Tensor) -> torch.Tensor:
    write(read() + 1)
    h = h * read()
    write(read() - 1)
    return h


LEAVES_BE: dict[str, tuple[Any, Use]] = {
    "writes for inspection": (None, _writes),
    "writes what is the same in each call": (None, _writes_constants),
    "collects in one call": (None, _collects),
    "caches constants": ({}, _caches_constants),
    "puts it back": (1, _puts_back),
}


@pytest.mark.parametrize(("place", "kind"), turns(LEAVES_BE))
def test_what_no_later_call_reads_is_let_be(place: str, kind: str) -> None:
    start, use = LEAVES_BE[kind]
    capture(stateful(place, start, use), (batch(),))


@pytest.mark.parametrize("kind", LEAVES_BE)
@pytest.mark.parametrize("place", ["an attribute", "a dict", "a closure"])
def test_and_trains_as_on_one_device(mesh: DeviceMesh, place: str, kind: str) -> None:
    model = stateful(place, *LEAVES_BE[kind])
    assert_equal(model, mesh)


def test_a_warning_says_what_the_parallel_module_does_not_write(caplog: pytest.LogCaptureFixture) -> None:
    capture(stateful("an attribute", None, _writes), (batch(),))
    assert any("forward writes state, which no later call reads" in message for message in caplog.messages)


def test_a_warning_says_what_calls_of_other_forms_do_not_see(caplog: pytest.LogCaptureFixture) -> None:
    class Longest(Base):
        longest, table = 0, None

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            if len(h) > self.longest:
                self.longest = len(h)
                self.table = torch.arange(self.longest, dtype=h.dtype)[:, None] / self.longest
            assert self.table is not None
            return h * self.table[: len(h)]

    capture(Longest(), (batch(),))
    (said,) = [message for message in caplog.messages if message.startswith("forward ")]
    assert "reads longest, table before it writes there" in said and "inputs of one form" in said


# ------------------------------------------------------------------------------------- whatever class holds it


class Level(enum.Enum):
    LOW = 1
    HIGH = [1.0]  # noqa: RUF012


class Point(ctypes.Structure):
    _fields_ = [("x", ctypes.c_double)]


class Mangled:
    __slots__ = ("__state",)

    def __init__(self, state: float) -> None:
        self.__state = state

    def access(self, *state: float) -> float:
        (self.__state,) = state or (self.__state,)
        return self.__state


class Dynamic:
    """Gives attributes that it has in a dictionary."""

    def __init__(self, state: float) -> None:
        self.__dict__["_values"] = {"state": state}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_values"][name]


class Descriptor:
    def __init__(self, state: float) -> None:
        self.state = state

    def __get__(self, instance: Any, owner: Any) -> float:
        return self.state


class Meta(type):
    state = 1.0


class Real(float):
    state: float


class Names(dict[str, float]):
    state: float


class Pair(NamedTuple):
    first: Any
    second: Any = None


class Worker(threading.local):
    state = 0.0


MAPPED: dict[str, float] = {}
VIEWED: dict[str, float] = {}
SETTINGS = types.ModuleType("tests_settings")
sys.modules[SETTINGS.__name__] = SETTINGS


def _owned(owner: Any, state: float) -> Any:
    owner.state = state
    return owner


def _of_class(state: float) -> Any:
    return type("Scaled", (), {"scale": Descriptor(state)})()


def _of_metaclass(state: float) -> Any:
    return Meta("Scaled", (), {})


def _under_no_grad(state: float) -> Any:
    kept = [state]

    @torch.no_grad()
    def read() -> float:
        return kept[0]

    read.kept = kept  # type: ignore[attr-defined]
    return read


def _in_context(state: float) -> Any:
    kept = [state]

    @contextlib.contextmanager
    def read() -> Iterator[float]:
        yield kept[0]

    read.kept = kept  # type: ignore[attr-defined]
    return read


def _entered(context: Any) -> float:
    with context() as state:
        return state  # type: ignore[no-any-return]


def _imported(held: Any) -> float:
    from tests_settings import state  # type: ignore[import-not-found]

    return state  # type: ignore[no-any-return]


def _kept(state: float) -> Config:
    KEPT.append(Config(state))
    return KEPT[-1]


def _queued(state: float, kind: Any = queue.Queue) -> Any:
    held = kind()
    held.put(state)
    return held


def _written(state: float) -> io.StringIO:
    held = io.StringIO()
    held.write(str(state))
    return held


def _rewrite(held: Any, state: float) -> None:
    held.seek(0)
    held.truncate()
    held.write(str(state))


def _mapped(state: float) -> mmap.mmap:
    held = mmap.mmap(-1, 8)
    held[:] = struct.pack("d", state)
    return held


def _optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def _set_rate(held: Any, lr: float) -> None:
    held.optimizer.param_groups[0]["lr"] = lr
    held._last_lr = [lr]


def _in_an_array(state: float) -> Any:
    held = np.empty(2, dtype=object)
    held[1] = [state]
    return held


def _state(held: Any) -> float:
    return held.state  # type: ignore[no-any-return]


def _set_state(held: Any, state: float) -> None:
    held.state = state


def _at(*keys: Any) -> Any:
    """Ways to read and write what lies at these keys."""

    def inner(held: Any) -> Any:
        return functools.reduce(lambda inside, key: inside[key], keys[:-1], held)

    return lambda held: float(inner(held)[keys[-1]]), lambda held, state: inner(held).__setitem__(keys[-1], state)


OF_STATE = (_state, _set_state)
Holder = tuple[Callable[[float], Any], Callable[[Any], float], Callable[[Any, float], object]]
HOLDERS: dict[str, Holder] = {
    "argparse.Namespace": (lambda state: argparse.Namespace(state=state), *OF_STATE),
    "its dictionary": (lambda state: argparse.Namespace(state=state), lambda held: vars(held)["state"], _set_state),
    "UserDict": (lambda state: collections.UserDict(state=state), *_at("state")),
    "UserList": (lambda state: collections.UserList([state]), *_at(0)),
    "ChainMap": (
        lambda state: collections.ChainMap({}, {"state": state}), _at("state")[0],
        lambda held, state: held.maps[1].__setitem__("state", state),
    ),
    "Counter": (lambda state: collections.Counter(state=state), *_at("state")),  # type: ignore[arg-type]
    "a default of a dictionary": (
        lambda state: collections.defaultdict(vars(Config(state)).copy), lambda held: held.default_factory()["state"],
        lambda held, state: held.default_factory.__self__.__setitem__("state", state),
    ),
    "a subclass of dict": (lambda state: _owned(Names(), state), *OF_STATE),
    "a subclass of float": (lambda state: _owned(Real(2.0), state), *OF_STATE),
    "a member of an enum": (lambda state: _owned(Level.LOW, state), *OF_STATE),
    "the value of a member": (
        lambda state: Level.HIGH, lambda held: held.value[0], lambda held, state: held.value.__setitem__(0, state)
    ),
    "an object array": (_in_an_array, *_at(1, 0)),
    "an array": (lambda state: np.full((300, 300), state), *_at((7, 7))),
    "an array of records": (lambda state: np.array([(state, 1)], dtype=[("x", "f8"), ("n", "i4")]), *_at(0, "x")),
    "a masked array": (lambda state: np.ma.masked_array([state, 1.0], mask=[0, 1]), *_at(0)),
    "array.array": (lambda state: array.array("d", [state]), *_at(0)),
    "a view of memory": (lambda state: memoryview(array.array("d", [state])), *_at(0)),
    "bytes that change": (
        lambda state: bytearray(struct.pack("d", state)), lambda held: struct.unpack("d", bytes(held))[0],
        lambda held, state: held.__setitem__(slice(None), struct.pack("d", state)),
    ),
    "mapped memory": (
        _mapped, lambda held: struct.unpack("d", held[:])[0],
        lambda held, state: held.__setitem__(slice(None), struct.pack("d", state)),
    ),
    "a number of C": (ctypes.c_double, lambda held: held.value, lambda held, state: setattr(held, "value", state)),
    "a structure of C": (Point, lambda held: held.x, lambda held, state: setattr(held, "x", state)),
    "an array of C": (lambda state: (ctypes.c_double * 2)(state, 1.0), *_at(0)),
    "a number that processes share": (
        lambda state: multiprocessing.Value("d", state), lambda held: held.value,
        lambda held, state: setattr(held, "value", state),
    ),
    "a queue": (_queued, lambda held: held.queue[0], lambda held, state: held.queue.__setitem__(0, state)),
    "an event": (
        lambda state: threading.Event(), lambda held: 1.0 + held.is_set(),
        lambda held, state: held.clear() if state % 2 else held.set(),
    ),
    "threading.local": (lambda state: _owned(threading.local(), state), *OF_STATE),
    "a subclass of it": (lambda state: _owned(Worker(), state), *OF_STATE),
    "an optimizer": (
        _optimizer, lambda held: held.param_groups[0]["lr"],
        lambda held, state: held.param_groups[0].__setitem__("lr", state),
    ),
    "a scheduler": (
        lambda state: torch.optim.lr_scheduler.LambdaLR(_optimizer(state), lambda epoch: 1.0),
        lambda held: held.get_last_lr()[0], _set_rate,
    ),
    "a distribution": (
        lambda state: torch.distributions.Normal(torch.tensor(state), 1.0), lambda held: held.mean.item(),
        lambda held, state: setattr(held, "loc", torch.tensor(state)),
    ),
    "the numbers of one": (
        lambda state: torch.distributions.Normal(torch.tensor(state), 1.0), lambda held: held.mean.item(),
        lambda held, state: held.loc.fill_(state),
    ),
    "a frozen object of slots": (
        lambda state: Frozen([state]), lambda held: held.state[0], lambda held, state: held.state.__setitem__(0, state)
    ),
    "a slot with a private name": (Mangled, lambda held: held.access(), lambda held, state: held.access(state)),
    "a mixture": (
        lambda state: Config(Pair(types.SimpleNamespace(state={"x": Frozen([state])}))),
        lambda held: held.state.first.state["x"].state[0],
        lambda held, state: held.state.first.state["x"].state.__setitem__(0, state),
    ),
    "what answers for attributes": (Dynamic, _state, lambda held, state: held._values.__setitem__("state", state)),
    "a descriptor": (
        _of_class, lambda held: held.scale, lambda held, state: _set_state(vars(type(held))["scale"], state)
    ),
    "a metaclass": (_of_metaclass, _state, lambda held, state: setattr(Meta, "state", state)),
    "a mapping that is read only": (
        lambda state: MAPPED.update(state=state) or types.MappingProxyType(MAPPED), _at("state")[0],
        lambda held, state: MAPPED.__setitem__("state", state),
    ),
    "a view of a dictionary": (
        lambda state: VIEWED.update(state=state) or VIEWED.values(), lambda held: next(iter(held)),
        lambda held, state: VIEWED.__setitem__("state", state),
    ),
    "weak values": (
        lambda state: weakref.WeakValueDictionary(x=_kept(state)), lambda held: held["x"].state,
        lambda held, state: _set_state(held["x"], state),
    ),
    "a weak set": (
        lambda state: weakref.WeakSet([_hashed(state)]), lambda held: next(iter(held)).state,
        lambda held, state: _set_state(next(iter(held)), state),
    ),
    "a proxy": (lambda state: weakref.proxy(_kept(state)), *OF_STATE),
    "an object in a set": (
        lambda state: {_hashed(state)}, lambda held: next(iter(held)).state,
        lambda held, state: _set_state(next(iter(held)), state),
    ),
    "a key": (
        lambda state: {_hashed(state): 1}, lambda held: next(iter(held)).state,
        lambda held, state: _set_state(next(iter(held)), state),
    ),
    "a text in memory": (_written, lambda held: float(held.getvalue()), _rewrite),
    "a context variable": (
        lambda state: VARIABLE.set(state) and VARIABLE, lambda held: held.get(), lambda held, state: held.set(state)
    ),
    "the context of decimal numbers": (
        lambda state: decimal.getcontext(), lambda held: decimal.getcontext().prec / 28,
        lambda held, state: setattr(decimal.getcontext(), "prec", int(28 * state)),
    ),
    "an attribute of a tensor": (lambda state: _owned(torch.ones(1), state), *OF_STATE),
    "an attribute of a function": (lambda state: _owned(lambda: None, state), *OF_STATE),
    "a partial function": (
        lambda state: functools.partial(_state, Config(state)), lambda held: held(),
        lambda held, state: _set_state(held.args[0], state),
    ),
    "a bound method": (lambda state: Mangled(state).access, lambda held: held(), lambda held, state: held(state)),
    "a function without gradients": (
        _under_no_grad, lambda held: held(), lambda held, state: held.kept.__setitem__(0, state)
    ),
    "a context": (_in_context, _entered, lambda held, state: held.kept.__setitem__(0, state)),
    "a module's global": (lambda state: _owned(SETTINGS, state), lambda held: SETTINGS.state, _set_state),
    "what forward imports": (lambda state: _owned(SETTINGS, state), _imported, _set_state),
    "a constant set on torch": (
        lambda state: setattr(torch, "my_state", state), lambda held: torch.my_state,
        lambda held, state: setattr(torch, "my_state", state),
    ),
    "an exception": (ValueError, lambda held: held.args[0], lambda held, state: setattr(held, "args", (state,))),
}  # fmt: skip
"""What holds state: how it is made, read and written."""


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    state: Any


class Hashed:
    def __init__(self, state: float) -> None:
        self.state = state


def _hashed(state: float) -> Hashed:
    KEPT.append(Hashed(state))  # type: ignore[arg-type]
    return KEPT[-1]  # type: ignore[return-value]


class Reader(Base):
    """Reads what it holds, or one of that, and counts it up where told to."""

    def __init__(self, *names: str, counts: bool = False) -> None:
        super().__init__()
        self.counts = counts
        self.uses = [HOLDERS[name][1:] for name in names]
        for i, name in enumerate(names):
            setattr(self, f"held_{i}", HOLDERS[name][0](1.0))

    def beside(self, h: torch.Tensor) -> torch.Tensor:
        for i, (read, write) in enumerate(self.uses):
            held = getattr(self, f"held_{i}")
            if self.counts:
                write(held, read(held) + 1.0)
            h = h * read(held)
        return h


@pytest.fixture(scope="module")
def reader() -> tuple[Reader, Reads]:
    model = Reader(*HOLDERS)
    return model, capture(model, (batch(),)).reads


@pytest.mark.parametrize("name", HOLDERS)
def test_what_forward_read_is_compared_whatever_holds_it(reader: tuple[Reader, Reads], name: str) -> None:
    (model, reads), (_, read, write) = reader, HOLDERS[name]
    held = getattr(model, f"held_{[*HOLDERS].index(name)}")
    guard = Guard(model, None, reads)
    model.beside(batch())
    assert read(held) == 1.0 and guard.seen.holds()
    write(held, 2.0)
    assert read(held) == 2.0 and not guard.holds() and len(guard.changed) < 3
    write(held, 1.0)


@pytest.mark.parametrize("name", HOLDERS)
def test_what_forward_counts_is_refused_and_put_back_whatever_holds_it(name: str) -> None:
    model = Reader(name, counts=True)
    with pytest.raises(CaptureError, match=r"forward keeps|forward writes held_0.loc in place"):
        capture(model, (batch(),))
    assert HOLDERS[name][1](model.held_0) == 1.0


def test_a_number_of_a_tensor_is_compared_by_whatever_name_forward_finds_it(mesh: DeviceMesh) -> None:
    class Reads(Base):
        def __init__(self) -> None:
            super().__init__()
            self.unread = self.used = Config(torch.tensor(2))

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h * int(self.used.state)

    assert_equal(Reads(), mesh, change=lambda step, model: model.used.state.fill_(2 + step))


UNSEEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "_queue.SimpleQueue": (lambda: _queued(1.0, queue.SimpleQueue), lambda held: held.qsize()),
    "LP_c_double": (lambda: ctypes.pointer(ctypes.c_double(1.0)), lambda held: held.contents.value),
    "_io.TextIOWrapper": (lambda: open(__file__), lambda held: 1.0 + held.closed),  # noqa: SIM115
    "SystemRandom": (lambda: random.SystemRandom(), lambda held: 1.0 + (held.random() > 2)),
    "_contextvars.Context": (contextvars.copy_context, lambda held: 1.0 + len(held)),
}
"""What nothing sees into, by the name of its class, and how it is read."""


@pytest.mark.parametrize("name", UNSEEN)
def test_what_nothing_sees_into_is_refused_by_name_where_forward_reads_it(mesh: DeviceMesh, name: str) -> None:
    make, read = UNSEEN[name]

    class Reads(Base):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.reads = make(), True

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h * read(self.held) if self.reads else h

    model = Reads()
    with pytest.raises(CaptureError, match="held") as error:
        autopar.parallelize(model, mesh, (batch(),))
    assert name in str(error.value) or "draws" in str(error.value)
    model.reads = False
    assert autopar.parallelize(model, mesh, (batch(),))(batch()).item() == pytest.approx(model(batch()).item())


READING: dict[str, Callable[[Path], Any]] = {
    "open": lambda path: open(path).read(),  # noqa: SIM115
    "io.open": lambda path: io.open(path, "rb").read(),  # noqa: SIM115, UP020
    "Path.read_text": Path.read_text,
    "np.load": np.load,
    "torch.load": torch.load,
    "os.path.exists": os.path.exists,
    "Path.is_file": Path.is_file,
    "os.listdir": lambda path: os.listdir(path.parent),
    "Path.glob": lambda path: [*path.parent.glob("*")],
}


class Opening(Base):
    def __init__(self, path: Path, way: str) -> None:
        super().__init__()
        self.path, self.way = path, READING[way]

    def beside(self, h: torch.Tensor) -> torch.Tensor:
        return h * (2 if self.way(self.path) else 1)


@pytest.mark.parametrize("way", READING)
def test_files_that_forward_reads_are_refused(tmp_path: Path, way: str) -> None:
    (tmp_path / "scale").write_text("2")
    said = refusal(Opening(tmp_path / "scale", way))
    assert "forward reads file" in said and str(tmp_path) in said and "test_state.py" in said
    (tmp_path / "scale").read_text()


def test_files_that_python_reads_for_forward_are_not() -> None:
    class Imports(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            import colorsys

            warnings.warn("a line of code is shown", stacklevel=1)
            logging.getLogger("model").warning("%s", linecache.getline(colorsys.__file__, 1))
            with open(os.devnull, "w") as nothing:
                nothing.write("a line")
            return h

    sys.modules.pop("colorsys", None)
    linecache.clearcache()
    with pytest.warns(UserWarning, match="a line of code"):
        assert capture(Imports(), (batch(),))


def test_what_is_reachable_and_not_read_is_let_be(mesh: DeviceMesh) -> None:
    class Tools:
        def __init__(self) -> None:
            self.file, self.queue, self.thread = open(__file__), queue.SimpleQueue(), threading.Thread()  # noqa: SIM115
            self.group, self.draws = dist.group.WORLD, iter(range(3))
            self.scale = 2.0

    class Holds(Base):
        def __init__(self) -> None:
            super().__init__()
            self.tools, self.loader = Tools(), torch.utils.data.DataLoader([1, 2, 3])
            self.file, self.lock = self.tools.file, threading.Lock()
            self.logger = logging.getLogger("model")

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            self.logger.debug("forward")
            with self.lock:
                return h * self.tools.scale

        def write(self) -> None:
            self.tools.file.write("")

    model = Holds()
    parallel = autopar.parallelize(model, mesh, (batch(),))
    before = parallel(batch()).item()
    next(model.tools.draws)
    model.file.readline()
    model.tools.queue.put(1)
    assert parallel(batch()).item() == before
    model.tools.scale = 4.0
    assert parallel(batch()).item() == pytest.approx(4 * before)


# ------------------------------------------------------------------------------------- draws


class Draws(Base):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def beside(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.draw()


OWN, NUMPY, OLD, COUNT, LIST, TORCH = (
    random.Random(0), np.random.default_rng(0), np.random.RandomState(0), itertools.count(), iter([1.0] * 100),
    torch.Generator().manual_seed(0),
)  # fmt: skip
DRAWS: dict[str, tuple[Callable[[], Any], str]] = {
    "random": (random.random, "draws from random"),
    "a choice": (lambda: random.choice([1.0, 2.0]), "draws from random"),
    "numpy": (lambda: float(np.random.rand()), r"draws from numpy.random"),
    "a generator of one's own": (lambda: OWN.random(), "OWN"),
    "a generator of numpy's": (lambda: float(NUMPY.random()), "NUMPY"),
    "a random state": (lambda: OLD.rand(), "OLD"),
    "a counter": (lambda: next(COUNT), "COUNT"),
    "an iterator": (lambda: next(LIST), "LIST"),
    "a bound method": (random.Random(3).random, "draw"),
}


@pytest.mark.parametrize("what", DRAWS)
def test_a_draw_of_python_is_refused_by_name(what: str) -> None:
    draw, name = DRAWS[what]
    before = random.getstate(), OWN.getstate(), repr(np.random.get_state()), repr(NUMPY.bit_generator.state)
    assert name in refusal(Draws(draw))
    assert before == (random.getstate(), OWN.getstate(), repr(np.random.get_state()), repr(NUMPY.bit_generator.state))


def test_a_seed_in_forward_is_refused() -> None:
    def seeded() -> float:
        with torch.random.fork_rng():
            torch.manual_seed(0)
        return 1.0

    model = Draws(seeded)  # which draws its weights
    before = torch.get_rng_state()
    assert "forward seeds torch's generator" in refusal(model)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("holder", ["an attribute", "an object", "a closure", "a global"])
def test_a_generator_that_forward_seeds_is_refused_whoever_holds_it(holder: str) -> None:
    held = torch.Generator().manual_seed(0)

    class Seeds(Base):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(0)
            self.config = types.SimpleNamespace(generator=torch.Generator().manual_seed(0))

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            held_by = {"an attribute": self.generator, "an object": self.config.generator, "a closure": held}
            generator = held_by.get(holder, TORCH)
            return h * torch.rand(h.shape, generator=generator.manual_seed(0))

    TORCH.manual_seed(0)
    assert "forward seeds a torch.Generator" in refusal(Seeds())
    assert torch.equal(held.get_state(), torch.Generator().manual_seed(0).get_state())


def test_what_changes_by_itself_is_refused() -> None:
    for draw in (time.time, lambda: random.Random().random(), lambda: np.random.default_rng().random()):
        assert "something that changes by itself" in refusal(Draws(lambda draw=draw: draw() if time else 0.0))
    capture(Draws(lambda: random.Random(3).random()), (batch(),))


DOES: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "registers a buffer": (lambda self, h: self.register_buffer("seen", h.detach()), "forward registers seen"),
    "freezes": (lambda self, h: self.layer.bias.requires_grad_(False), "requires_grad_"),
    "notes": (lambda self, h: setattr(self.layer.bias, "calls", 1), "layer.bias.calls"),
}  # fmt: skip


@pytest.mark.parametrize("what", DOES)
def test_what_forward_does_to_parameters_beside_operators_is_refused(what: str) -> None:
    does, message = DOES[what]

    class Does(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            does(self, h)
            return h

    assert message in refusal(Does())


@pytest.mark.parametrize("held", ["a buffer", "a parameter", "another tensor"])
def test_what_people_noted_on_a_tensor_is_read_and_compared(held: str) -> None:
    class Noted(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(WIDTH))
            self.other = torch.ones(WIDTH)
            self.noted = {"a buffer": "table", "a parameter": "gain", "another tensor": "other"}[held]
            self.gain = nn.Parameter(torch.ones(WIDTH))
            getattr(self, self.noted).scale = 2.0

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            noted = getattr(self, self.noted)
            return h * noted * noted.scale

    model = Noted()
    guard = Guard(model, None, capture(model, (batch(),)).reads)
    assert guard.holds()
    getattr(model, model.noted).scale = 3.0
    assert not guard.holds() and guard.changed == [f"{model.noted}.scale"]


# ------------------------------------------------------------------------------------- hooks


def hooked(place: Callable[[nn.Module], Any]) -> nn.Module:
    model = Base()
    place(model)
    return model


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.layer.register_forward_hook(lambda module, args, out: 2 * out),
    "before forward": lambda m: m.layer.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "full backward": lambda m: m.layer.register_full_backward_hook(
        lambda m, into, out: (None if into[0] is None else 2 * into[0],)
    ),
    "full backward of the root": lambda m: m.register_full_backward_hook(lambda *a: None),
    "before backward": lambda m: m.layer.register_full_backward_pre_hook(lambda m, out: (3 * out[0],)),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("where", HOOKS)
def test_hooks_run(mesh: DeviceMesh, where: str) -> None:
    assert_equal(hooked(HOOKS[where]), mesh)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_global_hooks_run(mesh: DeviceMesh) -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda m, into, out: None)
    try:
        assert_equal(Base(), mesh)
    finally:
        handle.remove()


def test_a_hook_on_what_is_accumulated_is_refused_by_name() -> None:
    message = refusal(hooked(lambda m: m.layer.bias.register_post_accumulate_grad_hook(lambda p: None)))
    assert "layer.bias has a hook that runs once its gradient is accumulated" in message


def test_a_hook_that_each_call_adds_is_refused() -> None:
    class Hooks(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            self.layer.weight.register_hook(lambda g: 2 * g)
            return h

    assert "forward registers a hook on layer.weight in each call, and they pile up" in refusal(Hooks())


def test_asking_for_inference_mode_is_refused_and_for_gradients_is_not(mesh: DeviceMesh) -> None:
    """A program is the same within inference mode and outside; with gradients and without there are two."""

    class Asks(Base):
        def __init__(self, ask: Callable[[], bool]) -> None:
            super().__init__()
            self.ask = ask

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h if self.ask() else 2 * h

    class AsksForInference(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h if torch.is_inference_mode_enabled() else 2 * h

    message = refusal(AsksForInference())
    assert "forward asks torch.is_inference_mode_enabled()" in message and "test_state.py" in message
    assert_equal(Asks(torch.is_grad_enabled), mesh)
    assert "is_inference_mode_enabled() as ask" in refusal(Asks(torch.is_inference_mode_enabled))


@pytest.mark.parametrize("ask", [torch.is_inference, torch.Tensor.is_inference])
def test_asking_a_tensor_for_inference_mode_is_refused(ask: Callable[[torch.Tensor], bool]) -> None:
    class Asks(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h if ask(h) else 2 * h

    message = refusal(Asks())
    assert "forward asks torch.is_inference_mode_enabled()" in message and "test_state.py" in message


OF_CALLERS: dict[str, Callable[[torch.Tensor], object]] = {
    "is_leaf": lambda x: x.is_leaf,
    "grad_fn": lambda x: x.grad_fn is None,
    "retains_grad": lambda x: x.retains_grad,
    "_version": lambda x: x._version == 0,
    "_base": lambda x: x._base is None,
    "_is_view": lambda x: not x._is_view(),
    "_backward_hooks": lambda x: x._backward_hooks is None,
}


@pytest.mark.parametrize("name", OF_CALLERS)
def test_asking_what_a_caller_did_to_an_input_is_refused_and_of_what_forward_makes_is_not(
    name: str, mesh: DeviceMesh
) -> None:
    class Asks(Base):
        def __init__(self, makes: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.makes = makes

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum() * (2.0 if OF_CALLERS[name](self.makes(x)) else 1.0)

    message = refusal(Asks(lambda x: x))
    assert "forward asks what was done to a tensor before the call" in message and "test_state.py" in message
    assert_equal(Asks(torch.sin), mesh)


def test_asking_how_often_a_parameter_was_written_is_refused() -> None:
    class Caches(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h * (1 + self.layer.weight._version)

    assert "forward asks what was done to a tensor before the call" in refusal(Caches())


def test_gradients_of_earlier_steps_are_refused() -> None:
    class Reads(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h if self.layer.weight.grad is None else 2 * h

    assert "forward reads .grad of a parameter or an input" in refusal(Reads())


asks_under_another_name = torch.is_anomaly_enabled

ASKED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dtype": (lambda: torch.get_default_dtype() is torch.float64, lambda: defaulted(torch.float64)),
    "dtype of what is made": (lambda: (torch.ones(1) / 3).double(), lambda: defaulted(torch.float64)),
    "device": (lambda: torch.get_default_device().type == "meta", lambda: torch.device("meta")),
    "another name": (lambda: asks_under_another_name(), torch.autograd.detect_anomaly),
    "environment": (lambda: os.environ.get("AUTOPAR_TEST") == "1", lambda: variable("AUTOPAR_TEST")),
}
"""What a forward asks of the process, and where the answer is another one."""


@contextlib.contextmanager
def defaulted(dtype: torch.dtype) -> Iterator[None]:
    known = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(known)


@contextlib.contextmanager
def variable(name: str) -> Iterator[None]:
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("what", ASKED)
def test_what_the_process_is_set_to_is_what_runs(mesh: DeviceMesh, what: str) -> None:
    """Before the change, within it and after it."""
    ask, other = ASKED[what]

    class Asks(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h * (1 + ask())

    model, x = Asks(), batch()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, mesh, (x,))
    found = []
    for context in (contextlib.nullcontext, other, contextlib.nullcontext):
        with context():
            pair = [step(x).detach().clone() for step in (alone, parallel)]
        torch.testing.assert_close(*pair, rtol=1e-12, atol=0)
        found.append(pair[0])
    assert found[0] == found[2] != found[1]


def test_what_a_backward_keeps_is_refused_by_name() -> None:
    calls = [0]

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return gradient * calls[0]

    class Model(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return Counts.apply(h)  # type: ignore[no-any-return]

    message = refusal(Model())
    assert "from one call for the next" in message and "calls[0]" in message
    assert calls == [0]


def test_state_of_a_class_that_is_closed_over_is_refused_by_name() -> None:
    class Kept:
        calls = 0

    class Model(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            Kept.calls += 1
            return h * Kept.calls

    assert "Kept.calls" in refusal(Model())


def test_packed_sequences_are_refused_with_their_line() -> None:
    class Packs(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(h[:, :, None], torch.full((len(h),), h.shape[1]), True)
            return packed.data.sum() * h

    message = refusal(Packs())
    assert "forward packs sequences by their lengths" in message and "test_state.py" in message


class _Sine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0].cos()


# ------------------------------------------------------------------------------------- tensors that are not the model's


def test_a_loss_with_parameters_is_refused_by_name() -> None:
    head = nn.Linear(WIDTH, 1, dtype=torch.float64)
    scale = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
    model = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, output: torch.Tensor) -> torch.Tensor:
            return self.head(output).sum()

    assert "loss_fn.head.weight" in refusal(model, loss_fn=Loss())
    assert "head.weight" in refusal(model, loss_fn=lambda output: head(output).sum())
    partial = functools.partial(lambda scale, output: (output * scale).sum(), scale)
    assert "loss_fn.args[0]" in refusal(model, loss_fn=partial)
    head.requires_grad_(False)
    capture(model, (batch(),), loss_fn=Loss())


@pytest.mark.parametrize("kind", ["list", "dict", "tensor"])
def test_a_parameter_that_no_module_registers_is_refused_by_name(kind: str) -> None:
    class Unregistered(Base):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
            self.held = {"list": [weight], "dict": {"w": weight}, "tensor": [weight.detach().requires_grad_()]}[kind]

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h * (self.held["w"] if kind == "dict" else self.held[0])

    message = refusal(Unregistered())
    assert "held" in message and "requires a gradient and is no parameter of the model" in message
    with torch.no_grad():
        capture(Unregistered(), (batch(),))


@pytest.mark.parametrize("kind", ["data", "transposed", "part of a buffer", "closure"])
def test_a_view_of_a_parameter_that_python_keeps_is_refused_by_name(kind: str) -> None:
    class Views(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
            weight = self.layer.weight
            kept = {"transposed": weight.detach().T, "part of a buffer": self.average[1:]}.get(kind, weight.data)
            self.kept = (lambda: kept) if kind == "closure" else kept

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h @ (self.kept() if kind == "closure" else self.kept).sum(0, keepdim=True).T

    name = "average" if kind == "part of a buffer" else "layer.weight"
    message = refusal(Views())
    assert "kept is on the memory of " + name in message and "would not change with it" in message


def test_capture_writes_no_tensor_of_the_users() -> None:
    counter = torch.zeros((), dtype=torch.float64)
    norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    class Writes(Base):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(WIDTH, dtype=torch.float64)

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h * self.table.mul_(0.5)

    model = Writes()
    assert "forward writes table in place" in refusal(model) and model.table.eq(1).all()
    assert "counter in place" in refusal(Draws(lambda: counter.add_(1))) and counter.item() == 0
    assert "norm.num_batches_tracked in place" in refusal(
        nn.Linear(WIDTH, WIDTH, dtype=torch.float64), loss_fn=lambda output: norm(output).square().sum()
    )
    assert norm.num_batches_tracked.item() == 0 and norm.running_mean.eq(0).all()


def test_a_cache_of_functions_is_left_without_fakes() -> None:
    @functools.lru_cache
    def table(width: int) -> torch.Tensor:
        return torch.arange(width, dtype=torch.float64)

    model = Draws(lambda: table(WIDTH))
    capture(model, (batch(),))
    model(batch())
    assert type(table(WIDTH)) is torch.Tensor


# ------------------------------------------------------------------------------------- changes after planning


class Knobs(Base):
    """Reads what users set between steps."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.config, self.dropout = 0.5, Config(state=[1.0]), nn.Dropout(0.0)
        self.table, self.power = torch.ones(WIDTH, dtype=torch.float64), torch.tensor(2)

    def beside(self, h: torch.Tensor) -> torch.Tensor:
        h = self.dropout(h) * self.beta * self.config.state[0] * self.table * self.factor
        return h ** int(self.power) * getattr(self, "late", 1.0) * getattr(self.layer.weight, "gain", 1.0)


def _put(name: str, *values: Any) -> Callable[[int, Any], None]:
    return lambda step, model: setattr(model, name, values[step])


CHANGES: dict[str, Callable[[int, Any], None]] = {
    "a number": _put("beta", 0.5, 0.25, 0.5),
    "a type": _put("beta", 1, 1.0, True),
    "an attribute that was not there": lambda step, model: setattr(model, "late", 3.0) if step else None,
    "a field of an object": lambda step, model: model.config.state.__setitem__(0, float(step)),
    "an object": lambda step, model: setattr(model, "config", Config(state=[1.0 + step])),
    "a tensor": lambda step, model: setattr(model, "table", torch.full((WIDTH,), 1.0 + step, dtype=torch.float64)),
    "a tensor's shape": lambda step, model: setattr(model, "table", torch.full((1,), 1.0 + step, dtype=torch.float64)),
    "a tensor's data": lambda step, model: setattr(
        model.table, "data", torch.full((WIDTH,), 1.0 + step, dtype=torch.float64)
    ),
    "a tensor in place": lambda step, model: model.table.add_(step),
    "a tensor that is a number of Python's": lambda step, model: model.power.fill_(2 + step % 2),
    "a tensor that is a number of Python's, behind autograd's back": lambda step, model: model.power.data.fill_(
        2 + step % 2
    ),
    "a tensor that is a number of Python's, by its array": lambda step, model: model.power.numpy().fill(2 + step % 2),
    "what is noted on a parameter": lambda step, model: setattr(model.layer.weight, "gain", 2.0) if step else None,
    "an attribute of the class": lambda step, model: setattr(model, "factor", 1.0 + step),
    "forward": lambda step, model: setattr(
        model.dropout, "forward", (lambda x: x) if step % 2 else (lambda x: 2.0 * x)
    ),
    "a forward hook": lambda step, model: model.dropout.register_forward_hook(lambda module, args, out: 3 * out),
    "a hook before forward": lambda step, model: model.layer.register_forward_pre_hook(lambda m, args: 2 * args[0]),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_changed_between_calls_is_what_runs(mesh: DeviceMesh, what: str) -> None:
    assert_equal(Knobs(), mesh, change=CHANGES[what])


class Answering(types.ModuleType):
    """A Python module whose class answers for it."""

    tau = 1.0

    @property
    def now(self) -> float:
        return self.tau


answered = {"gain": 1.0}
lazy, answering = types.ModuleType("lazy"), Answering("answering")
vars(lazy)["__getattr__"] = lambda name: answered[name]

ANSWERS: dict[str, tuple[Callable[[], float], Callable[[float], None]]] = {
    "a function of a module": (lambda: lazy.gain, lambda value: answered.update(gain=value)),
    "a property of a module": (lambda: answering.now, lambda value: setattr(Answering, "tau", value)),
    "a property of a module, its own": (lambda: answering.now, lambda value: setattr(answering, "tau", value)),
}  # fmt: skip


@pytest.mark.parametrize("what", ANSWERS)
def test_what_a_python_module_answers_is_compared(mesh: DeviceMesh, what: str) -> None:
    read, change = ANSWERS[what]

    class Reading(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h * read()

    change(1.0)
    assert_equal(Reading(), mesh, change=lambda step, model: change(1.0 + step))
    vars(answering).pop("tau", None)


def test_a_method_that_is_bound_to_a_layer_is_its_copys_when_it_is_captured_again(mesh: DeviceMesh) -> None:
    class Patched(Base):
        def __init__(self) -> None:
            super().__init__()
            self.tau = 1.0
            self.layer.forward = types.MethodType(lambda layer, x: x @ layer.weight.t() + layer.bias, self.layer)

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(lambda h: self.layer(h * self.tau), h, use_reentrant=True)

    assert_equal(Patched(), mesh, change=_put("tau", 1.0, 0.5, 2.0))


def test_a_late_hook_on_a_gradient_that_forward_computes_too_is_refused(mesh: DeviceMesh) -> None:
    class Inner(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            h.square().mean().backward(retain_graph=True)
            return h

    parallel = autopar.parallelize(Inner(), mesh, (batch(),))
    parallel(batch()).backward()
    parallel.get_parameter("layer.weight").register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    with pytest.raises(ValueError, match=r"layer\.weight was given a hook, which eager calls for what forward"):
        parallel(batch()).backward()


def noted() -> None:
    """A function on which people note things."""


def _tried() -> float:
    try:
        return float(Config.late)  # type: ignore[attr-defined]
    except AttributeError:
        return 1.0


UNSET: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "of a function": (noted, lambda _: getattr(noted, "late", 1.0)),
    "of a class": (Config, lambda _: getattr(Config, "late", 1.0)),
    "of a class, by a name that is put together": (Config, lambda _: getattr(Config, "la" + "te", 1.0)),
    "of a class, tried": (Config, lambda _: _tried()),
    "of the module's class": (Base, lambda model: getattr(model, "late", 1.0)),
    "of a class of torch's": (nn.Linear, lambda model: getattr(model.layer, "late", 1.0)),
    "of the class of all modules": (nn.Module, lambda model: getattr(model, "late", 1.0)),
    "of the class of tensors": (torch.Tensor, lambda model: getattr(model.layer.weight, "late", 1.0)),
    "of Python's module": (sys.modules[__name__], lambda _: getattr(sys.modules[__name__], "late", 1.0)),
    "of the globals": (sys.modules[__name__], lambda _: globals().get("late", 1.0)),
}


@pytest.mark.parametrize("what", UNSET)
def test_what_was_not_there_yet_is_read_once_it_is(
    mesh: DeviceMesh, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, read = UNSET[what]

    class Reading(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h * read(self)

    parallel = autopar.parallelize(Reading(), mesh, (batch(),))
    before = parallel(batch())
    monkeypatch.setattr(holder, "late", 2.0, raising=False)
    torch.testing.assert_close(parallel(batch()), 4 * before)
    monkeypatch.delattr(holder, "late")
    assert torch.equal(parallel(batch()), before)


def test_gradients_that_an_attribute_turns_off_are_none(mesh: DeviceMesh) -> None:
    """A program that computes them serves such calls, and they get none of it."""

    class Frozen(Base):
        flows = True

        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(self.training and self.flows):
                h = torch.tanh(self.layer(x))
            return self.last(h).square().sum()

    def train(model: Any) -> Iterator[list[torch.Tensor | None]]:
        for flows in (True, False, True, False):
            model.flows = flows
            model.zero_grad()
            model(batch()).backward()
            yield [None if p.grad is None else _whole(p.grad) for p in model.parameters()]

    for ours, theirs in zip(train(autopar.parallelize(Frozen(), mesh, (batch(),))), train(Frozen()), strict=True):
        assert [g is None for g in ours] == [g is None for g in theirs]
        torch.testing.assert_close([g for g in ours if g is not None], [g for g in theirs if g is not None])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_what_is_set_on_the_model_itself_is_warned_of(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model = Knobs()
    parallel = autopar.parallelize(model, mesh, (batch(),))
    before = parallel(batch())
    model.beta, model.dropout.p = 0.25, 0.5
    assert torch.equal(parallel(batch()), before)
    warned = [message for message in caplog.messages if "which the parallel module does not see" in message]
    assert len(warned) == 2 and "beta of the model was set to 0.25" in caplog.text and "dropout.p" in caplog.text
    parallel.beta = model.beta = 0.125
    parallel(batch())
    assert "0.125" not in caplog.text
    caplog.clear()
    model.table, model.forward = model.table + 1, model.beside
    model.dropout.eval()
    model.add_module("more", nn.Linear(1, 1))
    model.layer.register_buffer("late", torch.ones(1))
    for _ in range(2):
        parallel(batch())
    said = [message.split(" of the model was ") for message in caplog.messages if "does not see" in message]
    names = {name: what.split(" after")[0] for name, what in said}
    assert len(said) == len(names) and names == {
        "table": "changed", "forward": "changed", "dropout.training": "set to False", "more": "added or replaced",
        "layer.late": "added or replaced",
    }  # fmt: skip


def test_what_is_noted_on_a_parameter_is_read_in_each_mode(mesh: DeviceMesh) -> None:
    class Noted(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return h * getattr(self.layer.weight, "scale", 1.0)

    model = Noted()
    model.layer.weight.scale = 3.0
    parallel = autopar.parallelize(model, mesh, (batch(),))
    for training in (True, False):
        assert parallel.train(training)(batch()).item() == pytest.approx(model(batch()).item(), rel=1e-12)


def test_a_value_that_comes_back_has_its_program_still(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    parallel = autopar.parallelize(Knobs(), mesh, (batch(),))
    for beta in (0.5, 0.25, 0.5, 0.25, 0.5):
        parallel.beta = beta
        parallel(batch())
    assert sum("beta changed since the model was captured" in message for message in caplog.messages) == 1


def test_a_change_counts_in_other_modes_too(mesh: DeviceMesh) -> None:
    model = Knobs()
    parallel = autopar.parallelize(model, mesh, (batch(),))
    for beta in (0.5, 0.25):
        model.beta = parallel.beta = beta
        for training in (True, False):
            model.train(training)
            parallel.train(training)
            assert parallel(batch()).item() == pytest.approx(model(batch()).item(), rel=1e-12)


def test_a_recurrent_layer_in_another_mode_changes_nothing(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    class Recurrent(Base):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(WIDTH, WIDTH, dtype=torch.float64)

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return self.cells(h)[0]  # type: ignore[no-any-return]

    parallel = autopar.parallelize(Recurrent(), mesh, (batch(),))
    for training in (True, False, True):
        parallel.train(training)(batch())
    assert "changed since" not in caplog.text


def test_what_forward_does_not_read_is_not_looked_at(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    class Trainer:
        step, weight = 0, 2.0

    trainer = Trainer()
    trainer.step, trainer.weight = 0, 2.0

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output * trainer.weight

    parallel = autopar.parallelize(Knobs(), mesh, (batch(),), loss_fn=loss_fn)
    first = parallel(batch()).item()
    for step in range(2):
        trainer.step = parallel.epoch = parallel.layer.seen = step
        parallel(batch())
    assert not any("changed" in message for message in caplog.messages)
    trainer.weight = 4.0
    assert parallel(batch()).item() == pytest.approx(2 * first)
    assert any("trainer" in message and "changed" in message for message in caplog.messages)


LATER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a hook that collects": (
        lambda m: m.layer.register_forward_hook(lambda module, args, out, seen=[]: seen.append(out)), "from one call"
    ),
    "another module": (lambda m: setattr(m, "dropout", nn.Identity()), "module dropout was replaced"),
}  # fmt: skip


@pytest.mark.parametrize("what", LATER)
def test_what_no_program_can_do_is_refused_at_the_next_call(mesh: DeviceMesh, what: str) -> None:
    change, message = LATER[what]
    parallel = autopar.parallelize(Knobs(), mesh, (batch(),))
    parallel(batch())
    change(parallel)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            parallel(batch())


def test_hooks_on_the_parallel_module_and_its_parameters_run(mesh: DeviceMesh) -> None:
    parallel = autopar.parallelize(Knobs(), mesh, (batch(),))
    seen: list[str] = []
    parallel.register_forward_hook(lambda *a: seen.append("forward"))
    parallel.register_full_backward_hook(lambda *a: seen.append("backward"))
    parallel.layer.bias.register_hook(lambda gradient: seen.append("gradient"))
    parallel(batch()).backward()
    assert sorted(seen) == ["backward", "forward", "gradient"]


def _scaling(*scales: str) -> Any:
    class Scaling(nn.Linear):
        kinds = frozenset(scales)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * len(max(self.kinds))

    return Scaling


def _scaled_by(scale: float) -> tuple[Callable[..., torch.Tensor], Callable[[float], None]]:
    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda module, args, out: out * scale, change


def test_things_of_one_name_are_compared_one_by_one() -> None:
    """Two classes of one name, of which several modules are, and two closures of one function."""
    classes, hooks = (_scaling("a"), _scaling("bb")), (_scaled_by(2.0), _scaled_by(3.0))
    model = nn.Sequential(*(cls(WIDTH, WIDTH, dtype=torch.float64) for cls in classes for _ in range(2)))
    model[0].register_forward_hook(hooks[0][0])
    model[1].register_forward_hook(hooks[1][0])
    guard = Guard(model, None, capture(model, (batch(),)).reads)
    for cls, scales in zip(classes, ("a", "bb"), strict=True):
        cls.kinds = frozenset({"changed"})
        assert not guard.holds() and len(guard.changed) == 1
        cls.kinds = frozenset({scales})
        assert guard.holds()
    for (_, change), scale in zip(hooks, (2.0, 3.0), strict=True):
        change(9.0)
        assert not guard.holds() and len(guard.changed) == 1
        change(scale)
        assert guard.holds()


def test_a_guard_takes_microseconds() -> None:
    class Deep(Base):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Knobs() for _ in range(8)])

        def beside(self, h: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                h = layer.beside(layer.layer(h))
            return h

    model = Deep()
    guard = Guard(model, None, capture(model, (batch(),)).reads)
    assert guard.holds() and len(guard.seen.entries) < 40 * len(guard.modules)
    model.layers[5].config.state[0] = 2.0
    assert not guard.holds() and guard.changed == ["layers.5.config.state[0]"]
    model.layers[5].config.state[0] = 1.0
    assert guard.holds()


def test_what_instruments_write_beside_an_assert_is_not_the_models() -> None:
    class Asserting(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            assert isinstance(h, torch.Tensor) and h.shape[-1] == WIDTH
            return h

    model = Asserting()
    found = look(dict(model.named_modules()))
    assert not [path for path in found.tokens if "pytest" in path] and len(found.tokens) < 200


def test_a_wrapper_with_the_defaults_of_what_it_wraps() -> None:
    def scaled(h: torch.Tensor, by: list[float] = [0.5]) -> torch.Tensor:  # noqa: B006
        return h * by[0]

    def wrapper(*args: Any) -> torch.Tensor:
        return scaled(*args)

    wrapper.__defaults__ = scaled.__defaults__

    class Wrapped(Base):
        def beside(self, h: torch.Tensor) -> torch.Tensor:
            return wrapper(h)

    model = Wrapped()
    assert [p for p in look(dict(model.named_modules())).tokens if p.endswith("wrapper's default 0")]
    assert len(capture(model, (batch(),)).graph.outputs) == 3


def test_defaults_of_a_function_that_are_replaced(mesh: DeviceMesh) -> None:
    """A call sees what stands there at the call."""

    def scaled(h: torch.Tensor, by: float = 2.0, *, more: float = 1.0) -> torch.Tensor:
        return h * by * more

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled(self.layer(x)).sum()

    def with_more() -> None:
        assert scaled.__kwdefaults__ is not None
        scaled.__kwdefaults__["more"] = 7.0

    model = Calls()
    module = autopar.parallelize(copy.deepcopy(model), mesh, (batch(),))
    for change in (
        lambda: None,
        lambda: setattr(scaled, "__defaults__", (5.0,)),
        lambda: setattr(scaled, "__kwdefaults__", {"more": 3.0}),
        with_more,
    ):
        change()
        torch.testing.assert_close(module(batch()), model(batch()))


def test_attributes_that_a_caller_sets_on_an_input_are_refused_where_code_names_them(mesh: DeviceMesh) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum() * getattr(x, "scale_of_x", 1.0)

    def noted(name: str) -> torch.Tensor:
        x = batch()
        setattr(x, name, 3.0)
        return x

    model = Scales()
    with pytest.raises(CaptureError, match=r"input args\.0 has an attribute 'scale_of_x' that its caller set"):
        capture(model, (noted("scale_of_x"),))
    module = autopar.parallelize(copy.deepcopy(model), mesh, (noted("index_of_x"),))
    torch.testing.assert_close(module(noted("index_of_x")), model(batch()))
    with pytest.raises(CaptureError, match=r"input args\.0 has an attribute 'scale_of_x' that its caller set"):
        module(noted("scale_of_x"))


def test_what_a_look_saw_ends_with_it() -> None:
    """And not in a cycle, for Python's collector to find: of a Llama, there are a hundred thousand objects."""

    class Named(Base):
        def by_nobody(self) -> None:
            """What code may still name is looked at once it does."""

    modules = dict(Named().named_modules())
    for _ in range(2):  # the first fills caches
        gc.collect()
        look(modules, {})
        left = gc.collect()
    assert not left


# ------------------------------------------------------------------------------------- two models


def test_a_parameter_of_two_parallel_models_is_refused(mesh: DeviceMesh) -> None:
    one, two = Base(), Base()
    two.layer.bias = one.layer.bias
    first = autopar.parallelize(one, mesh, (batch(),))
    autopar.parallelize(one, mesh, (batch(),))  # another plan for the same model, which does not live on
    gc.collect()
    with pytest.raises(ValueError, match=r"parameter layer.bias is layer.bias of a Base that is parallel already"):
        autopar.parallelize(two, mesh, (batch(),))
    del first
