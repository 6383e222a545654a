"""Masks: what a mask of attention says that the operator knows by itself is said by an argument, and is no tensor."""

from .rewrite import without_masks

__all__ = ["without_masks"]
