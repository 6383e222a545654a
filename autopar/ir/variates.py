"""Random numbers of distributions with a parameter of their own at every element, by key and global index.

Poisson numbers are quantiles of a uniform number; gamma numbers are drawn by rejection (Marsaglia and Tsang, A simple
method for generating gamma variables, 2000), where the i-th attempt of an element has random words of its own. Either
is a function of the key, the element's global index and its parameter alone, as in `autopar.randomness`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .randomness import FORM, part_of, uniform_of

_ATTEMPTS = 64
"""Each accepts with a probability above 0.95."""
_WORDS = 6
"""Random words that an attempt takes."""
_ABOVE_ZERO = 2.0**-55
"""What keeps a uniform number of float64 off 0, and does not round one up to 1."""


def poisson(
    key: torch.Tensor, rate: torch.Tensor, box: Sequence[int] | None = None, strides: Sequence[int] | None = None,
    base: int = 0,
) -> torch.Tensor:  # fmt: skip
    """The smallest k for which the chance of k or fewer exceeds a uniform number. NaN for a rate that is none."""
    wide = rate.double()
    u = uniform_of(key, rate.shape, torch.float64, part_of(rate.shape, box, strides, base), 0)
    below = torch.full_like(wide, -1.0)
    reaching = (wide + 12.0 * wide.sqrt() + 60.0).ceil_()  # the chance of more is below 2^-60
    furthest = float(reaching.nan_to_num(0.0, 0.0, 0.0).max()) if rate.numel() else 0.0
    for _ in range(math.ceil(math.log2(min(furthest, 2.0**53) + 2.0)) + 1):
        middle = ((below + reaching) / 2).floor_()
        enough = torch.special.gammaincc(middle + 1.0, wide) > u
        reaching = torch.where(enough, middle, reaching)
        below = torch.where(enough, below, middle)
    return torch.where((wide >= 0) & wide.isfinite(), reaching, math.nan).to(rate.dtype)


def standard_gamma(
    key: torch.Tensor, shape: torch.Tensor, box: Sequence[int] | None = None, strides: Sequence[int] | None = None,
    base: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Of scale 1 and of these shape parameters. NaN for one that is none."""
    part, wide = part_of(shape.shape, box, strides, base), shape.double()

    def uniform(word: int) -> torch.Tensor:
        return uniform_of(key, shape.shape, torch.float64, part, word) + _ABOVE_ZERO

    # below 1: a number of one more, times a uniform one to the power of 1 / shape
    small = wide < 1.0
    factor = torch.where(small, uniform(0) ** (1.0 / wide), 1.0)
    d = torch.where(small, wide + 1.0, wide) - 1.0 / 3.0
    c = 1.0 / (9.0 * d).sqrt()
    found, waiting = torch.full_like(wide, math.nan), (wide >= 0) & wide.isfinite()
    for attempt in range(_ATTEMPTS):
        word = 2 + attempt * _WORDS
        x = (-2.0 * uniform(word).log()).sqrt() * (2.0 * math.pi * uniform(word + 2)).cos()
        v = (1.0 + c * x) ** 3
        # where v is negative its logarithm is NaN, and the attempt fails
        accepted = waiting & (uniform(word + 4).log() < 0.5 * x * x + d - d * v + d * v.log())
        found = torch.where(accepted, d * v, found)
        waiting = waiting & ~accepted
        if not bool(waiting.any()):
            break
    return (found * factor).to(shape.dtype).clamp_min(torch.finfo(shape.dtype).tiny)


OPERATORS: Mapping[Callable[..., Any], str] = {
    poisson: f"(Tensor key, Tensor rate, {FORM}) -> Tensor",
    standard_gamma: f"(Tensor key, Tensor shape, {FORM}) -> Tensor",
}

for _function, _schema in OPERATORS.items():
    torch.library.define(f"autopar::{_function.__name__}", _schema)
    torch.library.impl(f"autopar::{_function.__name__}", "CompositeExplicitAutograd")(_function)
    torch.library.impl(f"autopar::{_function.__name__}", "Meta")(lambda key, parameter, *_: torch.empty_like(parameter))


def workspace_bytes(numel: int) -> int:
    """Alive at most beside the result: a dozen tensors of float64."""
    return 12 * 8 * numel
