"""What cannot be captured: what forward asks of torch or tells it, refused where it is called, and traces that fail.
Each error says the cause, the line of the model, and what to do."""

import builtins
import contextlib
import io
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from torch import nn

from autopar.compat.patching import patched
from autopar.compat.watching import cause_of

from .errors import CaptureError
from .source import is_library, is_users, line_in, line_raised, line_shown


def refuse(message: str, **named: Any) -> NoReturn:
    """Refuses what the model does, naming the line that does it."""
    raise CaptureError(message.format(**{"line": line_shown(), **named}))


def refusal(error: Exception, model: nn.Module, unread: Sequence[tuple[str, tuple[str, ...]]], sized: str) -> Exception:
    """The error for a trace that failed: the same one where eager raises it too. `unread` are the values that Python
    asked for and that are not concrete, `sized` is the first line whose result is as large as data say."""
    cause = cause_of(error)
    decides = cause == "decides"
    if decides or cause == "sizes":
        if (refused := unread_refusal(model, unread[-1:] if decides else unread)) is not None:
            return refused
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
    if decides or cause == "sizes":
        return CaptureError(
            f"{subject}: a size in it depends on data{sized or line_raised(error)}, such as how many elements a mask "
            f"picks. Compute with all elements and a mask, or pass the size as a Python constant"
        )
    if cause == "unknown":
        return CaptureError(
            f"{subject}: torch cannot say how large the results of {vars(error)['func']} are{line_raised(error)} "
            f"before it computes them. Compute them outside of the model, or by other operators"
        )
    if cause == "sparse":
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


@contextlib.contextmanager
def without_files() -> Iterator[None]:
    """Within it this thread may not read files, or ask about them, other than those of Python and its libraries."""
    thread, refused = threading.get_ident(), list[CaptureError]()

    def guarded(original: Callable[..., Any], reads: Callable[..., bool]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and reads(*args, **kwargs) and not _is_of_library(path):
                try:
                    refuse(READING_FILES, path=os.fspath(path))
                except CaptureError as error:
                    refused.append(error)
                    raise
            return original(path, *args, **kwargs)

        return call

    def opens(mode: str = "r", *_: Any, **__: Any) -> bool:
        return "r" in mode or "+" in mode

    asks = {call.__name__: guarded(call, lambda *_, **__: True) for call in (os.stat, os.listdir, os.scandir)}
    opened = guarded(io.open, opens)
    with patched(builtins, open=opened), patched(io, open=opened), patched(os, **asks):
        yield
    if refused:  # `os.path.exists` takes it for the answer "no"
        raise refused[0]


def _is_of_library(path: Any) -> bool:
    """Whether a file is one of Python, of a library or of the system, or is asked for to import a module, to show a
    line of code, to write a log, or by torch's compiler."""
    if not isinstance(path, (str, bytes, os.PathLike)):  # a descriptor of what is open
        return True
    file = os.path.abspath(os.fsdecode(path))
    if is_library(file) or "site-packages" in file or file.startswith(_SYSTEM) or file.endswith((".py", ".pyc")):
        return True
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in ("linecache", "inspect") or name.startswith(("importlib", "logging", "torch._inductor")):
            return True
        frame = frame.f_back
    return False


_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/")

READING_FILES = (
    "forward reads file {path!r}, or asks about it{line}: a program would keep what the first call saw. Read it in the "
    "constructor, or outside, and pass in what it says as an input or a number"
)
SEEDING = (
    "forward seeds torch's generator, or sets its state{line}: a program's random operators draw by the step's seed. "
    "Seed outside"
)
ASKING = (
    "forward asks torch.is_inference_mode_enabled(){line}, and a program is the same within inference mode and "
    "outside: ask self.training or torch.is_grad_enabled(), for which the module has a program each"
)
OF_CALLER = (
    "forward asks what was done to a tensor before the call{line} (is_leaf, grad_fn, _version and the like), which may "
    "differ from call to call: pass it in as an argument, or ask for requires_grad"
)
READING_GRADIENTS = (
    "forward reads .grad of a parameter or an input{line}, which holds what earlier steps left there, and a program "
    "would keep what the first call saw: pass it in as an input, or leave it out of forward"
)
WRITING_GRADIENTS = (
    "forward sets .grad of a parameter or an input{line}, where gradients of earlier calls add up: leave that to the "
    "training loop, or compute with torch.autograd.grad, which leaves .grad alone"
)
PACKING = (
    "forward packs sequences by their lengths{line}, and the shapes of a program do not depend on data: run the layer "
    "on the padded sequences, and mask what it makes of the padding"
)
READING_VALUES = (
    "forward reads the values of a tensor{line}, as text (print, an f-string), with numpy or through dlpack, and they "
    "depend on parameters, buffers, random numbers or inputs that were given without values: return the tensor as an "
    "output, and print it or convert it outside of forward"
)
CHANGING_SAVED = (
    "saved_tensors_hooks change what is saved for backward{line}, and a program computes this gradient by another "
    "formula than eager, from other values: leave this operator out of the hooks' context, or have them give back what "
    "they got"
)
WRITING_SAVED = (
    "forward writes what an operator keeps for its backward{line} before that reads it (.data, saved_tensors_hooks), "
    "and a program computes this gradient by another formula than eager: write a copy (clone())"
)
PICKLING = (
    "forward pickles or copies a tensor{line} (pickle, torch.save, copy.copy), and a program would not do so again: "
    "save it outside of forward, and copy with clone(), detach() or copy.deepcopy()"
)
ADDRESSING = (
    "forward asks where a tensor lies in memory{line}, which is elsewhere on each rank: compare tensors with `is`, and "
    "share memory outside of forward"
)
WRITING_CONSTANTS = (
    "forward writes {name} in place, which is no buffer of the model: capture changes nothing, and a program writes "
    "buffers alone. Make it a buffer (register_buffer, persistent=False if no checkpoint is to hold it), or write a "
    "copy (clone()){line}"
)
WRITING_ARRAYS = (
    "forward writes an array on the memory of a tensor{line}, as numpy() and torch.from_numpy() give one, and a "
    "program does not see that: write a copy (array.copy()), or write the tensor by torch's own operators"
)
WRITING_INPUTS = (
    "forward writes input {name} in place{line}, which a program does not do: write a copy (clone()), or make it a "
    "buffer"
)
TRAINING_CONSTANTS = (
    "{name} requires a gradient and is no parameter of the model: it would not train. Make it one (an nn.Parameter "
    "attribute, nn.ParameterList, nn.ParameterDict; a loss with parameters is a module of the model), or detach() it"
    "{line}"
)
