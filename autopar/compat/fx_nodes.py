"""Nodes of torch.fx."""

from torch import fx


def called_whole(node: fx.Node) -> None:
    """Keeps what a node calls a single call when its module is loaded again, which traces the module's code."""
    if node.op == "call_function" and not (node.target.__module__ or "torch").startswith(("torch", "_operator")):
        node.meta["is_wrapped"] = True
