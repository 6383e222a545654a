"""Flattens nested inputs and outputs into leaves with paths, and puts them together again.

Containers are those that `torch.utils._pytree` knows, and every dataclass, registered or not. The parts of one that is
registered without keys are numbered.
"""

import dataclasses
from typing import Any

import torch.utils._pytree as pytree


def joined(path: str, name: str) -> str:
    """The path of what stands under a name in what is at a path."""
    return f"{path}.{name}" if path else name


class _Record:
    """A container that pytree cannot name the parts of, as a node of the tree: an unregistered dataclass, or one that
    is registered without keys."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_without_keys(value: Any) -> bool:
    registered = pytree.SUPPORTED_NODES.get(type(value))
    return registered is not None and registered.flatten_with_keys_fn is None


def _opened(value: Any) -> Any:
    """The tree with such containers as nodes instead of leaves."""

    def opened(leaf: Any) -> Any:
        is_record = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
        return _Record(leaf) if is_record or _is_without_keys(leaf) else leaf

    return pytree.tree_map(opened, value, is_leaf=_is_without_keys)


def _parts(record: _Record) -> tuple[list[tuple[Any, Any]], Any]:
    value = record.value
    if _is_without_keys(value):
        values, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        return [(pytree.SequenceKey(i), _opened(part)) for i, part in enumerate(values)], (type(value), None, context)
    fields = dataclasses.fields(value)
    keyed: list[tuple[Any, Any]] = [(pytree.GetAttrKey(f.name), _opened(getattr(value, f.name))) for f in fields]
    return keyed, (type(value), tuple((f.name, f.init) for f in fields), None)


def _flattened(record: _Record) -> tuple[list[Any], Any]:
    keyed, context = _parts(record)
    return [value for _, value in keyed], context


def _rebuilt(values: Any, context: Any) -> Any:
    """Rebuilds a dataclass as `dataclasses.replace` would, and others as they are registered."""
    kind, fields, own = context
    if fields is None:
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(list(values), own)
    given = list(zip(fields, values, strict=True))
    record = kind(**{name: value for (name, init), value in given if init})
    for (name, init), value in given:
        if not init:
            object.__setattr__(record, name, value)
    return record


pytree.register_pytree_node(_Record, _flattened, _rebuilt, flatten_with_keys_fn=_parts)


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
