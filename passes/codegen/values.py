"""Values: what is local to a rank, and the operators that make it.

Where a reader wants another layout than a tensor has, the route that the cost model priced is written out; a view runs
where it is read; what backward recomputes is written where backward first reads it.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from autopar.cost.redistribute import RouteStep
from autopar.ir.emitter import Emitter
from autopar.ir.graph import RESHAPE, Node, Ref
from autopar.ir.layout import REPLICATE, Layout, Routed, is_routed, local_meta, local_shape
from autopar.ir.program import COLLECTIVES
from autopar.ir.rewrite import reading
from autopar.ops.emit import OPERAND, Emission, local_program
from autopar.passes.space.choices import REGATHER
from autopar.passes.space.collapse import Steps, from_root
from autopar.passes.space.items import operand_layouts
from autopar.passes.space.operator_layouts import splits_of
from autopar.passes.space.space import Space

from .demand import Demand, Placed
from .redistribution import Redistribution


@dataclass(eq=False)
class Values:
    """Local values, written where they are first read."""

    space: Space
    demand: Demand
    emitter: Emitter
    halves: tuple[list[Node], list[Node]] = field(default_factory=lambda: ([], []))
    """What is written of forward and backward."""
    uneven: set[str] = field(default_factory=set)
    """Values of as many rows as happen to come."""
    there: tuple[dict[tuple[str, Layout], str], dict[tuple[str, Layout], str]] = field(default_factory=lambda: ({}, {}))
    """Per phase: (root, layout) -> local value."""
    views: tuple[dict[tuple[str, Steps], str], dict[tuple[str, Steps], str]] = field(default_factory=lambda: ({}, {}))
    constants: tuple[dict[tuple[str, str, str], str], dict[tuple[str, str, str], str]] = field(
        default_factory=lambda: ({}, {})
    )
    """Per phase: what expansions compute without operands -> its value."""
    fixed: set[str] = field(default_factory=set)
    """Those values."""
    made: dict[Hashable, tuple[str, ...]] = field(default_factory=dict)
    """What is made where it is read, as far as it is: phase, form, choice and operands -> the local results."""

    def emit(self, phase: int, root: str, op: str, *args: Any) -> str:
        """Append an instruction that does something to a root, and return the name of its result."""
        self.emitter.written = self.halves[phase]
        name = self.emitter.emit(op, args, self.emitter.fresh(root))
        if args[0].name in self.uneven:
            self.uneven.add(name)
        return name

    def define(self, root: str, layout: Layout, phase: int, local: str) -> None:
        meta = self.demand.metas[root]
        self.emitter.metas[local] = local_meta(meta, layout, self.space.mesh)
        if is_routed(layout):
            self.uneven.add(local)
        self.there[phase][root, layout] = local

    def _get(self, root: str, layout: Layout, phase: int) -> str:
        """The local value of a root in a layout, written now if it is not there."""
        if (root, layout) in self.there[phase]:
            return self.there[phase][root, layout]
        if phase == 1 and root in self.demand.made and (root, layout) in self.there[0]:
            return self.there[0][root, layout]
        if root in self.demand.made:
            return self._make(root, layout, phase)
        produced, policy = self.demand.produced.get(root, (None, ""))
        if phase == 1 and root in self.demand.again:
            if (root, produced) not in self.there[1]:
                self.operator(self.demand.again[root], phase)
            if layout == produced:
                return self.there[1][root, layout]
        elif phase == 1 and (policy != REGATHER or layout == produced) and (root, layout) in self.there[0]:
            return self.there[0][root, layout]
        if layout == produced:
            self._cross(root, layout, phase)
            return self.there[phase][root, layout]
        if root not in self.demand.wanted or layout not in self.demand.source(root, phase, policy):
            return self._cut(root, layout, phase)
        source, steps = self.demand.source(root, phase, policy)[layout]
        return self._moved(root, layout, source, steps, phase)

    def _moved(self, root: str, layout: Layout, source: Layout, steps: Sequence[RouteStep], phase: int) -> str:
        local = self._get(root, source, phase)
        redistribution = Redistribution(
            emit=partial(self.emit, phase, root),
            metas=self.emitter.metas,
            mesh=self.space.mesh,
            whole=self.demand.metas[root].shape,
        )
        for step in steps:
            local = redistribution.write(local, step)
        self.there[phase][root, layout] = local
        return local

    def _make(self, root: str, layout: Layout, phase: int) -> str:
        """The local value of a root that is made where it is read, once for all that read it so."""
        item = self.demand.made[root]
        position = [item.name(name) for name in item.site.makes].index(root)
        option = self.space.making.option(item.site.makes[position], layout)
        if option is None:
            return self._cut(root, layout, phase)
        self.operator(replace(item, option=option), phase)
        return self.there[phase][root, layout]

    def _cut(self, root: str, layout: Layout, phase: int) -> str:
        """A rank's part of a root that is there in full."""
        meta, whole = self.demand.metas[root], (REPLICATE,) * len(layout)
        route = self.space.redistributor.route(meta.shape, meta.dtype, whole, layout)
        assert route is not None and not any(step.kind in COLLECTIVES for step in route.steps), (root, layout)
        return self._moved(root, layout, whole, route.steps, phase)

    def _cross(self, border: str, layout: Layout, phase: int) -> None:
        """A border tensor: the value behind it in the layout of the border."""
        if border not in self.demand.borders:
            raise AssertionError(f"{border} is read before it is written")
        item = self.demand.borders[border]
        (read,) = item.site.reads
        local = self.view(item.name(read.alias.root), read.alias.steps, item.option.reads[0], phase)
        self.there[phase][border, layout] = local

    def view(self, root: str, steps: Steps, layout: Layout, phase: int) -> str:
        """The local value of a view of a root whose layout is `layout`."""
        local = self._get(root, layout, phase)
        if not steps:
            return local
        if (local, steps) in self.views[phase]:
            return self.views[phase][local, steps]
        kind, before, after = steps[-1]
        source = self.view(root, steps[:-1], layout, phase)
        here = from_root(steps, layout, self.space.mesh)
        assert here is not None
        if kind == RESHAPE:
            any_number = {p.dim for p in here if isinstance(p, Routed)}
            shape = local_shape(after, here, self.space.mesh)
            before = tuple(-1 if dim in any_number else size for dim, size in enumerate(shape))
        name = self.emit(phase, root, kind, Ref(source), before)
        self.views[phase][local, steps] = name
        return name

    # --- operators

    def operator(self, item: Placed, phase: int) -> None:
        site, option, mesh = item.site, item.option, self.space.mesh
        call, rule = site.call, site.rule
        assert call is not None and site.node is not None
        outside = self.emitter.about
        self.emitter.about = {"module": self.space.graph.nodes[item.order].module, "serves": item.name(site.name)}
        operands = [
            self.view(item.name(read.alias.root), read.alias.steps, layout, phase)
            for read, layout in zip(site.reads, option.reads, strict=True)
        ]
        layouts = operand_layouts(self.space, site, option)
        key = (phase, site.form, option.choice, *operands)
        known = dict(zip(site.makes, self.made.get(key, ()), strict=False)) if site.made else {}
        names = {}
        for root, layout in zip(site.makes, option.makes, strict=True):
            if root:
                name = names[root] = known.get(root) or self._name(item, root, layout, phase)
                self.define(item.name(root), layout, phase, name)
        if known:
            self.emitter.about = outside
            return
        if site.made:
            self.made[key] = tuple(names.get(root, "") for root in site.makes)
        splits = splits_of(rule, option.choice) if rule is not None else ()
        emission = local_program(call, rule, splits, layouts, option.makes, mesh, site.zeros)
        self._write(item, emission, operands, names, phase)
        self.emitter.about = outside

    def _name(self, item: Placed, root: str, layout: Layout, phase: int) -> str:
        """The name of a local value: that of the root, unless it is one of several."""
        part = item.site.made and any(placement != REPLICATE for placement in layout)
        return self.emitter.fresh(item.name(root)) if part or phase > int(item.site.backward) else item.name(root)

    def _write(
        self, item: Placed, emission: Emission, operands: list[str], results: Mapping[str, str], phase: int
    ) -> None:
        """Append an operator's local program under the names of this copy; `results` are those of its results."""
        names = {OPERAND.format(i): operand for i, operand in enumerate(operands)}
        roots = set(results.values())
        for result, root in zip(emission.results, item.site.makes, strict=True):
            if root:
                assert result is not None, f"the expansion of {item.site.name} makes no {root}"
                names[result] = results[root]

        def name(value: str) -> str:
            if value not in names:
                names[value] = self.emitter.fresh(item.name(item.site.name))
            return names[value]

        routed = any(is_routed(layout) for layout in (*item.option.reads, *item.option.makes))
        self.emitter.written, constant = self.halves[phase], self.constants[phase]
        for instruction in emission.instructions:
            here = reading(instruction, names)
            # what depends on no operand (a mask of padding) is computed once
            once = (
                len(instruction.outputs) == 1
                and instruction.outputs[0] not in emission.results
                and not instruction.collective
                and all(name(value) in self.fixed for value in instruction.inputs)
            )
            same = (here.op, str(here.args), str(here.kwargs)) if once else None
            if same in constant:
                names[instruction.outputs[0]] = constant[same]
                continue
            outputs = tuple(name(o) if o else "" for o in instruction.outputs)
            if same is not None:
                constant[same] = outputs[0]
                self.fixed.add(outputs[0])
            if routed:
                self.uneven.update(new for new in outputs if new and new not in roots)
            metas = tuple(map(emission.metas.get, instruction.outputs))
            self.emitter.emit(here.op, here.args, *outputs, kwargs=here.kwargs, metas=metas)

    def gradient(self, owner: Placed) -> str:
        (read,) = owner.site.reads
        module = "" if owner.rename else owner.site.module
        self.emitter.about = {"module": module, "serves": f"gradient of {owner.name(owner.site.name)}"}
        return self.view(owner.name(read.alias.root), read.alias.steps, owner.option.reads[0], 1)
