"""What a model is refused with that cannot be captured."""

from collections.abc import Sequence


class CaptureError(ValueError):
    """The model cannot be captured as it is; the message says what to change."""


class NothingTrainedError(CaptureError):
    """Nothing that is differentiated depends on any trainable parameter, in eager neither."""


class OfData(CaptureError):
    """A number or a shape of the graph depends on data."""


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names in a message, and how many more there are."""
    shown = ", ".join(dict.fromkeys(names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
