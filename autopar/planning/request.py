"""What a person asks of a planner, each option once: its name, type, default, help, range and spelling.

`Options` are the keywords of the verbs and `Request` their values, checked. From the fields of `Request` come the
options of the command line, the keys of `autopar.toml`, the errors, and the tables of docs/api.md. `Source` is what the
command line builds a model from. Nothing here imports PyTorch, so that `--help` does not wait for it.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args

from autopar.extensions import TABLES, nearest, unknown
from autopar.files.kinds import Size

from .progress import WHOLE, Stage

if TYPE_CHECKING:
    from autopar.cluster.machine import Cluster
    from autopar.cost.optimizers import Optimizer
    from autopar.ir.precision import Precision

    from .constraints import Constraints

AUTO = "auto"

STAGES = "pp"
"""The mesh axis whose devices are the stages of a pipeline, if nothing else is said."""

Recompute = Literal["auto", "asked", "none"]
"""What backward makes again: what the planner chooses; what lies in the calls of `torch.utils.checkpoint` that the
model makes, and nothing else; nothing."""

COMPILED = ("default", "max-autotune-no-cudagraphs")
"""Modes of `torch.compile` in which programs are compiled, those without CUDA graphs; `True` is the first."""

Gathers = Literal["each", "once"]
"""When forward gathers parameters: in each micro-batch, or once a step, held until gradients are reduced."""

Lengths = Sequence[int] | Mapping[int, float]
"""What batches are padded to, with equal shares of the batches or with those that are given."""

LimitFrom = Literal["given", "device", "lifted", "none"]
"""Where a plan's memory limit is from: the caller; the device's memory less its reserve; nowhere, since the caller
lifted it, or since the cluster does not say what memory its devices have."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "solver": (AUTO, "dp", "ilp", "exhaustive"),
    "preset": ("ddp", "fsdp", "megatron", "megatron_sp", "atp", "par4d", "meshslice"),
    "cost": ("analytical", "serial", "volume", "hybrid", "profiled"),
    "optimizer": ("adamw", "adamw_fp32", "sgd", "sgd_momentum", "adamw_on_host", "adamw_fp32_on_host"),
    "recompute": get_args(Recompute),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "searched"),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "gather dtype": ("bfloat16", "float16", "float8_e4m3fn"),
    "library": ("fsdp2", "parallelize_module", "transformers", "torchtitan"),
}
"""The words that options take, by kind. Those of tables are autopar's own rows, since the tables need PyTorch; a test
holds that they are the same."""

HEADROOM = 0.05
"""The part of a device's memory, beyond the cluster's reserve, that plans leave free unless told otherwise."""

MICRO_BATCHES_MOST = 4096

