"""A directory of Hugging Face, sharded, trained, written: `python benchmarks/pretrained.py [--layers N] [--json FILE]`.

A Llama with random weights (1 GB in float32 for 16 layers, in files of 200 MB at most) is saved with transformers. Four
gloo ranks build it on meta, `load_pretrained`, train 10 steps under fsdp, and `save_pretrained`; transformers reads
that again. Prints each rank's peak of resident memory (VmHWM, which counts mapped files) while it reads and while it
writes, beyond what it had before, with the seconds, and compares the losses with those of one process. Exits with 1 if
a rank needs more than its share and a third of the model while it reads, more than a third besides while it writes, or
if losses differ by 1e-4.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# in the place of this folder, where `models` is another file
sys.path[0] = str(ROOT / "tests/support")

RANKS, STEPS, BATCH, SEQUENCE = 4, 10, 4, 32
FILE_BYTES = 200_000_000


def resident(field: str) -> int:
    """Bytes: VmRSS of now, or VmHWM, the most since the mark."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def measured(row: dict[str, Any], what: str) -> Iterator[None]:
    """Seconds of a block, and the most memory that it needs beyond what was there."""
    before, start = resident("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")
    yield
    row[f"{what}_seconds"] = time.perf_counter() - start
    row[f"{what}_bytes"] = resident("VmHWM") - before


def batch() -> dict[str, Any]:
    import torch

    ids = torch.randint(1000, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def losses(module: Callable[..., Any], steps: int) -> list[float]:
    import torch

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[attr-defined]
    found = []
    for _ in range(steps):
        loss = module(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def alone(folder: Path, layers: int) -> tuple[int, list[float]]:
    """Write the model, and train it on one process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=16, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=FILE_BYTES)
    return sum(p.nbytes for p in model.parameters()), losses(model, STEPS)


def once_more(folder: Path) -> list[float]:
    """The loss of what the ranks wrote."""
    from transformers import AutoModelForCausalLM

    return losses(AutoModelForCausalLM.from_pretrained(folder), 1)


def rank(folder: Path) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoConfig, AutoModelForCausalLM

    import autopar

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    parallel = autopar.parallelize(model, mesh, kwargs=batch(), solver="fsdp")
    row: dict[str, Any] = {"rank": torch.distributed.get_rank()}
    with measured(row, "read"):
        parallel.load_pretrained(folder)
    row["share_bytes"] = sum(p.to_local().nbytes for p in parallel.parameters())
    row["losses"] = losses(parallel, STEPS)
    with measured(row, "write"):
        parallel.save_pretrained(folder / "out", max_file_bytes=FILE_BYTES)
    row["losses"] += losses(parallel, 1)
    return row


def table(rows: list[dict[str, Any]], model_bytes: int) -> Iterator[str]:
    yield f"model {model_bytes / 1e6:.0f} MB; a third {model_bytes / 3e6:.0f} MB"
    yield "rank  share MB  read: MB beyond before  seconds  write: MB beyond before  seconds"
    for row in rows:
        yield (
            f"{row['rank']:<4}  {row['share_bytes'] / 1e6:<8.0f}  {row['read_bytes'] / 1e6:<22.0f}  "
            f"{row['read_seconds']:<7.1f}  {row['write_bytes'] / 1e6:<23.0f}  {row['write_seconds']:.1f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    from ranks import run

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # each in a process of its own: ranks are forked, and would use again what this one had freed
        [(model_bytes, expected)] = run(1, alone, folder, options.layers, timeout_seconds=3600)
        rows = run(RANKS, rank, folder, timeout_seconds=3600)
        expected += run(1, once_more, folder / "out")[0]
    print("\n".join(table(rows, model_bytes)))
    off = max(abs(a / b - 1) for row in rows for a, b in zip(row["losses"], expected, strict=True))
    print(f"losses {expected[0]:.4f} to {expected[-1]:.4f}, the last by transformers again; off by {off:.1e} at most")
    if options.json:
        options.json.write_text(json.dumps({"model_bytes": model_bytes, "expected": expected, "rows": rows}, indent=1))
    reads = all(row["read_bytes"] < row["share_bytes"] + model_bytes / 3 for row in rows)
    writes = all(row["write_bytes"] < model_bytes / 3 for row in rows)
    return 0 if reads and writes and off < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
