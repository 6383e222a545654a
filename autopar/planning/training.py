"""How a plan's step trains, beyond the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from autopar.extensions import nearest

Recompute = Literal["auto", "asked", "none"]
"""What backward makes again: what the planner chooses; what lies in the calls of `torch.utils.checkpoint` that the
model makes, and nothing else; nothing."""

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """`recompute` says what backward makes again. Raises ValueError for an invalid option."""

    recompute: Recompute = "auto"

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            close = nearest(self.recompute, RECOMPUTE) if isinstance(self.recompute, str) else ""
            raise ValueError(
                f"recompute is {self.recompute!r}{close}: 'auto' (the planner chooses what backward makes again), "
                f"'asked' (what torch.utils.checkpoint marks in the model, and nothing else) or 'none'"
            )

    @property
    def given(self) -> dict[str, Any]:
        """What is not as by default."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


def recompute_text(training: Training, checkpoints: int) -> Iterator[str]:
    """What backward makes again, as a plan says it: nothing where the planner chooses and the model marks nothing."""
    marked = f"{checkpoints} region{'s' * (checkpoints != 1)} that torch.utils.checkpoint marks"
    if training.recompute == "asked":
        yield f"as asked: {marked}, and nothing else" if checkpoints else "as asked, and the model marks nothing"
    elif training.recompute == "none":
        yield "nothing, as asked" + (f", whatever the model marks ({marked})" if checkpoints else "")
    elif checkpoints:
        yield f'chosen by the planner; {marked} are a hint that it ignores (recompute="asked" follows them)'
