"""Attributes that are replaced for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def patched(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of a module or a class within the context. A class that inherited it does so again
    afterwards."""
    inherits = isinstance(holder, type) and name not in vars(holder)
    original = None if inherits else vars(holder)[name] if isinstance(holder, type) else getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if inherits:
            delattr(holder, name)
        else:
            setattr(holder, name, original)
