"""What forward asks of torch, or tells it, that a graph cannot hold: refused where it is called, with the line."""

import builtins
import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from autopar.compat.patching import patched

from .errors import CaptureError
from .source import is_library, line_shown


def refusing(message: str) -> Callable[[], None]:
    """What refuses a call, naming the line of the model that makes it."""

    def refuse() -> None:
        raise CaptureError(message.format(line=line_shown()))

    return refuse


@contextlib.contextmanager
def without_files() -> Iterator[None]:
    """Within it this thread may not read files, or ask about them, other than those of Python and its libraries."""
    thread, refused = threading.get_ident(), list[CaptureError]()

    def guarded(original: Callable[..., Any], reads: Callable[..., bool]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and reads(*args, **kwargs) and not _is_of_library(path):
                refused.append(CaptureError(READING_FILES.format(path=os.fspath(path), line=line_shown())))
                raise refused[0]
            return original(path, *args, **kwargs)

        return call

    def opens(mode: str = "r", *_: Any, **__: Any) -> bool:
        return "r" in mode or "+" in mode

    with contextlib.ExitStack() as stack:
        for holder in (builtins, io):
            stack.enter_context(patched(holder, "open", guarded(io.open, opens)))
        for name in ("stat", "listdir", "scandir"):
            stack.enter_context(patched(os, name, guarded(getattr(os, name), lambda *_, **__: True)))
        yield
    if refused:  # `os.path.exists` takes it for the answer "no"
        raise refused[0]


def _is_of_library(path: Any) -> bool:
    """Whether a file is one of Python, of a library or of the system, or is asked for to import a module, to show a
    line of code or to write a log."""
    if not isinstance(path, (str, bytes, os.PathLike)):  # a descriptor of what is open
        return True
    file = os.path.abspath(os.fsdecode(path))
    if is_library(file) or "site-packages" in file or file.startswith(_SYSTEM) or file.endswith((".py", ".pyc")):
        return True
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in ("linecache", "inspect") or name.startswith(("importlib", "logging")):
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
PICKLING = (
    "forward pickles or copies a tensor{line} (pickle, torch.save, copy.copy), and a program would not do so again: "
    "save it outside of forward, and copy with clone(), detach() or copy.deepcopy()"
)
ADDRESSING = (
    "forward asks where a tensor lies in memory{line}, which is elsewhere on each rank: compare tensors with `is`, and "
    "share memory outside of forward"
)
