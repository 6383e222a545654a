"""Copies to the host's memory and back, `autopar::to_host` and `autopar::from_host`, while a device computes.

Programs call functions that start a copy, and wait for it as for a collective. On a CPU, and under torch's dispatcher,
they copy there and then.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.own import FUNCTIONS

TO_HOST, FROM_HOST = "autopar.to_host.default", "autopar.from_host.default"

HOST_COPIES = frozenset({TO_HOST, FROM_HOST})


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy under way, and what it reads, held until it is done."""

    source: torch.Tensor
    event: torch.cuda.Event | None

    def wait(self) -> None:
        """What runs from now on has the copy; the rank itself goes on."""
        if self.event is not None:
            self.event.wait()

    def finish(self) -> None:
        """The rank goes on once it is made."""
        if self.event is not None:
            self.event.synchronize()


def to_host(x: torch.Tensor) -> tuple[torch.Tensor, Copy]:
    """A copy in pinned memory of the host, which torch keeps for the next step."""
    return _copied(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=x.is_cuda), x, x.device)


def from_host(x: torch.Tensor) -> tuple[torch.Tensor, Copy]:
    """A copy on the device of what `to_host` copied."""
    device = torch.device("cuda", torch.cuda.current_device()) if x.is_pinned() else x.device
    return _copied(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device), x, device)


def _copied(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Copy]:
    if device.type != "cuda":
        return target.copy_(source), Copy(source, None)
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return target, Copy(source, stream.record_event())


@functools.cache
def _stream(device: torch.device) -> Any:
    """The stream of a device's copies, one after the other."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


for function in (to_host, from_host):
    name = function.__name__
    torch.library.define(f"autopar::{name}", "(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))  # strides stay
    torch.library.impl(f"autopar::{name}", "CompositeExplicitAutograd", torch.clone)
    FUNCTIONS[f"autopar.{name}.default"] = function
