"""Errors for traces that fail: the cause, the line of the model, and what to do."""

import linecache
from collections.abc import Sequence

from torch import nn

from autopar.compat.watching import decides_by_data, is_of_sparse, leaves_numbers, unrecordable

from .errors import CaptureError
from .source import is_users, line_in, line_raised


def refusal(error: Exception, model: nn.Module, unread: Sequence[tuple[str, tuple[str, ...]]], sized: str) -> Exception:
    """The error for a trace that failed: the same one where eager raises it too. `unread` are the values that Python
    asked for and that are not concrete, `sized` is the first line whose result is as large as data say."""
    decides, sizes = decides_by_data(error), leaves_numbers(error)
    if decides or sizes:
        cause = unread_refusal(model, unread[-1:] if decides else unread)
        if cause is not None:
            return cause
    elif is_users(error):
        return error
    subject = f"{type(model).__name__} cannot be captured as a graph of static shapes"
    if decides and not (sized and line_in(error) is None):
        line = line_in(error)
        code = "" if line is None else linecache.getline(line[0].co_filename, line[1]).strip().rstrip(":")
        return CaptureError(
            f"{subject}: its code decides by a value of a tensor{f', {code!r}' if code else ''}{line_raised(error)}. A "
            f"graph takes one way for all data: choose with torch.where, or pass the value as a Python constant"
        )
    if decides or sizes:
        return CaptureError(
            f"{subject}: a size in it depends on data{sized or line_raised(error)}, such as how many elements a mask "
            f"picks. Compute with all elements and a mask, or pass the size as a Python constant"
        )
    if (op := unrecordable(error)) is not None:
        return CaptureError(
            f"{subject}: torch cannot say how large the results of {op} are{line_raised(error)} before it computes "
            f"them. Compute them outside of the model, or by other operators"
        )
    if is_of_sparse(error):
        return CaptureError(
            f"{type(model).__name__} computes with a sparse tensor{line_raised(error)}, and shards are dense: use its "
            f"to_dense(), or index_add and gather"
        )
    reason, _, _ = str(error).partition("\n\n")  # what follows is torch's own state
    return CaptureError(f"{type(model).__name__} cannot be captured{line_raised(error)}: {reason}")


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
