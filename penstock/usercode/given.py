"""Functions that a program hands over by itself, under the names that a configuration has for them.

A configuration names a user's function as `module:name`, which is imported (penstock/usercode/imports.py). A notebook's
cell is no module. So what a program gives to `penstock.train` is found under its name as long as that runs, and a
command that goes on with the run later says what it lacks. Left out: functions that other processes call, which have to
import them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.base.errors import UserError
from penstock.usercode.imports import import_named

_GIVEN: dict[str, Callable[..., Any]] = {}


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function in a configuration."""
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"


@contextmanager
def given(*functions: Callable[..., Any]) -> Iterator[None]:
    """Let functions be found under their names, until the context ends."""
    before = dict(_GIVEN)
    _GIVEN.update({name_of(function): function for function in functions})
    try:
        yield
    finally:
        _GIVEN.clear()
        _GIVEN.update(before)


def given_or_imported(setting: str, spec: str, example: str) -> Callable[..., Any]:
    """Return the function that a setting names: one that was given, or else that of a module.

    Raises:
        UserError: a program gave it, and this is another one; or as `import_named`.
    """
    if spec in _GIVEN:
        return _GIVEN[spec]
    if spec.startswith("__main__:") or "<locals>" in spec:
        raise UserError(
            f"{setting} '{spec}' was given by a program, and no module has it",
            f"go on with that program, or put the function into a module of its own: {setting}={example}",
        )
    return import_named(setting, spec, "function", example)
