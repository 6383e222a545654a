"""Seconds and bytes: redistribution, memory, and the timeline with its simulator."""
