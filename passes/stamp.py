"""Stamping: a deep model is captured with three of its layers, and the rest is repeated from the middle one.

    model --copy with stand-ins--> capture --segments--> one repeat of layers --_stamp--> JointGraph of all layers

A run is a stretch of children of an `nn.ModuleList` or `nn.Sequential` that are alike, with a period
(1 where all are alike, 2 where two kinds of layer alternate). In a copy of the model all its periods
but the first two and the last one become stand-ins, which return what they were given and so leave
nothing in the graph. Containers keep their lengths, layers their places and numbers.

Why the result is what a full capture gives. What a layer computes is fixed by its class, its attributes,
its tensors and its arguments. Classes, attributes and tensors are compared here, arguments while the model is traced,
those of the stand-ins too, so code around the layers that treats them differently is seen. A layer's
own number is the one attribute that may differ; who computes with it is refused. What the layers
do to one another and to the rest is read off the graph: the copies must be exactly a repeat of
`segments`, all of the middle period must lie in it, and nothing outside may depend on how often it
repeats. Where anything does not fit, the model is captured in full.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import nn

from .. import compat
from ..graph import GraphInput, GraphOutput, JointGraph, Node, Ref, TensorMeta, map_references
from .capture import Captured, CaptureError, capture, copied
from .segments import Repeated, segments

logger = logging.getLogger(__name__)

# A shorter run is captured in full: three layers of it are traced anyhow.
LAYERS_LEAST = 5
PERIODS_LEAST = 4
PERIOD_MOST = 8


class _Unfit(Exception):
    """The model cannot be stamped; the message says why."""


def capture_stamped(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    device_type: str | None = None,
) -> Captured:
    """What `capture` returns, up to the names of values, in a time that hardly depends on depth.

    Arguments and errors as for `capture`. A model without a run of at least five layers, or with
    one that does not repeat exactly, is captured in full; the reason is logged.
    """
    full = partial(capture, model, args, kwargs, loss_fn=loss_fn, device_type=device_type)
    runs = _runs(model)
    if not runs:
        logger.info("captured in full: %s has no run of layers that are alike", type(model).__name__)
        return full()
    watches = [_Watch(run) for run in runs]
    try:
        captured = capture(_shortened(model, watches), args, kwargs, loss_fn=loss_fn, device_type=device_type)
        graph = captured.graph
        found = segments(graph).repeats
        crops = [_crop(graph, watch, found) for watch in watches]
        for crop in crops:
            graph = _stamp(graph, crop)
        missing = _check_parameters(model, graph, runs, captured.without_gradient)
    except (CaptureError, _Unfit) as error:
        # a fault of the model itself is raised by the full capture
        logger.info("captured in full: %s", error)
        return full()
    for run in runs:
        logger.info("captured %d of the layers %s, and repeated them", 3 * run.period, run)
    return replace(captured, graph=graph, without_gradient=missing)


# ---- runs of layers that are alike ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Children [start, start + count * period) of a container; child i is like child i + period.
    `numbers` are, for each kind of layer, the (module, attribute) that hold the child's own number."""

    path: str
    start: int
    period: int
    count: int
    numbers: tuple[frozenset[tuple[str, str]], ...]

    @property
    def length(self) -> int:
        return self.period * self.count

    @property
    def real(self) -> tuple[int, ...]:
        """Positions in the run of the layers that are traced: the first two periods and the last one."""
        return (*range(2 * self.period), *range(self.length - self.period, self.length))

    def name(self, position: int) -> str:
        """Path of a layer."""
        return f"{self.path}.{self.start + position}" if self.path else str(self.start + position)

    def place(self, path: str) -> tuple[int, str] | None:
        """(position in the run, path inside the layer) of a module's or tensor's path; None outside of the
        container. Children before and after the run have positions too."""
        rest = path.removeprefix(f"{self.path}.") if self.path else path
        if self.path and rest == path:
            return None
        number, _, inner = rest.partition(".")
        return (int(number) - self.start, inner) if number.isdecimal() else None

    def __str__(self) -> str:
        period = f" with a period of {self.period}" if self.period > 1 else ""
        return f"{self.name(0)} to {self.name(self.length - 1)}{period}"


