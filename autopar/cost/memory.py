"""Memory: the most bytes that a rank holds at once during a training step, and what they are.

Counted on the program as it runs: values are dropped right after their last use, views share the memory of their base,
collectives hold what they send until they are waited for. A step is forward, backward and the optimizer; gradients are
freed after it (`zero_grad()`), and outputs are held until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.files.kinds import Count
from autopar.ir import randomness, variates
from autopar.ir.dataflow import derived, leading, reads_some
from autopar.ir.graph import Node, TensorMeta
from autopar.ir.layout import local_meta
from autopar.ir.program import Program, source_line
from autopar.ops.experts import DOT, MM, MM_WEIGHT, SUM
from autopar.ops.kinds import MOVING
from autopar.ops.sdpa import ATTENTION, ATTENTION_BACKWARD
from autopar.ops.sdpa.workspace import workspace_bytes as attention_bytes

from .fusion import fusion
from .lifetimes import Line, lifetimes
from .liveness import Memory, PlacementCache
from .optimizers import Optimizer

KINDS = ("parameters", "gradients", "optimizer", "inputs", "outputs", "activations", "temporaries")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes of a rank at the moment when they are the most. Parameters at rest; gradients so far; what
    the optimizer keeps; buffers, and the rank's part of the inputs; outputs, which the caller holds; activations, which
    forward keeps for backward; temporaries: all else, such as results in use, gathers and buckets. `at` says when
    that is."""

    parameters: Count
    gradients: Count
    optimizer: Count
    inputs: Count
    outputs: Count
    activations: Count
    temporaries: Count
    at: str

    @property
    def bytes(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)


class Moment(NamedTuple):
    """What a rank holds while an instruction runs, or at the end of a step: the bytes of each of `KINDS`. Of its
    activations and temporaries, `weight_bytes` are those of parameters and their gradients, gathered or on their way,
    which a smaller batch leaves."""

    phase: str
    instruction: Node | None
    parts: tuple[int, ...]
    weight_bytes: int

    @property
    def bytes(self) -> int:
        return sum(self.parts)

    @property
    def lasting_bytes(self) -> int:
        """Of what is not temporary."""
        return sum(self.parts[:-1])

    def peak(self, at: str) -> Peak:
        return Peak(**dict(zip(KINDS, self.parts, strict=True)), at=at)


def peak(
    program: Program,
    optimizer: Optimizer,
    device_type: str,
    cache: PlacementCache | None = None,
    waiting: Mapping[str, int] | None = None,
) -> Peak:
    """The largest of the `moments` of a step."""
    largest = max(moments(program, optimizer, device_type, cache, waiting), key=lambda moment: moment.bytes)
    at, instruction = largest.phase, largest.instruction
    if instruction is not None:
        at += f", `{source_line(instruction, program.axes)}`"
        at += f" of module {instruction.module!r}" if instruction.module else ""
    return largest.peak(at)


def moments(
    program: Program,
    optimizer: Optimizer,
    device_type: str,
    cache: PlacementCache | None = None,
    waiting: Mapping[str, int] | None = None,
    *,
    weighs: bool = False,
) -> list[Moment]:
    """All moments of a step of a program as it is run (after `passes.lower.bucket`), in their order. `device_type` is
    that of the mesh: "cpu" or "cuda". `waiting`: phase -> bytes of gradients of earlier micro-batches that are there
    beside it. `weighs`: count `weight_bytes`, which are 0 without."""
    memory, weights = Memory(cache=cache or PlacementCache()), _weights(program) if weighs else set[str]()
    inside = fusion(program).inside if memory.cache.fuses else frozenset[str]()
    step = _TrainingStep(program, optimizer, device_type, memory, waiting or {}, weights, inside)
    step.run()
    return step.moments


def phases(program: Program, optimizer: Optimizer, device_type: str, cache: PlacementCache) -> list[Moment]:
    """The largest moments of forward, backward and what follows it: what a step cannot go below when the parts of its
    peak shrink."""
    largest: dict[str, Moment] = {}
    for moment in moments(program, optimizer, device_type, cache, weighs=True):
        name = moment.phase.partition(",")[0]
        if name not in largest or moment.bytes > largest[name].bytes:
            largest[name] = moment._replace(phase=name)
    return list(largest.values())


