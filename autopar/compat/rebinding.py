"""Functions and hooks that hold on to what was copied, bound to the copies."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Mapping
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules.module import _WrappedHook

HOOKS_OF_STATES = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
)  # fmt: skip


def rebind_state_hooks(modules: Mapping[int, nn.Module]) -> None:
    """Have the hooks of `state_dict` and `load_state_dict` of these modules act on them. `modules` are copies of
    others, by the id of the original, and have the originals' hooks; `copy.deepcopy` of a model does the same, except
    for what a function closed over."""
    rebound = Rebound({**modules})
    for module in modules.values():
        for registry in HOOKS_OF_STATES:
            hooks = vars(module)[registry]
            vars(module)[registry] = type(hooks)((key, rebound.hook(hook)) for key, hook in hooks.items())


class Rebound:
    """Functions of a copy, for those of what was copied: `memo` has the copy of each object."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo, self.made = memo, dict[int, Any]()

    def within(self, value: Any) -> Any:
        """The same as `of` for an attribute of the copy, whose dictionaries and lists are its own: they get other
        values."""
        if not isinstance(value, (dict, list)):
            return self.of(value)
        if id(value) not in self.made:
            self.made[id(value)] = value
            for key, item in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
                if (other := self.within(item)) is not item:
                    value[key] = other
        return value

    def hook(self, hook: Any) -> Any:
        """The same for a hook, which may be an object that holds what was copied as an attribute."""
        other = self._held(hook)
        if other is not hook or isinstance(hook, (FunctionType, MethodType, functools.partial)):
            return other
        attributes = getattr(hook, "__dict__", {})
        is_wrapped = isinstance(hook, _WrappedHook)
        moved = self.hook if is_wrapped else self._held
        held = {name: moved(value) for name, value in attributes.items()}
        if all(map(is_, held.values(), attributes.values())):
            return hook
        other = object.__new__(_WrappedHook) if is_wrapped else copy.copy(hook)  # whose copy a dead module forbids
        vars(other).update(held)
        return other

    def of(self, value: Any) -> Any:
        """The same for the copy; the value itself where it holds on to nothing that was copied."""
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType) and id(value.__self__) in self.memo:
            return MethodType(value.__func__, self.memo[id(value.__self__)])
        if isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            function, *given = moved = [*map(self._held, parts)]
            if all(map(is_, parts, moved)):
                return value
            count = len(value.args)
            other = functools.partial(function, *given[:count], **dict(zip(value.keywords, given[count:], strict=True)))
            vars(other).update(vars(value))
            return other
        if isinstance(value, weakref.ref) and id(value()) in self.memo:
            return weakref.ref(self.memo[id(value())])
        return value

    def _function(self, function: FunctionType) -> Any:
        if id(function) in self.made:
            return self.made[id(function)]
        self.made[id(function)] = function  # within itself, until it is known to be another
        cells, given = function.__closure__ or (), function.__defaults__ or ()
        named = function.__kwdefaults__ or {}
        new_cells, new_given = tuple(map(self._cell, cells)), tuple(map(self._held, given))
        new_named = {name: self._held(value) for name, value in named.items()}
        if all(map(is_, (*cells, *given, *named.values()), (*new_cells, *new_given, *new_named.values()))):
            return function
        other = FunctionType(function.__code__, function.__globals__, function.__name__, new_given or None, new_cells)
        self.made[id(function)] = other
        other.__kwdefaults__ = new_named or None
        other.__qualname__, other.__module__ = function.__qualname__, function.__module__
        vars(other).update(vars(function))
        return other

    def _cell(self, cell: CellType) -> CellType:
        try:
            held = cell.cell_contents
        except ValueError:  # there is nothing in it yet
            return cell
        return cell if (other := self._held(held)) is held else CellType(other)

    def _held(self, held: Any) -> Any:
        parts = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else ()
        if id(held) in self.memo:
            return self.memo[id(held)]
        return copy.deepcopy(held, self.memo) if any(id(part) in self.memo for part in parts) else self.of(held)
