"""Flattens nested inputs and outputs into leaves with paths, and puts them together again.

Containers are those that `torch.utils._pytree` knows, and every dataclass, registered or not.
"""

import dataclasses
from typing import Any

import torch.utils._pytree as pytree


class _Record:
    """An unregistered dataclass, as a node of the tree."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _opened(value: Any) -> Any:
    """The tree with unregistered dataclasses as nodes instead of leaves."""

    def opened(leaf: Any) -> Any:
        is_record = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
        return _Record(leaf) if is_record else leaf

    return pytree.tree_map(opened, value)


def _fields(record: _Record) -> tuple[list[tuple[Any, Any]], Any]:
    fields = dataclasses.fields(record.value)
    keyed = [(pytree.GetAttrKey(f.name), _opened(getattr(record.value, f.name))) for f in fields]
    return keyed, (type(record.value), tuple((f.name, f.init) for f in fields))


def _flattened(record: _Record) -> tuple[list[Any], Any]:
    keyed, context = _fields(record)
    return [value for _, value in keyed], context


def _rebuilt(values: Any, context: Any) -> Any:
    """Rebuilds the dataclass as `dataclasses.replace` would."""
    kind, fields = context
    given = list(zip(fields, values, strict=True))
    record = kind(**{name: value for (name, init), value in given if init})
    for (name, init), value in given:
        if not init:
            object.__setattr__(record, name, value)
    return record


pytree.register_pytree_node(_Record, _flattened, _rebuilt, flatten_with_keys_fn=_fields)


def flatten(root: str, tree: Any) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """Leaves with their paths. The root of inputs is "", and its two items are "args" and "kwargs"."""
    leaves, spec = pytree.tree_flatten_with_path(_opened(tree))
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
