"""Code: whose it is, which line of the model runs, and what a function names and holds."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch

_PLACES = tuple(sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}))


@functools.cache
def is_library(code_file: str) -> bool:
    """Whether code is torch's or Python's own."""
    if not code_file or code_file.startswith("<frozen"):
        return True
    if code_file.startswith(str(Path(torch.__file__).parent)):
        return True
    return code_file.startswith(_PLACES) and "site-packages" not in code_file


@functools.cache
def is_library_module(name: str) -> bool:
    root = name.partition(".")[0]
    return root in ("torch", "autopar", "numpy", "builtins") or (root in sys.stdlib_module_names and root != "__main__")


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Values of arguments that are made once."""
    given = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if len(given) > len(names):  # a decorator gave its wrapper the defaults of what it wraps
        names = tuple(f"default {i}" for i in range(len(given)))
    return {**dict(zip(names[len(names) - len(given) :], given, strict=True)), **(function.__kwdefaults__ or {})}


def names_of(code: types.CodeType) -> set[str]:
    """Names that a function's code mentions, functions inside of it too."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_of(constant)
    return found


def line_of_model() -> str:
    """The line of the model's code that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "autopar.")) and not is_library(frame.f_code.co_filename):
            return f" ({frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name})"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
