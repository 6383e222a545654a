"""Generated models as programs: each is executed on simulated ranks and compared with eager, and has an outcome."""

from __future__ import annotations

import math
import random
import re
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from generator import Built, Spec, build

from autopar.cost.memory import peak
from autopar.passes.codegen.program import layouts
from autopar.passes.lower.bucket import bucket
from autopar.passes.lower.chunk import CHUNKING
from autopar.passes.lower.slice import SLICING
from autopar.planning.presets import PRESETS
from autopar.solve.problem import Infeasible
from autopar.testing import Row, Trial, random_assignment

MESHES: tuple[Mapping[str, int], ...] = ({"a": 2, "b": 2}, {"a": 4}, {"a": 3}, {"a": 2, "b": 3})

RANDOM, RANDOM_LOWERED = 5, 2
"""Random plans on a mesh: as they are, and as they would run."""

SHARES = (0.85, 0.7, 0.55, 0.4)
"""Limits, as shares of the peak without one."""

BUDGET_SECONDS = 60.0
"""Of processor time, after which a program hangs."""

FAILURES = ("wrong", "crash", "hang")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one program: equal, refused, wrong, crash or hang; what was said, and where."""

    kind: str
    mesh: str
    plan: str
    message: str = ""

    @property
    def signature(self) -> str:
        """The same for failures that look alike: numbers and names of values do not count."""
        told = re.sub(r"'[^']*'|\[[^\]]*\]|\([0-9, ]*\)|-?\d[\d.e+-]*|[a-z_]+_\d+", "#", self.message)
        return f"{self.kind}: {told[:160]}"


class Hang(BaseException):
    """The budget is spent."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises Hang after so much processor time of this process."""

    def stop(number: int, frame: Any) -> None:
        raise Hang(f"{seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def outcomes(spec: Spec, seed: int, *, meshes: int = 2, budget: float = BUDGET_SECONDS) -> Iterator[Outcome]:
    """Every program of a model: on some meshes, by the solver, presets, random plans, and in parts by force."""
    draw = random.Random(seed)
    built = build(spec)
    made: list[Trial] = []

    def capture() -> Row | None:
        made.append(_trial(built, spec.steps))
        return None

    first = _outcome("-", "capture", capture, budget)
    if first is not None:
        yield first
        return
    trial = made[0]
    for mesh in draw.sample(MESHES, meshes):
        shape = ",".join(f"{axis}={size}" for axis, size in mesh.items())
        for plan, run in plans(trial, mesh, draw):
            found = _outcome(shape, plan, run, budget)
            if found is not None:
                yield found
            if plan == "dp" and found is not None and found.kind in ("refused", "hang"):
                break  # a mesh without a plan


def _trial(built: Built, steps: int) -> Trial:
    trial = Trial(built.model, built.args, loss_fn=built.loss_fn, steps=steps)
    assert trial.expected
    return trial


def plans(trial: Trial, mesh: Mapping[str, int], draw: random.Random) -> Iterator[tuple[str, Callable[[], Row | None]]]:
    """The plans of a mesh, by name, each with what runs it (None: it is one that ran before)."""
    for solver in ("dp", *draw.sample(tuple(PRESETS), 2)):
        yield solver, lambda solver=solver: trial.of_solver(mesh, solver)  # type: ignore[misc]
    share = draw.choice(SHARES)
    yield f"within {share}", lambda: limited(trial, mesh, share)
    for number in range(RANDOM + RANDOM_LOWERED):
        seed = draw.randrange(10**6)
        lower = number >= RANDOM
        name = f"random {seed}{' lowered' * lower}"
        yield name, lambda seed=seed, lower=lower: trial.of_random(mesh, seed, lower=lower)  # type: ignore[misc]
        if number < 2:
            for parts in ("sliced", "chunked"):
                yield f"{parts} {seed}", lambda seed=seed, parts=parts: in_parts(trial, mesh, seed, parts)  # type: ignore[misc]


def limited(trial: Trial, mesh: Mapping[str, int], share: float) -> Row:
    """A plan within a share of what the plan without a limit needs, or, if none fits, within the smallest peak that the
    error names."""
    planner = trial.on(mesh)
    limit = share * planner.plan(memory_limit_bytes=math.inf).bytes
    try:
        plan = planner.plan(memory_limit_bytes=limit)
    except Infeasible as error:
        assert error.smallest_bytes is not None and error.smallest_bytes > limit, error
        limit = error.smallest_bytes
        plan = planner.plan(memory_limit_bytes=limit)
    program = planner.program(plan)
    needed = peak(program, planner.optimizer, planner.kind_of_device, planner.memory).bytes
    assert needed == plan.bytes <= limit, f"the peak is {needed}, the plan says {plan.bytes}, the limit is {limit}"
    return trial.row(f"within {limit}", program, layouts(planner.space, planner.assignment(plan)))


def in_parts(trial: Trial, mesh: Mapping[str, int], seed: int, parts: str) -> Row | None:
    """A random plan with every stretch in two parts that can be; None where there is none."""
    planner = trial.on(mesh)
    assignment = random_assignment(planner.space, seed)
    program = bucket(planner.writer.plain(assignment))
    cut = (SLICING if parts == "sliced" else CHUNKING).everywhere(program, 2)
    return None if cut == program else trial.row(parts, cut, layouts(planner.space, assignment))


def named(trial: Trial, mesh: Mapping[str, int], plan: str) -> Row | None:
    """The row of a plan by the name that an outcome has."""
    kind, _, seed = plan.partition(" ")
    if kind in ("sliced", "chunked"):
        return in_parts(trial, mesh, int(seed), kind)
    if kind == "within":
        return limited(trial, mesh, float(seed))
    if kind == "random":
        return trial.of_random(mesh, int(seed.split()[0]), lower=seed.endswith("lowered"))
    return trial.of_solver(mesh, plan)


def _outcome(mesh: str, plan: str, run: Callable[[], Row | None], budget: float) -> Outcome | None:
    def outcome(kind: str, message: str) -> Outcome:
        return Outcome(kind=kind, mesh=mesh, plan=plan, message=message)

    try:
        with within(budget):
            row = run()
    except ValueError as error:
        told = str(error)
        return outcome("invalid" if "does not run in PyTorch as it is given" in told else "refused", told)
    except Hang as error:
        return outcome("hang", f"more than {error}")
    except Exception as error:
        last = _last_line(error)
        return outcome("crash", f"{type(error).__name__}: {error} ({last})")
    if row is None:
        return None
    if row.failure:
        # replicas that differ are a wrong result, found before it is compared
        return outcome("wrong" if "replicas at" in row.failure else "crash", row.failure)
    if not row.equal:
        kinds = [kind for kind, error in row.errors.items() if not error <= row.tolerance]
        return outcome("wrong", f"{'/'.join(kinds)} of step {1 + (row.step or 0)}: {row.first}")
    return outcome("equal", "")


def _last_line(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename.rpartition('/')[2]}:{last.lineno}"
