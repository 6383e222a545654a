"""Modules that torch puts around those of a model, the names that parameters have without them, and hooks that belong
to a module."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.nn.modules.module import _WrappedHook

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What a module is called within what `torch.compile` and `checkpoint_wrapper` put around it."""


def plain_name(name: str) -> str:
    """The name that a tensor of a model has where nothing is put around its modules."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without what `torch.compile` put around it and its modules, and without a `checkpoint_wrapper` around
    all of it: the same module objects, but for those that hold a compiled one. It computes the same, under the names
    that files have."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    made: dict[int, nn.Module] = {}
    copies: dict[int, nn.Module] = {}

    def copied(module: nn.Module, **changed: Any) -> nn.Module:
        """A module of the same attributes and tensors."""
        copy: nn.Module = object.__new__(type(module))
        vars(copy).update(vars(module), **changed)
        return copies.setdefault(id(module), copy)

    def plain(module: nn.Module, root: bool = False) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        if isinstance(module, compiled) or (root and isinstance(module, ActivationWrapper)):
            (inner,) = module._modules.values()
            assert inner is not None
            inner = plain(inner, root)
            hooks = _hooks_around(inner, module)
            made[id(module)] = copied(inner, **hooks) if hooks else inner
        else:
            made[id(module)] = module  # in a circle, it holds itself
            children = {name: None if child is None else plain(child) for name, child in module._modules.items()}
            if any(child is not children[name] for name, child in module._modules.items()):
                made[id(module)] = copied(module, _modules=children)
        return made[id(module)]

    result = plain(model, root=True)
    rebind_state_hooks({key: copies.get(id(copy), copy) for key, copy in copies.items()})
    return result


def _hooks_around(inner: nn.Module, outer: nn.Module) -> dict[str, Any]:
    """The hooks of the inner module of two with the outer one's around them, if that has any."""
    joined = {}
    for name, hooks in vars(outer).items():
        if isinstance(hooks, dict) and hooks and "_hooks" in name and name not in HOOKS_OF_STATES:
            own = vars(inner)[name]
            joined[name] = type(hooks)({**hooks, **own} if "pre_hooks" in name else {**own, **hooks})
    return joined


HOOKS_OF_STATES = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
)  # fmt: skip


def rebind_state_hooks(modules: dict[int, nn.Module]) -> None:
    """Have the hooks of `state_dict` and `load_state_dict` of these modules act on them. `modules` are copies of
    others, by the id of the original, and have the originals' hooks; `copy.deepcopy` of a model does the same, except
    for what a function closed over."""
    for module in modules.values():
        for registry in HOOKS_OF_STATES:
            hooks = vars(module)[registry]
            vars(module)[registry] = type(hooks)((key, rebound(hook, modules)) for key, hook in hooks.items())


def rebound(hook: Any, modules: dict[int, nn.Module], within: tuple[int, ...] = ()) -> Any:
    """A hook that acts on the copy of each module that it holds: a method of it, a partial, a function that closed over
    it, or an object that has it as an attribute. What holds none is the same object. `within` are the functions that
    closed over this one."""

    def moved(value: Any) -> Any:
        if isinstance(value, FunctionType | MethodType | partial) and id(value) not in within:
            return rebound(value, modules, (*within, id(hook)))
        return modules.get(id(value), value)

    if isinstance(hook, _WrappedHook):
        return _WrappedHook(rebound(hook.hook, modules), moved(hook.module()) if hook.with_module else None)
    if isinstance(hook, MethodType):
        owner = moved(hook.__self__)
        return hook if owner is hook.__self__ else MethodType(hook.__func__, owner)
    if isinstance(hook, partial):
        parts = [hook.func, *hook.args, *hook.keywords.values()]
        function, *given = map(moved, parts)
        if all(map(is_, parts, (function, *given))):
            return hook
        count = len(hook.args)
        made: Any = partial(function, *given[:count], **dict(zip(hook.keywords, given[count:], strict=True)))
    elif isinstance(hook, FunctionType):
        cells = tuple(_cell(cell, moved) for cell in hook.__closure__ or ())
        if all(map(is_, cells, hook.__closure__ or ())):
            return hook
        made = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells)
        made.__kwdefaults__ = hook.__kwdefaults__
    else:
        attributes = getattr(hook, "__dict__", {})
        held = {name: moved(value) for name, value in attributes.items()}
        if all(map(is_, held.values(), attributes.values())):
            return hook
        made = copy.copy(hook)
        vars(made).update(held)
        return made
    vars(made).update(vars(hook))
    return made


def _cell(cell: CellType, moved: Callable[[Any], Any]) -> CellType:
    """The cell itself, or one that holds the copy of what it holds."""
    try:
        value = cell.cell_contents
    except ValueError:  # it is empty
        return cell
    held = moved(value)
    return cell if held is value else CellType(held)


def reduces_itself(model: nn.Module) -> str | None:
    """The class of a wrapper around the model or a part of it that reduces gradients on its own."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    return next((type(module).__name__ for module in model.modules() if isinstance(module, wrappers)), None)
