"""Recomputation as a choice: the tensors of a copy of a segment that may be recomputed in backward.

A copy that is recomputed reads some tensors in forward and again in backward, and acquires them twice; one that is not
acquires them once. Its problem has a variable, `SWITCH`, that says which.
"""

from __future__ import annotations

from autopar.solve.problem import Tensor, Variable

SWITCH = "recompute"
"""The variable of a body that says whether a copy is recomputed in backward."""


def twice(variable: Variable, number: int, switch: int) -> Tensor:
    """What an operator costs once more where the copy is recomputed, as a tensor between it and the switch."""
    seconds: dict[float, int] = {}
    codes = tuple(seconds.setdefault(of_option, len(seconds)) for of_option in variable.seconds)
    costs = {(code, again): (again * one, 0.0) for one, code in seconds.items() for again in (0, 1)}
    return Tensor(
        name=f"{variable.name} again",
        producer=number,
        produced=codes,
        consumers=(switch,),
        wanted=((0, 1),),
        costs=costs,
    )
