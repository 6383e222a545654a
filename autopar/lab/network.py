"""What `ip` and `tc` are told to build a lab's network.

A tree: the core bridge and a bridge for each child that is not a rank lie in one network namespace, the
hub; each rank has a namespace of its own. A link is a veth pair with a token bucket at both ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .shape import Shape

INTERFACE = "eth0"
"""A rank's end of its link."""
LATENCY_MILLISECONDS = 4000
"""How long a packet may wait in a bucket before it is dropped: never, in practice."""
SMALLEST_BURST_BYTES = 36 * 1000
BURST_SECONDS = 300e-6
"""A bucket holds what the link carries in that time, and at least four packets: what more it held would travel at no
cost."""
PACKET_BYTES = 9000
SEGMENT_BYTES = 32 * 1024
"""What the kernel hands on at once: less than any bucket holds, which would cut it into packets, one timer each."""
WINDOW = 64
"""Packets that a connection may have under way before it has seen how fast it is."""
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
class Network:
    """Batches for `ip -batch` and `tc -batch`, of the hub and of each rank's namespace. `{3}` in the hub's
    stands for the path of rank 3's namespace."""

    hub_ip: str
    hub_tc: str
    rank_ip: tuple[str, ...]
    rank_tc: tuple[str, ...]
    rank_settings: Mapping[str, str]
    """Paths under /proc/sys, and what is written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    """A child in the tree: its place from the outermost level in."""

    place: tuple[int, ...]
    bytes_per_second: float
    is_rank: bool


def network(shape: Shape) -> Network:
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
            rank_ip.append(
                "\n".join(
                    [
                        "link set lo up",
                        f"addr add {address(number)}/24 dev {INTERFACE} noprefixroute",
                        f"{_up(INTERFACE)} gso_max_size {SEGMENT_BYTES}",
                        f"route add {address(0)[:-1]}0/24 dev {INTERFACE} initcwnd {WINDOW} initrwnd {WINDOW}",
                    ]
                )
            )
            rank_tc.append(_bucket(INTERFACE, child.bytes_per_second))
        else:
            up = f"u{inner}"
            hub_ip += [*_bridge(inner), f"link add {down} type veth peer name {up}", f"link set {up} master {inner}"]
            hub_ip.append(_up(up))
            hub_tc.append(_bucket(up, child.bytes_per_second))
        hub_ip += [f"link set {down} master {outer}", _up(down)]
        hub_tc.append(_bucket(down, child.bytes_per_second))
    return Network(
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
