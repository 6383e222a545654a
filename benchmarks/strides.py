"""Which kernels read which operands without their strides: every operator of the table, on operands that lie in memory
in many ways, beside contiguous ones.

    python benchmarks/strides.py                      # kernels as the contract of the table gives them their operands
    python benchmarks/strides.py --without-contract   # kernels as they are: what the contract has to say
    python benchmarks/strides.py --only layer_norm group_norm --draws 60

Arguments are those that the oracle's tests draw (`tests/ops/test_ops.py`), in float64, float32 and bfloat16, with many
dims of size 1. Each operand is laid out alone, and all of them at random. Operators run in processes of their own: a
kernel that reads beyond an operand may end one.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path += [str(Path(__file__).resolve().parents[1] / "tests" / folder) for folder in ("support", "ops", "")]

import test_ops

from autopar.ir.graph import overload, parameters
from autopar.ops.oracle import LAYOUTS, laid_out
from autopar.ops.prepared import prepared_arguments
from autopar.ops.registry import REGISTERED
from autopar.ops.rules import RULES

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2}
TOGETHER = 12
"""Random layouts of all operands for each draw of arguments."""
MEANINGLESS = ("empty_like", "new_empty")
"""Operators whose values mean nothing."""


class Draw(test_ops.Draw):
    """The tests' draws, by a seed. Every other one has many dims of size 1."""

    def __init__(self, seed: int) -> None:
        self.random, self.ones = random.Random(seed), seed % 2
        self.generator = torch.Generator().manual_seed(seed)

    def one_of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def size(self) -> int:
        return 1 if self.ones and self.random.random() < 0.4 else super().size()


Way = tuple[int, ...]
"""Positions, from outside in, of a tensor among arguments."""


@dataclass
class Sweep:
    """What was tried of an operator. `wrong` counts by argument, of which `example` has the first."""

    tried: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    example: dict[str, str] = field(default_factory=dict)
    skipped: str = ""


def each(arguments: Any) -> Iterator[tuple[Way, torch.Tensor]]:
    """The tensors among arguments, each with the way to it."""
    if isinstance(arguments, torch.Tensor):
        yield (), arguments
    elif isinstance(arguments, (list, tuple)):
        for i, item in enumerate(arguments):
            for way, tensor in each(item):
                yield (i, *way), tensor


def put(arguments: Any, way: Way, tensor: torch.Tensor) -> Any:
    """Arguments with another tensor in a place."""
    if not way:
        return tensor
    return [put(item, way[1:], tensor) if i == way[0] else item for i, item in enumerate(arguments)]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Arguments whose numbers of double precision are of another."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is torch.float64 else value
    if isinstance(value, (list, tuple)):
        return [cast(item, dtype) for item in value]
    return dtype if value is torch.float64 else value


def difference(expected: Any, actual: Any, dtype: torch.dtype) -> float:
    """How many times the tolerance the results differ, at most."""
    worst = 0.0
    for (_, a), (_, b) in zip(each(expected), each(actual), strict=True):
        if a.is_complex():
            a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        a, b = a.double(), b.double()
        finite = a[a.isfinite()]
        scale = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
        if not torch.allclose(a, b, rtol=0.0, atol=TOLERANCES[dtype] * scale, equal_nan=True):
            worst = max(worst, (a - b).nan_to_num().abs().max().item() / TOLERANCES[dtype] / scale)
    return worst


def expanded(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor with one of its dims as copies of the first index, of stride 0."""
    for dim in range(x.dim()):
        if x.shape[dim] > 1:
            yield x.narrow(dim, 0, 1).expand(x.shape)


def sweep(op: str, draws: int, contract: bool) -> Sweep:
    """Try one operator."""
    torch.set_num_threads(1)
    swept = Sweep()
    function = overload(op)
    names = [parameter.name for parameter in parameters(op)]
    example = test_ops.EXAMPLES.get(op) or test_ops._pointwise(op)

    def run(args: list[Any], kwargs: dict[str, Any], kept: bool) -> Any:
        if kept:
            args, kwargs = prepared_arguments(op, args, kwargs)
        results = function(*args, **kwargs)
        return results if isinstance(results, (list, tuple)) else [results]

    def attempt(
        what: str, dtype: torch.dtype, args: Any, kwargs: dict[str, Any], placed: list[tuple[Way, torch.Tensor]]
    ) -> None:
        dense, strided = args, args
        for way, tensor in placed:
            dense, strided = put(dense, way, tensor.contiguous()), put(strided, way, tensor)
        try:
            expected = run(dense, kwargs, True)
        except RuntimeError:  # equal rows may be no arguments of it
            return
        swept.tried += 1
        try:
            wrong = difference(expected, run(strided, kwargs, contract), dtype)
            shown = f"{wrong:.2g} times the tolerance"
        except RuntimeError as error:
            wrong, shown = 1.0, str(error).split("\n")[0]
        if wrong:
            swept.wrong[what] += 1
            lay = ", ".join(f"{list(t.shape)} with strides {list(t.stride())}" for _, t in placed)
            swept.example.setdefault(what, f"{dtype} {lay}: {shown}")

    for seed, dtype in zip(range(draws), itertools.cycle(DTYPES)):
        try:
            args, kwargs = example(Draw(seed))
            args, kwargs = cast(args, dtype), {key: cast(value, dtype) for key, value in kwargs.items()}
            run(args, kwargs, contract)
        except (RuntimeError, NotImplementedError) as error:  # no kernel of this dtype, or of this device
            swept.skipped = str(error).split("\n")[0]
            continue
        tensors, generator = list(each(args)), random.Random(seed)
        for way, tensor in tensors:
            # equal rows have no variance: in low precision a norm of them is nothing but rounding
            equal = expanded(tensor) if dtype is torch.float64 else ()
            for other in (*(laid_out(tensor, i) for i in range(LAYOUTS)), *equal):
                attempt(names[way[0]], dtype, args, kwargs, [(way, other)])
        for _ in range(TOGETHER if len(tensors) > 1 else 0):
            placed = [(way, laid_out(t, generator.randrange(LAYOUTS))) for way, t in tensors]
            attempt("several", dtype, args, kwargs, placed)
    return swept


def alone(op: str, draws: int, contract: bool, answer: Callable[[Sweep], None]) -> None:
    answer(sweep(op, draws, contract))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=12, help="draws of arguments for each operator")
    parser.add_argument("--only", nargs="*", default=[], help="operators whose names contain one of these")
    parser.add_argument("--without-contract", action="store_true", help="give kernels operands as they lie")
    options = parser.parse_args()
    tried, wrong, context = 0, 0, multiprocessing.get_context("fork")
    for op in (*RULES.rows, *REGISTERED.own):
        if any(name in op for name in MEANINGLESS) or not any(name in op for name in options.only or ("",)):
            continue
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=alone, args=(op, options.draws, not options.without_contract, send.send))
        process.start()
        send.close()
        try:
            swept: Sweep = receive.recv()
        except EOFError:
            process.join()
            print(f"{op}: the process ended with {process.exitcode}")
            wrong += 1
            continue
        process.join()
        tried += swept.tried
        wrong += sum(swept.wrong.values())
        if not swept.tried:
            print(f"{op}: not tried ({swept.skipped})")
        for name, count in swept.wrong.items():
            print(f"{op}, {name}: {count} of {swept.tried} wrong; {swept.example[name]}", flush=True)
    print(f"{tried} calls, {wrong} wrong")


if __name__ == "__main__":
    main()