NUMBER = r"\d+(\.\d+)?"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a field says of itself. A value is one of the words of the kinds `names`, or of the `kinds` of type and in
    the interval `range`, or as `check` wants it; `give` says what to give instead of another. The command line calls it
    `flag` (the field's name if not given) and takes a text `typed` as this type, of which `read` makes the value;
    `spelled` is what `help` lacks for that. An option of several `parts` is typed as so many, whose texts by name are
    its value."""

    help: str
    names: tuple[str, ...] = ()
    kinds: tuple[type, ...] = ()
    range: str = ""
    check: Callable[[Any], None] | None = None
    give: str = ""
    flag: str = ""
    typed: Any = str
    read: Callable[[Any], Any] | None = None
    spelled: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)

    def flag_of(self, name: str) -> str:
        """How the command line spells the option of a field, or a part of it."""
        return f"--{(self.flag or name).replace('_', '-')}"

    def checked(self, name: str, value: Any) -> None:
        """Raises ValueError for a value that the option does not take."""
        if self.check is not None:
            self.check(value)
        elif self.names:
            words = [word for kind in self.names for word in known(kind)]
            if not isinstance(value, str) or value not in words:
                if self.give:
                    raise ValueError(f"{name} is {shown(value)}{nearest(value, words)}: give {self.give}")
                headed = {f"{kind}s": known(kind) for kind in self.names}
                raise ValueError(unknown(name, value, headed if len(headed) > 1 else words))
        elif self.kinds:
            is_valid = isinstance(value, self.kinds) and isinstance(value, bool) == (self.kinds == (bool,))
            if is_valid and self.range:
                low, high = map(float, self.range[1:-1].split(","))
                ends = ({"[": low}.get(self.range[0]), {"]": high}.get(self.range[-1]))
                is_valid = low < value < high or value in ends
            if not is_valid:
                raise ValueError(f"{name} is {shown(value)}: give {self.give}")


def known(kind: str) -> Iterable[str]:
    """The words of a kind, with the rows that people added to its table."""
    return dict.fromkeys((*NAMES[kind], *(name for table in TABLES if table.kind == kind for name in table)))


def shown(value: Any) -> str:
    """A value with its type, cut if it is long."""
    if value is None:
        return "None"
    if hasattr(value, "requires_grad"):  # without PyTorch, which may not be there
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def check_lengths(lengths: Any) -> None:
    is_list = isinstance(lengths, Sequence) and not isinstance(lengths, str)
    shares = lengths if isinstance(lengths, Mapping) else dict.fromkeys(lengths, 1) if is_list else {}
    are_lengths = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shares)
    are_shares = all(isinstance(x, (int, float)) and 0 <= x < math.inf for x in shares.values())
    if not are_lengths or not are_shares or not sum(shares.values()):
        raise ValueError(
            f"lengths is {shown(lengths)}: give the lengths that batches are padded to, such as (512, 1024), or "
            f"each with the share of batches that it is for, such as {{512: 0.8, 1024: 0.2}}"
        )


def lengths_of(text: str) -> dict[int, float]:
    """As the command line takes them. Raises ValueError for text that is none."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {int(length): float(*share or (1,)) for length, *share in pairs}
    except (ValueError, TypeError):
        raise ValueError(f"--lengths is {text!r}: write lengths, such as 512,1024, or 512=0.8,1024=0.2") from None


def check_imbalance(imbalance: Any) -> None:
    is_list = isinstance(imbalance, Sequence) and not isinstance(imbalance, str) and len(imbalance) > 1
    values = imbalance if is_list else [imbalance]
    are_numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v < math.inf for v in values)
    if not are_numbers or (sum(values) <= 0 if is_list else imbalance < 1):
        raise ValueError(
            f"imbalance is {shown(imbalance)}: give the rows of the fullest rank over the mean of all, 1.0 or more, or "
            f"a list with the rows of each expert, as a run counted them"
        )


def check_compile(mode: Any) -> None:
    if not isinstance(mode, bool) and mode not in COMPILED:
        near = nearest(mode, COMPILED) if isinstance(mode, str) else ""
        raise ValueError(
            f"compile is {shown(mode)}{near}: give True, False, or a mode of torch.compile ({', '.join(COMPILED)})"
        )


def check_micro_batches(count: Any) -> None:
    is_valid = isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MICRO_BATCHES_MOST
    if not is_valid and count != AUTO:
        raise ValueError(
            f"micro_batches is {shown(count)}: give how many calls of the module a step has, 1 to "
            f"{MICRO_BATCHES_MOST}, or, on a mesh with an axis of stages, 'auto'"
        )


def micro_batches_of(text: str) -> int | str:
    """As the command line takes it."""
    return int(text) if text.isdecimal() else text


def check_schedule(name: Any) -> None:
    if name != AUTO and (not isinstance(name, str) or name not in known("schedule")):
        raise ValueError(unknown("schedule", name, (AUTO, *known("schedule"))))


def imbalance_of(text: str) -> float | list[float]:
    """As the command line takes it. Raises ValueError for text that is none."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--imbalance is {text!r}: give a number, or one of each expert with commas between") from None
    return values[0] if len(values) == 1 else values


def check_constraints(constraints: Any) -> None:
    example = 'such as {"lm_head.weight": {"tp": "S(0)"}}'
    if constraints is None:
        return
    if not isinstance(constraints, Mapping):
        raise ValueError(f"constraints is {shown(constraints)}: give placements on mesh axes by name, {example}")
    for pattern, placements in constraints.items():
        if not isinstance(pattern, str):
            raise ValueError(f"constraint {pattern!r} is no name: give a name or a pattern as text, {example}")
        if not isinstance(placements, Mapping):
            raise ValueError(f"constraint {pattern!r} is {shown(placements)}: give a placement for an axis, {example}")
        for axis, text in placements.items():
            is_stage = isinstance(text, int) and not isinstance(text, bool)
            if not isinstance(axis, str) or not (isinstance(text, str) or is_stage):
                raise ValueError(
                    f"constraint {pattern!r}: {axis!r}={text!r} is no placement: give R (replicated) or S(d) (dim "
                    f"d split) as text, {example}, or on an axis of stages the number of one, such as 0"
                )


def quiet(*told: Any) -> None:
    """Takes what nobody asked for."""


# ------------------------------------------------------------------------------------- values of texts that are typed


def constraints_of(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parses texts such as "lm_head.weight:tp=S(0)"."""
    placements: dict[str, dict[str, str]] = {}
    for text in texts:
        match = re.fullmatch(r"([^:=]+):(\w+)=(.+)", text)
        if match is None:
            raise ValueError(f"--pin is {text!r}: write NAME:AXIS=PLACEMENT, such as lm_head.weight:tp=S(0)")
        name, axis, placement = match.groups()
        if placements.setdefault(name, {}).setdefault(axis, placement) != placement:
            raise ValueError(
                f"--pin {text!r} contradicts {axis}={placements[name][axis]} for the same name: give one of them"
            )
    return placements


