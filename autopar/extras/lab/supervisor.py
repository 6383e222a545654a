"""Builds a lab, runs its ranks and ends with them. It runs as a script, with the standard library alone.

    python supervisor.py < SPEC

Two processes. The outer one is the child of whoever runs the lab. The inner one is the first process of a
PID namespace, in network namespaces that have no name: they exist as long as a process is in them or
holds them open. So the kernel removes every rank, its children and the network as soon as the inner one
ends, however it ends; and it ends when the outer one does, when the standard input (which the caller
holds open) is closed, or when all ranks have ended.

SPEC is one line of JSON: {"network": what `launch.Network` holds, "commands": [[...], ...], "environments": [{...},
...], "prefix": bool, "grace_seconds": ...}, with a command and an environment for each rank.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

NEW_MOUNTS, NEW_PIDS, NEW_NETWORK = 0x00020000, 0x20000000, 0x40000000
PRIVATE, RECURSIVE = 1 << 18, 1 << 14
PARENT_DEATH_SIGNAL = 1
NO_LAB = 125
"""Exit status where the lab could not be built."""

_libc = ctypes.CDLL(None, use_errno=True)


class SetupRefused(Exception):
    """The kernel or a tool refused; the message says what."""


def main() -> int:
    parent = os.getppid()
    _end_with_parent()
    if os.getppid() != parent:
        return 1
    spec = json.loads(sys.stdin.buffer.readline())
    try:
        _call("unshare", NEW_PIDS | NEW_MOUNTS | NEW_NETWORK)
    except OSError as error:
        return _no_lab(f"namespaces cannot be made here ({error.strerror}): a lab needs root with CAP_SYS_ADMIN")
    inner = os.fork()
    if inner == 0:
        code = NO_LAB
        try:
            code = _Lab(spec).run()
        except SetupRefused as error:
            code = _no_lab(str(error))
        finally:
            sys.stdout.flush()
            os._exit(code)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(inner, number))
    _, status = os.waitpid(inner, 0)
    return exit_status(os.waitstatus_to_exitcode(status))


def _no_lab(what: str) -> int:
    print(f"autopar lab: {what}", file=sys.stderr, flush=True)
    return NO_LAB


def _end_with_parent() -> None:
    _call("prctl", PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def exit_status(code: int) -> int:
    """The exit status of a shell: 128 + the signal."""
    return 128 - code if code < 0 else code


class _Stream:
    """Passes on one stream of one rank, line by line."""

    def __init__(self, source: IO[bytes], target: IO[bytes], prefix: bytes) -> None:
        self.source, self.target, self.prefix = source, target, prefix
        self.rest = b""
        os.set_blocking(source.fileno(), False)

    def read(self) -> bool | None:
        """Passes on what is there. Returns None if there is nothing, False at the end of the stream."""
        try:
            data = os.read(self.source.fileno(), 1 << 16)
        except BlockingIOError:
            return None
        if data and not self.prefix:
            self.target.write(data)
        elif data:
            *lines, self.rest = (self.rest + data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")).split(b"\n")
            self.target.write(b"".join(self.prefix + line + b"\n" for line in lines))
        else:
            self.finish()
        self.target.flush()
        return bool(data)

    def finish(self) -> None:
        """Passes on a last line that does not end."""
        if self.rest:
            self.target.write(self.prefix + self.rest + b"\n")
            self.target.flush()
        self.rest = b""


class _Lab:
    """The inner process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.ended: dict[int, int] = {}
        self.failed: int | None = None
        """The exit code of the rank that failed first, of the lowest where several did at once."""
        self.ending = False
        self.kill_at: float | None = None
        self.selector = selectors.DefaultSelector()

    def run(self) -> int:
        _end_with_parent()  # which is outside of the PID namespace, so its number is 0 here
        self._signals()
        _call("mount", b"none", b"/", None, PRIVATE | RECURSIVE, None)
        _call("mount", b"proc", b"/proc", b"proc", 0, None)
        hub = _network_namespace()
        namespaces = [self._new_namespace() for _ in self.spec["commands"]]
        _enter(hub)
        self._build(hub, namespaces)
        for rank, namespace in enumerate(namespaces):
            self._start(rank, namespace)
        self.selector.register(sys.stdin.buffer, selectors.EVENT_READ, None)
        self._watch()
        return 0 if self.failed is None else exit_status(self.failed)

    def _new_namespace(self) -> int:
        _call("unshare", NEW_NETWORK)
        return _network_namespace()

    def _build(self, hub: int, namespaces: list[int]) -> None:
        network = self.spec["network"]
        paths = [f"/proc/{os.getpid()}/fd/{namespace}" for namespace in namespaces]
        _batch("ip", network["hub_ip"].format(*paths))
        for namespace, text in zip(namespaces, network["rank_ip"], strict=True):
            _enter(namespace)
            _batch("ip", text)
            for path, value in network["rank_settings"].items():
                _set(path, value)
        for namespace, text in zip(namespaces, network["rank_tc"], strict=True):
            _enter(namespace)
            _batch("tc", text)
        _enter(hub)
        _batch("tc", network["hub_tc"])

    def _start(self, rank: int, namespace: int) -> None:
        command = self.spec["commands"][rank]
        try:
            process = subprocess.Popen(
                command,
                env=self.spec["environments"][rank],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=lambda: _as_rank(namespace),
                start_new_session=True,
            )
        except OSError as error:
            raise SetupRefused(f"cannot run {command[0]!r}: {error.strerror}") from error
        self.ranks.append(process)
        prefix = f"[rank {rank}] ".encode() if self.spec["prefix"] else b""
        for source, target in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
            assert source is not None
            self.selector.register(source, selectors.EVENT_READ, _Stream(source, target, prefix))

    def _signals(self) -> None:
        """A signal wakes the selector, through a pipe."""
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self.selector.register(reader, selectors.EVENT_READ, "signals")

    def _watch(self) -> None:
        while len(self.ended) < len(self.ranks):
            left = None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
            for key, _ in self.selector.select(left):
                self._event(key)
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self._pass_on(signal.SIGKILL)
                self.kill_at = None
            self._reap()
        self._drain()

    def _event(self, key: selectors.SelectorKey) -> None:
        if key.data == "signals":
            for number in os.read(key.fd, 4096):
                if number in (signal.SIGINT, signal.SIGTERM):
                    # the second time, at once
                    self._end(signal.Signals(number), 0.0 if self.ending else self.spec["grace_seconds"])
        elif key.data is None:
            if not os.read(key.fd, 4096):  # the caller is gone
                os._exit(NO_LAB)
        elif key.data.read() is False:
            self.selector.unregister(key.fileobj)

    def _end(self, number: signal.Signals, grace_seconds: float) -> None:
        self.ending = True
        self._pass_on(number)
        self.kill_at = time.monotonic() + grace_seconds

    def _pass_on(self, number: signal.Signals) -> None:
        for rank, process in enumerate(self.ranks):
            if rank not in self.ended:
                os.killpg(process.pid, number)

    def _reap(self) -> None:
        """Reaps ranks, and their orphans, which the namespace's first process inherits. The ranks that have ended by
        now count as one event: the kernel does not say which of them ended first."""
        numbers = {process.pid: rank for rank, process in enumerate(self.ranks)}
        self._ranks_ended({numbers[pid]: code for pid, code in _ended_children() if pid in numbers})

    def _ranks_ended(self, codes: dict[int, int]) -> None:
        for rank, code in codes.items():
            self.ended[rank] = self.ranks[rank].returncode = code
        failed = {rank: code for rank, code in sorted(codes.items()) if code}
        if not failed or self.failed is not None:
            return
        self.failed = next(iter(failed.values()))
        if not self.ending:
            others = len(self.ranks) - len(self.ended)
            ending = f"; ending the other {others}" if others else ""
            print(f"autopar lab: {_how_ended(failed)}{ending}", file=sys.stderr, flush=True)
            self._end(signal.SIGTERM, self.spec["grace_seconds"])

    def _drain(self) -> None:
        """Passes on what ranks wrote before they ended, without waiting for a child that holds a stream open."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, _Stream):
                while key.data.read():
                    pass
                key.data.finish()


def _ended_children() -> Iterator[tuple[int, int]]:
    """Process id and exit code of each child that has ended by now."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _how_ended(codes: dict[int, int]) -> str:
    """Such as "ranks 0 and 2 ended with exit status 1, rank 1 with signal SIGKILL", from each rank's exit code."""
    ranks: dict[int, list[str]] = {}
    for rank, code in codes.items():
        ranks.setdefault(code, []).append(str(rank))
    parts: list[str] = []
    for code, (*others, last) in ranks.items():
        who = f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
        how = f"exit status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        parts.append(f"{who}{'' if parts else ' ended'} with {how}")
    return ", ".join(parts)


def _as_rank(namespace: int) -> None:
    _enter(namespace)
    signal.set_wakeup_fd(-1)
    _end_with_parent()


def _network_namespace() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(namespace: int) -> None:
    _call("setns", namespace, NEW_NETWORK)


def _batch(tool: str, text: str) -> None:
    done = subprocess.run([tool, "-batch", "-"], input=text + "\n", capture_output=True, text=True)
    if done.returncode:
        raise SetupRefused(f"{tool} cannot build the network: {' '.join((done.stderr or done.stdout).split())}")


def _set(path: str, value: str) -> None:
    try:
        with open(f"/proc/sys/{path}", "w") as file:
            file.write(value)
    except OSError as error:
        raise SetupRefused(f"/proc/sys/{path} cannot be set to {value}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
