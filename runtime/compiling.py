"""Compiles the stretches of programs with Inductor: each once, in several processes, and on one rank of a machine.

What is compiled lies in Inductor's folder on disk, by its text, the versions and the options. So processes that this
one starts fill the folder, and every rank then reads what it needs from there. `python -m autopar.runtime.compiling`
is such a process: it reads units from its standard input, and says a line for each.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.compat import inductor
from autopar.report.telling import Ticker

from .agreement import exchange, is_first, patiently
from .agreement import together as raised_together
from .stretches import Kernels, Unit

FEW = 3
"""Stretches that this process compiles by itself: starting another one takes as long as compiling one."""


@dataclass(eq=False)
class Inductor:
    """The compiler of a module's programs (`stretches.Compiler`), in a mode of `torch.compile`. With a `mesh`, one rank
    of each machine compiles what no folder has, and the others wait for it, where all ask `together`."""

    mode: str = "default"
    mesh: DeviceMesh | None = None
    fuse: Callable[[Unit, Sequence[torch.Tensor], str], inductor.Fused] = inductor.fused
    processes: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """How many processes compile at once; 0: this one alone."""
    fake_mode: Any = field(default_factory=inductor.fakes, repr=False)
    compiled: dict[str, Kernels | None] = field(default_factory=dict, repr=False)
    """By a unit's key; None for what does not compile."""
    failed: dict[str, str] = field(default_factory=dict)
    """What did not compile, and why."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Inductor:
        return self

    def kernels(self, unit: Unit) -> Kernels | None:
        return self.compiled[unit.key]

    def prepare(self, units: Iterable[tuple[str, Unit]], *, together: bool) -> None:
        named = {unit.key: (words, unit) for words, unit in units if unit.key not in self.compiled}
        mesh = self.mesh if together else None
        if not named and mesh is None:
            return
        what, total = f"autopar: compiling {len(named)} stretches", len(named)
        with Ticker(what, enabled=self._is_first(), foresees=True) as ticker:

            def told(done: int) -> None:
                ticker.tell(what, done / total)

            if mesh is None:
                processes = 0 if self.mesh is not None else self.processes
                _filled([unit for _, unit in named.values()], self.mode, processes, told)
                self._load(named, ticker)
                return
            with patiently(mesh), raised_together(mesh):
                _folder()
            with patiently(mesh):
                wanted = {key: unit for key, (_, unit) in named.items()}
                with raised_together(mesh):  # the others wait for the first
                    if self._is_first_here(wanted, mesh):
                        _filled([*wanted.values()], self.mode, self.processes, told)
                        if mesh.device_type == "cpu":
                            self._load(named, ticker)
                self._load({key: of for key, of in named.items() if key not in self.compiled}, ticker)
                # ranks run the same kernels, so that what is equal on them stays equal to the last bit
                for failed in exchange(set(self.failed), mesh):
                    self.compiled.update(dict.fromkeys(failed & self.compiled.keys()))

    def _load(self, named: Mapping[str, tuple[str, Unit]], ticker: Ticker) -> None:
        for number, (words, unit) in enumerate(named.values()):
            ticker.tell(f"autopar: loading {len(named)} stretches", number / len(named))
            try:
                self.compiled[unit.key] = Kernels(unit, _compiled(unit, self.mode, self.fake_mode, self.fuse))
            except Exception as error:  # of any class: of a compiler, of a C++ compiler, of Triton
                self.compiled[unit.key] = None
                self.failed[unit.key] = _first_line(error)
                if self._is_first():
                    warnings.warn(
                        f"a stretch of {words} runs uncompiled, since it does not compile: {_first_line(error)}",
                        stacklevel=2,
                    )

    def _is_first(self) -> bool:
        return self.mesh is None or is_first(self.mesh)

    @staticmethod
    def _is_first_here(wanted: dict[str, Unit], mesh: DeviceMesh) -> bool:
        """Whether this is the mesh's first rank on its machine; adds what other ranks there want, where they want other
        units. All ranks call it at once."""
        here = (os.uname().nodename, str(inductor.folder()))
        own = [replace(unit) for unit in wanted.values() if unit.differs_by_rank]
        everyone = exchange((here, os.getpid(), own), mesh)
        neighbours = [(pid, units) for place, pid, units in everyone if place == here]
        for _, units in neighbours:
            wanted.update((unit.key, unit) for unit in units)
        return neighbours[0][0] == os.getpid()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _compiled(unit: Unit, mode: str, fake_mode: Any, fuse: Any = inductor.fused) -> inductor.Fused:
    with torch.no_grad(), fake_mode:
        operands = unit.examples()
    fused: inductor.Fused = fuse(unit, operands, mode)
    _mark(unit, mode).touch()
    return fused


def _folder() -> Path:
    """Where it is noted what Inductor's folder has. Raises ValueError where nothing can be written there."""
    try:
        folder = inductor.folder() / "autopar"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"compile= keeps what it compiled in Inductor's folder, which cannot be made ({error}): set "
            f"TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
        ) from error
    return folder


def _mark(unit: Unit, mode: str) -> Path:
    """The file that says that Inductor's folder has a unit."""
    name = torch.cuda.get_device_name(unit.device) if unit.device.type == "cuda" else ""
    versions = (torch.__version__, sys.version, mode, torch.get_num_threads(), unit.key, name)
    return _folder() / hashlib.sha256(repr(versions).encode()).hexdigest()[:24]


def _filled(units: Sequence[Unit], mode: str, processes: int, told: Callable[[int], None]) -> None:
    """Fills Inductor's folder with what it lacks of units for a CPU, in so many processes. (For a GPU Inductor itself
    starts processes.)"""
    lacking = [unit for unit in units if unit.device.type == "cpu" and not _mark(unit, mode).exists()]
    if len(lacking) <= FEW or not processes:
        return
    waiting: SimpleQueue[Unit] = SimpleQueue()
    for unit in sorted(lacking, key=lambda unit: -len(unit.nodes)):
        waiting.put(unit)
    done = SimpleQueue[None]()

    def work() -> None:
        with _process(mode) as ask:
            while True:
                try:
                    unit = waiting.get_nowait()
                except Empty:
                    return
                if not ask(unit):
                    return  # the process is gone: this one will compile the unit
                done.put(None)
                told(done.qsize())

    count = min(len(lacking), processes)
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work) for _ in range(count)]:
            future.result()


@contextmanager
def _process(mode: str) -> Iterator[Callable[[Unit], bool]]:
    """A process that compiles, and says whether it lives; ends with the block. What it cannot compile, this one will
    try."""
    command = [sys.executable, "-m", __name__, mode, str(torch.get_num_threads())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None and process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def ask(unit: Unit) -> bool:
        try:
            asked.write(pickle.dumps(replace(unit)))  # without what it has worked out
            asked.flush()
        except BrokenPipeError:
            return False
        return answers.readline() != b""

    try:
        yield ask
    finally:
        process.kill()
        process.wait()
        with suppress(BrokenPipeError):  # of what the process did not read
            asked.close()
        answers.close()


def main() -> None:
    mode, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    said, sys.stdout = sys.stdout, sys.stderr
    fake_mode = inductor.fakes()
    while True:
        try:
            unit = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            _compiled(unit, mode, fake_mode)
        except Exception as error:  # the process that asked tries again, and says why
            print(_first_line(error), file=sys.stderr)
        print("done", file=said, flush=True)


if __name__ == "__main__":
    main()
