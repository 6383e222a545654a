"""What a model is refused with that cannot be captured."""


class CaptureError(ValueError):
    """The model cannot be captured as it is; the message says what to change."""


class NothingTrainedError(CaptureError):
    """Nothing that is differentiated depends on any trainable parameter, in eager neither."""


class OfData(CaptureError):
    """A number or a shape of the graph depends on data."""
