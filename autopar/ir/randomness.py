"""Random numbers as a function of a key and of an element's global index.

A stateful generator gives every rank numbers of its own, or the same numbers at other places. Here a number is a hash
of (key, index): every rank that holds an element of a tensor draws the same number for it, on a CPU and on a GPU,
whatever else it holds. The operators `autopar::bernoulli`, `autopar::dropout`, `autopar::uniform`, `autopar::normal`
and `autopar::integers` use this "counter-based" generator (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
SC 2011).

A key is int32 [2]; `keys` derives one for each random operator of a program from the seed of a step. `box`, `strides`
and `base` say which elements a rank holds: in row-major order they are nested loops of lengths `box`, whose steps
through the row-major global tensor are `strides`, from index `base` on. Without them an operator fills all of it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .own import define

# odd numbers: 2^32 / golden ratio, the multipliers of Wellons' lowbias32, and 2^32 / plastic number
_WEYL, _FIRST, _SECOND, _HIGH = 0x9E3779B9, 0x7FEB352D, 0x846CA68B, 0xC13FA9A9
_BITS = 32
KEY_SHAPE, KEY_DTYPE = (2,), torch.int32
_CHUNK = {"cpu": 1 << 16}
"""Elements processed at a time: on a CPU as many as fit into a core's cache, elsewhere `_CHUNK_MOST`."""
_CHUNK_MOST = 1 << 24