@dataclass(eq=False)
class _TrainingStep:
    program: Program
    optimizer: Optimizer
    device_type: str
    memory: Memory
    waiting: Mapping[str, int]
    """Phase -> bytes of gradients that wait to be reduced."""
    weights: Collection[str]
    """Values of parameters and of their gradients."""
    inside: Collection[str]
    """Values that stay within kernels."""
    kinds: dict[int, str] = field(default_factory=dict)
    """Storage -> what it counts as, if not as temporary."""
    users: Counter[int] = field(default_factory=Counter)
    """Storage -> how many values of the program, or others outside of it, hold it."""
    alive: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    weighed: set[int] = field(default_factory=set)
    """Storages of `weights` that count as activations or as temporary."""
    weight_bytes: int = 0
    moments: list[Moment] = field(default_factory=list)

    def run(self) -> None:
        program, memory = self.program, self.memory
        given, tangents = ([i.name for i in inputs] for inputs in (program.given, program.tangents))
        outputs = [o.name for o in program.outputs if o.role == "output" and o.name is not None]
        results = list(dict.fromkeys(o.name for o in program.results if o.name is not None))
        gradients = [o.name for o in program.gradients if o.name is not None]
        for i in program.inputs:
            memory.give(i.name, local_meta(i.meta, i.layout, program.mesh))
        unread, forward = lifetimes(given, program.forward, (*results, *program.saved))
        unread_late, backward = lifetimes([*program.saved, *tangents], program.backward, gradients)
        for line in (*forward, *backward):
            memory.run(program, line, by_parts=self.device_type == "cpu")
        copied = self._copied(gradients)
        self._sort(outputs, [g for g, is_copied in zip(gradients, copied, strict=True) if not is_copied])

        self.alive["optimizer"] = self._of_trained(self.optimizer.bytes)
        self._hold(given)  # by the module and the caller
        self._hold(given)
        self._drop(unread)
        self._run(forward, "forward")
        self._hold(outputs)  # by the caller
        self._drop(name for name in results if name not in program.saved)
        self._hold(tangents)  # by autograd
        self._hold(tangents)
        self._drop(unread_late)
        self._run(backward, "backward")
        left = Counter(gradients)
        for name, is_copied in zip(gradients, copied, strict=True):
            if is_copied:
                size = memory.placed[name]
                storage = memory.new(TensorMeta(size.shape, size.dtype).bytes)
                self.kinds[storage] = "gradients"
                self._use(storage)
                self._look(f"end of backward, copying the gradient {name}")
                left[name] -= 1
                self._drop([name] if not left[name] else [])
        self._drop(tangents)
        parameters = [memory.bytes[memory.storages[i.name][0]] for i in program.inputs if i.role == "parameter"]
        self.alive["optimizer"] += self._of_trained(self.optimizer.brought_bytes)
        self._look("optimizer step", self.optimizer.copies * max(parameters, default=0))

    def _of_trained(self, size: Callable[[TensorMeta], int]) -> int:
        return sum(
            size(local_meta(i.meta, i.layout, self.program.mesh))
            for i in self.program.inputs
            if i.role == "parameter" and i.target in self.program.trained
        )

    def _copied(self, gradients: Sequence[str]) -> list[bool]:
        """Which gradients the module copies at the end: those that are not contiguous, or that share memory with what
        lives on (`runtime.shared_memory`)."""
        spans: dict[int, list[tuple[int, int]]] = {}
        living = [i.name for i in self.program.inputs]
        living += [o.name for o in self.program.outputs if o.role == "output" and o.name is not None]
        for name in living:
            spans.setdefault(self.memory.storages[name][0], []).append(self.memory.placed[name].span)
        copied = []
        for name in gradients:
            placed, taken = self.memory.placed[name], spans.setdefault(self.memory.storages[name][0], [])
            begin, end = placed.span
            overlaps = any(begin < other_end and other < end for other, other_end in taken)
            copied.append(overlaps or not placed.is_contiguous)
            taken.append((begin, end))
        return copied

    def _sort(self, outputs: Iterable[str], gradients: Iterable[str]) -> None:
        program, storages = self.program, self.memory.storages
        kinds = {"parameter": "parameters", "tangent": "temporaries"}
        sorts = [
            *((i.name, kinds.get(i.role, "inputs")) for i in program.inputs),
            *((name, "gradients") for name in gradients),
            *((name, "outputs") for name in outputs),
            *((name, "activations") for name in program.saved),
        ]
        for name, kind in sorts:
            self.kinds.setdefault(storages[name][0], kind)
        weighed = {storage for name in self.weights for storage in storages.get(name, ())}
        self.weighed = {s for s in weighed if self.kinds.get(s, "temporaries") in ("temporaries", "activations")}

    def _use(self, storage: int) -> None:
        self.users[storage] += 1
        if self.users[storage] == 1:
            self._count(storage, self.memory.bytes[storage])

    def _count(self, storage: int, size: int) -> None:
        """Count a storage that comes, or, with a negative size, goes."""
        self.alive[self.kinds.get(storage, "temporaries")] += size
        if storage in self.weighed:
            self.weight_bytes += size

    def _hold(self, names: Iterable[str]) -> None:
        for name in names:
            for storage in self.memory.storages[name]:
                self._use(storage)

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            for storage in self.memory.storages[name]:
                self.users[storage] -= 1
                if not self.users[storage]:
                    self._count(storage, -self.memory.bytes[storage])

    def _run(self, lines: Sequence[Line], phase: str) -> None:
        for line in lines:
            instruction = line.instruction
            self._hold(name for name in instruction.outputs if name and name not in self.inside)
            inside = workspace_bytes(instruction, self.program.metas, self.device_type) + self.memory.unnamed.get(
                id(instruction), 0
            )
            self._look(phase, inside, instruction)
            self._drop(name for name in line.dead if name not in self.inside)

    def _look(self, phase: str, inside: int = 0, instruction: Node | None = None) -> None:
        """Remember this moment. `inside` is what lives within an operator."""
        parameters, gradients, *others, temporaries = self.alive.values()
        gradients += self.waiting.get(phase.partition(",")[0], 0) if self.waiting else 0
        parts = (parameters, gradients, *others, temporaries + inside)
        self.moments.append(Moment(phase, instruction, parts, self.weight_bytes))