def _runs(model: nn.Module) -> list[_Run]:
    """The runs of a model, none inside another."""
    alone = _unshared(model)
    found: list[_Run] = []
    seen: set[int] = set()

    def search(path: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        run = _longest(path, module, alone) if isinstance(module, (nn.ModuleList, nn.Sequential)) else None
        if run is not None:
            found.append(run)
        for i, (name, child) in enumerate(module.named_children()):
            if run is None or not run.start <= i < run.start + run.length:
                search(f"{path}.{name}" if path else name, child)

    search("", model)
    return found


def _unshared(model: nn.Module) -> frozenset[int]:
    """Identities of the parameters and buffers that have one name, and memory of their own."""
    names: dict[int, int] = {}
    storages: dict[int, set[int]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for iterator in (model.named_parameters, model.named_buffers):
        for _, tensor in iterator(remove_duplicate=False):
            names[id(tensor)] = names.get(id(tensor), 0) + 1
            if not nn.parameter.is_lazy(tensor) and compat.is_plain(tensor):
                tensors[id(tensor)] = tensor
                storages.setdefault(compat.storage_span(tensor)[0], set()).add(id(tensor))
    return frozenset(
        i for i, tensor in tensors.items() if names[i] == 1 and len(storages[compat.storage_span(tensor)[0]]) == 1
    )


def _longest(path: str, container: nn.Module, alone: frozenset[int]) -> _Run | None:
    """The run of a container that leaves most layers out, and of the smallest period among those."""
    children = list(container.children())
    if len(children) < LAYERS_LEAST or list(container._modules) != [str(i) for i in range(len(children))]:
        return None
    descriptions = [_describe(child, i, len(children), alone) for i, child in enumerate(children)]
    best: _Run | None = None
    for period in range(1, min(PERIOD_MOST, len(children) // PERIODS_LEAST) + 1):
        links = [
            _numbers(descriptions[i], descriptions[i + period], i, i + period) for i in range(len(children) - period)
        ]
        start = 0
        while start < len(links):
            stop = start
            while stop < len(links) and links[stop] is not None:
                if stop - start >= period and links[stop] != links[stop - period]:
                    break
                stop += 1
            run = _Run(
                path=path,
                start=start,
                period=period,
                count=(stop - start) // period + 1,
                numbers=tuple(link for link in links[start : start + period] if link is not None),
            )
            long = run.length >= LAYERS_LEAST and run.count >= PERIODS_LEAST
            if long and (best is None or run.length - 3 * period > best.length - 3 * best.period):
                best = run
            start = max(stop, start + 1)
    return best


Description = dict[tuple[str, str], Any]


def _describe(layer: nn.Module, number: int, length: int, alone: frozenset[int]) -> Description | None:
    """Everything that a layer computes from, by (module, attribute): constants, and objects that are
    the same only if they are one. None for a layer that has something which cannot be compared.

    A list with an entry for each of the `length` layers (in a configuration too) counts with the
    entry that is this layer's `number`.
    """
    found: Description = {}
    tensors = 0
    for path, module in layer.named_modules(remove_duplicate=False):
        found[path, "class"] = type(module)
        found[path, "children"] = tuple(module._modules)
        for name, attribute in vars(module).items():
            if name in ("_parameters", "_buffers"):
                for inner, tensor in attribute.items():
                    if tensor is not None and id(tensor) not in alone:
                        return None
                    tensors += tensor is not None
                    found[path, f"{name}.{inner}"] = None if tensor is None else _form(tensor)
            elif name != "_modules" and "state_dict" not in name:
                if "hooks" in name and attribute:
                    return None
                if not _note(found, path, name, attribute, number, length):
                    return None
    return found if tensors else None


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad)


_CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, Enum)


def _note(found: Description, path: str, name: str, value: Any, number: int, length: int) -> bool:
    """Add an attribute to a description; False if it cannot be compared."""
    note = partial(_note, found, path, number=number, length=length)
    if isinstance(value, (torch.Tensor, nn.Module)):
        return False
    if isinstance(value, (list, tuple, dict)):
        found[path, name] = (type(value), len(value), tuple(value) if isinstance(value, dict) else ())
        _note_own(found, path, name, value, number, length)
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return all(note(f"{name}[{key!r}]", item) for key, item in pairs)
    if isinstance(value, partial):
        return note(f"{name}.func", value.func) and note(f"{name}.args", (value.args, value.keywords))
    if isinstance(getattr(value, "__self__", None), nn.Module):
        return False  # a method of the layer itself, or of another
    found[path, name] = value if isinstance(value, (*_CONSTANTS, set, frozenset)) else _Object(value)
    if isinstance(found[path, name], _Object):
        for inner, item in getattr(value, "__dict__", {}).items():
            _note_own(found, path, f"{name}.{inner}", item, number, length)
    return True


def _note_own(found: Description, path: str, name: str, values: Any, number: int, length: int) -> None:
    """The entry of a list, or of a dict by number, that is one layer's own."""
    per_layer = isinstance(values, (list, tuple)) and len(values) == length
    if per_layer or (isinstance(values, dict) and list(values) == list(range(length))):
        own = values[number]
        found[path, f"{name}[its own]"] = own if isinstance(own, _CONSTANTS) else _Object(own)


class _Object(NamedTuple):
    """An object that is equal to itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _numbers(a: Description | None, b: Description | None, i: int, j: int) -> frozenset[tuple[str, str]] | None:
    """The (module, attribute) that hold the own numbers i and j of two layers which are otherwise
    alike, or None if they are not alike."""
    if a is None or b is None or a.keys() != b.keys():
        return None
    differing = [key for key in a if not _same(a[key], b[key])]
    if any(type(a[key]) is not int or type(b[key]) is not int or (a[key], b[key]) != (i, j) for key in differing):
        return None
    # in a list it could not be watched
    return None if any("[" in name for _, name in differing) else frozenset(differing)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))


# ---- the shortened model, watched -----------------------------------------------------------------


def _shortened(model: nn.Module, watches: Sequence[_Watch]) -> nn.Module:
    """A copy of the model, on the same tensors, whose runs are watched, and stood in for but at their ends."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for attributes in (vars(module), module._parameters, module._buffers):
            for tensor in pytree.tree_leaves(attributes):
                if isinstance(tensor, torch.Tensor):
                    memo[id(tensor)] = tensor
    for watch in watches:
        run = watch.run
        for position in range(run.length):
            if position not in run.real:
                layer = model.get_submodule(run.name(position))
                memo[id(layer)] = _stand_in(layer, watch, position)
    shortened = copied(model, memo)
    for watch in watches:
        run = watch.run
        for position in run.real:
            layer = shortened.get_submodule(run.name(position))
            for path, attribute in run.numbers[position % run.period]:
                module = layer.get_submodule(path)
                vars(module)[attribute] = _Number(vars(module)[attribute])
            layer.register_forward_pre_hook(_entering(watch, position), with_kwargs=True)
            layer.register_forward_hook(_leaving(watch, position))
    return shortened


def _stand_in(layer: nn.Module, watch: _Watch, position: int) -> nn.Module:
    """A layer of the same class and attributes, without tensors and submodules, that hands on its input."""
    made: nn.Module = object.__new__(type(layer))
    vars(made).update(vars(layer))
    vars(made).update(_parameters={}, _buffers={}, _modules={})
    # functions are shared by copies, methods are not
    vars(made)["forward"] = lambda *args, **kwargs: watch.hand_on(position, args, kwargs)
    return made


def _entering(watch: _Watch, position: int) -> Callable[..., None]:
    return lambda _, args, kwargs: watch.enter(position, args, kwargs)


def _leaving(watch: _Watch, position: int) -> Callable[..., None]:
    return lambda _, args, output: watch.leave(position, output)


def _refuse(self: int, *_: Any) -> NoReturn:
    raise _Unfit(f"a layer computes with its own number, {int.__repr__(self)}")


class _Number(int):
    """A layer's own number, which must not matter to what the layer computes."""

    __slots__ = ()
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _refuse
    __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = __invert__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = __bool__ = __int__ = __index__ = __float__ = __str__ = __format__ = _refuse

    def __copy__(self) -> _Number:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Number:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Arguments of a layer. `chained[a]` is the leaf of the previous layer's output that leaf a is, None
    for what all layers are given alike."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    chained: tuple[int | None, ...]


class _Watch:
    """Follows the calls of a run's layers while the model is traced, and refuses what is not alike."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.calls: list[_Call] = []
        self.outputs: list[tuple[list[Any], pytree.TreeSpec]] = []

    def enter(self, position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if position == 0:
            self.calls, self.outputs = [], []  # each pass over the model starts anew
        name, period = self.run.name(position), self.run.period
        if not position == len(self.calls) == len(self.outputs):
            raise _Unfit(f"{name} is not called after the layer before it")
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        before = self.outputs[-1][0] if self.outputs else []
        chained: tuple[int | None, ...] = (None,) * len(leaves)
        if position >= period:
            model = self.calls[position - period]
            if model.spec != spec:
                raise _Unfit(f"{name} is given other arguments than the layers before it")
            triples = zip(leaves, model.leaves, model.chained, strict=True)
            chained = tuple(self._source(position, value, other, link, before) for value, other, link in triples)
        self.calls.append(_Call(leaves=tuple(leaves), spec=spec, chained=chained))

    def _source(self, position: int, value: Any, model: Any, link: int | None, before: Sequence[Any]) -> int | None:
        """Where an argument comes from, given the same argument a period earlier and where that came from."""
        if isinstance(value, torch.Tensor):
            if position < 2 * self.run.period:
                # what all are given alike, even if layers pass it on
                link = None if value is model else next((j for j, leaf in enumerate(before) if leaf is value), -1)
            if value is (model if link is None else before[link] if 0 <= link < len(before) else None):
                return link
        else:
            own = self.run.start + position
            numbers = type(value) is type(model) is int and (value, model) == (own, own - self.run.period)
            if value is model or numbers or (isinstance(value, _CONSTANTS) and _same(value, model)):
                return None
        raise _Unfit(f"{self.run.name(position)} is given an argument of its own")

    def leave(self, position: int, output: Any) -> None:
        self.outputs.append(pytree.tree_flatten(output))

    def hand_on(self, position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a stand-in returns: what it was given, in the form of a layer's output."""
        self.enter(position, args, kwargs)
        call, period = self.calls[position], self.run.period
        model = period + position % period
        leaves, spec = self.outputs[model]
        other, _ = self.outputs[position % period]
        handed: list[Any] = []
        for j, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                if len(other) != len(leaves) or not _same(other[j], leaf):
                    raise _Unfit(f"{self.run.name(position)} returns something of its own")
                handed.append(leaf)
                continue
            sources = [a for a, given in enumerate(self.calls[model].leaves) if given is leaf]
            sources += [a for a, chained in enumerate(call.chained) if chained == j]
            found = call.leaves[sources[0]] if sources else None
            if found is None or (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
                raise _Unfit(f"output {j} of {self.run.name(position)} does not go into the next layer")
            handed.append(found)
        output = pytree.tree_unflatten(handed, spec)
        self.leave(position, output)
        return output

    @property
    def complete(self) -> bool:
        return len(self.calls) == len(self.outputs) == self.run.length


# ---- the repeat that a run is in the captured graph ------------------------------------------------


class _At(NamedTuple):
    """Where a module or tensor stands: the traced period (0, 1 and 2 in the run, and others before and
    after it), which of its layers, and the path inside."""

    period: int
    kind: int
    inner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crop:
    """A run, and the repeat that it is in the graph of the shortened model. `copies` are nodes by name,
    which stamping other runs does not change. Copy `middle`, the last that reaches no further than the
    middle period, is stamped `extra` times after itself; a copy's sequence numbers are `stride` above
    those of the copy before it."""

    run: _Run
    copies: tuple[tuple[str, ...], ...]
    repeat: Repeated
    middle: int
    stride: int

    @property
    def extra(self) -> int:
        return self.run.count - 3

    def at(self, path: str) -> _At | None:
        return _at(self.run, path)


def _at(run: _Run, path: str) -> _At | None:
    place = run.place(path)
    if place is None:
        return None
    period, kind = divmod(place[0], run.period)
    return _At(min(period, period - run.count + 3) if period > 1 else period, kind, place[1])


Item = TypeVar("Item", GraphInput, GraphOutput)


def _crop(graph: JointGraph, watch: _Watch, repeats: Sequence[Repeated]) -> _Crop:
    """The repeat of a run, if everything about it fits."""
    run = watch.run
    if not watch.complete:
        raise _Unfit(f"not all of {run} are called")
    targets = {i.name: i.target for i in graph.inputs if i.role in ("parameter", "buffer")}

    def mine(repeat: Repeated) -> bool:
        ats = [_at(run, targets.get(name, "?")) for copy in repeat.own for name in copy]
        return any(at is not None and at.period == 1 for at in ats)

    candidates = [repeat for repeat in repeats if mine(repeat)]
    if len(candidates) != 1:
        raise _Unfit(f"{run} are {len(candidates)} repeats in the graph, not one")
    (repeat,) = candidates
    _check_order(graph, run, repeat)
    _check_tensors(graph, run, repeat, targets)
    return _Crop(
        run=run,
        copies=tuple(tuple(graph.nodes[i].name for i in copy) for copy in repeat.copies),
        repeat=repeat,
        middle=_middle(graph, run, repeat),
        stride=_stride(graph, run, repeat),
    )


def _check_order(graph: JointGraph, run: _Run, repeat: Repeated) -> None:
    """Copies are intervals: forward ones side by side, and backward ones in reverse."""
    for backward in (False, True):
        parts = [[i for i in copy if graph.nodes[i].backward == backward] for copy in repeat.copies]
        joined = [i for part in (reversed(parts) if backward else parts) for i in part]
        if joined and joined != list(range(joined[0], joined[-1] + 1)):
            raise _Unfit(f"the operators of {run} are mixed with others")


def _middle(graph: JointGraph, run: _Run, repeat: Repeated) -> int:
    """The copy to stamp. From copy to copy it is one period further, the middle period is all inside, and
    so is what lies between it and the last one, the place of the stand-ins."""
    for position in zip(*repeat.copies, strict=True):
        _check_step(run, [graph.nodes[i].module for i in position], f"{graph.nodes[position[0]]}")
    forward = [[graph.nodes[i].module for i in copy if not graph.nodes[i].backward] for copy in repeat.copies]
    reached = [max((at.period for path in copy if (at := _at(run, path)) is not None), default=-1) for copy in forward]
    if 1 not in reached or 2 not in reached:
        raise _Unfit(f"the copies of {run} do not reach to the last layer")
    covered = {i for copy in repeat.copies for i in copy}
    for i, node in enumerate(graph.nodes):
        at = _at(run, node.module)
        if at is not None and at.period == 1 and i not in covered:
            raise _Unfit(f"{node.name} in {node.module} is no part of the repeat")
    return reached.index(1)


def _check_step(run: _Run, paths: Sequence[str], what: str) -> None:
    ats = [_at(run, path) for path in paths]
    for a, b in itertools.pairwise(ats):
        if (a is None) != (b is None) or (a is not None and b != a._replace(period=a.period + 1)):
            raise _Unfit(f"the copies of {run} are not one layer further each: {what} in {', '.join(paths)}")
    if ats[0] is None and any(path != paths[0] for path in paths):
        raise _Unfit(f"the copies of {run} belong to other modules too: {what} in {', '.join(paths)}")


def _check_tensors(graph: JointGraph, run: _Run, repeat: Repeated, targets: Mapping[str, str]) -> None:
    """A copy's own inputs are its layer's tensors, its results belong to those, and no other output of
    the graph is made by a copy but at the ends of the run."""
    for names in zip(*repeat.own, strict=True):
        if any(name not in targets for name in names) or _at(run, targets[names[0]]) is None:
            raise _Unfit(f"{names[0]} of {run} is no parameter or buffer of theirs")
        _check_step(run, [targets[name] for name in names], names[0])
    outputs: dict[str, list[GraphOutput]] = {}
    for output in graph.outputs:
        if output.name is not None:
            outputs.setdefault(output.name, []).append(output)
    for names in zip(*repeat.results, strict=True):
        found = [outputs[name] for name in names]
        if any(len(each) != 1 or each[0].role == "output" or _at(run, each[0].target) is None for each in found):
            raise _Unfit(f"{names[0]} of {run} is an output of the model")
        _check_step(run, [each[0].target for each in found], names[0])
    own = {name for copy in repeat.own for name in copy}
    results = {name for copy in repeat.results for name in copy}
    leaving = {b.values[0] if b.backward else b.values[-1] for b in repeat.borders}
    made = {name for copy in repeat.copies for i in copy for name in graph.nodes[i].outputs}
    for name, each in outputs.items():
        if name in made and name not in results | leaving:
            raise _Unfit(f"{name} of {run} is an output of the graph: {each[0].target}")
        inside = [at for output in each if (at := _at(run, output.target)) is not None]
        if any(at.period == 1 for at in inside) and name not in results:
            raise _Unfit(f"{name} of {run} is made outside of the repeat")
    for name, target in targets.items():
        at = _at(run, target)
        if at is not None and at.period == 1 and name not in own and graph.consumers.get(name):
            raise _Unfit(f"{target} is read outside of the repeat")


def _stride(graph: JointGraph, run: _Run, repeat: Repeated) -> int:
    strides: set[int] = set()
    for position in zip(*repeat.copies, strict=True):
        numbers = [graph.nodes[i].sequence for i in position]
        known = [number for number in numbers if number >= 0]
        if known:
            strides.update(b - a if len(known) == len(numbers) else -1 for a, b in itertools.pairwise(numbers))
    if len(strides) != 1 or min(strides) <= 0:
        raise _Unfit(f"the operators of {run} are not numbered alike")
    return strides.pop()


# ---- stamping --------------------------------------------------------------------------------------


def _stamp(graph: JointGraph, crop: _Crop) -> JointGraph:
    """The graph with the middle copy of a run repeated."""
    stamp = _Stamp(graph, crop)
    inputs = tuple(_repeated(graph.inputs, crop, stamp.input))
    nodes = tuple(stamp.nodes())
    outputs = tuple(_repeated(graph.outputs, crop, stamp.output))
    names = [*(i.name for i in inputs), *(name for node in nodes for name in node.outputs if name)]
    return JointGraph(inputs=inputs, nodes=nodes, outputs=outputs, metas={name: stamp.metas[name] for name in names})


def _repeated(items: Sequence[Item], crop: _Crop, stamped: Callable[[Item, int], Item]) -> Iterator[Item]:
    """The inputs or outputs of a graph, those of the middle period followed by their repetitions."""

    def key(item: Item) -> str | None:
        at = None if item.role in ("input", "tangent", "output") else crop.at(item.target)
        return item.role if at is not None and at.period == 1 else None

    done: set[str] = set()
    for role, group in itertools.groupby(items, key):
        together = list(group)
        yield from together
        if role is not None:
            if role in done:
                raise _Unfit(f"the tensors of {crop.run} do not stand together")
            done.add(role)
            yield from (stamped(item, step) for step in range(1, crop.extra + 1) for item in together)


class _Stamp:
    """Makes the nodes of the copies that are missing. Step s is the copy s after the middle one."""

    def __init__(self, graph: JointGraph, crop: _Crop) -> None:
        self.graph, self.crop = graph, crop
        self.metas: dict[str, TensorMeta] = dict(graph.metas)
        self.copies = [[graph.nodes[graph.producer[name]] for name in copy] for copy in crop.copies]
        self.fresh: dict[tuple[str, int], str] = {}
        repeat, middle = crop.repeat, crop.middle
        self.own = set(repeat.own[middle])
        self.targets = {i.name: i.target for i in graph.inputs}
        for step in range(1, crop.extra + 1):
            for i in graph.inputs:
                at = crop.at(i.target) if i.role in ("parameter", "buffer") else None
                if at is not None and (at.period == 1 or i.name in self.own):
                    self._take(i.name, step, re.sub(r"\W", "_", self.moved(i.target, step)))
        number = crop.run.start + crop.run.period
        for step in range(1, crop.extra + 1):
            for node in self.copies[middle]:
                for name in node.outputs:
                    if name:
                        self._take(name, step, f"{name}_layer_{number + step * crop.run.period}")

    def _take(self, name: str, step: int, wanted: str) -> None:
        taken, count = wanted, 0
        while taken in self.metas:
            count += 1
            taken = f"{wanted}_{count}"
        self.metas[taken] = self.graph.metas[name]
        self.fresh[name, step] = taken

    def moved(self, path: str, step: int) -> str:
        """The path of a module or tensor of the middle copy, in the copy a number of steps later."""
        place = self.crop.run.place(path)
        if place is None:
            return path
        name = self.crop.run.name(place[0] + step * self.crop.run.period)
        return f"{name}.{place[1]}" if place[1] else name

    def input(self, item: GraphInput, step: int) -> GraphInput:
        return replace(item, name=self.fresh[item.name, step], target=self.moved(item.target, step))

    def output(self, item: GraphOutput, step: int) -> GraphOutput:
        name = None if item.name is None else self.fresh[item.name, step]
        return replace(item, name=name, target=self.moved(item.target, step))

    def nodes(self) -> Iterator[Node]:
        crop, middle = self.crop, self.crop.middle
        last = crop.extra
        enters = {b.values[middle]: b.values[middle + 1] for b in crop.repeat.borders if not b.backward}
        leaves = {b.values[middle + 1]: b.values[middle] for b in crop.repeat.borders if b.backward}
        home = {node.name: k for k, copy in enumerate(self.copies) for node in copy}
        numbers = [node.sequence for node in self.copies[middle + 1] if node.sequence >= 0]
        steps = range(1, last + 1)
        # the copies before and after the new ones are connected to them
        after = {name: self.fresh[name, last] for name in enters.values()}
        before = {name: self.fresh[made, 1] for name, made in leaves.items()}
        renamed: Mapping[str, str]
        pending = {False: True, True: True}
        for node in self.graph.nodes:
            k = home.get(node.name)
            if pending[node.backward] and k == (middle if node.backward else middle + 1):
                pending[node.backward] = False
                for step in reversed(steps) if node.backward else steps:
                    for own in self.copies[middle]:
                        if own.backward == node.backward:
                            yield self._node(own, step, enters, leaves)
            late = k > middle if k is not None else node.sequence >= min(numbers)
            renamed = {} if k is None else after if k == middle + 1 else before if k == middle else {}
            yield replace(
                self._renamed(node, renamed),
                sequence=node.sequence + late * last * crop.stride if node.sequence >= 0 else node.sequence,
            )

    def _node(self, node: Node, step: int, enters: Mapping[str, str], leaves: Mapping[str, str]) -> Node:
        """A node of the middle copy, in the copy `step` after it."""
        names: dict[str, str] = {}
        for name in node.inputs:
            if name in enters:
                made = enters[name]
                names[name] = made if step == 1 else self.fresh[made, step - 1]
            elif name in leaves:
                names[name] = name if step == self.crop.extra else self.fresh[leaves[name], step + 1]
            else:
                names[name] = self.fresh.get((name, step), name)
        return replace(
            self._renamed(node, names),
            outputs=tuple(self.fresh[name, step] if name else "" for name in node.outputs),
            module=self.moved(node.module, step),
            sequence=node.sequence + step * self.crop.stride if node.sequence >= 0 else node.sequence,
        )

    @staticmethod
    def _renamed(node: Node, names: Mapping[str, str]) -> Node:
        if not any(name in names for name in node.inputs):
            return node

        def rename(name: str) -> Ref:
            return Ref(names.get(name, name))

        return replace(
            node,
            args=map_references(node.args, rename),
            kwargs=tuple((key, map_references(value, rename)) for key, value in node.kwargs),
        )


def _check_parameters(
    model: nn.Module, graph: JointGraph, runs: Sequence[_Run], allowed: Sequence[str]
) -> tuple[str, ...]:
    """Every parameter of the model is an input, in the model's order, and has the gradient that it asks for, unless
    it (or the middle layer's, of which it is a copy) was captured without one. Returns those."""
    expected = [name for name, _ in model.named_parameters()]
    found = [i.target for i in graph.inputs if i.role == "parameter"]
    if found != [name for name in expected if name in set(found)] or len(set(found)) != len(found):
        raise _Unfit("the parameters are not in the model's order")
    gradients = {o.target for o in graph.outputs if o.role == "gradient" and o.name is not None}
    if not torch.is_grad_enabled():
        return ()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and name not in gradients]
    for name in missing:
        if name not in allowed and _in_the_middle(name, runs) not in allowed:
            raise _Unfit(f"{name} has no gradient")
    return tuple(missing)


def _in_the_middle(name: str, runs: Sequence[_Run]) -> str:
    """The name of the parameter of the middle layer of which this one is a copy; the name itself outside of runs."""
    for run in runs:
        place = run.place(name)
        if place is not None and 0 <= place[0] < run.length:
            return f"{run.name(run.period + place[0] % run.period)}.{place[1]}"
    return name
