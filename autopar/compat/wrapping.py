"""Modules that torch puts around those of a model, and the names that parameters have without them."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from .rebinding import HOOKS_OF_STATES, rebind_state_hooks

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


def reduces_itself(model: nn.Module) -> str | None:
    """The class of a wrapper around the model or a part of it that reduces gradients on its own."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    return next((type(module).__name__ for module in model.modules() if isinstance(module, wrappers)), None)
