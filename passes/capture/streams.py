"""What gives another value each time it is asked: generators of random numbers, iterators, arrays."""

from __future__ import annotations

import contextvars
import functools
import itertools
import random
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .looks import Drawn, Look, Same, put_back_generator

ARRAY_BYTES_MOST = 1 << 16
"""Arrays up to this size are compared at every call."""


class Streams:
    """What gives another value each time it is asked, in a look: generators of random numbers, iterators, arrays."""

    look: Look
    seen: dict[int, str]

    def value(self, path: str, value: Any) -> None:
        """Takes a value into the look."""
        raise NotImplementedError

    def generators(self) -> None:
        self._generator("random", random)
        # the functions of `random` and `numpy.random` are methods of a hidden generator each
        self.seen[id(getattr(random.random, "__self__", None))] = "random"
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self.seen[id(numpy.random.rand.__self__)] = "numpy.random"
            self._numpy("numpy.random", numpy.random.get_state, numpy.random.set_state)
        self.look.facts["torch.get_rng_state()"] = Drawn((_bytes(torch.get_rng_state()),))
        state = torch.get_rng_state()
        self.look.undo.append(lambda: torch.set_rng_state(state))

    def _generator(self, path: str, generator: Any) -> None:
        state = generator.getstate()
        self.look.facts[path] = Drawn((state,))
        self.look.undo.append(lambda: generator.setstate(state))

    def _numpy(self, path: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        state = get()
        self.look.facts[path] = Drawn((_flat(state),))
        self.look.undo.append(lambda: put(state))

    def stream(self, path: str, value: Any) -> bool:
        facts = self.look.facts
        numpy = sys.modules.get("numpy")
        if isinstance(value, random.Random):
            self._generator(path, value)
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            self._numpy(path, lambda: bits.state, lambda state: setattr(bits, "state", state))
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            self._numpy(path, value.get_state, value.set_state)
        elif numpy is not None and isinstance(value, numpy.ndarray):
            kept = value.copy()
            facts[path] = ("array", value.shape, str(value.dtype), kept.tobytes() if value.dtype != object else None)
            if kept.nbytes <= ARRAY_BYTES_MOST:
                self.look.arrays.append((value, kept.tobytes()))
            if value.flags.writeable:
                self.look.undo.append(lambda: value.__setitem__(..., kept))
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            facts[path] = Drawn((_bytes(state),))
            self.look.undo.append(functools.partial(put_back_generator, value, state))
        elif isinstance(value, contextvars.ContextVar):
            held = value.get(None)
            self.value(f"{path}.get()", held)
            self.look.undo.append(lambda: None if value.get(None) is held else value.set(held) and None)
        elif isinstance(value, weakref.ref):
            held = value()
            facts[path] = (type(value), Same(held))
            if not isinstance(held, (torch.Tensor, nn.Module)):  # those are reached where they are registered
                self.look.others.append((value, held))
                self.value(f"{path}()", held)
        elif isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            facts[path] = Drawn(("generator", frame.f_lasti if frame else None, repr(frame and frame.f_locals)))
        elif is_stream(value):
            facts[path] = Drawn((type(value), _position(value)))
        else:
            return False
        return True


def is_stream(value: Any) -> bool:
    """Whether `next` moves it on."""
    return hasattr(value, "__next__") and type(value).__module__ in ("builtins", "itertools")


def _position(value: Any) -> Any:
    if isinstance(value, itertools.count):
        return repr(value)
    hint = getattr(value, "__length_hint__", None)
    if hint is not None:
        return hint()
    # a copy is where the original is, and gives what that gives next
    try:
        return repr(value.__reduce__())
    except TypeError:
        return None


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())


def _flat(state: Any) -> Any:
    """A numpy generator's state as what can be compared."""
    if isinstance(state, dict):
        return tuple((key, _flat(item)) for key, item in state.items())
    if isinstance(state, (tuple, list)):
        return tuple(map(_flat, state))
    return state.tobytes() if hasattr(state, "tobytes") else state
