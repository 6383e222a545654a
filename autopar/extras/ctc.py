"""CTC loss without its table. torch's own operator returns, beside the loss, a table whose size depends on the data,
which a graph of static shapes cannot hold; these operators do not, and backward recomputes the table.
"""

from collections.abc import Sequence
from typing import Any

import torch

from autopar.compat.neutral import watched
from autopar.ops.families import FIRST, either, from_template
from autopar.ops.registry import know
from autopar.ops.rule import Call
from autopar.ops.rules import Entry
from autopar.ops.strides import needs
from autopar.ops.table import own
from autopar.ops.template import Dim

Lengths = torch.Tensor | Sequence[int]


@torch.library.custom_op("autopar::ctc_loss", mutates_args=())
def losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """log_probs: [time, batch, classes], targets: [batch, longest] or all in a row -> [batch]."""
    given = (log_probs, targets, input_lengths, target_lengths)
    loss: torch.Tensor = torch.ops.aten._ctc_loss.Tensor(*given, blank, zero_infinity)[0]
    return loss.masked_fill(loss == torch.inf, 0) if zero_infinity else loss.clone()


@torch.library.custom_op("autopar::ctc_loss_backward", mutates_args=())
def losses_backward(
    gradient: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """gradient: [batch] -> [time, batch, classes]."""
    given = (log_probs, targets, input_lengths, target_lengths)
    loss, table = torch.ops.aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    result: torch.Tensor = torch.ops.aten._ctc_loss_backward.Tensor(gradient, *given, loss, table, blank, zero_infinity)
    return result.contiguous()


losses.register_fake(lambda log_probs, *_: log_probs.new_empty(log_probs.shape[1]))
losses_backward.register_fake(lambda gradient, log_probs, *_: log_probs.new_empty(log_probs.shape))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return losses_backward(gradient, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), None, None, None, None, None


losses.register_autograd(_backward, setup_context=_setup)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.ctc_loss`."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    counts = [_counts(lengths, log_probs.device) for lengths in (input_lengths, target_lengths)]
    single = log_probs.dim() == 2
    if single:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0) if targets.dim() == 1 else targets
        counts = [count.reshape(1) for count in counts]
    with watched():
        loss: torch.Tensor = losses(log_probs, targets, *counts, blank, zero_infinity)
    if reduction == "mean":
        return (loss / counts[1].clamp_min(1).to(loss.dtype)).mean()
    return loss.sum() if reduction == "sum" else loss.squeeze(0) if single else loss


def _counts(lengths: Lengths, device: torch.device) -> torch.Tensor:
    return lengths if isinstance(lengths, torch.Tensor) else torch.tensor(lengths, dtype=torch.int64, device=device)


def _apart(call: Call) -> bool:
    """Whether each sequence has a row of targets. Concatenated targets cannot be split."""
    return len(call.inputs[1 if call.node.op == "autopar.ctc_loss.default" else 2].shape) == 2


know({
    **own("ctc_loss", Entry(
        either(
            _apart,
            from_template("t! n c!, n s!, n, n -> n", {"n": Dim(even=True)}),
            from_template("t! n! c!, s!, n!, n! -> n!"),
        ),
        strides=needs("targets"),
    )),
    **own("ctc_loss_backward", Entry(
        either(
            _apart,
            from_template("n, t! n c!, n s!, n, n -> t! n c!", {"n": Dim(even=True)}, linear=FIRST),
            from_template("n!, t! n! c!, s!, n!, n! -> t! n! c!", linear=FIRST),
        ),
        strides=needs("targets"),
    )),
})  # fmt: skip
