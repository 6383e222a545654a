"""Whose error it is, and how people see it: that of their own code as eager raises it, and ours in a sentence."""

import dis
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import ContextDecorator
from types import FrameType, TracebackType

from .looks import is_library
from .recorder import Line, line_of

logger = logging.getLogger(__name__)


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
    line = line_running()
    return "" if line is None else line_of(*line)


def line_raised(error: BaseException) -> str:
    """The line of the model at which an error was raised."""
    line = line_in(error)
    return "" if line is None else line_of(*line)


def line_in(error: BaseException) -> Line | None:
    lines = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__) if is_of_model(frame)]
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
