"""What a compiler writes as one kernel, by rule: pointwise operators and reductions that loop over the same elements,
and depend on each other or read the same values. A kernel reads and writes memory once: what stays inside costs
nothing (Inductor's scheduler, `torch/_inductor/scheduler.py`, fuses nodes of equal ranges so)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from autopar.cluster.machine import Device
from autopar.ir.graph import CAST, CONTIGUOUS, RESHAPE, JointGraph, Node, TensorMeta, producers, schema
from autopar.ir.own import FUNCTIONS
from autopar.ir.pointwise import is_pointwise
from autopar.ir.program import Program
from autopar.ops.kinds import BY_INDEX
from autopar.ops.rule import call_of
from autopar.ops.rules import rule_of


@dataclass(frozen=True, slots=True)
class Fused:
    """The part of a kernel that an operator is. Of its operands and results, `reads` and `writes` go through memory
    here; the others stay on the chip, or went through before. The first of a kernel `launches` it. The whole kernel
    moves `bytes`."""

    reads: frozenset[str]
    writes: frozenset[str]
    launches: bool
    bytes: int

    def moved_bytes(self, metas: Mapping[str, TensorMeta]) -> int:
        """What the part reads and writes in memory."""
        return sum(metas[name].bytes for name in (*self.reads, *self.writes))

    def seconds(self, device: Device, metas: Mapping[str, TensorMeta]) -> float:
        """The kernel's seconds by the bytes that the part moves, and its launch."""
        moved = self.moved_bytes(metas)
        moving = device.moving_seconds(self.bytes) * moved / self.bytes if moved else 0.0
        return moving + device.seconds_per_op * self.launches


@cache
def is_view(op: str) -> bool:
    """Whether an operator of torch moves nothing, or nothing that a kernel around it would not move anyway."""
    if not op.startswith("aten."):
        return False
    returns = schema(op).returns
    return op in (RESHAPE, CONTIGUOUS) or any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@cache
def is_elementwise(op: str) -> bool:
    """Whether a kernel that reads the result can compute it instead, wherever it stands."""
    return is_view(op) or (op.startswith("aten.") and (op == CAST or is_pointwise(op)))


def stays(node: Node, uneven: Collection[str]) -> bool:
    """Whether an instruction runs by itself, where the schedule put it: a collective or a wait for one, an operator of
    autopar's own, or one with rows that only the run counts. Between two such, operators run as one function."""
    if node.op.startswith("collective.") or node.op in FUNCTIONS:
        return True
    return any(name in uneven for name in (*node.inputs, *node.outputs))


