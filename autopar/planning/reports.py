"""Warnings of what a model is captured without."""

import logging

from autopar.passes.capture.captured import Captured
from autopar.passes.space.space import Space

logger = logging.getLogger("autopar")


def report_captured(captured: Captured) -> None:
    """Warns of parameters that do not train, and of numbers that the model's Python reads off inputs."""
    if names := captured.without_gradient:
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        logger.warning(
            "%d trainable parameters get no gradient, since nothing that is differentiated depends on them: %s",
            len(names),
            shown,
        )
    if captured.pinned:
        logger.warning(
            "the model's Python reads %s: a program is right for inputs of which it reads the same, and "
            "parallelize captures and plans again for others",
            captured.pinned,
        )


def report_without_rule(space: Space) -> None:
    if space.without_rule:
        modules = space.without_rule_in
        ops = "; ".join(
            f"{count} x {op} in {', '.join(path or 'the model' for path in modules[op])}"
            for op, count in space.without_rule.items()
        )
        logger.warning("replicated, since the op has no rule: %s", ops)
