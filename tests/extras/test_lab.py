"""The lab: ranks on links as slow as they are told to be, and nothing left of it, however it ends."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from autopar.cli import main
from autopar.cluster.library import named_cluster
from autopar.extras import lab
from autopar.extras.lab import supervisor
from autopar.extras.lab.launch import network

pytestmark = pytest.mark.timeout(120)
needs_lab = pytest.mark.skipif(bool(lab.missing()), reason=f"a lab needs {', '.join(lab.missing())}")

COMMAND = [sys.executable, "-m", "autopar.cli", "lab"]


# --- shapes and networks, without a lab


def test_rates_are_written_as_tc_writes_them() -> None:
    assert lab.rate("400mbit") == 50e6
    assert lab.rate("1.5 Gbit/s") == 187.5e6
    assert lab.rate(50e6) == 50e6
    with pytest.raises(ValueError, match="'fast' is no rate: give a number and one of"):
        lab.rate("fast")


def test_a_network_is_a_tree_with_a_bucket_at_both_ends_of_each_link() -> None:
    made = network(lab.nodes(2, 2, "400mbit", "6gbit"))
    assert [line for line in made.hub_ip.splitlines() if "type" in line] == [
        "link add core type bridge",
        "link add 0 type bridge",
        "link add d0 type veth peer name u0",
        "link add d0-0 type veth peer name eth0 netns {0}",
        "link add d0-1 type veth peer name eth0 netns {1}",
        "link add 1 type bridge",
        "link add d1 type veth peer name u1",
        "link add d1-0 type veth peer name eth0 netns {2}",
        "link add d1-1 type veth peer name eth0 netns {3}",
    ]
    ends = [line.split()[3] for line in made.hub_tc.splitlines()]
    assert ends == ["u0", "d0", "d0-0", "d0-1", "u1", "d1", "d1-0", "d1-1"]
    assert made.hub_tc.count("rate 400000000bit") == 4
    assert all("dev eth0 root tbf rate 6000000000bit" in text for text in made.rank_tc)


def test_a_flat_shape_has_one_bridge() -> None:
    assert network(lab.flat(4, "1gbit")).hub_ip.count("type bridge") == 1


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="a level of 0 children: give at least 1"):
        lab.flat(0, "1gbit")
    with pytest.raises(ValueError, match="a lab of 400 ranks: give at most 250"):
        lab.nodes(20, 20, "1gbit", "1gbit")
    with pytest.raises(ValueError, match="cannot be emulated"):
        lab.flat(2, 0.0)


def test_part_of_a_cluster_keeps_the_ratio_of_its_rates_and_of_compute_to_communication() -> None:
    cluster = named_cluster("dgx-a100")
    network_level, nvlink = cluster.levels
    divisor = lab.divisor(cluster, 30e9)
    shape = lab.part_of(cluster, (2, 4), divisor)
    outer, inner = (level.bytes_per_second * divisor for level in shape.levels)
    assert inner == pytest.approx(nvlink.group_bytes_per_second)
    assert outer == pytest.approx(network_level.group_bytes_per_second * 4 * network_level.devices_per_link / 8)
    # seconds of arithmetic an element over seconds to send it: bfloat16 there, float32 here
    peak = cluster.device.flops(torch.bfloat16)
    assert (1 / 30e9) / (4 / (inner / divisor)) == pytest.approx((1 / peak) / (2 / inner))


def test_a_part_that_does_not_fit_its_cluster_is_refused() -> None:
    cluster = named_cluster("dgx-a100")
    with pytest.raises(ValueError, match=r"a lab of 2 x 16 does not fit cluster dgx-a100.*nvlink 8"):
        lab.part_of(cluster, (2, 16), 1.0)
    with pytest.raises(ValueError, match="has no rate for int4; it has"):
        lab.divisor(cluster, 1e9, "int4")


def test_what_a_lab_needs_and_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match=r"a lab needs root .*`ip` .*`tc` .*: missing here"):
        lab.launch(lab.flat(2, "1gbit"), ["true"])


def ranks_end() -> int:
    """Each argument is how a rank ends; the supervisor looks when all but the last have ended, which waits."""
    watching = supervisor._Lab({"grace_seconds": 5.0})
    watching.ranks = [subprocess.Popen(["sh", "-c", how], start_new_session=True) for how in sys.argv[1:]]
    for process in watching.ranks[:-1]:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    watching._reap()
    assert len(watching.ended) == len(watching.ranks) - 1
    assert watching.ranks[-1].wait() == -signal.SIGTERM and watching.failed is not None
    return supervisor.exit_status(watching.failed)


@pytest.mark.parametrize(
    ("how", "said", "status"),
    [
        (("exit 0", "exit 7"), "rank 1 ended with exit status 7", 7),
        (("exit 1", "exit 1"), "ranks 0 and 1 ended with exit status 1", 1),
        (
            ("exit 1", "kill -KILL $$", "exit 0", "exit 1", "exit 1"),
            "ranks 0, 3 and 4 ended with exit status 1, rank 1 with signal SIGKILL",
            1,
        ),
    ],
)
def test_ranks_that_ended_at_once_are_all_named(tmp_path: Path, how: tuple[str, ...], said: str, status: int) -> None:
    command = ranks.start(tmp_path, ranks_end, "ranks_end", *how, "exec sleep 100")
    assert command.status() == status, command.error
    assert command.error == f"autopar lab: {said}; ending the other 1\n"


# --- in a lab


def said() -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return {name: os.environ[name] for name in names} | {"sum": total.item(), "threads": torch.get_num_threads()}


def said_and_sent(size: int) -> tuple[dict[str, Any], float]:
    return said(), seconds_of_a_message(size)


def seconds_of_a_message(size: int) -> float:
    """Of `size` bytes from rank 0 to the last, as the last one sees it."""
    message = torch.zeros(size, dtype=torch.uint8)
    last = dist.get_world_size() - 1
    for _ in range(2):  # the first one opens the connection
        dist.barrier()
        began = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(message, last)
        if dist.get_rank() == last:
            dist.recv(message, 0)
        taken = time.perf_counter() - began
    return taken


def fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the reason")
    dist.barrier()


def fails_with_collectives_under_way() -> None:
    atexit.register(print, "the interpreter ends", file=sys.stderr)
    for _ in range(3000):
        dist.all_reduce(torch.ones(1000), async_op=True)
    raise KeyError("the reason")


def waits() -> None:
    time.sleep(1000)


@pytest.fixture(scope="module")
def slow() -> list[tuple[dict[str, Any], float]]:
    """What the ranks of one lab were told, and how long they took for 4 MB."""
    return lab.run(lab.nodes(2, 1, "80mbit", "6gbit"), said_and_sent, 4_000_000, timeout_seconds=200.0)


@needs_lab
def test_ranks_are_told_who_they_are_and_reach_each_other(slow: list[tuple[dict[str, Any], float]]) -> None:
    assert [told for told, _ in slow] == [
        {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "10.0.0.1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "sum": 3,
            "threads": 1,
        }
        for rank in range(2)
    ]


@needs_lab
def test_links_are_as_slow_as_they_are_told_to_be(slow: list[tuple[dict[str, Any], float]]) -> None:
    assert slow[-1][1] > 0.36  # 0.4 s at 10 MB/s, if nothing else is in the way


@needs_lab
def test_an_error_on_a_rank_is_quoted() -> None:
    """Rank 0 fails as soon as rank 1 has closed its connection, so that both may have ended when the lab looks."""
    with pytest.raises(RuntimeError, match="fails_on in a lab of 2 at 1000 Mbit/s failed") as failure:
        lab.run(lab.flat(2, "1gbit"), fails_on, 1, timeout_seconds=200.0)
    assert "[rank 1] KeyError: 'the reason'" in str(failure.value)
    ended = r"(rank [01] ended with exit status 1; ending the other 1|ranks 0 and 1 ended with exit status 1)$"
    assert re.search(f"^autopar lab: {ended}", str(failure.value), re.MULTILINE), failure.value


def test_a_rank_that_fails_ends_before_its_interpreter_can_abort(tmp_path: Path) -> None:
    """One rank, without a lab. About every sixth interpreter aborted that ended with such collectives under way."""
    call = tmp_path / "call.json"
    where = {"file": __file__, "function": fails_with_collectives_under_way.__name__}
    call.write_text(json.dumps({"arguments": [], **where}))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "autopar.extras.lab.rank", str(call), str(tmp_path / "result.json")],
        env={**os.environ, **alone, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1 and "KeyError: 'the reason'" in done.stderr, done.stderr[-2000:]
    assert "the interpreter ends" not in done.stderr and not (tmp_path / "result.json").exists()


@needs_lab
def test_ranks_that_do_not_finish_are_ended() -> None:
    with pytest.raises(TimeoutError, match=r"waits in a lab of 2 at 1000 Mbit/s is not finished after 0\.5 s"):
        lab.run(lab.flat(2, "1gbit"), waits, timeout_seconds=0.5)


def test_only_functions_that_ranks_can_import_are_run() -> None:
    with pytest.raises(ValueError, match="not at the top level of a module"):
        lab.run(lab.flat(2, "1gbit"), lambda: None, timeout_seconds=1.0)


@needs_lab
def test_output_has_the_rank_before_each_line_and_the_exit_status_is_that_of_the_rank_that_failed(
    tmp_path: Path,
) -> None:
    written = tmp_path / "written"
    fails = f"while [ ! -e {written} ]; do sleep 0.1; done; exit 7"
    script = f"echo one; printf two; if [ $RANK = 1 ]; then {fails}; fi; touch {written}; sleep 100"
    done = subprocess.run([*COMMAND, "--", "sh", "-c", script], capture_output=True, text=True, timeout=200)
    assert sorted(done.stdout.split("\n")) == ["", "[rank 0] one", "[rank 0] two", "[rank 1] one", "[rank 1] two"]
    assert "autopar lab: rank 1 ended with exit status 7; ending the other 1" in done.stderr
    assert done.returncode == 7


@needs_lab
def test_a_command_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    command = _lab(tmp_path, ["--", "no-such-command"])
    assert command.status() == 125
    assert "autopar lab: cannot run 'no-such-command': No such file" in command.error


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    script = "trap 'echo asked; exit 3' INT TERM; echo ready; while :; do sleep 0.1; done"
    command = _lab(tmp_path, ["--", "sh", "-c", script])
    command.lines_until("ready", 2)
    command.send_signal(number)
    assert command.status() == 3
    assert command.output.count("asked") == 2


@needs_lab
def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    """Of the lab, of its supervisor or of a rank: of ranks, of children that left their rank's session, and of the
    network. Four labs live at once, one is killed after the other, and the last one is ended."""
    token = f"300.{os.getpid()}"  # a number of seconds that no other process sleeps
    script = f"readlink /proc/self/ns/net; setsid sleep {token}1 & sleep {token}2 & echo ready; wait"
    labs = [
        _lab(tmp_path / str(number), ["--nodes", "2", "--ranks", "1", "--", "sh", "-c", script]) for number in range(4)
    ]
    try:
        lines = [line for command in labs for line in command.lines_until("ready", 2)]
        namespaces = {line.split()[-1] for line in lines if "net:[" in line}
        assert len(namespaces) == 8
        assert _soon(lambda: len(_sleeping(token)) == 16)
        assert namespaces <= _network_namespaces()
        for victim, command, left in zip(("lab", "supervisor", "rank"), labs, (3, 2, 1), strict=False):
            if victim == "lab":
                command.send_signal(signal.SIGKILL)
            else:
                (supervisor, *_) = _children(command.pid)
                killed = supervisor if victim == "supervisor" else _children(_children(supervisor)[0])[0]
                os.kill(killed, signal.SIGKILL)
            assert command.status() in (-signal.SIGKILL, 128 + signal.SIGKILL), victim
            assert _soon(lambda left=left: len(_sleeping(token)) == 4 * left), victim
            assert _soon(lambda left=left: len(namespaces & _network_namespaces()) == 2 * left), victim
        labs[-1].send_signal(signal.SIGTERM)
        labs[-1].status()
        assert _soon(lambda: not _sleeping(token) and not namespaces & _network_namespaces())
    finally:
        for command in labs:
            command.process.kill()
            command.process.join()


def _lab(folder: Path, arguments: list[str]) -> ranks.Command:
    """`autopar lab`."""
    return ranks.start(folder, main, "autopar", "lab", *arguments)


def _sleeping(token: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", f"^sleep {token}"], capture_output=True, text=True)
    return found.stdout.split()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _network_namespaces() -> set[str]:
    """Of all processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/net"))
        except OSError:
            continue  # it has ended meanwhile
    return found


def _soon(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
