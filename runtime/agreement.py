"""Ranks that decide together: an error on one rank is raised on all, so that nobody waits in a collective."""

import itertools
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.compat import distributed
from autopar.compat.calls import resolved
from autopar.report.telling import Ticker

from .execute import process_groups
from .failures import named_ranks, watched

T = TypeVar("T")


def follow_world_timeout(mesh: DeviceMesh) -> None:
    """Give the mesh's groups the timeout that `init_process_group` was given, unless they have their own."""
    for _, _, group in shared_axes(mesh):
        distributed.follow_world_timeout(group, torch.device(mesh.device_type))


@contextmanager
def patiently(mesh: DeviceMesh) -> Iterator[None]:
    """Within it, ranks wait for as long as the backend's default timeout, however short their groups' own is: to plan
    and to compile takes longer than a step, for which that may be meant."""
    with ExitStack() as stack:
        for _, _, group in shared_axes(mesh):
            stack.enter_context(distributed.patient(group, torch.device(mesh.device_type)))
        yield


def shared_axes(mesh: DeviceMesh) -> list[tuple[int, str, dist.ProcessGroup]]:
    """The axes of several ranks: the number of each, its name (or number), and the group that this rank belongs to."""
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    groups = zip(names, process_groups(mesh), strict=True)
    return [(axis, name, group) for axis, (name, group) in enumerate(groups) if group is not None]


def is_first(mesh: DeviceMesh) -> bool:
    """Whether this is the mesh's first rank."""
    return not any(mesh.get_coordinate() or (1,))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank computes."""
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's coordinate. Raises ValueError on a rank outside of the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh}")
    return tuple(coordinate)


def exchange(value: T, mesh: DeviceMesh) -> list[T]:
    """The values of all ranks of the mesh, in row-major order of their coordinates.

    Values travel pickled, one mesh axis after the other, so that no group beyond the axes' is needed.
    """
    values: list[T] = [value]
    for _, name, group in reversed(shared_axes(mesh)):
        gathered: list[Any] = [None] * group.size()
        with watched("an exchange of what the ranks must agree on,", name, group):
            dist.all_gather_object(gathered, values, group=group)
        values = list(itertools.chain.from_iterable(gathered))
    return values


def telling(doing: str, mesh: DeviceMesh) -> Ticker:
    """Tells on standard error of the mesh's first rank what is done within it, if that takes a while."""
    return Ticker(f"autopar: {doing}", enabled=is_first(mesh))


def on_first_rank(function: Callable[[], T], mesh: DeviceMesh) -> T:
    """The result of `function`, which runs on the mesh's first rank only, on every rank.

    If it raises, every rank raises the same, with its type and message. The result must be picklable. The others wait
    patiently.
    """
    coordinate = coordinate_of(mesh)
    original: Exception | None = None
    message: tuple[T | None, Exception | None] = (None, None)
    if not any(coordinate):
        try:
            message = (function(), None)
        except Exception as error:
            original = error
            message = (None, _portable(error))
    with patiently(mesh):
        for axis, name, group in shared_axes(mesh):
            if not any(coordinate[axis + 1 :]):
                box = [message]
                with watched("a broadcast of the first rank's result,", name, group):
                    dist.broadcast_object_list(box, group=group, group_src=0)
                message = box[0]
    result, failure = message
    if original is not None:
        raise original
    if failure is not None:
        raise agreed(failure, mesh)
    return result  # type: ignore[return-value]


def raise_together(error: Exception | None, mesh: DeviceMesh) -> None:
    """Raise on every rank if any rank brings an error: its type and message, and which ranks had it."""
    errors = exchange(None if error is None else _portable(error), mesh)
    everyone: list[int] = mesh.mesh.flatten().tolist()
    failed = [(rank, raised) for rank, raised in zip(everyone, errors, strict=True) if raised is not None]
    if not failed:
        return
    speaker, first = failed[0]
    same = [rank for rank, raised in failed if type(raised) is type(first) and str(raised) == str(first)]
    if len(same) == len(errors):
        raise agreed(error or first, mesh)
    text = f"{first} (on {named_ranks(same)} of {len(errors)})"
    try:
        located = type(first)(text)
    except TypeError:  # an error with other arguments than a message keeps its own
        located = first
    if error is None or dist.get_rank() not in same:
        raise agreed(located, mesh, speaker) from error
    vars(located).update(vars(error))
    located.with_traceback(error.__traceback__)
    raise agreed(located, mesh, speaker) from error.__cause__


