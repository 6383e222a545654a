"""What tests of programs share: the bytes of a float32, and a small cluster."""

from __future__ import annotations

from pathlib import Path

BYTES = 4

LAB = str(Path(__file__).parents[2] / "benchmarks" / "lab" / "2x2.toml")
