"""The handshake that begins each call: every rank tells the others what it calls, and what differs is an error on all.
So does a backward, and an operator that gathers an output.

A program's collectives meet only if all ranks run the same one. A rank that evaluates alone, that swallowed an error
and went on, or that has other data would hang the others, or spoil their numbers in silence. So each call begins with
an exchange of a few hundred bytes, on a process group of its own on the host, where no collective of a program can get
in its way. A rank that calls as it did before does not wait for the exchange: it travels while the program runs, and is
read before gradients are handed out. A rank that is about to do something new waits for it first.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.compat.collectives import all_gather_single
from autopar.compat.distributed import control_channel, keep_until_exit, local_tensor
from autopar.compat.tensors import is_real

from .agreement import agreed, coordinate_of, digest_of, shared_axes
from .failures import CollectiveError, is_timeout, named_ranks, outlasting

INPUTS_MOST = 6
"""Inputs whose values are compared one by one; further ones are added up."""

SAMPLED = 4096
"""Elements of an input, evenly spaced, that are compared at each call."""

TEXT_BYTES = 384

HEAD: Mapping[str, tuple[str, Callable[[int], str]]] = {
    "program": ("the ranks call different modules", str),
    "failures": ("the ranks do not make the same calls, after an error that only some of them had", "{} errors".format),
    "wants": (
        "the ranks call the module in different modes or with inputs of different forms: call train(), eval(), "
        "requires_grad_() and autocast() alike, and give every rank the same global batch",
        str,
    ),
    "calls": ("the ranks have called the module unequally often", "{} calls".format),
    "has_program": (
        "some ranks must capture the model again, and others need not: set attributes alike on every rank",
        lambda number: "no capture" if number else "a capture",
    ),
    "backwards": ("the ranks have called backward() unequally often since the last call", "{} times".format),
    "reductions": ("some ranks called backward() within no_sync(), and others outside", "{} outside".format),
}
"""The numbers that must be equal on all ranks, in the order in which they are compared: what is wrong where they are
not, and what is said of each rank's number."""
_WANTS = [*HEAD].index("wants")

GATHERS = "gathers "
"""What ranks say before the path of an output that they gather."""

BACKWARD = "backward()"

SAID, NOTHING = "What the ranks say", "The ranks have not heard of each other"
"""How begins what is known of the ranks where an exchange did not come to its end."""

