"""The command line: what is typed becomes a call of the public interface, and its result becomes text or JSON."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Return ``main``, which console scripts that were installed by an earlier version import from here."""
    if name == "main":
        return import_module(f"{__name__}.app").main
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
