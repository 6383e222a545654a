"""Other attributes of modules and classes, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Within it an attribute of a module or a class is another one; a class that inherits it has none of its own
    afterwards, as before."""
    inherits = isinstance(holder, type) and name not in vars(holder)
    known = None if inherits else vars(holder)[name] if isinstance(holder, type) else getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if inherits:
            delattr(holder, name)
        else:
            setattr(holder, name, known)
