"""Find the files of a package, so that no list of them has to be kept.

A package read this way holds one function per file, named as the file, and ``types.py`` with what they share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any


def modules(package: str, path: Iterable[str]) -> dict[str, ModuleType]:
    """Import every file of a package but ``types.py``; called with the package's ``__name__`` and ``__path__``."""
    names = (info.name for info in iter_modules(path) if info.name != "types")
    return {name: import_module(f"{package}.{name}") for name in names}


def settings(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's settings with their defaults: its keyword-only parameters, in the order written."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
