"""A rewrite of programs; a lowering: which rewrites to take, and whether they are worth it.

The decision is made on a program of few copies of each layer, so that it costs the same at any depth, and is then
written in all programs of the same operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from autopar.cluster.machine import Cluster
from autopar.cost.streams import TimelineCache, timeline
from autopar.ir.graph import Node
from autopar.ir.program import Program

from .regions import Refused

LIMIT_BYTES = 25 * 2**20
"""The most bytes of a bucket."""

LEAST_GAIN = 1e-2
"""What is saved at least, of the step's seconds: instructions have costs that a timeline leaves out."""

Write = Callable[[Program], Program]

When = Literal["first", "where quicker", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a program is lowered for: a cluster, the cache of timelines on it, the most bytes that a bucket holds, on
    each mesh axis (none given: no more than) and on any, and the axes on which no collective hides behind what is
    computed. `offload_bytes` of what is kept for backward leave for the host. Without `trials`, what is taken in any
    case takes its first form, and simulates none. `latest` are programs, rewrites and what these made of them: a
    lowering may look at a program again, with trials."""

    cluster: Cluster
    cache: TimelineCache = field(default_factory=TimelineCache)
    axis_bytes: tuple[int, ...] = ()
    limit_bytes: int = LIMIT_BYTES
    unhidden: tuple[int, ...] = ()
    offload_bytes: int = 0
    trials: bool = True
    latest: list[tuple[Program, tuple[Rewrite, ...], Program]] = field(default_factory=list)

    def seconds(self, program: Program) -> float:
        """Of a step, by the program's timeline."""
        return timeline(program, self.cluster, self.cache).seconds


@dataclass(frozen=True)
class Rewrite:
    """From program to program, with a name and arguments. Its text is `name{argument=value,...}`, with the arguments
    that are not as by default; `passes.flow.rewrites` reads it."""

    name: ClassVar[str]

    def __call__(self, program: Program, target: Target) -> Program:
        raise NotImplementedError

    def on(self, program: Program) -> Rewrite:
        """The rewrite that does the same to this program, and has a text."""
        return self

    def __str__(self) -> str:
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.repr}
        said = ",".join(f"{name}={value!r}" for name, (value, default) in values.items() if value != default)
        return (f"{self.name}{{{said}}}" if said else self.name).replace(" ", "")


@dataclass(frozen=True)
class Written(Rewrite):
    """What a function writes. Its text is the name of the lowering that adopted it."""

    write: Callable[[Program, Target], Program] = field(repr=False)
    name = ""

    def __call__(self, program: Program, target: Target) -> Program:
        return _checked(self.write(program, target), self.write)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A lowering that is taken: the rewrites that write it for a target, in any program of the operators of `given`,
    where it was looked at; `program` is what became of that one, if it was written already. `what` is for the log."""

    given: Program
    rewrites: tuple[Rewrite, ...]
    target: Target
    program: Program | None = None
    what: str = ""

    def on(self, program: Program) -> Program:
        if self.program is not None and program is self.given:
            return self.program
        return rewritten(program, self.rewrites, self.target)


def rewritten(program: Program, rewrites: Sequence[Rewrite], target: Target) -> Program:
    """The program after rewrites, one after the other."""
    for rewrite in rewrites:
        program = rewrite(program, target)
    return program


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """A row of the table of lowerings. In words, its `name`, where it `applies`, what it `writes` and what that
    `costs`; `adopt`, which looks at a program and says how it is taken, or None; and the `rewrites` by whose names a
    text says how (none: by its own). With `taken` "first" or "last" it is taken always, one after the other; of those
    "where quicker", the one, or those together, that make the shortest step.
    """

    name: str
    applies: str
    writes: str
    costs: str
    adopt: Callable[[Program, Target], Adopted | None]
    rewrites: tuple[Rewrite, ...] = ()
    taken: When = "where quicker"

    def __post_init__(self) -> None:
        if callable(self.adopt) and not _takes(self.adopt, "program", "target"):
            raise ValueError(
                f"lowering {self.name!r} has an adopt that does not take a program and a target: give "
                f"where_quicker(write) or always(write) of a function from program to program"
            )
        if self.taken not in get_args(When):
            raise ValueError(
                f"lowering {self.name!r} is taken {self.taken!r}: write one of {', '.join(get_args(When))}"
            )

    def on(self, program: Program, target: Target) -> Program:
        """The program with the lowering, if it is taken."""
        adopted = self.adopt(program, target)
        return program if adopted is None else adopted.on(program)


def _takes(function: Callable[..., object], *names: str) -> bool:
    try:
        inspect.signature(function).bind(*names)
    except TypeError:
        return False
    return True


def _checked(written: Any, write: Callable[..., Any]) -> Program:
    if not isinstance(written, Program):
        name = getattr(write, "__qualname__", repr(write))
        raise ValueError(f"{name}, which a lowering writes with, returned a {type(written).__name__}: give a Program")
    return written


def always(write: Rewrite | Write) -> Callable[[Program, Target], Adopted]:
    """Takes it, whatever the step comes to."""
    rewrite = write if isinstance(write, Rewrite) else Written(lambda program, target: write(program))
    return lambda program, target: Adopted(given=program, rewrites=(rewrite,), target=target)


def where_quicker(write: Write) -> Callable[[Program, Target], Adopted | None]:
    """Takes it where that makes the step shorter. What `write` raises `Refused` for is left as it is."""
    if not callable(write):
        raise ValueError(f"where_quicker is given {write!r}: give a function from program to program")

    def tried(program: Program, target: Target) -> Program:
        try:
            return _checked(write(program), write)
        except Refused:
            return program

    def adopt(program: Program, target: Target) -> Adopted | None:
        written = tried(program, target)
        before, seconds = target.seconds(program), target.seconds(written)
        if written is program or seconds >= before * (1 - LEAST_GAIN):
            return None
        what = step(before, seconds)
        return Adopted(given=program, program=written, rewrites=(Written(tried),), target=target, what=what)

    return adopt


def check_written(program: Program, name: str) -> None:
    """Of a program that a lowering of another package wrote: raises ValueError where it reads what is not made, or has
    no meta of what it makes."""
    tangents = {i.name for i in program.tangents}
    there = {i.name for i in program.inputs} - tangents
    _check_half(program, program.forward, there, name)
    _known(program.saved, there, f"lowering {name!r} saves for backward")
    _check_half(program, program.backward, {*program.saved, *tangents}, name)


def _check_half(program: Program, half: Sequence[Node], there: set[str], name: str) -> None:
    """Adds to what is there what the half makes."""
    for instruction in half:
        _known(instruction.inputs, there, f"lowering {name!r} wrote a program in which {instruction.op} reads")
        made = [output for output in instruction.outputs if output]
        if lacking := [output for output in made if output not in program.metas]:
            raise ValueError(
                f"lowering {name!r} made {lacking[0]} by {instruction.op}, and the program's metas do not have it: "
                f"add its local shape and dtype, as an Emitter does"
            )
        there.update(made)


def _known(names: Sequence[str], there: Collection[str], words: str) -> None:
    for name in names:
        if name not in there:
            raise ValueError(f"{words} {name}, which nothing makes before: make it there, or save it for backward")


def step(before: float, seconds: float) -> str:
    """What a lowering does to the seconds of a step."""
    return f"step of {before * 1e3:.3f} -> {seconds * 1e3:.3f} ms"
