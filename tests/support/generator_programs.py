"""Generated programs beside eager: on simulated ranks under random plans, and as a parallel module that is trained.

    for outcome in outcomes(drawn(17), seed=17):
        print(outcome)

The reference is the program's own model in PyTorch, made anew, whose Python runs every step; its random numbers are
those of the plan's program (`autopar.testing.draws`). A program whose loop does more than steps runs as a module alone.
"""

from __future__ import annotations

import math
import re
import signal
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import generator
import torch
import torch.distributed as dist
from generator import STEPS, Program, as_result, plain, steps
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode

import autopar
from autopar.cli.common import mesh_shape
from autopar.cost.memory import peak
from autopar.passes.lower.bucket import bucket
from autopar.passes.lower.chunk import CHUNKING
from autopar.passes.lower.slice import SLICING
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.solve.problem import Infeasible
from autopar.testing import EagerTrial, PlanRow, random_assignment
from autopar.testing.draws import untouched_random_state
from autopar.testing.steps import DRAWS, StepResult, eager_steps, errors, read_draws
from autopar.testing.trial import TOLERANCES, layouts

MESHES: tuple[Mapping[str, int], ...] = ({"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 3})

SHARES = (0.85, 0.7, 0.55, 0.4)
"""Limits, as shares of the peak without one."""

BUDGET_SECONDS = 60.0
"""Of processor time, after which a plan hangs."""

SEEDS = 5
"""Of a random plan, before it is left out."""

FAILURES = ("wrong", "crash", "hang")

PROGRAM_FILE = re.compile(r"program_\w+\.py$")

MODULE = "module"
"""The plan of a program that runs as a parallel module, on a mesh of this process alone."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of a program under a plan: right, refused, wrong, crash or hang; what was said."""

    kind: str
    mesh: str
    plan: str
    message: str = ""

    @property
    def reason(self) -> str:
        """The same for messages that differ in numbers, and in the names of values, modules and places alone."""
        text = re.sub(r"\(program_\w+\.py:\d+ in \w+\)", "(#)", self.message.split("\n")[0])
        text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]|\([0-9, ]*\)|-?\d[\d.e+-]*", "#", text)
        text = re.sub(r"\b(self\.|model\.|args\.|kwargs\.|buffer |gradient |parameter )[\w.#]+", r"\1#", text)
        return re.sub(r"\b[a-z]{1,2}#", "#", text)[:120]


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


# ---------------------------------------------------------------------------------------------------- simulated ranks


class Programmed(EagerTrial):
    """A trial of a program, which is made anew for eager and for capture: what its functions close over is copied by no
    other way."""

    def __init__(self, program: Program) -> None:
        self.program, self.seed, self.steps = program, 0, STEPS
        loaded, traced = program.load(), program.load()
        self.args, self.kwargs = (), loaded.batch(0)
        self.model, self.loss_fn = loaded.make(), getattr(loaded, "loss_fn", None)
        self.planners: dict[tuple[tuple[str, int], ...], Planner] = {}
        model = traced.make()
        with untouched_random_state():
            self.base = Planner(model, {"a": 1}, (), traced.batch(0), loss_fn=getattr(traced, "loss_fn", None))
        if changed := _differing(self.model, model):
            raise RuntimeError(f"capture changed {changed} of the model")
        metas = self.captured.graph.metas.values()
        self.tolerance = max(TOLERANCES[d] for d in (torch.float64, *(m.dtype for m in metas)) if d in TOLERANCES)

    @cached_property
    def expected(self) -> list[StepResult]:
        return self.eager()

    def eager(self, around: AbstractContextManager[Any] | None = None) -> list[StepResult]:
        """Eager's steps within a context, of a model that is made outside of it."""

        def run(read: Any = None) -> list[StepResult]:
            loaded = self.program.load()
            options = {"loss_fn": getattr(loaded, "loss_fn", None), "steps": self.steps, "seed": self.seed}
            model = loaded.make()
            with around or nullcontext():
                return eager_steps(model, lambda: ((), loaded.batch(0)), self.captured, **options, read=read)

        try:
            with untouched_random_state():
                results = run()
                if DRAWS in results[0].outputs:
                    loaded = self.program.load()
                    loss_fn = getattr(loaded, "loss_fn", None)
                    read = read_draws(loaded.make(), lambda: ((), loaded.batch(0)), self.captured, loss_fn=loss_fn)
                    results = run(read)
        except Exception as error:
            kind = ValueError if _is_of_program(error) else RuntimeError
            raise kind(f"the reference does not run: {type(error).__name__}: {error}") from error
        return results


def _is_of_program(error: BaseException) -> bool:
    """Whether a program's own code raised, or what it called of PyTorch; and not what watches it."""
    of_autopar = tuple(str(Path(module.__file__ or "").parent) for module in (autopar, autopar.passes, autopar.runtime))
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = next((name for name in reversed(names) if PROGRAM_FILE.search(name) or name.startswith(of_autopar)), "")
    return bool(PROGRAM_FILE.search(last))


def _differing(model: nn.Module, other: nn.Module) -> str:
    """What of two models is not the same."""
    for tensors in ("named_parameters", "named_buffers"):
        ones, others = (dict(getattr(m, tensors)()) for m in (model, other))
        for name in ones.keys() | others.keys():
            a, b = ones.get(name), others.get(name)
            same = a is not None and b is not None and a.requires_grad == b.requires_grad and b.grad is None
            if not same or not torch.equal(a, b):  # type: ignore[arg-type]
                return f"{name} in {tensors}"
    modules = zip(model.modules(), other.modules(), strict=False)
    return "modes" if any(one.training != mine.training for one, mine in modules) else ""


class Rounding(TorchDispatchMode):
    """Moves what each operator computes by a part of its last digit, in forward, backward and optimizer. (Stochastic
    arithmetic: Vignes, "Discrete stochastic arithmetic for validating results of numerical software", 2004.) Sums in
    another order differ by more: by the root of how many numbers there are. What an operator only moves stays as it
    is."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            for leaf in pytree.tree_leaves(result):
                self._round(leaf, given)
        return result

    def _round(self, result: Any, given: list[torch.Tensor]) -> None:
        if not isinstance(result, torch.Tensor) or not result.is_floating_point() or result.layout != torch.strided:
            return
        if any(stride == 0 < size - 1 for size, stride in zip(result.shape, result.stride(), strict=True)):
            return
        values = [
            t.reshape(-1) for t in given if t is not result and (t.dtype, t.layout) == (result.dtype, result.layout)
        ]
        if values and bool(torch.isin(result, torch.cat(values)).all()):
            return
        numbers = max((t.numel() for t in given), default=1)
        digit = (
            torch.finfo(result.dtype).eps
            * math.sqrt(numbers)
            * (2 * torch.rand(result.shape, generator=self.generator) - 1)
        )
        result.mul_(1 + digit.double()) if result.dtype == torch.float64 else result.add_(result * digit)


def unsteady(eager: Callable[..., list[StepResult]]) -> float:
    """How far eager's own results move where its operators round otherwise: sums whose parts cancel, and functions
    where they saturate, have few digits left."""

    exact = eager()
    moved = [errors(*pair) for seed in range(4) for pair in zip(eager(Rounding(seed)), exact, strict=True)]
    return 4 * max((error for found in moved for error in found.values() if math.isfinite(error)), default=0.0)


def limited(trial: EagerTrial, mesh: Mapping[str, int], share: float) -> PlanRow:
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


def in_parts(trial: EagerTrial, mesh: Mapping[str, int], seed: int, parts: str) -> PlanRow | None:
    """A random plan with every stretch in two parts that can be; None where there is none."""
    planner = trial.on(mesh)
    assignment = random_assignment(planner.space, seed)
    program = bucket(planner.writer.plain(assignment))
    cut = (SLICING if parts == "sliced" else CHUNKING).everywhere(program, 2)
    return None if cut == program else trial.row(parts, cut, layouts(planner.space, assignment))


def row(trial: Programmed, mesh: Mapping[str, int], plan: str) -> PlanRow | None:
    """`row_of`, once more where eager's own results are not steady up to the tolerance."""
    found = row_of(trial, mesh, plan)
    if found is None or found.equal or found.failure:
        return found
    tolerance, trial.tolerance = trial.tolerance, max(trial.tolerance, unsteady(trial.eager))
    return found if trial.tolerance == tolerance else row_of(trial, mesh, plan)


def row_of(trial: EagerTrial, mesh: Mapping[str, int], plan: str) -> PlanRow | None:
    """A plan by its name beside eager: of a solver or preset, "random 17", "random 17 lowered", "sliced 17",
    "chunked 17", "within 0.7"."""
    kind, _, text = plan.partition(" ")
    if kind == "within":
        return limited(trial, mesh, float(text))
    if kind not in ("sliced", "chunked", "random"):
        return trial.of_solver(mesh, plan)
    for seed in range(int(text.split()[0]), int(text.split()[0]) + SEEDS):
        try:
            random_assignment(trial.on(mesh).space, seed)
        except ValueError:  # no plan of this seed
            continue
        if kind == "random":
            return trial.of_random(mesh, seed, lower=text.endswith("lowered"))
        return in_parts(trial, mesh, seed, kind)
    return None


# ---------------------------------------------------------------------------------------------------- a parallel module


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process, if there is none."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def module_differs(program: Program) -> str:
    """How a parallel module that trains as the program says departs from eager ("": in nothing)."""
    with one_rank(), torch.random.fork_rng():
        loaded, ours = program.load(), program.load()
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        loss_fn = getattr(ours, "loss_fn", None)
        parallel = autopar.parallelize(ours.make(), mesh, kwargs=ours.batch(0), loss_fn=loss_fn)
        vars(parallel)["applies_loss_fn"] = loss_fn is not None
        try:
            eager = list(steps(loaded, loaded.make(), plain))
        except Exception as error:
            raise ValueError(f"eager does not run: {type(error).__name__}: {error}") from error
        tolerance = tolerance_of(program)
        for number, (theirs, mine) in enumerate(zip(eager, steps(ours, parallel, gathered), strict=True)):
            found = errors(as_result(mine), as_result(theirs))
            wrong = {name: error for name, error in found.items() if not error <= tolerance}
            if wrong:
                (kind, name), error = max(wrong.items(), key=lambda item: item[1])
                return f"step {number + 1}: {'/'.join(sorted({k for k, _ in wrong}))}, {kind} {name} by {error:.2g}"
    return ""


def tolerance_of(program: Program) -> float:
    """By the narrowest dtype that the source names."""
    if re.search(r"bfloat16", program.source):
        return TOLERANCES[torch.bfloat16]
    return TOLERANCES[torch.float32 if re.search(r"float32|\.float\(\)", program.source) else torch.float64]


# ------------------------------------------------------------------------------------------------------------ outcomes


def plans(seed: int, effort: int) -> Iterator[tuple[Mapping[str, int], str]]:
    """Which plans of a program are tried, the quickest first: few of many programs (0), or many of few (2)."""
    draw = Random(seed)
    number = draw.randrange(10**6)
    for mesh in draw.sample(MESHES, 2) if effort > 1 else [draw.choice(MESHES)]:
        yield mesh, f"random {number}"
        if effort or draw.random() < 0.3:
            yield mesh, f"{draw.choice(('sliced', 'chunked'))} {number + 1}"
        if effort > 1 or draw.random() < 0.3 * effort:
            yield mesh, f"random {number + 2} lowered"
        if effort > 1 or draw.random() < 0.1 * effort:
            yield mesh, "dp"
            yield mesh, draw.choice(tuple(PRESETS))
            yield mesh, f"within {draw.choice(SHARES)}"
        if effort > 1:
            yield from ((mesh, f"random {number + k}") for k in range(3, 6))


def outcomes(program: Program, seed: int, *, effort: int = 1, budget: float = BUDGET_SECONDS) -> Iterator[Outcome]:
    """A program under plans of a seed, and as a module."""
    drawing = False
    if program.is_plain:
        made: list[Programmed] = []

        def capture() -> None:
            made.append(Programmed(program))
            assert made[0].expected

        captured = outcome("-", "capture", capture, budget)
        if captured.kind != "right":
            yield captured
            return
        drawing = any(i.role == "seed" for i in made[0].captured.graph.inputs) or generator.draws(program)
        for mesh, plan in plans(seed, effort):
            shape = ",".join(f"{axis}={size}" for axis, size in mesh.items())
            found = outcome(shape, plan, lambda mesh=mesh, plan=plan: row(made[0], mesh, plan), budget)  # type: ignore[misc]
            if found.kind != "refused" or plan not in PRESETS:  # which are not for every model
                yield found
            if found.kind in FAILURES:
                return  # what is wrong under one plan is told
    if not drawing and (effort or not program.is_plain or seed % 3 == 0):  # a module draws seeds of its own
        yield outcome("a=1", MODULE, lambda: module_differs(program), budget)


def again(program: Program, mesh: Mapping[str, int], plan: str, budget: float = BUDGET_SECONDS) -> Outcome:
    """One plan of a program once more."""
    shape = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    if plan == MODULE:
        return outcome(shape, plan, lambda: module_differs(program), budget)

    def run() -> PlanRow | None:
        trial = Programmed(program)
        assert trial.expected
        return None if plan == "capture" else row(trial, mesh, plan)

    return outcome(shape, plan, run, budget)


def worst(found: list[Outcome]) -> Outcome:
    """Which of the outcomes of a program is told."""
    return max(found, key=lambda o: ("right", "refused", "hang", "crash", "wrong").index(o.kind))


def is_same(one: Outcome, other: Outcome) -> bool:
    """Whether two failures look alike."""
    graph = ["captured graph is not" in failed.message for failed in (one, other)]
    crash = [failed.message.split(":")[0] if failed.kind == "crash" else "" for failed in (one, other)]
    return one.kind == other.kind and graph[0] == graph[1] and crash[0] == crash[1]


SCRIPT = """\
# {kind}: {plan} on {mesh}
{message}
# again: python benchmarks/generated.py --again FILE --mesh {mesh} --plan "{plan}"

{source}

if __name__ == "__main__":
"""

CHECKED = """\
    from autopar.testing import check

    loss_fn = globals().get("loss_fn")
    print(check(make(), {shape}, kwargs=batch(0), loss_fn=loss_fn, plans=3, steps=3))
"""

TRAINED = """\
    import runpy

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    for name in ("eager", "parallel"):
        own = runpy.run_path(__file__)  # so that they share no state
        model = own["make"]()
        if name == "parallel":
            model = autopar.parallelize(model, mesh, kwargs=own["batch"](0), loss_fn=own.get("loss_fn"))
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = own["optimizer"](model) if "optimizer" in own else sgd
        for step in range(3):
            if "train" in own:
                stepping = own["train"](model, optimizer, step)
            else:
                loss = model(**own["batch"](step))
                loss.backward()
                stepping = iter([loss])
            loss = next(stepping)
            norms = {{name: f"{{p.grad.norm():.6f}}" for name, p in model.named_parameters() if p.grad is not None}}
            print(name, step, f"loss {{loss:.6f}}, norms of gradients {{norms}}")
            next(stepping, None)
            if "train" not in own:
                optimizer.step()
                optimizer.zero_grad()
"""


def script(program: Program, failed: Outcome) -> str:
    """A failure as a file that runs."""
    mesh = failed.mesh if "=" in failed.mesh else "a=2"
    fields = {
        "kind": failed.kind, "plan": failed.plan, "mesh": mesh, "source": program.source,
        "message": "\n".join(f"# {line}" for line in textwrap.wrap(failed.message, 110)[:12]),
    }  # fmt: skip
    ran = TRAINED.format() if failed.plan == MODULE else CHECKED.format(shape=mesh_shape(mesh))
    return SCRIPT.format(**fields) + ran


def outcome(mesh: str, plan: str, run: Callable[[], PlanRow | str | None], budget: float) -> Outcome:
    def of(kind: str, message: str) -> Outcome:
        return Outcome(kind=kind, mesh=mesh, plan=plan, message=message)

    grad = torch.is_grad_enabled()
    try:
        with within(budget):
            found = run()
        if torch.is_grad_enabled() != grad:
            return of("crash", "grad mode is another one afterwards")
        if left := _modes_left():
            return of("crash", f"modes are active afterwards: {left}")
    except ValueError as error:
        return of("refused", str(error))
    except Hang as error:
        return of("hang", f"more than {error}")
    except Exception as error:
        left = _modes_left()
        return of(
            "crash", f"{type(error).__name__}: {error} ({_last_line(error)}){f', and leaves {left}' if left else ''}"
        )
    finally:
        torch.set_grad_enabled(grad)
    if isinstance(found, str):
        return of("wrong", found) if found else of("right", "")
    if found is None or found.equal:
        return of("right", "")
    if found.failure:
        # replicas that differ are a wrong result, found before it is compared
        return of("wrong" if "replicas at" in found.failure else "crash", found.failure)
    kinds = [kind for kind, error in found.errors.items() if not error <= found.tolerance]
    return of("wrong", f"step {1 + (found.step or 0)}: {'/'.join(kinds)}, {found.first}")


def _modes_left() -> list[str]:
    """Modes that are still active, by the names of their classes; they are no longer."""
    left = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    for _ in left:
        _pop_mode()
    return left


def _last_line(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename.rpartition('/')[2]}:{last.lineno}"
