"""A lab from outside: `launch` runs a command on its ranks, `run` a function."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from . import supervisor
from .network import INTERFACE, address, network
from .shape import Shape

GRACE_SECONDS = 5.0
"""Between asking a rank to end and killing it."""
PORT = 29500
TAIL = 4000
"""Characters of what ranks wrote that an error quotes."""


def missing() -> list[str]:
    """What a lab needs and is not here."""
    needed = [f"`{tool}` (package iproute2)" for tool in ("ip", "tc") if shutil.which(tool) is None]
    if not sys.platform.startswith("linux"):
        return ["Linux", *needed]
    return needed if os.geteuid() == 0 else ["root (start it with sudo)", *needed]


def environments(shape: Shape, threads: int = 1, base: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """What each rank's environment says, on top of `base` (this process's own if not given)."""
    inner = shape.ranks_per_node
    return [
        {
            **(os.environ if base is None else base),
            "RANK": str(rank),
            "WORLD_SIZE": str(shape.ranks),
            "LOCAL_RANK": str(rank % inner),
            "LOCAL_WORLD_SIZE": str(inner),
            "GROUP_RANK": str(rank // inner),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": str(threads),
        }
        for rank in range(shape.ranks)
    ]


def launch(shape: Shape, command: Sequence[str], *, threads: int = 1) -> int:
    """Run a command on every rank; what ranks write comes out with the rank before each line.

    SIGINT and SIGTERM are passed on to the ranks. When a rank fails the others are ended. Returns the exit status
    of the rank that failed first, 0 if none did. Raises ValueError where a lab cannot be had.
    """
    with _supervisor(shape, [list(command)] * shape.ranks, environments(shape, threads), prefix=True) as process:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}
        try:
            for number in numbers:
                signal.signal(number, lambda number, _: process.send_signal(number))
            return supervisor.exit_status(process.wait())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(
    shape: Shape,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float,
    threads: int = 1,
    show: bool = False,
) -> list[Any]:
    """[function(*arguments) on each rank], in rank order; arguments and results travel as JSON.

    `function` is at the top level of a module or script; inside, `torch.distributed` is initialised with
    gloo. What ranks write is shown, or else quoted in the error. No process outlives the call. Raises
    ValueError where a lab cannot be had, RuntimeError if a rank fails, TimeoutError.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-lab-") as folder:
        call = Path(folder, "call.json")
        call.write_text(json.dumps({"arguments": arguments, **_where(function)}))
        commands = [
            [sys.executable, "-m", "autopar.lab.rank", str(call), str(Path(folder, f"{rank}.json"))]
            for rank in range(shape.ranks)
        ]
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        given = environments(shape, threads, {**os.environ, "PYTHONPATH": path})
        with open(Path(folder, "output"), "w+b") as output:
            with _supervisor(shape, commands, given, prefix=True, output=None if show else output) as process:
                try:
                    code = process.wait(timeout_seconds)
                except subprocess.TimeoutExpired as error:
                    late = f"is not finished after {timeout_seconds} s"
                    raise TimeoutError(f"{function.__name__} in a lab of {shape} {late}{_tail(output)}") from error
            if code == supervisor.NO_LAB:
                raise ValueError(f"there is no lab{_tail(output)}")
            if code:
                raise RuntimeError(f"{function.__name__} in a lab of {shape} failed{_tail(output)}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(shape.ranks)]


def _where(function: Callable[..., Any]) -> dict[str, str]:
    """How a rank finds the function again."""
    name = function.__qualname__
    if "." in name:
        raise ValueError(f"{name} is not at the top level of a module: ranks cannot import it")
    if function.__module__ != "__main__":
        return {"module": function.__module__, "function": name}
    return {"file": os.path.abspath(inspect.getfile(function)), "function": name}


def _tail(output: IO[bytes]) -> str:
    output.flush()
    output.seek(0)
    text = output.read().decode(errors="replace").strip()
    return f": {text[-TAIL:]}" if text else ""


@contextmanager
def _supervisor(
    shape: Shape,
    commands: list[list[str]],
    environments: list[dict[str, str]],
    *,
    prefix: bool,
    output: IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """The supervisor of a lab, at work. Killed at the end, if it is still there, and all that is in the lab with it."""
    if needed := missing():
        raise ValueError(f"a lab needs {', '.join(needed)}: missing here")
    spec = {
        "network": asdict(network(shape)),
        "commands": commands,
        "environments": environments,
        "prefix": prefix,
        "grace_seconds": GRACE_SECONDS,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", supervisor.__file__],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,  # so that Ctrl-C reaches the ranks once, through us
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(spec).encode() + b"\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
