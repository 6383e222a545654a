"""50 steps of Trainer, Accelerate and Lightning on ranks beside one process: `python benchmarks/trainers.py`.

What `tests/test_integrations.py` does with few steps: accumulation, clipping, evaluation, and checkpoints after half of
the steps (Accelerate: after the first epoch; Lightning: after half of the epochs) that are resumed with the same plan
and with another one. Prints the largest relative difference to one process of what is logged: losses, norms of
gradients, losses of evaluations. Exits with 1 if one is above 1e-4, or above 5e-2 under autocast to bfloat16, which
rounds differently where products are split, and more so with each step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# in the place of this folder, where `models` is another file
sys.path[0] = str(ROOT / "tests")


def off(found: Iterable[Any], expected: Iterable[Any]) -> float:
    """The largest relative difference of numbers, or of those under the same names."""
    pairs: list[tuple[float, float]] = []
    for one, other in zip(found, expected, strict=True):
        pairs += [(one[name], other[name]) for name in other] if isinstance(other, Mapping) else [(one, other)]
    return max(abs(one - other) / max(abs(other), 1e-9) for one, other in pairs)


def rows(folder: Path, steps: int) -> Iterable[tuple[str, float, float]]:
    """What was compared, by how much it is off, and by how much it may be."""
    import test_integrations as tests
    from ranks import run

    for name, bf16, most in (("float32", False, 1e-4), ("bfloat16", True, 5e-2)):
        alone = run(1, tests.trained_alone, folder / f"{name} alone", steps, bf16, timeout_seconds=3600)[0][0]
        found = run(2, tests.trained, folder / name, steps, bf16, ("fsdp", "megatron"), timeout_seconds=3600)[0]
        for what, one in zip(("fsdp", "fsdp resumed", "megatron resumed from fsdp"), found, strict=True):
            yield f"Trainer, {name}, {what}", off(one[0], alone), most
    epochs = steps // 2  # of two steps each
    alone = run(1, tests.accelerated_alone, folder / "accelerate alone", epochs)[0]
    found = run(2, tests.accelerated, folder / "accelerate", (2,), "fsdp", range(epochs))[0]
    yield "Accelerate, fsdp", off(found, alone), 1e-4
    found = run(4, tests.accelerated, folder / "accelerate", (2, 2), "megatron", range(1, epochs))[0]
    yield "Accelerate, megatron on (2, 2) resumed from fsdp on (2,)", off(found, alone[-len(found) :]), 1e-4
    alone = run(1, tests.fitted, folder / "lightning alone", 1, epochs)[0]
    checkpoint = run(2, tests.fitted, folder / "lightning", 2, epochs // 2)[0][2]
    found = run(2, tests.fitted, folder / "lightning resumed", 2, epochs, checkpoint)[0]
    yield "Lightning, fsdp resumed, at the end", off([found[0]], [alone[0]]), 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    done = []
    with tempfile.TemporaryDirectory() as folder:
        for what, difference, most in rows(Path(folder), options.steps):
            done.append({"what": what, "off": difference, "most": most})
            print(f"{difference:.1e} (most {most:.0e})  {what}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(done, indent=1))
    return 0 if all(row["off"] < row["most"] for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