NOTES_SECONDS = 1.0
"""How long a rank that fails waits for what the others say."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intent:
    """What a rank is about to call. `number` is equal where the same is called, and `text` says what that is."""

    number: int
    text: str
    has_program: bool = True
    reads: bool = False
    """Whether the ranks compare values that Python reads before the program runs."""
    defers: bool = False
    """Whether gradients may wait for their reduction: no hook wants to see them before."""
    tensors: Mapping[str, torch.Tensor]
    """The inputs by path."""
    error: Exception | None = None
    """What this rank found wrong."""

    @classmethod
    def failed(cls, error: Exception) -> Self:
        return cls(number=-1, text=f"{type(error).__name__}: {error}", tensors={}, error=error)


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """An exchange under way. `rows` has a line for each rank, once it has ended."""

    call: int
    work: Any
    rows: torch.Tensor
    paths: tuple[str, ...]
    sent: torch.Tensor
    error: Exception | None


class Handshake:
    """What ranks tell each other at the calls of one module."""

    def __init__(self, mesh: DeviceMesh, program: str) -> None:
        self.mesh, self.program = mesh, int(program[:15], 16)
        self.ranks: list[int] = sorted(mesh.mesh.flatten().tolist())
        self.groups = [group for _, _, group in shared_axes(mesh)]
        device = torch.device(mesh.device_type)
        self.channel = control_channel(self.ranks, self.groups[0], device) if self.groups else None
        self.coordinate = coordinate_of(mesh)
        self._start()

    def _start(self) -> None:
        self.calls = self.failures = self.backwards = self.reductions = 0
        self.defers = False
        """Whether gradients may wait on all ranks, as of the last call that was settled."""
        self.before: tuple[int, ...] = ()
        """What was called last."""
        self.exchange: _Exchange | None = None
        self.digests = _Digests(self.coordinate)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handshake:
        copied = Handshake.__new__(Handshake)
        vars(copied).update(vars(self))
        copied._start()
        return copied

    def begin(self, intent: Intent) -> None:
        """Tell the others of a call, and wait for what they say unless it is as the last one was. Raises ValueError on
        all ranks, now or in `settle`, if they do not do the same, and what this rank found wrong."""
        self.settle()
        self.calls += 1
        if self.channel is None:
            if intent.error is not None:
                raise intent.error
            self.defers = intent.defers
            return
        now = self._tell(intent, self.digests.of(intent.tensors), self.channel.group)
        self.backwards = self.reductions = 0
        if now != self.before or not intent.has_program or intent.reads or intent.error is not None:
            self.settle()
        self.before = now

    def gathers(self, output: str) -> None:
        """Tell the others that this rank is about to gather an output of a call, and wait for what they say. Raises
        ValueError on all ranks if they do something else."""
        self._say(f"{GATHERS}{output}")
        self.settle()

    def differentiates(self, absent: Sequence[str]) -> None:
        """Tell the others of a backward without gradients of some outputs; they may gather outputs instead."""
        self._say(f"{BACKWARD} without {', '.join(absent)}" if absent else BACKWARD)

    def _say(self, text: str) -> None:
        """Tell the others what follows a call."""
        self.settle()
        if self.channel is not None:
            number = 1 << 61 | zlib.crc32(text.encode())
            intent = Intent(number=number, text=text, defers=self.defers, tensors={})
            self._tell(intent, [0] * 2 * INPUTS_MOST, self.channel.group)

    def _tell(self, intent: Intent, digests: Sequence[int], group: dist.ProcessGroup) -> tuple[int, ...]:
        """Begin an exchange; what others must have the same of, whichever call it is."""
        head = {
            "program": self.program,
            "failures": self.failures,
            "wants": intent.number,
            "calls": self.calls,
            "has_program": int(intent.has_program),
            "backwards": self.backwards,
            "reductions": self.reductions,
        }
        words = torch.cat([torch.tensor([*head.values(), *digests, int(intent.defers)]), _words(intent.text)])
        rows = torch.empty(len(self.ranks) * len(words), dtype=torch.int64)
        work = all_gather_single(rows, words, group)
        self.exchange = _Exchange(
            call=self.calls, work=work, rows=rows, paths=tuple(intent.tensors), sent=words, error=intent.error
        )
        return tuple(number for name, number in head.items() if name != "calls")

    def settle(self) -> None:
        """Wait for the exchange of the last call. Raises ValueError, on all ranks, if they did not do the same."""
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        try:
            with outlasting():
                exchange.work.wait()
        except RuntimeError as error:
            self.failures += 1
            mine = f"rank {dist.get_rank()} came to call {exchange.call} ({_text(exchange.sent)}) and"
            self._note(f"{mine} waited for the others")
            how = "not all others did, within the timeout" if is_timeout(error) else "lost the connection to another"
            raise CollectiveError(f"{mine} {how}", self._cause() or self._notes()[0]) from error
        self._check(exchange)

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """What goes wrong within it on this rank, the others learn when they end."""
        try:
            yield
        except CollectiveError as error:
            self.failures += 1
            if self.channel is None or error.guess.startswith((SAID, NOTHING)):  # `settle` has told and asked
                raise
            self._note(f"rank {dist.get_rank()} waited for others in the {what} of call {self.calls}")
            if (told := self._cause()) is None:
                told, all_spoke = self._notes()
                told = told if all_spoke else f"{error.guess}. {told}"
            error.args = (error.fact, told)
            raise
        except Exception as error:
            self.failures += 1
            if self.channel is not None:
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                self._note(f"rank {dist.get_rank()} failed in the {what} of call {self.calls}: {text}", is_cause=True)
            raise

    def _check(self, exchange: _Exchange) -> None:
        rows = exchange.rows.view(len(self.ranks), -1)
        count = len(HEAD) + 2 * INPUTS_MOST
        self.defers = bool(rows[:, count].all())
        if bool((rows[:, :count] == rows[0, :count]).all()) and exchange.error is None:
            return
        message = self._difference(rows, exchange)
        if message is not None:
            self.failures += 1
            self._note(message, is_cause=True)
            failed = [rank for rank, wants in zip(self.ranks, rows[:, _WANTS].tolist(), strict=True) if wants < 0]
            raise agreed(ValueError(message), self.mesh, next(iter(failed), None)) from exchange.error
        if exchange.error is not None:
            raise agreed(exchange.error, self.mesh)

    def _difference(self, rows: torch.Tensor, exchange: _Exchange) -> str | None:
        """In what the ranks differ."""
        head = dict(zip(HEAD, rows[:, : len(HEAD)].T.tolist(), strict=True))
        texts = [_text(row) for row in rows]
        failed = [k for k, number in enumerate(head["wants"]) if number < 0]
        if failed:
            text = texts[failed[0]]
            if all(texts[k] == text for k in range(len(texts))):
                return None
            kind, _, what = text.partition(": ")
            return f"{what or kind} (on {self._named(failed)} of {len(texts)})"
        for name, (advice, described) in HEAD.items():
            if len(set(head[name])) > 1:
                backwards = [text.startswith(BACKWARD) for text in texts]
                if name == "wants" and any(backwards):
                    advice = HEAD["backwards"][0]
                if name == "wants" and all(backwards):
                    advice = "the losses of ranks read other outputs: let those of all ranks read the same"
                if name == "wants" and any(text.startswith(GATHERS) for text in texts):
                    advice = "an operator that reads an output gathers it on all ranks at once, and they do not all"
                    advice += " read it: read it on every rank, in one order, or take what a rank has (out.to_local())"
                return f"{advice}: {self._by_value(texts if name == 'wants' else [*map(described, head[name])])}"
        for slot in range(INPUTS_MOST):
            shards, digests = rows[:, len(HEAD) + 2 * slot : len(HEAD) + 2 * slot + 2].T.tolist()
            seen: dict[int, int] = {}
            if any(seen.setdefault(shard, digest) != digest for shard, digest in zip(shards, digests, strict=True)):
                path = ", ".join(exchange.paths[slot : None if slot == INPUTS_MOST - 1 else slot + 1])
                groups = self._by_value([f"{d % 2**32:08x}" for d in digests])
                late = " (seen a call late)" if self.digests.are_late else ""
                return (
                    f"input {path} differs between ranks: a plain tensor is the global batch and must be the same on "
                    f"every rank. Give a DTensor if each rank has its own slice (see shard_batch and "
                    f"input_placements). Digests of call {exchange.call}{late}: {groups}"
                )
        return None

    def _by_value(self, values: Sequence[str]) -> str:
        """What each rank has, ranks with the same together."""
        groups: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            groups.setdefault(value, []).append(rank)
        return "; ".join(f"{self._named(ranks)}: {value}" for value, ranks in groups.items())

    def _named(self, rows: Sequence[int]) -> str:
        return named_ranks([self.ranks[row] for row in rows])

    # -- after a failure

    def _cause(self) -> str | None:
        """What one of the ranks failed with, or in what they differed at the last call, if that is known."""
        causes = [note.split(" ", 1)[1] for note in self._read(self.ranks).values() if note[0] == "!"]
        if causes:
            return "; ".join(causes)
        exchange, self.exchange = self.exchange, None
        if exchange is None or not _ended(exchange.work):
            return None
        return self._difference(exchange.rows.view(len(self.ranks), -1), exchange)

    def _note(self, text: str, is_cause: bool = False) -> None:
        assert self.channel is not None
        self.channel.write(str(dist.get_rank()), f"{'!' if is_cause else ' '}{self.calls} {text}")
        for group in (self.channel.group, *self.groups):
            keep_until_exit(group)

    def _notes(self) -> tuple[str, bool]:
        """Where the ranks were as they failed, or the one that is the cause; and whether no rank is silent."""
        found: dict[int, str] = {}
        end = time.monotonic() + NOTES_SECONDS
        while len(found) < len(self.ranks) and time.monotonic() < end:
            found.update(self._read([rank for rank in self.ranks if rank not in found]))
            causes = [note.split(" ", 1)[1] for note in found.values() if note[0] == "!"]
            if causes:
                return "; ".join(causes), True
            time.sleep(0.05)
        if not found:
            return NOTHING, False
        said = "; ".join(note.split(" ", 2)[2] for _, note in sorted(found.items()))
        silent = [row for row, rank in enumerate(self.ranks) if rank not in found]
        nothing = f"; {self._named(silent)} said nothing: stopped, ended, or busy elsewhere" if silent else ""
        return f"{SAID}: {said}{nothing}", not silent

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        """The notes of this call, and of those right before and after it."""
        assert self.channel is not None
        notes = {rank: self.channel.read(str(rank)) for rank in ranks}
        near = {str(call) for call in range(self.calls - 1, self.calls + 2)}
        return {rank: note for rank, note in notes.items() if note and note[1:].split(" ")[0] in near}


@lru_cache(maxsize=64)
def _words(text: str) -> torch.Tensor:
    """The beginning of a text as numbers."""
    padded = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    return torch.frombuffer(bytearray(padded), dtype=torch.int64)


def _text(words: torch.Tensor) -> str:
    return (
        bytes(words[-(TEXT_BYTES // 8) :].contiguous().view(torch.uint8).tolist())
        .rstrip(b"\0")
        .decode(errors="replace")
    )


def _ended(work: Any) -> bool:
    """Whether an exchange has brought what all ranks sent. Nobody waits for one: a rank may have ended."""
    if not work.is_completed():
        return False
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


class _Digests:
    """Digests of a call's inputs: pairs of the shard that this rank has and a digest of a sample of it. On an
    accelerator, which no host waits for, they are those of the call before."""

    def __init__(self, coordinate: tuple[int, ...]) -> None:
        self.coordinate = coordinate
        self.are_late = False
        self.late: tuple[torch.Tensor, Any] | None = None

    def of(self, tensors: Mapping[str, torch.Tensor]) -> list[int]:
        shards = [0] * INPUTS_MOST
        sums: list[Any] = [0] * INPUTS_MOST
        for number, tensor in enumerate(tensors.values()):
            slot = min(number, INPUTS_MOST - 1)
            if isinstance(tensor, DTensor):
                shards[slot], tensor = self._shard(tensor), local_tensor(tensor)
            if is_real(tensor) and tensor.numel():
                value = digest_of(sampled(tensor.detach()))
                sums[slot] = sums[slot] + value * (number + 1)
        return [word for pair in zip(shards, self._on_host(sums), strict=True) for word in pair]

    def _shard(self, tensor: DTensor) -> int:
        number = 1
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                number = number * tensor.device_mesh.size(axis) + self.coordinate[axis] + 1
        return number

    def _on_host(self, sums: list[Any]) -> list[int]:
        devices = {value.device for value in sums if isinstance(value, torch.Tensor)}
        accelerator = next((device for device in devices if device.type != "cpu"), None)
        if accelerator is None:
            self.are_late, self.late = False, None
            return [int(value) for value in sums]
        value = torch.stack([torch.as_tensor(value, device=accelerator) for value in sums])
        host = torch.empty(INPUTS_MOST, dtype=torch.int64, pin_memory=True)
        host.copy_(value, non_blocking=True)
        event = torch.get_device_module(accelerator.type).Event()
        event.record()
        before, self.late = self.late, (host, event)
        self.are_late = True
        if before is None:
            return [0] * INPUTS_MOST
        before[1].synchronize()
        return [int(word) for word in before[0].tolist()]


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Up to so many of its elements, evenly spaced."""
    if tensor.numel() <= 2 * SAMPLED:
        return tensor
    return tensor.reshape(-1)[:: (tensor.numel() // SAMPLED) | 1]