def fuses(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether an operator becomes part of a kernel with others: it has no arithmetic to speak of, and is torch's."""
    if not node.op.startswith("aten.") or node.op in BY_INDEX:
        return False
    if is_elementwise(node.op):
        return True
    rule = rule_of(call_of(node, metas))
    return rule is not None and not rule.flops


@dataclass(eq=False)
class _Kernel:
    """Members, in their order, and what they loop over; after how many products, and within which function."""

    size: int
    place: tuple[int, int]
    nodes: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fusion:
    """What is fused of a program: `parts` of kernels, by the first result of an operator, and the values that lie
    `inside` of kernels, and never in memory."""

    parts: Mapping[str, Fused] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()


def fusion(of: Program | JointGraph) -> Fusion:
    """What a compiler fuses of a program, or of a graph on one device."""
    first, second = of.halves
    if isinstance(of, Program):
        saved, uneven = of.saved, of.uneven
    else:
        late = {name for node in second for name in node.inputs}
        saved, uneven = tuple(late.intersection(producers(first))), frozenset()
    kept = {*saved, *(o.name for o in of.outputs if o.name is not None)}
    parts: dict[str, Fused] = {}
    inside: set[str] = set()
    for half in (first, second):
        _of_half(half, of.metas, kept, uneven, parts, inside)
    return Fusion(parts, frozenset(inside))


def saved_part(graph: JointGraph, device: Device) -> float:
    """The part of the seconds of operators without arithmetic that fusing them saves, in a graph on one device."""
    found = fusion(graph)
    alone = together = 0.0
    for node in graph.nodes:
        if (part := found.parts.get(node.name)) is not None:
            names = {*node.inputs, *filter(None, node.outputs)}
            size = sum(graph.metas[name].bytes for name in names)
            alone += device.seconds_per_op + device.moving_seconds(size)
            together += part.seconds(device, graph.metas)
    return max(0.0, 1.0 - together / alone) if alone else 0.0


def _of_half(
    half: Sequence[Node],
    metas: Mapping[str, TensorMeta],
    kept: Collection[str],
    uneven: Collection[str],
    parts: dict[str, Fused],
    inside: set[str],
) -> None:
    """Adds the parts of kernels, and what lies inside of them."""
    base: dict[str, str] = {}  # of a view
    depths: dict[str, int] = {}  # how many kernels that do not fuse lie before a value
    kernels: dict[str, _Kernel] = {}  # by base
    ordered: list[_Kernel] = []
    readers: dict[str, list[_Kernel | None]] = {}  # by base; None: something else than a kernel
    function = 0
    for node in half:
        by_itself = stays(node, uneven)
        function += by_itself
        sources = list(dict.fromkeys(base.get(name, name) for name in node.inputs))
        depth = max((depths.get(name, 0) for name in sources), default=0)
        names = [name for name in node.outputs if name]
        if not names:
            continue
        if is_view(node.op) and sources and not by_itself:
            base[names[0]] = sources[0]
            base.update(dict.fromkeys(names[1:], sources[0]))
            continue
        if by_itself or not fuses(node, metas):
            for name in sources:
                readers.setdefault(name, []).append(None)
            depths.update(dict.fromkeys(names, depth + 1))
            continue
        size = max(metas[name].numel for name in (*node.inputs, *names))
        kernel = _joined(sources, kernels, readers, size, (depth, function))
        if kernel is None:
            kernel = _Kernel(size, (depth, function))
            ordered.append(kernel)
        kernel.nodes.append(node)
        for name in sources:
            readers.setdefault(name, []).append(kernel)
        kernels.update(dict.fromkeys(names, kernel))
        depths.update(dict.fromkeys(names, depth))
    outside = {base.get(name, name) for name in kept}
    for kernel in ordered:
        found = _parts(kernel, base, readers, outside, metas)
        parts.update(found)
        inside.update(
            name for node in kernel.nodes for name in node.outputs if name and name not in found[node.name].writes
        )
    inside.update(view for view, of in base.items() if of in inside)


def _joined(
    sources: Sequence[str],
    kernels: Mapping[str, _Kernel],
    readers: Mapping[str, Sequence[_Kernel | None]],
    size: int,
    place: tuple[int, int],
) -> _Kernel | None:
    """The kernel that an operator becomes part of: that of what it reads, or of another reader of it."""
    producers = [kernels[name] for name in sources if name in kernels]
    others = [kernel for name in sources for kernel in readers.get(name, ()) if kernel is not None]
    return next((k for k in (*reversed(producers), *others) if k.size == size and k.place == place), None)


def _parts(
    kernel: _Kernel,
    base: Mapping[str, str],
    readers: Mapping[str, Sequence[_Kernel | None]],
    outside: Collection[str],
    metas: Mapping[str, TensorMeta],
) -> dict[str, Fused]:
    inside = {name for node in kernel.nodes for name in node.outputs}
    seen: set[str] = set()
    moved = 0
    found: list[tuple[Node, set[str], set[str]]] = []
    for node in kernel.nodes:
        reads = set[str]()
        for name in dict.fromkeys(node.inputs):
            source = base.get(name, name)
            if source not in inside and source not in seen:
                seen.add(source)
                reads.add(name)
        writes = {
            name
            for name in node.outputs
            if name and (name in outside or any(reader is not kernel for reader in readers.get(name, ())))
        }
        moved += sum(metas[name].bytes for name in (*reads, *writes))
        found.append((node, reads, writes))
    return {
        node.name: Fused(frozenset(reads), frozenset(writes), number == 0, moved)
        for number, (node, reads, writes) in enumerate(found)
    }
