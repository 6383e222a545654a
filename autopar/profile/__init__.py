"""Measurements: the database, and the segment programs that are measured."""
