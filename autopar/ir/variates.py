"""Random numbers of distributions with a parameter of their own at every element, by key and global index.

Poisson numbers are quantiles of a uniform number. Gamma numbers are drawn by rejection (Marsaglia and Tsang, A simple
method for generating gamma variables, 2000); every attempt of an element has random words of its own. Both depend on
the key, the element's global index and its parameter alone, as in `autopar.randomness`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .own import define
from .randomness import FORM, Loops, part_of, uniform_of

_ATTEMPTS = 64
"""Each attempt accepts with a probability above 0.95."""
_WORDS = 6
"""Random words of an attempt."""
_ABOVE_ZERO = 2.0**-55
"""Added to a uniform float64, it keeps the number above 0 and does not round it up to 1."""


def poisson(
    key: torch.Tensor, rate: torch.Tensor, box: Loops = None, strides: Loops = None, base: int = 0
) -> torch.Tensor:
    """The smallest k for which the chance of k or fewer exceeds a uniform number; NaN for an invalid rate."""
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
    key: torch.Tensor, shape: torch.Tensor, box: Loops = None, strides: Loops = None, base: int = 0
) -> torch.Tensor:
    """Gamma numbers of scale 1 with these shape parameters; NaN for an invalid one."""
    part, wide = part_of(shape.shape, box, strides, base), shape.double()

    def uniform(word: int) -> torch.Tensor:
        return uniform_of(key, shape.shape, torch.float64, part, word) + _ABOVE_ZERO

    # a shape below 1: the number for shape + 1, times a uniform number to the power of 1 / shape
    small = wide < 1.0
    factor = torch.where(small, uniform(0) ** (1.0 / wide), 1.0)
    d = torch.where(small, wide + 1.0, wide) - 1.0 / 3.0
    c = 1.0 / (9.0 * d).sqrt()
    numbers, waiting = torch.full_like(wide, math.nan), (wide >= 0) & wide.isfinite()
    for attempt in range(_ATTEMPTS):
        word = 2 + attempt * _WORDS
        x = (-2.0 * uniform(word).log()).sqrt() * (2.0 * math.pi * uniform(word + 2)).cos()
        v = (1.0 + c * x) ** 3
        # where v is negative its logarithm is NaN, and the attempt fails
        accepted = waiting & (uniform(word + 4).log() < 0.5 * x * x + d - d * v + d * v.log())
        numbers = torch.where(accepted, d * v, numbers)
        waiting = waiting & ~accepted
        if not bool(waiting.any()):
            break
    return (numbers * factor).to(shape.dtype).clamp_min(torch.finfo(shape.dtype).tiny)


OPERATORS: Mapping[Callable[..., Any], str] = {
    poisson: f"(Tensor key, Tensor rate, {FORM}) -> Tensor",
    standard_gamma: f"(Tensor key, Tensor shape, {FORM}) -> Tensor",
}

define(OPERATORS)
for _function in OPERATORS:
    torch.library.impl(f"autopar::{_function.__name__}", "Meta")(lambda key, parameter, *_: torch.empty_like(parameter))


def workspace_bytes(numel: int) -> int:
    """Peak bytes besides the result: a dozen float64 tensors."""
    return 12 * 8 * numel
