"""Codegen: the program of one rank under an assignment.

Every operator runs on local shapes; where a reader wants another layout than a tensor has, the route
that the cost model priced is written out as local reshapes and collectives. Copies of a repeated
segment are made from the sites of the first one, by renaming.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.cost.redistribute import Step
from autopar.ir.graph import PERMUTE, RESHAPE, Ref, TensorMeta, map_references
from autopar.ir.layout import REPLICATE, Layout, Routed, Shape, Split, is_routed, local_shape, local_stride
from autopar.ir.program import Instruction, Program, ProgramInput, ProgramOutput, RankIndex
from autopar.ops.emit import OPERAND, Emission, local_program
from autopar.passes.segments.segment import Repeated
from autopar.passes.space.choices import REGATHER, SiteChoice
from autopar.passes.space.collapse import Steps, from_root
from autopar.passes.space.operator_layouts import splits_of
from autopar.passes.space.sites import Option, Site, border_name, output_name, output_numbers
from autopar.passes.space.space import Space, operand_layouts

from .space.problem import Assignment, is_bucketed
from .space.recompute import reacquired, remade


@dataclass(frozen=True, slots=True)
class Placed:
    """A site of one copy: its option, and how names of the first copy read in this one."""

    site: Site
    option: Option
    rename: Mapping[str, str]
    order: int
    again: bool = False
    """Whether it is made again in backward."""

    def name(self, value: str) -> str:
        return self.rename.get(value, value)


def codegen(space: Space, assignment: Assignment) -> Program:
    """The program that runs `assignment`. It is the same on every rank.

    Raises ValueError where the assignment asks for a layout that cannot be had.
    """
    return _Writer(space, assignment).write()


def layouts(space: Space, assignment: Assignment) -> dict[str, Layout]:
    """How each value of the graph lies where it is made, by the name that it has there and in the program. (Views are
    made of these values, and have no layout of their own.)"""
    return {
        item.name(root): layout
        for item in _Writer(space, assignment)._place()
        for root, layout in zip(item.site.makes, item.option.makes, strict=True)
        if root
    }


@dataclass(eq=False)
class _Writer:
    space: Space
    assignment: Assignment
    instructions: tuple[list[Instruction], list[Instruction]] = field(default_factory=lambda: ([], []))
    metas: dict[str, TensorMeta] = field(default_factory=dict)
    uneven: set[str] = field(default_factory=set)
    """Values of as many rows as happen to come."""
    there: tuple[dict[tuple[str, Layout], str], dict[tuple[str, Layout], str]] = field(default_factory=lambda: ({}, {}))
    """Per phase: (root, layout) -> local value."""
    views: tuple[dict[tuple[str, Steps], str], dict[tuple[str, Steps], str]] = field(default_factory=lambda: ({}, {}))
    produced: dict[str, tuple[Layout, str]] = field(default_factory=dict)
    wanted: dict[str, tuple[set[Layout], set[Layout]]] = field(default_factory=dict)
    global_meta: dict[str, TensorMeta] = field(default_factory=dict)
    sources: dict[tuple[str, bool], dict[Layout, tuple[Layout, tuple[Step, ...]]]] = field(default_factory=dict)
    bucketed: dict[str, bool] = field(default_factory=dict)
    """Root -> whether it travels in a bucket, as the problem priced it."""
    constants: tuple[dict[tuple[str, str, str], str], dict[tuple[str, str, str], str]] = field(
        default_factory=lambda: ({}, {})
    )
    """Per phase: what expansions computed of no operand -> its value."""
    fixed: set[str] = field(default_factory=set)
    """Those values."""
    borders: dict[str, Placed] = field(default_factory=dict)
    """Border name -> the site that reads the value behind it."""
    reacquired: set[str] = field(default_factory=set)
    again: dict[str, Placed] = field(default_factory=dict)
    """Root -> the operator that makes it again in backward."""
    context: tuple[str, str] = ("", "")
    """Module and node that instructions are written for."""
    _counter: dict[str, int] = field(default_factory=dict)

    def write(self) -> Program:
        placed = list(self._place())
        self.reacquired = self._reacquired()
        for item in placed:
            for root, layout in zip(item.site.makes, item.option.makes, strict=True):
                if root:
                    name = item.name(root)
                    policy = item.option.choice[-1] if item.site.kind == "parameter" else ""
                    if item.again:
                        self.again[name] = item
                    if item.again or name in self.reacquired:
                        policy = REGATHER
                    self.produced[name] = (layout, policy)
                    self.global_meta[name] = self.space.metas[root]
            for read, layout in zip(item.site.reads, item.option.reads, strict=True):
                early, late = self.wanted.setdefault(item.name(read.alias.root), (set(), set()))
                (late if read.backward else early).add(layout)
                if item.again:
                    late.add(layout)
        readers: dict[str, list[Site]] = {}
        for item in placed:
            for read in item.site.reads:
                readers.setdefault(item.name(read.alias.root), []).append(item.site)
        for item in placed:
            for root in item.site.makes:
                if root:
                    name = item.name(root)
                    self.bucketed[name] = is_bucketed(item.site, readers.get(name, ()))
        inputs: dict[str, Layout] = {}
        outputs: dict[str, Placed] = {}
        gradients: dict[str, list[Placed]] = {}
        ops: list[Placed] = []
        for item in placed:
            if item.site.kind in ("parameter", "buffer", "input", "tangent", "seed"):
                name = item.name(item.site.name)
                layout = item.option.makes[0]
                phase = int(item.site.kind == "tangent")
                self._define(name, layout, phase, name)
                inputs[name] = layout
                for read in item.site.reads:
                    gradients.setdefault(item.name(read.alias.root), []).append(item)
            elif item.site.kind == "op":
                ops.append(item)
            elif item.site.kind == "border" and item.site.reads:
                self.borders[item.name(item.site.name)] = item
            elif item.site.kind == "output":
                outputs[item.name(item.site.name)] = item
        gradient_values: dict[str, str] = {}
        ops.sort(key=lambda item: item.order)
        for item in ops:
            self._op(item, int(item.site.backward))
            for root in item.site.makes:
                for owner in gradients.pop(item.name(root), ()) if root else ():
                    gradient_values[owner.name(owner.site.name)] = self._gradient(owner)
        for owners in gradients.values():  # a gradient that is an input (a tangent) passed on
            for owner in owners:
                gradient_values[owner.name(owner.site.name)] = self._gradient(owner)
        return self._finish(inputs, outputs, gradient_values)

    def _place(self) -> Iterator[Placed]:
        space = self.space
        producer, nothing = space.graph.producer, dict[str, str]()

        def order(site: Site, rename: Mapping[str, str]) -> int:
            if site.kind != "op":
                return -1
            return producer[rename.get(site.name, site.name)]

        for site in space.rest.sites.values():
            option = self._option(site, self.assignment.rest[site.name])
            yield Placed(site, option, nothing, order(site, nothing))
        bodies = zip(space.repeats, space.bodies, self.assignment.copies, strict=True)
        for number, (repeat, region, copies) in enumerate(bodies):
            twice, again = remade(region), self.assignment.again(number)
            for k, decisions in enumerate(copies):
                rename = self._rename(repeat, k)
                for site in region.sites.values():
                    if site.kind == "shared":
                        continue
                    if site.kind == "border" and not site.reads:
                        # made on the other side: by the neighbour's border site that reads it
                        continue
                    option = self._option(site, decisions[site.name])
                    yield Placed(site, option, rename, order(site, rename), again[k] and site.name in twice)

    def _reacquired(self) -> set[str]:
        """Names of the roots that are brought to their layouts again in backward."""
        found: set[str] = set()
        for number, (repeat, region) in enumerate(zip(self.space.repeats, self.space.bodies, strict=True)):
            for k, again in enumerate(self.assignment.again(number)):
                if again:
                    rename = self._rename(repeat, k)
                    found.update(rename.get(root, root) for root in reacquired(region))
        return found

    def _rename(self, repeat: Repeated, k: int) -> dict[str, str]:
        nodes = self.space.graph.nodes
        rename = {}
        for first, here in zip(repeat.copies[0], repeat.copies[k], strict=True):
            for a, b in zip(nodes[first].outputs, nodes[here].outputs, strict=True):
                if a:
                    rename[a] = b
        rename.update(zip(repeat.own[0], repeat.own[k], strict=True))
        numbers = output_numbers(self.space.graph)
        for first_value, value in zip(repeat.results[0], repeat.results[k], strict=True):
            places = zip(numbers.get(first_value, ()), numbers.get(value, ()), strict=True)
            rename.update({output_name(a): output_name(b) for a, b in places})
        for border in repeat.borders:
            rename[border_name(border.values[0])] = border_name(border.values[k])
            rename[border_name(border.values[1])] = border_name(border.values[k + 1])
            rename.setdefault(border.values[0], border.values[k])
            rename.setdefault(border.values[1], border.values[k + 1])
        return rename

    def _option(self, site: Site, choice: SiteChoice) -> Option:
        option = self.space.option(site, tuple(choice))
        if option is None:
            raise ValueError(f"{site.kind} {site.name} ({site.module}) cannot take {choice}")
        return option

    # --- values

    def _fresh(self, hint: str) -> str:
        hint = hint.replace("|", "_")
        number = self._counter.get(hint, 0)
        while True:
            number += 1
            name = f"{hint}_{number}"
            if name not in self.metas and name not in self.space.graph.metas:
                self._counter[hint] = number
                return name

    def _define(self, root: str, layout: Layout, phase: int, local: str) -> None:
        meta = self.global_meta[root]
        self.metas[local] = TensorMeta(local_shape(meta.shape, layout, self.space.mesh), meta.dtype)
        if is_routed(layout):
            self.uneven.add(local)
        self.there[phase][root, layout] = local

    def _emit(self, phase: int, op: str, args: tuple[Any, ...], name: str, meta: TensorMeta) -> str:
        self.metas[name] = meta
        if any(isinstance(value, Ref) and value.name in self.uneven for value in args):
            self.uneven.add(name)
        module, node = self.context
        self.instructions[phase].append(Instruction(op=op, args=args, outputs=(name,), module=module, node=node))
        return name

    def _get(self, root: str, layout: Layout, phase: int) -> str:
        """The local value of a root in a layout, made now if it is not there."""
        if (root, layout) in self.there[phase]:
            return self.there[phase][root, layout]
        produced, policy = self.produced.get(root, (None, ""))
        if phase == 1 and root in self.again:
            if (root, produced) not in self.there[1]:
                self._op(self.again[root], phase)
            if layout == produced:
                return self.there[1][root, layout]
        elif phase == 1 and (policy != REGATHER or layout == produced) and (root, layout) in self.there[0]:
            return self.there[0][root, layout]
        if layout == produced:
            self._cross(root, layout, phase)
            return self.there[phase][root, layout]
        source, steps = self._source(root, phase, policy)[layout]
        local = self._get(root, source, phase)
        for step in steps:
            local = self._redistribute(root, local, step, phase)
        self.there[phase][root, layout] = local
        return local

    def _cross(self, border: str, layout: Layout, phase: int) -> None:
        """A border tensor, made from the value behind it in the layout that the border has."""
        if border not in self.borders:
            raise AssertionError(f"{border} is read before it is made")
        item = self.borders[border]
        (read,) = item.site.reads
        local = self._view(item.name(read.alias.root), read.alias.steps, item.option.reads[0], phase)
        self.there[phase][border, layout] = local

    def _source(self, root: str, phase: int, policy: str) -> dict[Layout, tuple[Layout, tuple[Step, ...]]]:
        key = (root, policy == REGATHER and phase == 1)
        if key not in self.sources:
            early, late = self.wanted[root]
            wanted = (late if phase else early) if policy == REGATHER else early | late
            meta, (produced, _) = self.global_meta[root], self.produced[root]
            layouts, bucketed = frozenset(wanted), self.bucketed[root]
            acquired = self.space.redistributor.acquire(meta.shape, meta.dtype, produced, layouts, bucketed)
            if acquired is None:
                raise ValueError(f"{root} is made as {produced} and cannot be had as {sorted(map(str, wanted))}")
            self.sources[key] = {a.layout: (a.source, a.route.steps) for a in acquired}
        return self.sources[key]

    def _view(self, root: str, steps: Steps, layout: Layout, phase: int) -> str:
        """The local value of a view of a root whose layout is `layout`."""
        local = self._get(root, layout, phase)
        if not steps:
            return local
        if (local, steps) in self.views[phase]:
            return self.views[phase][local, steps]
        kind, before, after = steps[-1]
        source = self._view(root, steps[:-1], layout, phase)
        here = from_root(steps, layout, self.space.mesh)
        assert here is not None
        meta = self.metas[source]
        if kind == RESHAPE:
            shape = local_shape(after, here, self.space.mesh)
            any_number = {p.dim for p in here if isinstance(p, Routed)}
            sizes = tuple(-1 if dim in any_number else size for dim, size in enumerate(shape))
            name = self._emit(phase, RESHAPE, (Ref(source), sizes), self._fresh(root), TensorMeta(shape, meta.dtype))
        else:
            shape = tuple(meta.shape[d] for d in before)
            name = self._emit(phase, PERMUTE, (Ref(source), before), self._fresh(root), TensorMeta(shape, meta.dtype))
        self.views[phase][local, steps] = name
        return name

    # --- operators

    def _op(self, item: Placed, phase: int) -> None:
        site, option, mesh = item.site, item.option, self.space.mesh
        call, rule = site.call, site.rule
        assert call is not None and site.node is not None
        outside = self.context
        self.context = (self.space.graph.nodes[item.order].module, item.name(site.name))
        operands = [
            self._view(item.name(read.alias.root), read.alias.steps, layout, phase)
            for read, layout in zip(site.reads, option.reads, strict=True)
        ]
        layouts = operand_layouts(site, option, self.space)
        made = {}
        for root, layout in zip(site.makes, option.makes, strict=True):
            if root:
                name = made[root] = self._fresh(item.name(root)) if phase > int(site.backward) else item.name(root)
                self._define(item.name(root), layout, phase, name)
        splits = splits_of(rule, option.choice) if rule is not None else ()
        emission = local_program(call, rule, splits, layouts, option.makes, mesh, site.zeros)
        self._write(item, emission, operands, made, phase)
        self.context = outside

    def _write(
        self, item: Placed, emission: Emission, operands: list[str], made: Mapping[str, str], phase: int
    ) -> None:
        """Append an operator's local program under the names of this copy; `made` are those of its results."""
        names = {OPERAND.format(i): operand for i, operand in enumerate(operands)}
        roots = set(made.values())
        for result, root in zip(emission.results, item.site.makes, strict=True):
            if root:
                assert result is not None, f"the expansion of {item.site.name} makes no {root}"
                names[result] = made[root]

        def name(value: str) -> str:
            if value not in names:
                names[value] = self._fresh(item.name(item.site.name))
            return names[value]

        routed = any(is_routed(layout) for layout in (*item.option.reads, *item.option.makes))
        module, node = self.context
        constant = self.constants[phase]
        for instruction in emission.instructions:
            args = map_references(instruction.args, lambda value: Ref(name(value)))
            kwargs = map_references(instruction.kwargs, lambda value: Ref(name(value)))
            # what depends on no operand (a mask of padding) is made once
            once = (
                len(instruction.outputs) == 1
                and instruction.outputs[0] not in emission.results
                and not instruction.collective
                and all(name(value) in self.fixed for value in instruction.inputs)
            )
            same = (instruction.op, str(args), str(kwargs)) if once else None
            if same in constant:
                names[instruction.outputs[0]] = constant[same]
                continue
            outputs = tuple(name(o) if o else "" for o in instruction.outputs)
            if same is not None:
                constant[same] = outputs[0]
                self.fixed.add(outputs[0])
            for old, new in zip(instruction.outputs, outputs, strict=True):
                if old:
                    self.metas[new] = emission.metas[old]
                    if routed and new not in roots:
                        self.uneven.add(new)
            self.instructions[phase].append(
                Instruction(op=instruction.op, args=args, kwargs=kwargs, outputs=outputs, module=module, node=node)
            )

    def _gradient(self, owner: Placed) -> str:
        (read,) = owner.site.reads
        self.context = (owner.site.module if not owner.rename else "", f"gradient of {owner.name(owner.site.name)}")
        return self._view(owner.name(read.alias.root), read.alias.steps, owner.option.reads[0], 1)

    # --- redistribution

    def _redistribute(self, root: str, local: str, step: Step, phase: int) -> str:
        """One step of a route, as reshapes, permutes and one collective along dim 0."""
        mesh, axis = self.space.mesh, step.axis
        n = mesh[axis]
        dtype = self.metas[local].dtype
        shape = self.metas[local].shape

        def emit(op: str, args: tuple[Any, ...], shape: Shape) -> str:
            return self._emit(phase, op, args, self._fresh(root), TensorMeta(shape, dtype))

        def reshape(value: str, shape: Shape) -> str:
            return value if self.metas[value].shape == shape else emit(RESHAPE, (Ref(value), shape), shape)

        def compact(value: str) -> str:
            """Kernels such as CPU layer norm's backward read operands as if they were contiguous."""
            return emit("aten.contiguous.default", (Ref(value),), self.metas[value].shape)

        def move(value: str, source: int, target: int) -> str:
            """Move one dim to another place."""
            old = self.metas[value].shape
            order = [d for d in range(len(old)) if d != source]
            order.insert(target, source)
            if order == list(range(len(old))):
                return value
            return emit(PERMUTE, (Ref(value), tuple(order)), tuple(old[d] for d in order))

        def communicate(kind: str, value: str, *args: Any, shape: Shape) -> str:
            before = self.metas[value].shape
            flat = self._contiguous(phase, root, value)
            assert math.prod(before) == math.prod(self.metas[flat].shape)
            started = emit(f"collective.{kind}", (Ref(flat), *args, axis), shape)
            return emit("collective.wait", (Ref(started),), shape)

        def expose(value: str, dim: int, stride: int, ways: int) -> str:
            """Cut a dim as [above, ways, stride] and bring `ways` to the front."""
            old = self.metas[value].shape
            above = old[dim] // (ways * stride)
            if dim == 0 and above == 1:
                return reshape(value, (ways, stride, *old[1:]))
            cut = reshape(value, (*old[:dim], above, ways, stride, *old[dim + 1 :]))
            front = move(cut, dim + 1, 0)
            return reshape(front, (ways, *old[:dim], above * stride, *old[dim + 1 :]))

        def insert(value: str, dim: int, stride: int) -> str:
            """The inverse: the leading dim goes between [above] and [stride] of a dim."""
            ways, *old = self.metas[value].shape
            above = old[dim] // stride
            if dim == 0 and above == 1:
                return reshape(value, (ways * stride, *old[1:]))
            cut = reshape(value, (ways, *old[:dim], above, stride, *old[dim + 1 :]))
            back = move(cut, 0, dim + 1)
            return compact(reshape(back, (*old[:dim], above * ways * stride, *old[dim + 1 :])))

        def resize(value: str, dim: int, size: int) -> str:
            """Add padding behind a dim, or drop it."""
            old = self.metas[value].shape
            new = (*old[:dim], size, *old[dim + 1 :])
            if old[dim] < size:
                behind = (0, 0) * (len(old) - 1 - dim) + (0, size - old[dim])
                return emit("aten.constant_pad_nd.default", (Ref(value), behind, 0), new)
            if old[dim] == size:
                return value
            part = emit("aten.slice.Tensor", (Ref(value), dim, 0, size), new)
            return part if math.prod(new[:dim]) == 1 else compact(part)

        before, after = step.before[axis], step.after[axis]
        whole = self.global_meta[root].shape
        taken = local_shape(whole, step.after, mesh)
        if isinstance(after, Split):
            ways = 1 if isinstance(before, Split) and before.dim == after.dim else n
            local = resize(local, after.dim, ways * taken[after.dim])
            shape = self.metas[local].shape
        if step.kind == "all_reduce":
            reduction = before.reduction  # type: ignore[union-attr]
            return communicate("all_reduce", local, reduction, shape=shape)
        if step.kind == "slice":
            assert isinstance(after, Split)
            stride = local_stride(step.after, mesh, axis)
            above = shape[after.dim] // (n * stride)
            cut = reshape(local, (*shape[: after.dim], above, n, stride, *shape[after.dim + 1 :]))
            part_shape = (*shape[: after.dim], above, stride, *shape[after.dim + 1 :])
            part = emit("aten.select.int", (Ref(cut), after.dim + 1, RankIndex(((axis, 1),))), part_shape)
            if math.prod(part_shape[: after.dim + 1]) > 1:
                part = compact(part)
            return reshape(part, (*shape[: after.dim], above * stride, *shape[after.dim + 1 :]))
        if step.kind == "all_gather":
            assert isinstance(before, Split)
            gathered = communicate("all_gather", local, shape=(n * shape[0], *shape[1:]))
            stacked = reshape(gathered, (n, *shape))
            together = insert(stacked, before.dim, local_stride(step.before, mesh, axis))
            return resize(together, before.dim, taken[before.dim])
        assert isinstance(after, Split)
        if step.kind == "reduce_scatter":
            front = expose(local, after.dim, local_stride(step.after, mesh, axis), n)
            cut_shape = self.metas[front].shape
            flat = reshape(front, (cut_shape[0] * cut_shape[1], *cut_shape[2:]))
            result = (cut_shape[1], *cut_shape[2:])
            return communicate("reduce_scatter", flat, before.reduction, shape=result)  # type: ignore[union-attr]
        assert step.kind == "all_to_all" and isinstance(before, Split)
        stride = local_stride(step.after, mesh, axis)
        if after.dim == before.dim and before.period <= after.period // n:
            stride //= n  # the digit that is given up still lies below
        front = expose(local, after.dim, stride, n)
        cut_shape = self.metas[front].shape
        flat = reshape(front, (cut_shape[0] * cut_shape[1], *cut_shape[2:]))
        exchanged = communicate("all_to_all", flat, shape=self.metas[flat].shape)
        stacked = reshape(exchanged, cut_shape)
        given = local_stride(step.before, mesh, axis)
        if after.dim == before.dim and after.period <= before.period // n:
            given //= n  # the digit that was taken has left from below
        return resize(insert(stacked, before.dim, given), before.dim, taken[before.dim])

    def _contiguous(self, phase: int, root: str, value: str) -> str:
        """A scalar has no dim 0 to communicate along, and a collective wants contiguous input."""
        meta = self.metas[value]
        return self._emit(phase, "aten.contiguous.default", (Ref(value),), self._fresh(root), meta)

    # --- the whole

    def _finish(
        self, inputs: Mapping[str, Layout], outputs: Mapping[str, Placed], gradients: Mapping[str, str]
    ) -> Program:
        graph, space = self.space.graph, self.space
        made = []
        for number, output in enumerate(graph.outputs):
            meta = graph.metas[output.name] if output.name is not None else None
            layout: Layout = (REPLICATE,) * len(space.mesh)
            name: str | None = None
            if output.name is None:
                pass
            elif output.role == "gradient" and output.target in graph.parameters:
                parameter = graph.parameters[output.target]
                name, layout = gradients[parameter], inputs[parameter]
            else:
                item = outputs[output_name(number)]
                (read,) = item.site.reads
                self.context = ("", f"{output.role} {output.target}")
                phase = int(item.site.backward)
                name = self._view(item.name(read.alias.root), read.alias.steps, item.option.reads[0], phase)
                found = from_root(read.alias.steps, item.option.reads[0], space.mesh)
                assert found is not None
                layout = found
            made.append(ProgramOutput(name=name, role=output.role, target=output.target, meta=meta, layout=layout))
        forward, backward = self.instructions
        made_in_backward = {name for i in backward for name in i.outputs}
        made_in_backward.update(i.name for i in graph.inputs if i.role == "tangent")
        read_in_backward = [name for i in backward for name in i.inputs]
        read_in_backward += [o.name for o in made if o.role == "gradient" and o.name is not None]
        saved = tuple(dict.fromkeys(name for name in read_in_backward if name not in made_in_backward))
        return Program(
            axes=space.axes,
            mesh=space.mesh,
            inputs=tuple(
                ProgramInput(name=i.name, role=i.role, target=i.target, meta=graph.metas[i.name], layout=inputs[i.name])
                for i in graph.inputs
            ),
            forward=tuple(forward),
            backward=tuple(backward),
            saved=saved,
            outputs=tuple(made),
            metas=self.metas,
            uneven=frozenset(self.uneven),
        )
