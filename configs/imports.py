"""Finding what a user named as `module:name` in a setting; the working directory is importable.

Every mistake is answered with what to do. Left out: what the object must be able to do (each room checks its own).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from configs.errors import UserError
from configs.names import nearest_name


def import_named(setting: str, spec: str, kind: str, example: str) -> Callable[..., Any]:
    """Import the callable that `setting` names.

    Args:
        setting: key of the configuration, for messages.
        spec: `module:name`.
        kind: what it should be, for messages: function, class.
        example: a spec that would be right.

    Raises:
        UserError: the name is malformed, the module does not import, or it has no such callable.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UserError(f"{setting} '{spec}' is not of the form 'module:{kind}'.", f"Example: {example}")
    return _find(_import(setting, spec, module_name), setting, spec, name, kind)


def nearest(name: str, options: Iterable[str]) -> str:
    """Return a question that names the option nearest to `name`, or nothing if none is near."""
    near = nearest_name(name, options)
    return f" (did you mean '{near}'?)" if near else ""


def _import(setting: str, spec: str, module_name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # last: a user's folder named `data` or `rewards` must not hide a package of ours
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        raise UserError(
            f"{setting} '{spec}': module '{module_name}' does not import: {type(error).__name__}: {error}",
            f"Put {module_name.replace('.', '/')}.py under {folder}, or install it."
            if absent
            else f"`python -c 'import {module_name}'` shows where.",
        ) from error


def _find(module: ModuleType, setting: str, spec: str, name: str, kind: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            f"{setting} '{spec}': module '{module.__name__}' has no '{name}'{nearest(name, public)}.",
            f"It has: {', '.join(public) or f'no {kind}'}.",
        )
    found = getattr(module, name)
    if not callable(found):
        raise UserError(f"{setting} '{spec}' is a {type(found).__name__}, not a {kind}.", f"Name a {kind}.")
    return found
