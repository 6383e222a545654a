"""Errors for traces that fail: the cause, the line of the model, and what to do."""

import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx, nn

from autopar import compat

from .captured import CaptureError


class OfData(CaptureError):
    """A number or a shape of the graph depends on data."""


class Unlocated(OfData):
    """An operator is refused, and its line in the model was not traced."""


def refusal(error: Exception, model: nn.Module, unread: Sequence[tuple[str, tuple[str, ...]]]) -> CaptureError:
    """The error for a trace that failed. `unread` are the values that Python asked for and that are not concrete."""
    decides, sizes = compat.decides_by_data(error), compat.leaves_numbers(error)
    if decides or sizes:
        cause = unread_refusal(model, unread[-1:] if decides else unread)
        if cause is not None:
            return cause
    subject = f"{type(model).__name__} cannot be captured as a graph of static shapes"
    if decides:
        line = _line(error)
        return CaptureError(
            f"{subject}: its code decides by a value of a tensor{f', {line!r}' if line else ''}{line_raised(error)}. A "
            f"graph takes one way for all data: choose with torch.where, or pass the value as a Python constant"
        )
    if sizes:
        return CaptureError(
            f"{subject}: a size in it depends on data{line_raised(error)}, such as how many elements a mask picks. "
            f"Compute with all elements and a mask, or pass the size as a Python constant"
        )
    reason, _, _ = str(error).partition("\n\n")  # what follows is torch's own state
    return CaptureError(f"{subject}: {reason}{line_raised(error)}")


def unread_refusal(model: nn.Module, unread: Sequence[tuple[str, tuple[str, ...]]]) -> CaptureError | None:
    """The error for values that Python asked for and did not get."""
    subject = f"{type(model).__name__} cannot be captured as a graph of static shapes: its code reads"
    bare = [(line, paths) for line, paths in unread if paths]
    if bare:
        line, paths = bare[0]
        return CaptureError(
            f"{subject} a value of input {', '.join(paths)}{line}, which was given without values (on meta or fake): "
            f"give a real example of it, and the program will serve inputs of which the same is read"
        )
    if unread:
        return CaptureError(
            f"{subject} a number of a tensor{unread[0][0]} that depends on parameters, buffers or random numbers, and "
            f"may differ from step to step. A graph has one for all data: compute with all elements and a mask "
            f"(experts: an implementation that runs each on all tokens, or on padded ones), keep the number in a "
            f"tensor, or pass it as a Python constant"
        )
    return None


def line_raised(error: Exception) -> str:
    """The line of the model at which an error was raised, if its code is in a file."""
    frame = _frame(error)
    return f" ({frame.filename}:{frame.lineno} in {frame.name})" if frame else ""


def _line(error: Exception) -> str:
    """The code on that line."""
    frame = _frame(error)
    return (frame.line or "").strip().rstrip(":") if frame else ""


def _frame(error: Exception) -> traceback.FrameSummary | None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).exists()]
    lines = [frame for frame in frames if not _is_machinery(Path(frame.filename))]
    return lines[-1] if lines else None


def line_of_node(node: fx.Node) -> str:
    """The line of the model that a node comes from, if it was traced."""
    frames = re.findall(r'File "(.+)", line (\d+), in (\w+)', str(node.meta.get("stack_trace", "")))
    lines = [(file, line, name) for file, line, name in frames if not _is_machinery(Path(file))]
    return " at {}:{} in {}".format(*lines[-1]) if lines else ""


def _is_machinery(file: Path) -> bool:
    """Whether code is torch's, ours or Python's own."""
    modules = (str(torch.__file__), __file__, compat.__file__)
    if any(file.is_relative_to(Path(module).parent) for module in modules):
        return True
    return file.is_relative_to(sysconfig.get_path("stdlib")) and "site-packages" not in file.parts
