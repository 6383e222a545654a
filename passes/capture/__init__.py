"""A model and example inputs in, the joint graph of one step out."""

from .trace import Captured, CaptureError, NothingTrainedError, capture

__all__ = ["CaptureError", "Captured", "NothingTrainedError", "capture"]
