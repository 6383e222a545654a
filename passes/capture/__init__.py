"""A model and example inputs in, the joint graph of one step out."""

from .captured import Captured, CaptureError, NothingTrainedError
from .trace import capture

__all__ = ["CaptureError", "Captured", "NothingTrainedError", "capture"]
