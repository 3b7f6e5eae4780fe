"""Finding what a user named as `module:name` in a setting, among the modules that may be named there.

A configuration comes from a file or from a form, so it does not decide alone what runs: importing a module runs it, and
what is found there is called with settings. These modules may be named:

- those that lie in the working folder;
- of ours those that are made to be named (`OURS`);
- those that the environment variable `PENSTOCK_ALLOWED_MODULES` lists (`math_verify,my_package`), with all below. It
  belongs to whoever starts the terminal or the worker.

What is named must be defined in such a module, too: a user's module that imports `subprocess.run` for itself does not
thereby offer it. Every mistake is answered with what to do. Left out: what the object must be able to do (each room
checks its own).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.base.errors import UserError
from penstock.base.names import nearest_name

VARIABLE = "PENSTOCK_ALLOWED_MODULES"
OURS = (
    "penstock.benchmarks.workload.digit_reward",
    "penstock.benchmarks.workload.slow_environment",
    "penstock.api.dataflows",
    "penstock.environments.calculator",
    "penstock.environments.code",
    "penstock.environments.games.checked_sums",
    "penstock.environments.mcp",
    "penstock.environments.openenv",
    "penstock.environments.verifiers",
    "penstock.rewards.builtin",
    "penstock.rewards.code",
    "penstock.rewards.judge",
)
ROOMS = ("penstock", "tests")


def import_named(setting: str, spec: str, kind: str, example: str) -> Callable[..., Any]:
    """Import the callable that `setting` names.

    Args:
        setting: key of the configuration, for messages.
        spec: `module:name`.
        kind: what it should be, for messages: function, class.
        example: a spec that would be right.

    Raises:
        UserError: the name is malformed, the module may not be named here or does not import, or it has no such
            callable of its own.
    """
    return _find(module_named(setting, spec, kind, example), setting, spec, kind)


def module_named(setting: str, spec: str, kind: str, example: str) -> ModuleType:
    """Import the module of `module:name`, as `import_named` does; a module that may not be named is never run.

    Raises:
        UserError: the name is malformed, or the module may not be named here or does not import.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UserError(f"{setting} '{spec}' is not of the form 'module:{kind}'.", f"Example: {example}")
    folder = _working_folder()
    if module_name.endswith(".py") and (folder / module_name).is_file():
        module_name = module_name.removesuffix(".py")
        raise UserError(f"{setting} '{spec}' names a file, not a module.", f"Write {module_name}:{name}")
    if not _may_be_named(module_name, folder):
        problem, remedy = _refusal(module_name, folder)
        raise UserError(f"{setting} '{spec}': {problem}", remedy)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script, such as a setup.py, ends itself
        raise UserError(
            f"{setting} '{spec}': module '{module_name}' does not import: {type(error).__name__}: {error}",
            f"`python -c 'import {module_name}'` shows where.",
        ) from error


def nearest(name: str, options: Iterable[str]) -> str:
    """Return a question that names the option nearest to `name`, or nothing if none is near."""
    near = nearest_name(name, options)
    return f" (did you mean '{near}'?)" if near else ""


def _working_folder() -> Path:
    folder = Path.cwd()
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last: a user's folder named `data` or `rewards` must not hide a package of ours
    return folder.resolve()


def _may_be_named(module_name: str, folder: Path) -> bool:
    if any(f"{module_name}.".startswith(f"{allowed}.") for allowed in _allowed_by_operator()):
        return True
    top = module_name.partition(".")[0]
    return module_name in OURS if top in ROOMS else _lies_in(top, folder)


def _allowed_by_operator() -> list[str]:
    names = [name.strip().removesuffix(".*") for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UserError(f"{VARIABLE} has '{name}', which is no module", f"Example: {VARIABLE}=my_package,other")
    return names


def _lies_in(top: str, folder: Path) -> bool:
    """Whether `import top` finds it directly in `folder`: folders below may be environments with installed packages."""
    places = _places(top)
    return bool(places) and all(place.is_absolute() and place.parent.resolve() == folder for place in places)


def _places(top: str) -> list[Path]:
    """Return the file or the folders that `import top` takes, without running them; for a built-in module its kind."""
    loaded = sys.modules.get(top)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(top)
    if spec is None:
        return []
    return [Path(place) for place in spec.submodule_search_locations or [spec.origin or "built-in"]]


def _refusal(module_name: str, folder: Path) -> tuple[str, str]:
    """Return why a module may not be named, and what to do about it."""
    top = module_name.partition(".")[0]
    theirs = next((name for name in (f"{top}.py", top) if (folder / name).exists()), None)
    if theirs is not None and not _lies_in(top, folder):
        owner = "Penstock" if top in ROOMS else "Python or an installed package"
        return (
            f"'{top}' is a module of {owner}, which hides {folder / theirs}.",
            f"Rename yours, for instance my_{top}.",
        )
    if top in ROOMS:
        return (
            f"module '{module_name}' is one of Penstock's own that may not be named here.",
            f"Of its own these may: {', '.join(OURS)}.",
        )
    place = f"{module_name.replace('.', '/')}.py"
    remedy = f"allow it where the command or the worker is started: {VARIABLE}={top}"
    if not _places(top):
        return (
            f"module '{module_name}' does not import: ModuleNotFoundError: No module named '{top}'.",
            f"Put {place} under {folder}; or install it, and {remedy}",
        )
    return (
        f"module '{module_name}' may not be named here: it does not lie in the working folder {folder}.",
        f"Name a module of yours that uses it; or {remedy}",
    )


def _find(module: ModuleType, setting: str, spec: str, kind: str) -> Callable[..., Any]:
    name, folder = spec.partition(":")[2], _working_folder()
    if not hasattr(module, name):
        offered = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        own = [key for key in offered if _may_be_named(_home(getattr(module, key)), folder)]
        raise UserError(
            f"{setting} '{spec}': module '{module.__name__}' has no '{name}'{nearest(name, own)}.",
            f"It has: {', '.join(own) or f'no {kind}'}.",
        )
    found = getattr(module, name)
    if not callable(found):
        raise UserError(f"{setting} '{spec}' is not a {kind} but of type {type(found).__name__}.", f"Name a {kind}.")
    if not _may_be_named(home := _home(found), folder):
        raise UserError(
            f"{setting} '{spec}' is defined in '{home}', which is not among the modules that may be named here.",
            f"Define a {kind} of your own that uses it, or allow it where the command or the worker is started: "
            f"{VARIABLE}={home.partition('.')[0]}",
        )
    return found


def _home(found: Any) -> str:
    """Return the module that defines a callable."""
    while isinstance(found, functools.partial):
        found = found.func
    return str(getattr(found, "__module__", None))
