"""A lab from outside: `launch` runs a command on its ranks, `run` a function. `network` writes what `ip` and `tc` do.

The network is a tree. The core bridge, and a bridge for each child that is not a rank, lie in one network namespace,
the hub; each rank has a namespace of its own. A link is a veth pair with a token bucket at both ends.
"""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from . import supervisor
from .shape import Shape

INTERFACE = "eth0"
"""A rank's end of its link."""
LATENCY_MILLISECONDS = 4000
"""How long a packet may wait in a bucket before it is dropped: never, in practice."""
SMALLEST_BURST_BYTES = 36 * 1000
BURST_SECONDS = 300e-6
"""A bucket holds what the link carries in that time, and at least four packets; anything more would travel for free."""
PACKET_BYTES = 9000
SEGMENT_BYTES = 32 * 1024
"""What the kernel hands on at once. A bucket that holds less would cut it into packets, one timer each."""
WINDOW = 64
"""Packets that a connection may have under way before it has measured its rate."""
SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/tcp_rmem": "4096 524288 524288",
    "net/ipv4/tcp_wmem": "4096 33554432 33554432",
}
"""Of each rank's namespace. No packet is ever lost, so a sender must be held back by its receiver: else it fills the
bucket's queue with megabytes, and what others send waits behind them. With these, 8 MiB that all ranks sent to
the other node and got from it at once took what the links' rates say (335 ms), all flows alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSetup:
    """Batches for `ip -batch` and `tc -batch`, of the hub and of each rank's namespace. `{3}` in the hub's
    stands for the path of rank 3's namespace."""

    hub_ip: str
    hub_tc: str
    rank_ip: tuple[str, ...]
    rank_tc: tuple[str, ...]
    rank_settings: Mapping[str, str]
    """Path under /proc/sys -> the value to write there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    """A child in the tree: its place from the outermost level in."""

    place: tuple[int, ...]
    bytes_per_second: float
    is_rank: bool


def network(shape: Shape) -> NetworkSetup:
    hub_ip = ["link set lo up", *_bridge("core")]
    hub_tc: list[str] = []
    rank_ip: list[str] = []
    rank_tc: list[str] = []
    for child in _children(shape, ()):
        inner, outer = _name(child.place), _name(child.place[:-1]) if child.place[:-1] else "core"
        down = f"d{inner}"
        if child.is_rank:
            number = len(rank_ip)
            hub_ip.append(f"link add {down} type veth peer name {INTERFACE} netns {{{number}}}")
            lines = [
                "link set lo up",
                f"addr add {address(number)}/24 dev {INTERFACE} noprefixroute",
                f"{_up(INTERFACE)} gso_max_size {SEGMENT_BYTES}",
                f"route add {address(0)[:-1]}0/24 dev {INTERFACE} initcwnd {WINDOW} initrwnd {WINDOW}",
            ]
            rank_ip.append("\n".join(lines))
            rank_tc.append(_bucket(INTERFACE, child.bytes_per_second))
        else:
            up = f"u{inner}"
            hub_ip += [*_bridge(inner), f"link add {down} type veth peer name {up}", f"link set {up} master {inner}"]
            hub_ip.append(_up(up))
            hub_tc.append(_bucket(up, child.bytes_per_second))
        hub_ip += [f"link set {down} master {outer}", _up(down)]
        hub_tc.append(_bucket(down, child.bytes_per_second))
    return NetworkSetup(
        hub_ip="\n".join(hub_ip),
        hub_tc="\n".join(hub_tc),
        rank_ip=tuple(rank_ip),
        rank_tc=tuple(rank_tc),
        rank_settings=SETTINGS,
    )


def address(rank: int) -> str:
    return f"10.0.0.{rank + 1}"


def _children(shape: Shape, place: tuple[int, ...]) -> Iterator[_Child]:
    level = shape.levels[len(place)]
    innermost = len(place) == len(shape.levels) - 1
    for number in range(level.size):
        here = (*place, number)
        yield _Child(place=here, bytes_per_second=level.bytes_per_second, is_rank=innermost)
        if not innermost:
            yield from _children(shape, here)


def _name(place: tuple[int, ...]) -> str:
    return "-".join(map(str, place))


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge", _up(name)]


def burst_bytes(bytes_per_second: float) -> int:
    return max(SMALLEST_BURST_BYTES, round(bytes_per_second * BURST_SECONDS))


def _up(interface: str) -> str:
    return f"link set {interface} mtu {PACKET_BYTES} up"


def _bucket(interface: str, bytes_per_second: float) -> str:
    rate = f"rate {round(bytes_per_second * 8)}bit burst {burst_bytes(bytes_per_second)}b"
    return f"qdisc add dev {interface} root tbf {rate} latency {LATENCY_MILLISECONDS}ms"


GRACE_SECONDS = 5.0
"""Between asking a rank to end and killing it."""
PORT = 29500
TAIL = 4000
"""How many characters of the ranks' output an error quotes."""


def missing() -> list[str]:
    """What a lab needs and this machine lacks."""
    needed = [f"`{tool}` (package iproute2)" for tool in ("ip", "tc") if shutil.which(tool) is None]
    if not sys.platform.startswith("linux"):
        return ["Linux", *needed]
    return needed if os.geteuid() == 0 else ["root (start it with sudo)", *needed]


def environments(shape: Shape, threads: int = 1, base: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Each rank's environment, on top of `base` (this process's own if not given)."""
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
    """Runs a command on every rank, and prints what ranks write with the rank before each line.

    The ranks get SIGINT and SIGTERM too. When a rank fails, the others are ended. Returns the exit status of the rank
    that failed first (of the lowest, where several did at once), 0 if none did. Raises ValueError if a lab cannot be
    built.
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

    `function` is at the top level of a module or script; inside, `torch.distributed` is initialised with gloo. What
    ranks write is shown, or else quoted in the error. No process outlives the call. Raises ValueError if a lab cannot
    be built, RuntimeError if a rank fails, TimeoutError.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-lab-") as folder:
        call = Path(folder, "call.json")
        call.write_text(json.dumps({"arguments": arguments, **_where(function)}))
        commands = [
            [sys.executable, "-m", "autopar.extras.lab.rank", str(call), str(Path(folder, f"{rank}.json"))]
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
    """Where a rank imports the function from."""
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
    """A running supervisor of a lab. The end kills it, and with it all that is in the lab."""
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
