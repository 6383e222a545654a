"""Modules that are imported when a command runs: `--help` does not wait for PyTorch."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from autopar.report.telling import Ticker


class Deferred:
    """A module that is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self.__name = name

    def __getattr__(self, attribute: str) -> Any:
        with Ticker("loading PyTorch", enabled="torch" not in sys.modules):
            return getattr(import_module(self.__name), attribute)
