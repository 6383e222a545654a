"""The lab: a cluster on one machine. Real ranks on real links, slowed down to given rates."""

from .launch import environments, launch, missing, run
from .shape import Links, Shape, check_part, divisor, flat, nodes, part_of, rate

__all__ = [
    "Links",
    "Shape",
    "check_part",
    "divisor",
    "environments",
    "flat",
    "launch",
    "missing",
    "nodes",
    "part_of",
    "rate",
    "run",
]
