"""Source code: whose it is, what it names, which line runs or raised; and errors as people see them, that of their own
code as eager raises it, and ours in a sentence."""

import dis
import functools
import gc
import inspect
import itertools
import logging
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextlib import ContextDecorator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from .recorder import Line, line_of

logger = logging.getLogger(__name__)

_PLACES = tuple(sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}))


@functools.cache
def is_library(code_file: str) -> bool:
    """Whether code is torch's or Python's own."""
    if not code_file or code_file.startswith(("<frozen", str(Path(torch.__file__).parent))):
        return True
    return code_file.startswith(_PLACES) and "site-packages" not in code_file


@functools.cache
def is_library_module(name: str) -> bool:
    root = name.partition(".")[0]
    return root in ("torch", "autopar", "numpy", "builtins") or (root in sys.stdlib_module_names and root != "__main__")


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Default values of arguments, which Python builds once."""
    given = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if len(given) > len(names):  # a decorator gave its wrapper the defaults of what it wraps
        names = tuple(f"default {i}" for i in range(len(given)))
    return {**dict(zip(names[len(names) - len(given) :], given, strict=True)), **(function.__kwdefaults__ or {})}


def names_of(code: types.CodeType) -> set[str]:
    """Names that a function's code mentions, functions inside of it too, as text if it asks for attributes so, and "is"
    if it compares identities (other than with a constant: `x is None`)."""
    names = set(code.co_names)
    if names & _BY_TEXT:
        names.update(text for text in code.co_consts if isinstance(text, str) and text.isidentifier())
    if _IS in (ops := code.co_code[::2]) and any(b == _IS and a != _CONSTANT for a, b in itertools.pairwise(ops)):
        names.add("is")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return names


def codes_of(function: Any, module: nn.Module | None = None) -> Iterator[types.CodeType]:
    """A person's code that runs where a function of a module is called: its own, and of functions that it names."""
    own = _unwrapped(function)
    if own is None:
        return
    yield own.__code__
    cells = dict(zip(own.__code__.co_freevars, own.__closure__ or (), strict=True))
    for name in names_of(own.__code__) | cells.keys():
        cell = cells.get(name)
        found = own.__globals__.get(name) if cell is None else next(iter(gc.get_referents(cell)), None)
        for held in (found, vars(module).get(name) if module else None, getattr(type(module), name, None)):
            if (named := _unwrapped(held)) is not None:
                yield named.__code__


def _unwrapped(function: Any) -> types.FunctionType | None:
    function = getattr(function, "__func__", function)
    function = inspect.unwrap(function) if isinstance(function, types.FunctionType) else function
    is_own = isinstance(function, types.FunctionType) and not is_library(function.__code__.co_filename)
    return function if is_own else None


_BY_TEXT = frozenset({"getattr", "hasattr", "attrgetter", "methodcaller", "vars", "globals", "__dict__"})
_IS, _CONSTANT = dis.opmap["IS_OP"], dis.opmap["LOAD_CONST"]


def is_of_model(frame: FrameType) -> bool:
    """Whether code that runs is none of torch, numpy, ours or Python itself."""
    name = frame.f_globals.get("__name__", "")
    return not name.startswith(("torch.", "autopar.", "numpy.")) and not is_library(frame.f_code.co_filename)


def line_running() -> Line | None:
    """The line of the model's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_model(frame):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lineno)


def line_shown() -> str:
    """The line of the model's code that is running, in words."""
    return line_of(line_running())


def line_raised(error: BaseException) -> str:
    """The line of the model at which an error was raised."""
    return line_of(line_in(error))


def line_in(error: BaseException) -> Line | None:
    lines = [(at.tb_frame.f_code, at.tb_lineno) for at in _traces(error.__traceback__) if is_of_model(at.tb_frame)]
    return lines[-1] if lines else None


def is_users(error: BaseException) -> bool:
    """Whether a person's code raised it, or code that it calls: eager raises it too."""
    at = _innermost(error)
    if at is None or _EAGER in vars(error):
        return _EAGER in vars(error)
    name = str(at.tb_frame.f_globals.get("__name__"))
    return name.startswith("torch.nn.") or (line_in(error) is not None and not name.startswith(_INSIDES))


def of_eager(error: Exception) -> Exception:
    """An error that eager raises, whoever does so here."""
    vars(error)[_EAGER] = True
    return error


_EAGER = "_autopar_eager"
_INSIDES = ("autopar.", "torch._", "torch.fx.", "torch.overrides", "torch.utils._")
"""Where a step on fakes fails that would not fail on real tensors."""


def raised_by_model(error: BaseException) -> str:
    """The line of a person's code at which it raised, in words; empty if none did."""
    return line_raised(error) if is_users(error) else ""


def _is_in_words(error: BaseException) -> bool:
    """Whether our own code raised it for people, and did not stumble."""
    at = _innermost(error)
    if at is None or not (isinstance(error, ValueError) or type(error).__module__.startswith("autopar.")):
        return False
    return dis.opname[at.tb_frame.f_code.co_code[at.tb_lasti]] == "RAISE_VARARGS"


class presented(ContextDecorator):
    """What is raised within it leaves it as people want to see it, on one screen: with the frames of their own code
    alone, and without what it was raised from. `logging` shows all of it at level DEBUG. An error that nobody put into
    words keeps its frames."""

    def __enter__(self) -> None:
        """Nothing is needed before."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not (is_users(error) or _is_in_words(error)):
            return
        logger.debug("raised, with all frames:", exc_info=error)
        if not is_users(error):
            error.__cause__, error.__suppress_context__ = None, True
        own: TracebackType | None = None
        for each in reversed([each for each in _traces(error.__traceback__) if is_of_model(each.tb_frame)]):
            own = TracebackType(own, each.tb_frame, each.tb_lasti, each.tb_lineno)
        error.__traceback__ = own


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _innermost(error: BaseException) -> TracebackType | None:
    """Where it was raised."""
    return [*_traces(error.__traceback__)][-1] if error.__traceback__ else None
