"""What every solver asks of a problem before it starts."""

from __future__ import annotations

from .problem import Problem


def check(problem: Problem) -> None:
    """Raise ValueError where a repeat cannot be joined to its parent."""
    for repeat in problem.repeats:
        if not len(repeat.left) == len(repeat.right) == len(repeat.body_left) == len(repeat.body_right):
            raise ValueError(f"{repeat.name}: left, right, body_left and body_right must name equally many variables")
        if repeat.count < 1:
            raise ValueError(f"{repeat.name}: count is {repeat.count}, must be at least 1")
        parts = (problem, problem, repeat.body, repeat.body)
        for joined in zip(repeat.left, repeat.right, repeat.body_left, repeat.body_right, strict=True):
            counts = [len(part.variables[v].options) for part, v in zip(parts, joined, strict=True)]
            if len(set(counts)) > 1:
                raise ValueError(f"{repeat.name}: joined border variables have {counts} options, must be the same ones")
        check(repeat.body)
