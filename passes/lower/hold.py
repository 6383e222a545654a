"""Hold: what forward gathers of parameters, kept from one micro-batch to the next.

Parameters stay as they are until the optimizer steps, so what only they lead to is the same in all micro-batches of a
step. From a program come two:

- *cold*: the program, which also returns what it gathered (at the end of what it saves for backward);
- *warm*: the program that is given that, and gathers nothing.

What backward gathers again, it gathers in each micro-batch.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from autopar.ir.dataflow import derived, reached, reads_some
from autopar.ir.program import Program
from autopar.ir.rewrite import living

from .accumulate import within


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """`names` are the values that are held: the last of what `cold` saves, and the last inputs of `warm`."""

    names: tuple[str, ...]
    cold: Program
    warm: Program


def held(program: Program) -> Held:
    """The program in two forms, for the first micro-batch of a step and for the others."""
    values = gathered(program)
    rest = [node for node in program.forward if not values.issuperset(filter(None, node.outputs))]
    wanted = {*program.saved, *(o.name for o in program.results)}
    wanted.update(name for node in rest for name in node.inputs)
    names = tuple(name for node in program.forward for name in node.outputs if name in values & wanted)
    results = (*(o.name for o in program.results), *program.saved)
    given = tuple(within(name, "buffer", program.metas, program.mesh) for name in names)
    return Held(
        names=names,
        cold=replace(program, saved=(*program.saved, *names)),
        warm=replace(program, inputs=(*program.inputs, *given), forward=living(rest, results)),
    )


def gathered(program: Program, of: Collection[str] | None = None) -> set[str]:
    """Values of forward that parameters alone lead to, by way of a collective: all parameters, or those `of` these
    names."""
    written = {o.target for o in program.outputs if o.role in ("mutation", "update")}
    parameters = {i.name: i.target for i in program.inputs if i.role == "parameter"}
    known = {name for name, target in parameters.items() if target not in written and (of is None or target in of)}
    known = derived(program.forward, known, reads_some)
    own = [node for node in program.forward if node.name in known]
    begun = {name for node in own if node.collective for name in node.outputs}
    return reached(own, begun)
