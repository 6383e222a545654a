"""The names that options list in `--help`: autopar's own rows of its tables, which need PyTorch. A test holds that they
are the same."""

from __future__ import annotations

AUTO = "auto"

SOLVERS = (AUTO, "dp", "ilp", "exhaustive", "greedy", "beam")

PRESETS = ("ddp", "fsdp", "megatron", "megatron_sp", "atp", "par4d", "meshslice")

COSTS = ("analytical", "serial", "volume", "hybrid", "profiled")

DTYPES = ("float32", "bfloat16", "float16", "float64")

OPTIMIZERS = ("adamw", "adamw_fp32", "sgd", "sgd_momentum")
