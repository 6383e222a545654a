"""What torch notes on the nodes of a traced graph."""

from __future__ import annotations

from torch import fx


def module_path(node: fx.Node) -> str | None:
    """Path of the innermost module whose forward made the node ("" for the outermost), or None for
    a node that autograd made."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path: str = next(reversed(stack.values()))[0]
    return path


def is_accumulation(node: fx.Node) -> bool:
    """Whether it is an add that autograd made to sum the gradients of a tensor's consumers. Such a
    node carries the sequence number of the last forward node, whose gradient it is not."""
    return bool(node.meta.get("is_gradient_acc"))


def is_backward(node: fx.Node) -> bool:
    """Whether the node was traced while autograd ran."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