UNITS = {"": 1, "B": 1, **{f"{p}B": 1000 ** (k + 1) for k, p in enumerate("KMGT")}}
UNITS |= {f"{p}iB": 1024 ** (k + 1) for k, p in enumerate("KMGT")}


def byte_count(text: str) -> float:
    """Parses "40GB" or "40GiB"; "none" and "inf" are no limit."""
    if text.strip().lower() in ("none", "inf"):
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"--memory-limit is {text!r}: give bytes, such as 40GB or 40GiB, or none for no limit")
    count: float = float(match[1]) * UNITS[match[2]]
    return count


def check_optimizer(name: str) -> None:
    if name not in NAMES["optimizer"]:
        raise ValueError(f"{unknown('optimizer', name, NAMES['optimizer'])}; or give bytes per element of a parameter")


def check_dtype(name: str, option: str = "--dtype", kind: str = "dtype") -> None:
    words = NAMES[kind]
    if name not in words:
        raise ValueError(f"{option} is {name!r}{nearest(name, words)}: give {', '.join(words[:-1])} or {words[-1]}")


def settings_of(texts: Sequence[str]) -> dict[str, str]:
    """Parses texts such as "hidden_size=1024"."""
    values: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--set has {text!r}: write KEY=VALUE, such as hidden_size=1024")
        values[key] = value
    return values