def keys(seed: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The keys of `count` operators, from a seed int64 [] or [1]: the outputs of splitmix64."""
    z = torch.arange(1, count + 1, device=seed.device) * _int64(0x9E3779B97F4A7C15) + seed
    z = (z ^ _shifted(z, 30)) * _int64(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _int64(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return z.view(torch.int32).view(count, 2).unbind()


def _shifted(z: torch.Tensor, places: int) -> torch.Tensor:
    """The logical right shift of int64."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def _int64(value: int) -> int:
    return (value & (1 << 64) - 1 ^ 1 << 63) - (1 << 63)


def _int32(value: int) -> int:
    return (value & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)


def _wrapped(value: torch.Tensor) -> torch.Tensor:
    """int64 modulo 2^32, as int32."""
    return (((value & 0xFFFFFFFF) ^ (1 << 31)) - (1 << 31)).to(torch.int32)


def workspace_bytes(numel: int, device_type: str) -> int:
    """Peak bytes while random bits of a tensor are drawn: two int32 and up to four int64 an element of a chunk."""
    return (2 * 4 + 4 * 8) * min(numel, _CHUNK.get(device_type, _CHUNK_MOST))


Loops = Sequence[int] | None
"""Lengths or strides of nested loops, the innermost last."""


class _Part(NamedTuple):
    """The elements that a rank holds: `box`, `strides` and `base`."""

    box: Sequence[int]
    strides: Sequence[int]
    base: int


def part_of(shape: Sequence[int], box: Loops, strides: Loops, base: int) -> _Part:
    """The part of a local tensor of this shape."""
    if box is None or strides is None:
        return _Part((math.prod(shape),), (1,), base)
    assert math.prod(box) == math.prod(shape), f"a box {tuple(box)} for a shape {tuple(shape)}"
    return _Part(box, strides, base)


def _chunks(key: torch.Tensor, part: _Part, word: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(start, stop, bits): 32 random bits, as int32, of the elements [start, stop) of a part, in
    row-major order. `word` tells several numbers of one element apart. The next chunk overwrites the bits.

    index * odd + key goes through the finaliser of lowbias32, with more key between its rounds.
    """
    box, strides, base = part
    size = math.prod(box)
    if not size:
        return
    device, chunk = key.device, _CHUNK.get(key.device.type, _CHUNK_MOST)
    wide = base + sum((n - 1) * s for n, s in zip(box, strides, strict=True)) >= 1 << _BITS
    # the loops inside `inner` fit into a chunk, or the innermost alone does not; rows are the others
    inner, depth = 1, len(box)
    while depth and (inner == 1 or inner * box[depth - 1] <= chunk):
        depth -= 1
        inner *= box[depth]
    row = _indices(torch.arange(min(inner, chunk), device=device), box[depth:], strides[depth:])[None]
    step = strides[-1] if inner > chunk else 0  # then the row is one loop, and goes on for longer than a chunk
    rows, rows_at_once = size // inner, max(1, chunk // inner)
    room = torch.empty((2, min(rows, rows_at_once), row.numel()), dtype=torch.int32, device=device)
    first, second = key.unbind()
    if word:
        first, second = first + _int32(word * 0x3C6EF372), second + _int32(word * 0x1B873593)
    hashed = _wrapped(row * _WEYL) + first
    for top in range(0, rows, rows_at_once):
        bottom = min(rows, top + rows_at_once)
        above = _indices(torch.arange(top, bottom, device=device), box[:depth], strides[:depth])[:, None]
        for left in range(0, inner, row.numel()):
            right = min(inner, left + row.numel())
            x, t = room[:, : bottom - top, : right - left]
            start = base + left * step
            if depth:
                torch.add(_wrapped((above + start) * _WEYL), hashed[:, : right - left], out=x)
            else:
                torch.add(hashed[:, : right - left], _int32(start * _WEYL), out=x)
            more = second
            if wide:
                more = second + _wrapped(((above + start + row[:, : right - left]) >> _BITS) * _HIGH)
            _xor_shifted(x, t, 16)
            torch.add(more, x, alpha=_FIRST, out=x)
            _xor_shifted(x, t, 15)
            x.mul_(_int32(_SECOND))
            _xor_shifted(x, t, 16)
            begin = top * inner + left
            yield begin, begin + x.numel(), x.view(-1)


def _xor_shifted(x: torch.Tensor, room: torch.Tensor, places: int) -> None:
    torch.bitwise_right_shift(x, places, out=room)
    x.bitwise_xor_(room.bitwise_and_((1 << (_BITS - places)) - 1))


def _indices(counter: torch.Tensor, box: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The index that each iteration of nested loops, numbered row-major, stands for; int64."""
    if len(box) == 1:
        return counter * strides[0]
    indices = torch.zeros_like(counter)
    below = 1
    for n, stride in zip(reversed(box), reversed(strides), strict=True):
        indices += (counter // below) % n * stride
        below *= n
    return indices


def bernoulli(
    key: torch.Tensor, size: Sequence[int], p: float, box: Loops = None, strides: Loops = None, base: int = 0
) -> torch.Tensor:
    """Truth values, each true with probability p."""
    hits = torch.empty(tuple(size), dtype=torch.bool, device=key.device)
    if p in (0.0, 1.0):
        return hits.fill_(p == 1.0)
    largest = round(p * 2**_BITS) - 2 ** (_BITS - 1) - 1
    flat = hits.view(-1)
    for start, stop, bits in _chunks(key, part_of(size, box, strides, base), 0):
        torch.le(bits, largest, out=flat[start:stop])
    return hits


def dropout(
    key: torch.Tensor, x: torch.Tensor, p: float, box: Loops = None, strides: Loops = None, base: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x with each element zeroed with probability p and the others divided by 1 - p, and the mask of those kept."""
    kept = bernoulli(key, x.shape, 1.0 - p, box, strides, base)
    return x.mul(kept).mul_(0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept


_DIGITS = {torch.float16: 11, torch.bfloat16: 8}
"""Random bits of a number in [0, 1) that its dtype holds exactly; 24 of float32 and 53 of float64."""


def uniform(
    key: torch.Tensor, size: Sequence[int], dtype: torch.dtype, box: Loops = None, strides: Loops = None, base: int = 0
) -> torch.Tensor:
    """Uniform numbers in [0, 1) of a floating dtype: multiples of a power of 2 that the dtype holds exactly."""
    return uniform_of(key, size, dtype, part_of(size, box, strides, base), 0)


def uniform_of(key: torch.Tensor, size: Sequence[int], dtype: torch.dtype, part: _Part, word: int) -> torch.Tensor:
    """`uniform` of one part, from the given random word of each element."""
    numbers = torch.empty(tuple(size), dtype=dtype, device=key.device)
    flat = numbers.view(-1)
    if dtype == torch.float64:
        low = uniform_of(key, size, torch.float32, part, word + 1).view(-1)
        for start, stop, bits in _chunks(key, part, word):
            high = (bits >> 3) & 0x1FFFFFFF
            torch.add(low[start:stop].double(), high, out=flat[start:stop]).mul_(2.0**-29)
        return numbers
    digits = _DIGITS.get(dtype, 24)
    for start, stop, bits in _chunks(key, part, word):
        flat[start:stop] = (bits >> (_BITS - digits)).bitwise_and_((1 << digits) - 1)
    return numbers.mul_(2.0**-digits)


def normal(
    key: torch.Tensor, size: Sequence[int], dtype: torch.dtype, box: Loops = None, strides: Loops = None, base: int = 0
) -> torch.Tensor:
    """Normal numbers with mean 0 and variance 1 (Box and Muller; each element has a pair of its own)."""
    part = part_of(size, box, strides, base)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    radius = uniform_of(key, size, wide, part, 0).neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
    angle = uniform_of(key, size, wide, part, 2).mul_(2.0 * math.pi)
    return radius.mul_(angle.cos_()).to(dtype)


INTEGERS_MOST = 1 << 62
"""The most integers that `integers` can choose from."""


def integers(
    key: torch.Tensor,
    size: Sequence[int],
    low: int,
    high: int,
    dtype: torch.dtype,
    box: Loops = None,
    strides: Loops = None,
    base: int = 0,
) -> torch.Tensor:
    """Integers in [low, high), of 62 random bits modulo their number."""
    part = part_of(size, box, strides, base)
    flat = torch.empty(math.prod(size), dtype=torch.int64, device=key.device)
    for start, stop, bits in _chunks(key, part, 0):
        flat[start:stop] = (bits & 0x7FFFFFFF).to(torch.int64) << 31
    for start, stop, bits in _chunks(key, part, 1):
        flat[start:stop] |= bits & 0x7FFFFFFF
    return flat.remainder_(high - low).add_(low).view(tuple(size)).to(dtype)


FORM = "SymInt[]? box=None, SymInt[]? strides=None, SymInt base=0"
OPERATORS: Mapping[Callable[..., Any], str] = {
    bernoulli: f"(Tensor key, SymInt[] size, float p, {FORM}) -> Tensor",
    dropout: f"(Tensor key, Tensor x, float p, {FORM}) -> (Tensor, Tensor)",
    uniform: f"(Tensor key, SymInt[] size, ScalarType dtype, {FORM}) -> Tensor",
    normal: f"(Tensor key, SymInt[] size, ScalarType dtype, {FORM}) -> Tensor",
    integers: f"(Tensor key, SymInt[] size, SymInt low, SymInt high, ScalarType dtype, {FORM}) -> Tensor",
}

define(OPERATORS)


@torch.library.impl("autopar::dropout", "Meta")
def _(key: torch.Tensor, x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty(x.shape, dtype=torch.bool, device=x.device)
