"""Rewrites of a program that leave its numbers as they are: one file a lowering."""
