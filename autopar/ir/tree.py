"""Flattens nested inputs and outputs into leaves with paths, and puts them together again.

Containers are those that `torch.utils._pytree` knows, and those of `records`.
"""

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree

OPENED: list[Callable[[Any], Any]] = []
"""Functions from a tree to the same with containers that pytree does not know as nodes instead of leaves; `records` has
one."""


def joined(path: str, name: str) -> str:
    """The path of what stands under a name in what is at a path."""
    return f"{path}.{name}" if path else name


def flatten(root: str, tree: Any) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """Leaves with their paths. The root of inputs is "", and its two items are "args" and "kwargs"."""
    for opened in OPENED:
        tree = opened(tree)
    leaves, spec = pytree.tree_flatten_with_path(tree)
    pairs = []
    for keys, value in leaves:
        parts = [str(_key(key)) for key in keys]
        if not root:
            parts[0] = ("args", "kwargs")[int(parts[0])]
        pairs.append((".".join([root, *parts] if root else parts), value))
    return pairs, spec


def _key(key: Any) -> Any:
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    return key.name if isinstance(key, pytree.GetAttrKey) else key.key
