"""50 steps of Trainer, Accelerate and Lightning on ranks beside one process: `python benchmarks/trainers.py`.

What `tests/integrations/test_integrations.py` does with few steps: accumulation, clipping, evaluation, smaller last
batches, and checkpoints after half of the steps (Accelerate: after the first epoch; Lightning: after half of the
epochs) that are resumed with the same plan and with another one, in float32 and under autocast to bfloat16. Prints the
largest relative difference to one process of what is logged: losses, norms of gradients, losses of evaluations.

Under autocast, products round to bfloat16, and round differently where they are split. How much that is by itself is
measured without any rank: one process of plain PyTorch takes the same steps in micro-batches of a half, and of a
quarter, which is the same mathematics. The parallel run must not be farther off than the larger of these two is. And
against the run in float32, it must not be farther off than all of the plain ones in bfloat16 by more than a half.
Exits with 1 if it is, or if a run in float32 is off by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# in the place of this folder, where `models` is another file
sys.path[:1] = [str(ROOT / "tests" / folder) for folder in ("support", "integrations")]


def run(count: int, function: Callable[..., Any], *given: Any) -> list[Any]:
    import ranks

    return ranks.run(count, function, *given, timeout_seconds=3600)


def off(found: Iterable[Any], expected: Iterable[Any]) -> float:
    """The largest relative difference of numbers, or of those under the same names."""
    pairs: list[tuple[float, float]] = []
    for one, other in zip(found, expected, strict=True):
        pairs += [(one[name], other[name]) for name in other] if isinstance(other, Mapping) else [(one, other)]
    return max(abs(one - other) / max(abs(other), 1e-9) for one, other in pairs)


def trainer_rows(folder: Path, steps: int) -> Iterable[tuple[str, float, float]]:
    import test_integrations as tests

    def alone(name: str, *given: Any) -> Any:
        return run(1, tests.trained_alone, folder / name, steps, *given)[0][0]

    def parallel(name: str, bf16: bool) -> Any:
        given = folder / name, steps, bf16, ("fsdp", "megatron")
        found = run(2, tests.trained, *given)[0]
        return zip(("fsdp", "fsdp resumed", "megatron resumed from fsdp"), (one[0] for one in found), strict=True)

    exact = alone("alone", False)
    for what, one in parallel("float32", False):
        yield f"Trainer, float32, {what}", off(one, exact), 1e-4
    plain = {rows: alone(f"alone, bfloat16, {rows} rows", True, rows) for rows in (4, 2, 1)}
    split = {rows: off(plain[rows], plain[4]) for rows in (2, 1)}
    for rows, difference in split.items():
        yield f"Trainer, bfloat16, one process, micro-batches of {rows} rows of 4", difference, math.inf
    rounded = {rows: off(plain[rows], exact) for rows in plain}
    for rows, difference in rounded.items():
        yield f"Trainer, bfloat16 to float32, one process, micro-batches of {rows} rows", difference, math.inf
    for what, one in parallel("bfloat16", True):
        yield f"Trainer, bfloat16, {what}", off(one, plain[4]), max(split.values())
        yield f"Trainer, bfloat16 to float32, {what}", off(one, exact), 1.5 * max(rounded.values())


def rows(folder: Path, steps: int) -> Iterable[tuple[str, float, float]]:
    """What was compared, by how much it is off, and by how much it may be."""
    import test_integrations as tests

    yield from trainer_rows(folder, steps)
    epochs = steps // 2  # of two steps each
    for name, bf16, most in (("float32", False, 1e-4), ("bfloat16", True, 5e-2)):
        alone = run(1, tests.accelerated_alone, folder / f"accelerate alone {name}", epochs, bf16)[0]
        state = folder / f"accelerate {name}"
        found = run(2, tests.accelerated, state, (2,), "fsdp", range(epochs), bf16)[0]
        yield f"Accelerate, {name}, fsdp", off(found, alone), most
        found = run(4, tests.accelerated, state, (2, 2), "megatron", range(1, epochs), bf16)[0]
        yield (
            f"Accelerate, {name}, megatron on (2, 2) resumed from fsdp on (2,)",
            off(found, alone[-len(found) :]),
            most,
        )
    for name, bf16, most in (("float32", False, 1e-4), ("bfloat16", True, 5e-2)):
        alone = run(1, tests.fitted, folder / f"lightning alone {name}", 1, epochs, None, bf16)[0]
        checkpoint = run(2, tests.fitted, folder / f"lightning {name}", 2, epochs // 2, None, bf16)[0][2]
        found = run(2, tests.fitted, folder / f"lightning resumed {name}", 2, epochs, checkpoint, bf16)[0]
        yield f"Lightning, {name}, fsdp resumed, at the end", off([found[0]], [alone[0]]), most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    done = []
    with tempfile.TemporaryDirectory() as folder:
        for what, difference, most in rows(Path(folder), options.steps):
            done.append({"what": what, "off": difference, "most": most})
            print(f"{difference:.1e} (most {most:.1e})  {what}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(done, indent=1))
    return 0 if all(row["off"] < row["most"] for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
