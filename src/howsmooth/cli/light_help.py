"""typer's help without what it never shows: Markdown and tracebacks bring a parser and a highlighter with them.

Both take longer to import than everything else that `howsmooth --help` needs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}


class _Later(type):
    """The type of a class that stands for another of the same name, imported when something is asked of it."""

    @property
    def meant(cls) -> Any:
        return getattr(import_module(cls.__module__), cls.__name__)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return cls.meant(*args, **options)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.meant, name)


def import_help() -> None:
    """Import `typer.rich_utils`, its two unused classes put off; what others import of rich is rich's own."""
    absent = {module: name for module, name in _UNUSED.items() if module not in sys.modules}
    for module, name in absent.items():
        stand_in = ModuleType(module)
        setattr(stand_in, name, _Later(name, (), {"__module__": module}))
        sys.modules[module] = stand_in
    try:
        import_module("typer.rich_utils")
    finally:
        for module in absent:
            del sys.modules[module]
