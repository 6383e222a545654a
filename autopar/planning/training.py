"""How a plan's step trains, beyond the model itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import torch

from autopar.cost.optimizers import OPTIMIZERS, Optimizer
from autopar.ir.precision import AS_IS, Precision
from autopar.ops.rule import Load

from .request import COMPILED, NAMES, Gathers, Recompute, Request, check, check_optimizer

GATHERS: tuple[Gathers, ...] = get_args(Gathers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """`recompute` says what backward makes again. A step calls the module `micro_batches` times, each time with a batch
    of the size of the example, adds gradients up and reduces them once; `gathers` is the planner's choice. `precision`
    says what it casts, and `imbalance` how rows fall on experts. With `compile`, a mode of `torch.compile`, programs
    are compiled. Raises ValueError for an invalid option."""

    recompute: Recompute = "auto"
    micro_batches: int = 1
    gathers: Gathers = "each"
    precision: Precision = AS_IS
    imbalance: Load = ()
    compile: str = ""

    def __post_init__(self) -> None:
        check("recompute", self.recompute)
        check("micro_batches", self.micro_batches)
        check("compile", self.compile or False)
        if not isinstance(self.precision, Precision):
            raise ValueError(
                f"precision is {self.precision!r}: give an autopar.Precision, such as "
                f"Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
            )

    @staticmethod
    def of(request: Request) -> Training:
        """As a request says."""
        return Training(
            recompute=request.recompute,
            micro_batches=request.micro_batches if isinstance(request.micro_batches, int) else 1,
            gathers=request.gathers,
            precision=AS_IS if request.precision is None else request.precision,
            imbalance=load_of(request.imbalance),
            compile=request.compiled,
        )

    def asked_by(self, request: Request) -> Request:
        """The request for a plan that trains so."""
        same = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(request, **same | {"imbalance": self.asked_imbalance, "compile": self.compile or False})

    def check_asked(self, request: Request) -> None:
        """Raises ValueError where a request asks for something else than a plan that trains so."""
        asked = Training.of(request)
        if self == self.travelling_as_used:
            asked = asked.travelling_as_used
        for field in fields(self):
            theirs, mine = getattr(asked, field.name), getattr(self, field.name)
            if field.name != "gathers" and theirs not in (field.default, mine):
                raise ValueError(
                    f"{field.name} is {theirs!r}, and the plan that was given is for {mine!r}: leave it out, or plan "
                    f"with it"
                )

    @property
    def asked_imbalance(self) -> float | Load:
        """As a request takes it."""
        return self.imbalance if len(self.imbalance) > 1 else next(iter(self.imbalance), 1.0)

    @property
    def asked(self) -> Training:
        """What is the caller's to say."""
        return replace(self, gathers="each")

    @property
    def travelling_as_used(self) -> Training:
        """The same without a narrower dtype for parameters that travel: that is a leave, which is not always taken."""
        return replace(self, precision=self.precision.travelling_as_used)

    @property
    def setting(self) -> dict[str, Any]:
        """What a search space is judged by of it (`passes.space.setting.Setting`)."""
        dtypes = {"reduced_in": self.precision.reduced_in, "gathered_in": self.precision.gathered_in}
        calls = {"micro_batches": self.micro_batches, "holds": self.gathers == "once"}
        return {**calls, **dtypes, "load": self.imbalance}

    @property
    def given(self) -> dict[str, Any]:
        """What is not as by default, as a file says it."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        return given | ({"precision": self.precision.given} if "precision" in given else {})


def load_of(imbalance: float | Sequence[float]) -> Load:
    """How rows fall on experts, as a request says it."""
    if isinstance(imbalance, Sequence):
        return tuple(float(rows) for rows in imbalance)
    return () if imbalance == 1 else (float(imbalance),)


def experts_text(training: Training, experts: int) -> Iterator[str]:
    """How the rows of a model's experts are taken to fall, as a plan says it."""
    load, most = training.imbalance, max(training.imbalance, default=1.0)
    if experts and not load:
        yield "rows are taken to fall evenly on them (imbalance=1.0); the fullest rank of a run takes longer"
    elif len(load) == 1:
        yield f"the fullest rank is taken to have {most:g} times the mean of all rows (imbalance={most:g})"
    elif load:
        mean = sum(load) / len(load)
        yield f"rows fall on them as counted (imbalance=[...]): {most / mean:.3g} times the mean on one"


