"""Find the files of a package and its sub-rooms, so that no list of them has to be kept.

A package read this way holds one function per file, named as the file, and ``types.py`` with what they share. Which
sub-room a file lies in is for readers: its name alone counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from penstock.base.errors import UserError


def modules(package: str, path: Iterable[str]) -> dict[str, ModuleType]:
    """Import every file of a package and its sub-rooms but ``types.py``, and return them by name, in its order.

    Args:
        package: the package's ``__name__``.
        path: its ``__path__``.

    Raises:
        UserError: two files have one name.
    """
    found: dict[str, ModuleType] = {}
    for name, module in _walk(package, path):
        if name in found:
            raise UserError(
                f"{found[name].__file__} and {module.__file__} have one name, by which both would be found",
                "rename one of the files and its function",
            )
        found[name] = module
    return dict(sorted(found.items()))


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


def _walk(package: str, path: Iterable[str]) -> Iterator[tuple[str, ModuleType]]:
    for info in iter_modules(path):
        if info.name == "types":
            continue
        module = import_module(f"{package}.{info.name}")
        if info.ispkg:
            yield from _walk(module.__name__, module.__path__)
        else:
            yield info.name, module
