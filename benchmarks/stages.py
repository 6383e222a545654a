"""Pipelines beside the step that they cut: `python benchmarks/stages.py [--programs N] [--first SEED] [--zoo]`.

Models that the generator draws (`tests/support/generator.py`), or, with `--zoo`, small ones of `transformers`, are
planned on a mesh whose first axis are micro-batches, cut into stages at random, and run in a random schedule, all
devices in one process, in float64. Loss, outputs, buffers and gradients are compared with those of the same program on
all its ranks at once, and, where no random numbers are drawn, with eager PyTorch. A model whose micro-batches need one
another in the midst of a step is refused by name. The last lines count what came of all.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import torch
import zoo
from generator import Unfit, drawn, why_invalid
from generator import eager as steps_in_eager
from models import Case, eager, in_dtype
from staging import difference, in_time
from torch.utils._pytree import tree_leaves

from autopar.solve.problem import Infeasible
from autopar.solve.schedules import SCHEDULES, scheduled

MESHES = ({"pp": 2, "dp": 2}, {"pp": 4, "tp": 2}, {"pp": 3, "dp": 1}, {"pp": 2, "dp": 2, "tp": 2}, {"pp": 5, "dp": 2})
TOLERANCE = 1e-9
OF_EAGER = {8: 1e-6, 4: 1e-3, 2: 1e-1, 1: 1.0}
"""By the bytes of the narrowest floating numbers: sums are rounded in another order."""

Gradients = Mapping[str, torch.Tensor]


def generated(seed: int) -> tuple[Case, Gradients] | None:
    """A model of the generator's with the gradients of its first step in eager, if the seed draws one that trains as
    every program does, and gives the same when it is run again. Hooks of parameters are a module's, and no copy has
    them."""
    program = drawn(seed)
    if not program.is_plain or "weight.register" in program.source or why_invalid(program):
        return None
    module = program.load()
    loss_fn = getattr(module, "loss_fn", None) or getattr(module, "loss_of", None)
    case = Case(model=module.make(), batch=lambda step: ((), module.batch(step)), loss_fn=loss_fn)
    return case, steps_in_eager(program)[0].gradients


def of_transformers(name: str) -> tuple[Case, Gradients]:
    """In float64, with the gradients in eager: in float32 where kernels do no more, as for grouped products."""
    case = zoo.case(name, 3)
    in_double = in_dtype(case, torch.float64)
    try:
        return in_double, eager(in_double).gradients
    except RuntimeError as error:
        if "Double" not in str(error):
            raise
        return in_double, eager(case).gradients


def tried(case: Case, wanted_gradients: Gradients, rng: random.Random) -> tuple[str, str]:
    """What came of a model: the outcome, and what says more."""
    tensors = [t for t in tree_leaves(case.batch(0)) if isinstance(t, torch.Tensor) and t.ndim]
    rows = min((len(t) for t in tensors), default=1)
    mesh = rng.choice([mesh for mesh in MESHES if mesh["pp"] <= rows] or MESHES)
    devices = rng.choice((2, 3, 4))
    name = rng.choice([name for name in SCHEDULES if name != "searched"])
    schedule = scheduled(name, devices, mesh["pp"], chunks=SCHEDULES[name].chunks or 2)
    try:
        made = in_time(case, devices, mesh)
        cut = made.cut(len(schedule.devices), rng.randrange(1 << 30))
    except (ValueError, Infeasible) as error:
        return "refused", f"{type(error).__name__}: {error}"
    wanted, found = made.whole(), made.piped(cut, schedule)
    error = difference(found, wanted)
    said = f"{mesh} {name} {len(schedule.devices)} stages on {devices}, {len(cut.messages)} messages"
    if not error < TOLERANCE:
        return "wrong", f"{said}: {error:.2g} from the program of all ranks"
    if any(i.role == "seed" for i in made.program.inputs):
        return "right", said
    numbers = (*made.program.metas.values(), *wanted_gradients.values())
    narrow = [number.dtype.itemsize for number in numbers if number.dtype.is_floating_point]
    of_eager = max(
        float((found.gradients[k] - g).abs().max() / max(float(g.abs().max()), 1e-9)) if g.numel() else 0.0
        for k, g in wanted_gradients.items()
    )
    return ("right" if of_eager < OF_EAGER[min(narrow)] else "wrong"), f"{said}: {of_eager:.2g} from eager"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names: list[Any] = list(zoo.ZOO) if options.zoo else list(range(options.first, options.first + options.programs))
    rows, began = [], time.perf_counter()
    for name in names:
        rng = random.Random(str(name))
        try:
            drawn_case = of_transformers(name) if options.zoo else generated(name)
            outcome, said = ("no plain program", "") if drawn_case is None else tried(*drawn_case, rng)
        except Unfit:
            outcome, said = "no plain program", ""
        except Exception as error:  # whatever it is, it is what came of the model
            outcome, said = "crash", f"{type(error).__name__}: {error}"
        rows.append({"model": name, "outcome": outcome, "said": said})
        if outcome in ("wrong", "crash") or options.zoo:
            print(f"{name}: {outcome} {said[:240]}", flush=True)
    counts = Counter(row["outcome"] for row in rows)
    print(f"{len(rows)} models in {time.perf_counter() - began:.0f} s: {dict(counts)}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