def _weights(program: Program) -> set[str]:
    """Values that are of parameters alone, and gradients of parameters from the operator that computes them on."""
    nodes = program.nodes
    weights = derived(nodes, (i.name for i in program.inputs if i.role == "parameter"), reads_some)
    gradients = [o.name for o in program.gradients if o.name is not None]
    moving = leading(nodes, gradients, lambda node: node.op.startswith(MOVING) and node.name not in weights)
    computed = {*gradients, *(name for position in moving for name in nodes[position].inputs)}
    return weights.union(*(node.outputs for node in nodes if not computed.isdisjoint(node.outputs))) - {""}


Metas = tuple[TensorMeta, ...]


def _bits(outputs: Metas, device_type: str) -> int:
    return randomness.workspace_bytes(outputs[0].numel, device_type)


WORKSPACE: Mapping[str, Callable[[Metas, Metas, str], int]] = {
    MM: lambda inputs, outputs, _: inputs[0].bytes + outputs[0].bytes,  # rows by expert, and their products
    MM_WEIGHT: lambda inputs, outputs, _: inputs[0].bytes + inputs[1].bytes,  # rows by expert
    SUM: lambda inputs, outputs, _: inputs[0].bytes,  # rows times their weights
    DOT: lambda inputs, outputs, _: inputs[0].bytes,
    # the bits of the mask come before the result
    "autopar.dropout.default": lambda _, outputs, device: max(0, _bits(outputs, device) - outputs[0].bytes),
    "autopar.uniform.default": lambda _, outputs, device: _bits(outputs, device),
    "autopar.integers.default": lambda _, outputs, device: _bits(outputs, device) + outputs[0].numel * 8,
    "autopar.normal.default": lambda _, outputs, device: _bits(outputs, device) + outputs[0].numel * 8,
    "autopar.poisson.default": lambda _, outputs, device: variates.workspace_bytes(outputs[0].numel),
    "autopar.standard_gamma.default": lambda _, outputs, device: variates.workspace_bytes(outputs[0].numel),
}
"""Op -> bytes, from the local metas of its tensor operands and results, and the type of the device."""


def workspace_bytes(instruction: Node, metas: Mapping[str, TensorMeta], device_type: str) -> int:
    """Bytes that an instruction has alive at once beside its operands and results; 0 for ops without a row."""
    workspace, attends = WORKSPACE.get(instruction.op), instruction.op in (ATTENTION, ATTENTION_BACKWARD)
    if workspace is None and not attends:
        return 0
    inputs = tuple(metas[name] for name in instruction.inputs)
    if workspace is None:
        named, backward = dict(instruction.kwargs), instruction.op == ATTENTION_BACKWARD
        causal, offset = bool(named.get("is_causal")), named.get("offset", 0)
        return attention_bytes(inputs, device_type, backward=backward, causal=causal, offset=offset)
    return workspace(inputs, tuple(metas[name] for name in instruction.outputs if name), device_type)
