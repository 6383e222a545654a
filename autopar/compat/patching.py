"""Attributes that are replaced for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def patched(holder: Any, **attributes: Any) -> Iterator[None]:
    """Replaces attributes of a module, a class or an object within the context. A class that inherited one does so
    again afterwards."""
    own = vars(holder) if isinstance(holder, type) else {name: getattr(holder, name) for name in attributes}
    before = {name: own[name] for name in attributes if name in own}
    for name, value in attributes.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name in attributes:
            setattr(holder, name, before[name]) if name in before else delattr(holder, name)
