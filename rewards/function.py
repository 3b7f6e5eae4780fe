"""Finding a user's reward function and deciding, before anything starts, what each call will receive.

A reward function is any Python function named `module:function`; the working directory is importable. It receives
what its parameter names ask for:

- `response`, `prompt` (text), `prompt_id`, `row` (all columns of the data row, a dict), or a column by its name;
- settings from the recipe (`reward.settings`), which win over a column of the same name.

With a parameter `responses` it is a batch function: `responses`, `prompts`, `prompt_ids` and columns (under their
own name) are lists and `rows` is a list of dicts; it returns one value per row. A call gets the share of a batch that
one worker scores, so rows of a prompt may come in different calls. A function may be `async`. The value of a row is a
number, or a dict of named parts: the reward is the part "reward" if there is one, otherwise the sum of the parts.

Left out: running it (rewards/worker.py), so nothing here calls the user's code except its import.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from configs.errors import UserError

if TYPE_CHECKING:
    from rewards.scoring import Sample

Parameters = Mapping[str, inspect.Parameter]
# Parameter name -> field of Sample.
ROW_ARGUMENTS = {"response": "response", "prompt": "prompt", "prompt_id": "prompt_id", "row": "columns"}
BATCH_ARGUMENTS = {f"{name}s": field for name, field in ROW_ARGUMENTS.items()}


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function.

    Attributes:
        spec: its name, `module:function`.
        callable: the function with the recipe's settings already bound.
        is_async: whether a call returns a coroutine.
        is_batch: whether one call scores many rows.
        wants: the parameters that are filled from each sample.
    """

    spec: str
    callable: Callable[..., Any]
    is_async: bool
    is_batch: bool
    wants: tuple[str, ...]

    def arguments(self, sample: Sample) -> dict[str, Any]:
        """What the function receives for one row; a column that this row lacks is None, as null in JSON would be."""
        fields = BATCH_ARGUMENTS if self.is_batch else ROW_ARGUMENTS
        return {
            name: getattr(sample, fields[name]) if name in fields else sample.columns.get(name) for name in self.wants
        }


def load_reward_function(spec: str, settings: dict[str, Any], columns: Sequence[str]) -> RewardFunction:
    """Import `module:function` and match its parameters with the columns of the data and the recipe's settings.

    Raises:
        UserError: the name is malformed, the module does not import, the function is not there, a parameter has no
            source, or a setting has no parameter.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UserError(f"reward.function '{spec}' is not of the form 'module:function'.", "Example: my_rewards:score")
    function = _find(_import(spec, module_name), spec, name)

    parameters = inspect.signature(function).parameters
    is_batch = "responses" in parameters
    available = (*(BATCH_ARGUMENTS if is_batch else ROW_ARGUMENTS), *columns)
    _check_settings(spec, parameters, settings)
    return RewardFunction(
        spec=spec,
        callable=functools.partial(function, **settings),
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        is_batch=is_batch,
        wants=_wants(spec, parameters, settings, available),
    )


def _import(spec: str, module_name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # last: a user's folder named `data` or `rewards` must not hide a package of ours
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        raise UserError(
            f"reward.function '{spec}': module '{module_name}' does not import: {type(error).__name__}: {error}",
            f"Put {module_name.replace('.', '/')}.py under {folder}, or install it."
            if absent
            else f"`python -c 'import {module_name}'` shows where.",
        ) from error


def _find(module: ModuleType, spec: str, name: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            f"reward.function '{spec}': module '{module.__name__}' has no '{name}'{_nearest(name, public)}.",
            f"It has: {', '.join(public) or 'no function'}.",
        )
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"reward.function '{spec}' is a {type(function).__name__}, not a function.", "Name a function.")
    return function


def _check_settings(spec: str, parameters: Parameters, settings: dict[str, Any]) -> None:
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in settings:
        if name not in parameters:
            raise UserError(
                f"reward.settings has '{name}', which '{spec}' does not take{_nearest(name, parameters)}.",
                f"It takes: {', '.join(parameters)}.",
            )


def _wants(spec: str, parameters: Parameters, settings: dict[str, Any], available: Sequence[str]) -> tuple[str, ...]:
    wants = []
    for name, parameter in parameters.items():
        if name in settings or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in available:
            wants.append(name)
        elif parameter.default is parameter.empty:
            raise UserError(
                f"reward.function '{spec}' asks for '{name}', which is neither an argument, a column of the data "
                f"nor a setting{_nearest(name, available)}.",
                f"Available: {', '.join(available)}. Rename the parameter, or give '{name}' in reward.settings.",
            )
    return tuple(wants)


def _nearest(name: str, options: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(options), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