def recompute_text(training: Training, checkpoints: int) -> Iterator[str]:
    """What backward makes again, as a plan says it: nothing where the planner chooses and the model marks nothing."""
    marked = f"{checkpoints} region{'s' * (checkpoints != 1)} that torch.utils.checkpoint marks"
    if training.recompute == "asked":
        yield f"as asked: {marked}, and nothing else" if checkpoints else "as asked, and the model marks nothing"
    elif training.recompute == "none":
        yield "nothing, as asked" + (f", whatever the model marks ({marked})" if checkpoints else "")
    elif checkpoints:
        yield f'chosen by the planner; {marked} are a hint that it ignores (recompute="asked" follows them)'


def micro_batches_text(training: Training) -> Iterator[str]:
    """What a step of several micro-batches does, as a plan says it."""
    if training.micro_batches > 1:
        gathers = {"each": "in each of them", "once": "once, and held from the first to the last"}[training.gathers]
        yield f"{training.micro_batches} a step, whose gradients are reduced once; forward gathers parameters {gathers}"


def precision_text(training: Training, held: str) -> Iterator[str]:
    """What a step casts, as a plan says it; `held` is the dtype in which the module holds most parameters."""
    precision = training.precision
    if precision.param_dtype is not None:
        inputs = "" if precision.cast_forward_inputs else "; inputs stay as they are"
        yield f"parameters rest in {held or 'their own dtype'} and are used in {precision.param_dtype}{inputs}"
    if precision.reduce_dtype is not None:
        yield f"gradients are reduced in {precision.reduce_dtype}"
    if precision.gather_dtype is not None:
        yield gathered_text(precision, str(precision.param_dtype or held))
    if precision.output_dtype is not None:
        yield f"outputs are cast to {precision.output_dtype}"


def gathered_text(precision: Precision, used: str) -> str:
    """How parameters travel that are used in a dtype, and what of them is lost."""
    dtype: Any = precision.gathered_in
    share = f", {dtype.itemsize / getattr(torch, used).itemsize:.0%} of the bytes of {used}" if used else ""
    which = "parameters" if dtype.itemsize > 1 else "parameters of two dims or more"
    off = math.log2(torch.finfo(dtype).eps) - 1
    return f"{which} travel in {precision.gather_dtype}{share}, and arrive within 2^{off:.0f} of what they are"


def compile_text(training: Training) -> Iterator[str]:
    """How ranks run the program, as a plan says it."""
    if training.compile:
        mode = "" if training.compile == COMPILED[0] else f" in the mode {training.compile}"
        yield f"compiled by torch between collectives{mode}; prices and peak are those of fused ones"


def named_optimizer(optimizer: str | float | Optimizer) -> Optimizer:
    """By name, or, from a number, one that keeps so many bytes per element of a parameter.

    Raises ValueError for an unknown name, and for a number that no optimizer can keep.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        check_optimizer(optimizer)
        here = optimizer.removesuffix("_on_host")
        return replace(OPTIMIZERS[here], name=optimizer, on_host=here != optimizer)
    given: Any = optimizer
    if not isinstance(given, (int, float)) or isinstance(given, bool) or not 0 <= given < float("inf"):
        raise ValueError(
            f"optimizer is {optimizer!r}: give a name ({', '.join(NAMES['optimizer'])}) or bytes per element"
        )
    return Optimizer(name=f"{optimizer:g} bytes per element", bytes_per_element=float(optimizer))