def parsed(settings: Mapping[str, str]) -> dict[str, Any]:
    """The values of settings: JSON, or else texts."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or brackets in brackets
            raise ValueError(
                f"--set {key} is a JSON value that cannot be read ({error}): write a simpler one"
            ) from error
    return values


# --------------------------------------------------------------------------------------------------------- the options


def says(**about: Any) -> Mapping[str, Option]:
    """The metadata of a field that is an option: what it says of itself (`Option`)."""
    return {"option": Option(**about)}


class Keywords(TypedDict, total=False):
    """The keywords of every verb that plans: fields of `Request`."""

    cost: str
    memory_limit_bytes: float | None
    headroom: float | None
    optimizer: str | float | Optimizer
    constraints: Constraints | None
    effort: float | None
    recompute: Recompute
    offload: bool
    micro_batches: int | Literal["auto"]
    pipeline: str | None
    schedule: str
    precision: Precision | None
    imbalance: float | Sequence[float]
    compile: bool | str
    profiles: str | Path | None


class Several(Keywords, total=False):
    """The keywords of verbs that make several plans: where answers are kept, who is told how far it is, and who gets
    what is known so far."""

    keep: str | Path | None
    report: Callable[[float, str], None]
    each: Callable[[Any], None]


class Options(Keywords, total=False):
    """The keywords of verbs that make one plan."""

    solver: str
    cluster: str | Cluster | None
    within: str | Path | Mapping[str, str] | None


class LengthOptions(Options, total=False):
    """The keywords of verbs that plan for several lengths of a batch together."""

    lengths: Lengths | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request for a plan, one value from the verbs down to the solves. `stage` is what is done for the plan,
    `device_type` the type of device if it is not the cluster's, and `gathers` what the planner chose of micro-batches.

    Raises ValueError for an invalid option. What names a cluster, an optimizer or dtypes is checked where it is looked
    up, and `constraints.pins` checks the names in constraints.
    """

    cluster: str | Cluster | None = field(
        default=None, metadata=says(help="A name of the library (see autopar clusters), or a TOML file.")
    )
    solver: str = field(
        default=AUTO,
        metadata=says(
            help=f"One of {', '.join(NAMES['solver'])}; or a preset: {', '.join(NAMES['preset'])}.",
            names=("solver", "preset"),
        ),
    )
    cost: str = field(
        default="analytical",
        metadata=says(help=f"What the plan minimizes: {', '.join(NAMES['cost'])}.", names=("cost",)),
    )
    memory_limit_bytes: float | None = field(
        default=None,
        metadata=says(
            help="Memory of a rank at a step's peak. Default: device memory less the cluster's reserve and headroom.",
            kinds=(Real,),
            range="(0, inf]",
            give="a positive number of bytes, such as 40e9, math.inf for no limit, or None for what the device has",
            flag="memory-limit",
            read=byte_count,
            spelled="Such as 40GB, or none.",
        ),
    )
    headroom: float | None = field(
        default=None,
        metadata=says(
            help=f"Part of device memory to keep free beyond the cluster's reserve. Default: {HEADROOM}.",
            kinds=(Real,),
            range="[0, 1)",
            give=f"the part of a device's memory that plans leave free, such as {HEADROOM} (as by default), or 0",
            typed=float,
        ),
    )
    optimizer: str | float | Optimizer = field(
        default="adamw",
        metadata=says(
            help=f"Its states count as memory: {', '.join(NAMES['optimizer'])}; or bytes per element.",
            read=lambda text: float(text) if re.fullmatch(NUMBER, text) else text,
        ),
    )
    constraints: Constraints | None = field(
        default=None,
        metadata=says(
            help="Placements of parameters and inputs that are fixed, and modules that are kept off an axis.",
            check=check_constraints,
            flag="pin",
            typed=list[str],
            read=constraints_of,
            spelled="NAME:AXIS=PLACEMENT, such as lm_head.weight:tp=S(0) or model.layers.*.mlp:dp=R. Repeatable.",
        ),
    )
    effort: float | None = field(
        default=None,
        metadata=says(
            help="Time budget of the search in seconds; returns the best plan found. Default: run to completion.",
            kinds=(int, float),
            range="(0, inf]",
            give="the seconds after which the search ends with the best that it has, or None for a search that ends by "
            "itself",
            typed=float,
        ),
    )
    recompute: Recompute = field(
        default="auto",
        metadata=says(
            help="What backward makes again: auto (the planner chooses), asked (what torch.utils.checkpoint marks), "
            "none.",
            names=("recompute",),
            give="'auto' (the planner chooses what backward makes again), 'asked' (what torch.utils.checkpoint marks "
            "in the model, and nothing else) or 'none'",
        ),
    )
    offload: bool = field(
        default=False,
        metadata=says(
            help="Let what is kept for backward wait in the host's memory, where that makes the step shorter within "
            "the limit.",
            kinds=(bool,),
            give="True (the planner may send to the host what is kept for backward) or False",
            typed=bool,
        ),
    )
    micro_batches: int | Literal["auto"] = field(
        default=1,
        metadata=says(
            help="Calls of a step, each of a batch like the example; gradients are reduced once. With an axis of "
            "stages: parts of the example, which is a step's whole batch; 1 and auto: chosen.",
            check=check_micro_batches,
            typed=str,
            read=micro_batches_of,
        ),
    )
    pipeline: str | None = field(
        default=None,
        metadata=says(
            help=f"The mesh axis of pipeline stages, the outermost. Default: {STAGES}, if the mesh has it.",
            kinds=(str,),
            give=f"the name of a mesh axis, such as {STAGES!r}, or None",
        ),
    )
    schedule: str = field(
        default=AUTO,
        metadata=says(
            help=f"Of a pipeline: auto (the shortest step), {', '.join(NAMES['schedule'])}.", check=check_schedule
        ),
    )
    precision: Precision | None = field(
        default=None,
        metadata=says(
            help="The dtypes in which parameters are used and gathered and gradients reduced. Default: the model's.",
            parts={
                "param_dtype": "What parameters are cast to in use; they rest in --dtype, as masters.",
                "reduce_dtype": "What gradients are reduced in. Not given: what they are computed in.",
                "gather_dtype": f"What parameters travel in: {', '.join(NAMES['gather dtype'])}. Not given: as used.",
            },
        ),
    )
    imbalance: float | Sequence[float] = field(
        default=1.0,
        metadata=says(
            help="How unevenly rows fall on experts: the rows of the fullest rank over the mean of all.",
            check=check_imbalance,
            read=imbalance_of,
            spelled="Or the rows of each expert, such as 120,80,95,105.",
        ),
    )
    compile: bool | str = field(
        default=False,
        metadata=says(
            help=f"Whether ranks run compiled programs, in a mode of torch.compile: {', '.join(COMPILED)}.",
            check=check_compile,
        ),
    )
    profiles: str | Path | None = field(
        default=None,
        metadata=says(
            help="The database of what was measured; the user's own if not given.",
            kinds=(str, Path),
            give="the path of a profile database, or None",
            typed=Path,
        ),
    )
    within: str | Path | Mapping[str, str] | None = field(
        default=None,
        metadata=says(
            help=f"Plan inside what a library can express: {', '.join(NAMES['library'])}; or inside what a plan of one "
            "says, a file of names and styles.",
            kinds=(str, Path, Mapping),
            give=f"a library ({', '.join(NAMES['library'])}), the path of a plan of one, or names and styles",
        ),
    )
    lengths: Lengths | None = field(
        default=None,
        metadata=says(
            help="Lengths (dim 1) that batches are padded to, each planned, with one placement of parameters at rest.",
            check=check_lengths,
            read=lengths_of,
            spelled="Such as 512,1024, or with shares of batches: 512=0.8,1024=0.2.",
        ),
    )
    stage: Stage = field(default=WHOLE, compare=False, repr=False)
    device_type: str | None = None
    gathers: Gathers = "each"

    def __post_init__(self) -> None:
        for name in ASKED:
            check(name, getattr(self, name))

    @property
    def bytes_limit(self) -> float | None:
        """The limit of a search: none where it is lifted, or left to the device (`Planner.fitting`)."""
        limit = self.memory_limit_bytes
        return None if limit is None or math.isinf(limit) else float(limit)

    @property
    def free_part(self) -> float:
        """The part of a device's memory that is left free."""
        return HEADROOM if self.headroom is None else self.headroom

    @property
    def limit_from(self) -> LimitFrom:
        """Where the limit is from, as a plan says it."""
        if self.memory_limit_bytes is None:
            return "none"
        return "lifted" if self.bytes_limit is None else "given"

    @property
    def compiled(self) -> str:
        """The mode in which programs are compiled; "" if they are not."""
        return self.compile if isinstance(self.compile, str) else COMPILED[0] if self.compile else ""

    @property
    def preset(self) -> str | None:
        return self.solver if self.solver in known("preset") else None

    @property
    def exact_solver(self) -> str:
        """The solver of the request's problems; the dynamic program by default, and for a preset's."""
        return self.solver if self.solver in known("solver") and self.solver != AUTO else "dp"

    @property
    def shares(self) -> dict[int, float]:
        """The lengths of batches, the longest first, and the part of the batches that is padded to each."""
        lengths = self.lengths or ()
        shares = lengths if isinstance(lengths, Mapping) else dict.fromkeys(lengths, 1.0)
        whole = sum(shares.values())
        return {length: shares[length] / whole for length in sorted(shares, reverse=True)}

    @property
    def pinned(self) -> Mapping[str, Mapping[str, str]]:
        """The constraints, as a plan keeps them."""
        return {pattern: dict(placements) for pattern, placements in (self.constraints or {}).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """How the command line builds the model again: what `autopar plan` was given."""

    model: str = field(
        metadata=says(
            help="module:callable, hf:ConfigClass such as hf:LlamaConfig, or a config.json of Hugging Face or its "
            "folder."
        )
    )
    settings: Mapping[str, str] = field(
        default_factory=dict,
        metadata=says(
            help="KEY=VALUE of the configuration, or of the callable. Repeatable.",
            flag="set",
            typed=list[str],
            read=settings_of,
        ),
    )
    batch: Size = field(default=8, metadata=says(help="Global batch size.", range="[1, inf)", typed=int))
    sequence: Size = field(default=128, metadata=says(help="Sequence length.", range="[1, inf)", typed=int, flag="seq"))
    dtype: str = field(default="float32", metadata=says(help="The model's, such as float32, bfloat16 or float16."))


def options_of(record: Any) -> dict[str, Option]:
    """The options among the fields of a record."""
    return {f.name: f.metadata["option"] for f in fields(record) if "option" in f.metadata}


ASKED, DEFAULTS = options_of(Request), {f.name: f.default for f in fields(Request)}
DEFAULTS |= {"keep": None, "report": quiet, "each": quiet}


def check(name: str, value: Any) -> None:
    """Raises ValueError for a value that an option of a request does not take."""
    if value is not None or DEFAULTS[name] is not None:
        ASKED[name].checked(name, value)


def takes(options: type) -> Callable[[F], F]:
    """For a verb whose last parameter, `**options`, is such a `TypedDict`: whoever asks for its signature sees each of
    them with its default, and one that it does not take is refused with the nearest that it does."""

    def of(verb: F) -> F:
        signature = inspect.signature(verb)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        kinds = {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()}
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
            for name, default in DEFAULTS.items()
            if name in kinds
        ]
        names = {p.name for p in (*own, *more)}

        @functools.wraps(verb)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() - names:
                raise TypeError(f"{verb.__name__}() got an unexpected keyword argument {name!r}{nearest(name, names)}")
            return verb(*args, **kwargs)

        checked.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return of