def agreed(error: Exception, mesh: DeviceMesh, speaker: int | None = None) -> Exception:
    """An error that all ranks of the mesh raise: where nobody catches it, the `speaker` prints it, the mesh's first
    rank if that is None, and the others a line. The first rank's line has the message, since its log is the one that
    people look at."""
    first = is_first(mesh)
    if first if speaker is None else dist.get_rank() == speaker:
        return error
    message = f": {error}".splitlines()[0] if first else ""
    says = "the first rank" if speaker is None else f"rank {speaker}"
    vars(error)[_AGREED] = f"rank {dist.get_rank()}: {type(error).__name__}{message}, as {says} says"
    hook = sys.excepthook

    def say(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if _AGREED in vars(raised):
            time.sleep(_FIRST_SECONDS)
            print(vars(raised)[_AGREED], file=sys.stderr)
        else:
            hook(kind, raised, trace)

    if not hasattr(hook, _AGREED):
        setattr(say, _AGREED, True)
        sys.excepthook = say
    return error


_AGREED = "_autopar_agreed"


_FIRST_SECONDS = 2.0
"""How long the others let the first rank speak: launchers end all once one has ended."""


@contextmanager
def together(mesh: DeviceMesh, kind: type[Exception] = Exception) -> Iterator[None]:
    """Raises on every rank, at its end, what any rank raised within it, of this kind."""
    error: Exception | None = None
    try:
        yield
    except kind as caught:
        error = caught
    raise_together(error, mesh)


def all_alike(digests: Mapping[Any, int], mesh: DeviceMesh, message: str, *, everywhere: bool = True) -> None:
    """Raise the same ValueError on every rank unless each name has the same number on all; where it need not be
    `everywhere`, on all that have it. Names may be tuples that begin with one. `message` says what differs and what to
    do, with `{name}` for the first name that does."""
    everyone = exchange(digests, mesh)
    first: dict[Any, int] = {}
    for each in everyone:
        first |= {key: number for key, number in each.items() if key not in first}
    for key, number in first.items():
        if any(other.get(key, None if everywhere else number) != number for other in everyone):
            raise agreed(ValueError(message.format(name=key[0] if isinstance(key, tuple) else key)), mesh)


def all_equal(value: Any, mesh: DeviceMesh, message: str) -> None:
    """Raise the same ValueError on every rank unless all bring an equal value. `message` says what
    differs and what to do; the values of the ranks are added."""
    values = exchange(value, mesh)
    if any(other != values[0] for other in values):
        text = f"{message}: " + ", ".join(f"rank {rank} has {v}" for rank, v in enumerate(values))
        raise agreed(ValueError(text), mesh)


def _portable(error: Exception) -> Exception:
    """The error itself if it survives pickling, and otherwise its text as a RuntimeError."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception as failure:
        return RuntimeError(f"{type(error).__name__}: {error} (not picklable: {failure})")
    return error if str(copy) == str(error) else RuntimeError(f"{type(error).__name__}: {error}")


_WORDS = 1 << 17
"""Words of a tensor that are added up at a time, each with a weight of its own."""


def digest(tensor: torch.Tensor) -> int:
    """A sum of the tensor's bits, each word of them with a weight that says where it stands: exact, and the same
    whatever the order in which it is added up."""
    return int(digest_of(tensor)) % (1 << 64)


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """`digest`, where the tensor is: int64 [], for which no host waits."""
    tensor = resolved(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
    aligned = bits.numel() // 8 * 8
    words, rest = bits[:aligned], bits[aligned:]
    if words.storage_offset() % 8:
        words = words.clone()
    weights = torch.arange(1, 2 * min(_WORDS, max(aligned // 8, 8)), 2, device=bits.device) * _WEIGHT
    total = (rest.long() * weights[: rest.numel()]).sum()
    for number, chunk in enumerate(torch.split(words.view(torch.int64), _WORDS), 1):
        total = total + (chunk * weights[: chunk.numel()]).sum() * (2 * number + 1)
    return total


_WEIGHT = 0x1E3779B97F4A7C15
"""Odd: products with odd numbers, modulo 2^64, tell all words apart."""
