"""Find the files of a package, so that no list of them has to be kept.

A package read this way holds one function per file, named as the file, and ``types.py`` with what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from penstock.base.errors import UserError


def modules(package: str, path: Iterable[str]) -> dict[str, ModuleType]:
    """Import every file of a package but ``types.py``; called with the package's ``__name__`` and ``__path__``."""
    names = (info.name for info in iter_modules(path) if info.name != "types")
    return {name: import_module(f"{package}.{name}") for name in names}


def functions(found: Mapping[str, ModuleType]) -> dict[str, Callable[..., Any]]:
    """Return the function of each file, which has the file's name.

    Raises:
        UserError: a file holds none of its name.
    """
    for name, module in found.items():
        if not callable(getattr(module, name, None)):
            raise UserError(
                f"{module.__file__} holds no function '{name}', and a file there is found by the function of its name",
                f"name the function '{name}', or move the file: one of your own is named as 'module:function'",
            )
    return {name: getattr(module, name) for name, module in found.items()}
