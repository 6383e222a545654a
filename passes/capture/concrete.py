"""Concrete values of a step on fakes: those that depend on inputs and constants alone.

A fake has no values. Once Python asks for a value, a number or how many elements a mask picks, the recorded nodes that
it depends on run on real tensors. What depends on an input, which the next call may change, is pinned: the program is
right for calls in which everything that was read comes out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from autopar.compat.calls import resolved
from autopar.compat.dispatch import annotated, factors_as_it_lies, written_by
from autopar.compat.recording import Whereabouts
from autopar.compat.tensors import RECORDED, is_fake, is_plain, is_real, memory_of, unmodified, unseen
from autopar.compat.watching import (
    COLLECTIVES,
    DEVICE,
    property_of,
    raised_by,
    raised_by_product,
    sizes_by_values,
)
from autopar.ir.graph import Node, Ref, called, ran

from .leaves import same_value
from .recomputation import without_recomputed
from .recorder import Kind, Origin, Recorder, aten, kind_of
from .refusals import TRAINING_CONSTANTS, WRITING_ARRAYS, WRITING_CONSTANTS, WRITING_INPUTS, refuse
from .source import line_running, line_shown, of_eager


class Answer(NamedTuple):
    """What Python was given that asked for values, leaf by leaf, and the line that asked."""

    leaves: tuple[Any, ...]
    line: str


class Shared(NamedTuple):
    """Memory that Python can write without an operator: an array's, on which a tensor is, or would be in eager. `was`
    is what it held when there were so many nodes."""

    memory: int
    nodes: int
    now: torch.Tensor
    was: torch.Tensor
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """What Python read of inputs while a model was captured, and how it is computed of them."""

    steps: tuple[Node, ...] = ()
    answers: Mapping[str, Answer] = field(default_factory=lambda: MappingProxyType({}))
    """Of the steps at which Python asked, by their names."""
    inputs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Path of an input -> its name in the steps."""
    constants: Mapping[str, torch.Tensor] = field(default_factory=lambda: MappingProxyType({}))
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Path of an input -> its strides, and its offset where that counts; empty where Python asked for none."""
    asked: tuple[str, ...] = ()
    """Lines that asked for strides."""

    def __bool__(self) -> bool:
        return bool(self.inputs or self.strides)

    def __str__(self) -> str:
        lines = list(dict.fromkeys((*(answer.line for answer in self.answers.values()), *self.asked)))
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        what = [f"{what} of {', '.join(of)}" for what, of in (("values", self.inputs), ("strides", self.strides)) if of]
        return f"{' and '.join(what)}{lines[0] if lines else ''}{more}"

    def differs(self, inputs: Mapping[str, torch.Tensor], given: Mapping[str, Any] | None = None) -> str | None:
        """The first line that reads something else of these inputs, by path, which lie in memory as those `given`."""
        given = inputs if given is None else given
        for path, strides in self.strides.items():
            if strides_of(given[path], offset=len(strides) > given[path].dim()) != strides:
                return self.asked[0]
        with unmodified():
            values = {**self.constants, **{name: inputs[path].detach().cpu() for path, name in self.inputs.items()}}
            for step in self.steps:
                leaves = ran(step, values)
                answer = self.answers.get(step.name)
                if answer and not (len(leaves) == len(answer.leaves) and all(map(same_value, leaves, answer.leaves))):
                    return answer.line
        return None


def strides_of(tensor: torch.Tensor, *, offset: bool) -> tuple[int, ...]:
    """How a tensor lies in memory."""
    return (*tensor.stride(), int(tensor.storage_offset())) if offset else tensor.stride()


class StepRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records a step while it runs, and answers Python where it asks for concrete values.

    `sources` are the tensors that inputs stand for, by path: they are entered under their paths. `name_of` says where
    Python holds a tensor. Refuses to differentiate what is no parameter, and, before it happens, to write what is not
    the step's.
    """

    def __init__(
        self, where: Whereabouts, sources: Mapping[str, torch.Tensor], name_of: Callable[[torch.Tensor], str]
    ) -> None:
        super().__init__()
        self.where, self.sources, self.name_of = where, sources, name_of
        self.valued: set[int] = set()
        """The memory of real tensors whose numbers became Python's."""
        self.unread: list[tuple[str, tuple[str, ...]]] = []
        """Lines that ask for a value that is not concrete, each with the inputs that were given without values, if that
        is why."""
        self.strided: dict[str, str] = {}
        """Lines that ask how a tensor lies in memory, and what they ask last."""
        self.paths: dict[str, str] = {}  # name of an input -> path
        self._inputs: dict[int, str] = {}  # memory of an input -> path
        self._views: dict[int, torch.Tensor] = {}  # memory of a view of a constant
        self._origins: dict[int, Origin] = {}  # by autograd's number
        self._sequences = 0
        self._concrete: set[str] = set()
        self._numbers: dict[str, torch.Tensor] = {}  # of what nobody writes
        self._asked: list[tuple[int, Node, Answer]] = []  # and how many nodes there were
        self._arrays: list[Shared] = []

    def enter_input(self, path: str, name: str, fake: torch.Tensor) -> str:
        """And knows its source."""
        name = super().enter_input(path, name, fake)
        self.paths[name] = path
        self._inputs[self.values[name].memory] = path
        self._concrete.add(name)
        return name

    # -- recording

    without_recomputed = staticmethod(without_recomputed)

    @property
    def is_again(self) -> bool:
        return self.where.again is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE or kind_of(func).asks:  # two thirds of all calls
            return property_of(func, args, kwargs or {})
        with unseen():  # what the model called was seen; what is asked here is nobody's call
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        kind = kind_of(func)
        if refusal := _refusal(func, args):
            raise ValueError(refusal)
        if kind.reads or sizes_by_values(func, args):
            result = self.read(func, args, kwargs)
            if result is not NotImplemented:
                return result if kind.reads else pytree.tree_map_only(torch.Tensor, self._constant, result)
        if kind.replaces:
            if not isinstance(args[1], torch.Tensor):
                self.note(func, args, kwargs, args[0])  # which refuses storages
            self.replace(*args[:2])
            return args[0]
        if kind.indexes:
            args = self._placed(args)
        if factors_as_it_lies(func, args):
            # kernels of a program are given contiguous operands, and would factor the transpose
            args = (self._dispatch(aten.transpose.int, (*args, -2, -1), {}),)
        before = func
        func, args = annotated(func, args)
        kind = kind if func is before else kind_of(func)
        if kind.writes:
            for x in written_by(func, args, kwargs):
                self._refuse_write(x, self._inputs.get(memory_of(x)))
        if kind.is_product and (raised := raised_by_product(func, args, kwargs)) is not None:
            raise of_eager(raised)
        try:
            result = func(*args, **kwargs)
        except Exception:
            if (raised := raised_by(func, args, kwargs)) is None:
                raise
            raise of_eager(raised) from None
        node = self.note(func, args, kwargs, result)
        if node is None:
            return result
        names = [name for name in node.outputs if name]
        self._note_views(func, kind, node)
        if kind.is_determined and self.of_data.keys().isdisjoint(names) and all(map(self._is_known, node.inputs)):
            self._concrete.update(names)
        elif kind.writes:
            written = self.writes[len(self.nodes) - 1]
            self._concrete = {name for name in self._concrete if self.values[name].memory not in written}
        return result

    def _note_views(self, func: Any, kind: Kind, node: Node) -> None:
        """Takes note of what lies in a constant's memory."""
        if not kind.is_operator or not func.is_view:
            return
        for x in (self.constants[name] for name in node.inputs if name in self.constants):
            if not kind.lifts or not x.untyped_storage().resizable():  # an array's memory, which is not fresh
                self._views.update((self.values[name].memory, x) for name in node.outputs)

    def _refuse_write(self, tensor: torch.Tensor, path: str | None) -> None:
        constant = tensor if is_real(tensor) else self._views.get(memory_of(tensor))
        if constant is not None:
            refuse(WRITING_CONSTANTS, name=self.name_of(constant))
        if path is not None:
            refuse(WRITING_INPUTS, name=path)

    def _unknown(self, tensor: torch.Tensor, lifted: bool) -> str:
        if is_real(tensor) and tensor.requires_grad and torch.is_grad_enabled():
            refuse(TRAINING_CONSTANTS, name=self.name_of(tensor))
        name = super()._unknown(tensor, lifted)
        if is_real(tensor) and not tensor.untyped_storage().resizable():
            self.share(tensor, tensor)
        return name

    def _placed(self, args: Sequence[Any]) -> Sequence[Any]:
        """An index, or what is written there, with the places that concrete masks pick in the place of the masks. Where
        one number is written nothing depends on how many there are."""
        source, indices, *values = args
        if values and values[0].numel() == 1:
            return args
        placed: list[Any] = []
        for index in indices:
            places: Any = NotImplemented
            if index is not None and index.dtype in _MASKS:
                places = self.read(torch.ops.aten.nonzero.default, (index,), {})
            if places is NotImplemented:
                placed.append(index)
                continue
            with unmodified():
                columns = [column.clone() for column in places.unbind(1)]
            placed += map(self._constant, columns)
        return source, placed, *values

    def _constant(self, value: torch.Tensor) -> Any:
        """A real tensor as a constant of the step."""
        return self._dispatch(torch.ops.aten.lift_fresh_copy.default, (value,), {})

    def replace(self, tensor: torch.Tensor, value: Any) -> None:
        """`tensor.data = value`: from now on the tensor has the memory of the other one. Those that lie in the memory
        which it had stay as they are."""
        if not isinstance(value, torch.Tensor) or value.shape != tensor.shape or value.dtype != tensor.dtype:
            shown = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"forward sets a tensor of {tensor.dtype} {list(tensor.shape)} to {shown} (.data or set_()): give it a "
                f"tensor of its shape and dtype"
            )
        self._refuse_write(tensor, self.paths.get(self.name(tensor) or ""))
        if not is_fake(value):
            raise ValueError(
                "forward sets a tensor to one that Python holds (.data or set_()), and they would change together "
                "from then on: write its values with copy_()"
            )
        like, is_given = self.known(value), self.is_given(tensor)
        with unseen():
            tensor.data = value
        vars(tensor).get(RECORDED, {}).pop(self, None)
        name = self.enter("data", tensor)
        self.nodes.append(Node(op=str(aten.detach.default), args=(Ref(like),), outputs=(name,)))
        if like in self._concrete:
            self._concrete.add(name)
        if is_given:
            self.given |= {name}

    def _is_known(self, name: str) -> bool:
        """Whether a recorded value is concrete."""
        return name in self._concrete or (name in self.constants and self.is_concrete(self.constants[name]))

    def is_concrete(self, x: Any) -> bool:
        if not isinstance(x, torch.Tensor):
            return False
        if is_fake(x):
            return self.known(x) in self._concrete
        return is_real(x) and is_plain(x) and not x.requires_grad

    def origin(self) -> Origin:
        """Where an operator comes from: autograd's counter is at the operator's own number when it runs, and stays
        there for what follows it and is not differentiable. An operator of a derivative comes from where its operator
        does."""
        where = self.where
        if where.engines and where.again is None:
            first = Origin() if where.node is None else self._origins.get(where.node, Origin())
            if torch.is_grad_enabled():
                self._origins.setdefault(where.number(), first)
            return first._replace(backward=self.backward, again=None)
        number = where.number()
        at = where.modules[-1], self._sequences, where.regions
        here = Origin(*at, self.backward, line_running(), where.again)
        first = self._origins.setdefault(number, here)
        self._sequences += first is here
        return here._replace(sequence=first.sequence)

    # -- reading

    def strides(self, name: str, tensor: torch.Tensor, answer: Any) -> Any:
        """The answer to a line that asks how a tensor lies in memory, which depends on how inputs do."""
        line = line_shown()
        if self.strided.get(line) != "storage_offset":
            self.strided[line] = name
        path = self._inputs.get(memory_of(tensor), "")
        return answer + self.sources[path].storage_offset() if path and name == "storage_offset" else answer

    def share(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Takes note that Python has an array on these values of a tensor."""
        with unmodified():
            was = values.detach().clone()
        self._arrays.append(Shared(self.place(self.known(tensor)), len(self.nodes), values, was, line_shown()))

    def place(self, name: str) -> int:
        """The memory that a value has in eager."""
        memory = self.values[name].memory
        return memory_of(self._views[memory]) if memory in self._views else memory

    def check_arrays(self, read: Sequence[str] | None = None) -> None:
        """Refuses arrays that were written where a tensor on the same memory is read: one of those that are read now,
        or, at the end, one that a later node or the next call reads."""
        for array in self._arrays:
            with unmodified():
                if same_value(array.now, array.was):
                    continue
            later = [*self.paths, *self.constants, *(x for node in self.nodes[array.nodes :] for x in node.inputs)]
            if array.memory in map(self.place, later if read is None else read):
                refuse(WRITING_ARRAYS, line=array.line)

    def read(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function that asks for values, if its tensors are concrete, or NotImplemented."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not all(map(self.is_concrete, tensors)):
            if kind_of(func).reads or not kind_of(func).is_operator:
                self.unread.append((line_shown(), ()))
            return NotImplemented
        node_args, node_kwargs, _ = self.arguments(kind_of(func), args, kwargs)
        self.check_arrays([self.known(x) for x in tensors])
        asking = Node(op=str(func), args=node_args, kwargs=node_kwargs, outputs=(f"answer {len(self._asked)}",))
        steps = self._steps([asking])
        names = {name for step in (*steps, asking) for name in step.inputs}
        inputs = [self.paths[name] for name in sorted(names) if name in self.paths]
        if bare := tuple(path for path in inputs if not is_real(self.sources[path])):
            self.unread.append((line_shown(), bare))
            return NotImplemented
        self.valued.update(memory_of(self.constants[name]) for name in sorted(names & self.constants.keys()))
        with unmodified():
            result = called(asking, self._evaluated(steps, names).__getitem__)
            leaves = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(result))
        if inputs:
            self._asked.append((len(self.nodes), asking, Answer(leaves, line_shown())))
        return result

    def _steps(self, asking: Sequence[Node]) -> list[Node]:
        """The nodes on which these depend, in order."""
        names = {name for node in asking for name in node.inputs}
        memory = {self.values[name].memory for name in names}
        needed: list[Node] = []
        for i in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[i]
            if not names.isdisjoint(node.outputs) or not memory.isdisjoint(self.writes.get(i, ())):
                needed.append(node)
                names.update(node.inputs)
                memory.update(self.values[name].memory for name in node.inputs)
        return needed[::-1]

    def _evaluated(self, steps: Sequence[Node], names: set[str]) -> Mapping[str, torch.Tensor]:
        """The values of these nodes."""
        number = {id(node): i for i, node in enumerate(self.nodes)} if self.writes else {}
        writes = any(number[id(node)] in self.writes for node in steps) if number else False
        values: dict[str, torch.Tensor] = {} if writes else self._numbers
        for name in names - values.keys():
            if name in self.paths:
                values[name] = self.sources[self.paths[name]].detach().cpu()
            elif name in self.constants:
                values[name] = resolved(self.constants[name])
        for node in steps:
            if writes or any(name and name not in values for name in node.outputs):
                ran(node, values)
        return values

    def pinned(self) -> Pinned:
        """What was read of inputs."""
        offset = "storage_offset" in self.strided.values()
        strides = {path: strides_of(x, offset=offset) for path, x in self.sources.items() if self.strided}
        steps: list[Node] = []
        needed = {id(node) for node in self._steps([node for _, node, _ in self._asked])}
        begin = 0
        for end, asking, _ in self._asked:
            steps += [node for node in self.nodes[begin:end] if id(node) in needed] + [asking]
            begin = end
        names = {name for step in steps for name in step.inputs}
        return Pinned(
            steps=tuple(steps),
            answers=MappingProxyType({asking.name: answer for _, asking, answer in self._asked}),
            inputs=MappingProxyType({path: name for name, path in self.paths.items() if name in names}),
            constants=MappingProxyType({name: x for name, x in self.constants.items() if name in names}),
            strides=MappingProxyType(strides),
            asked=tuple(self.strided),
        )


_MASKS = (torch.bool, torch.uint8)


def _refusal(func: Any, args: Sequence[Any]) -> str:
    """Why no graph can hold a call of an operator; empty where it can."""
    kind = kind_of(func)
    if not kind.is_operator:
        return (
            f"the model has control flow that depends on data, torch's {kind.name}, which one graph cannot hold: "
            f"write the loop out in Python, or as operators on all of its steps"
        )
    if func.namespace in COLLECTIVES:
        return (
            f"forward calls a collective, {kind.name}, and a parallel module issues all collectives itself: its "
            f"forward is that of one device on the global batch. Leave it out, and what divides by the number of ranks"
        )
    if any(type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is not torch.strided for x in args):
        return f"{kind.name} of a sparse tensor, and shards are dense: give the model its to_dense(), or its indices"
    return ""
