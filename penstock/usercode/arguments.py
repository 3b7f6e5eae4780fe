"""Calling a user's function with what its parameter names ask for, and saying beforehand what has no source.

Left out: finding the function (penstock/usercode/imports.py), and what there is to ask for (each room says so itself).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.base.errors import UserError
from penstock.usercode.imports import nearest

Parameters = Mapping[str, inspect.Parameter]


def wanted(
    setting: str, spec: str, parameters: Parameters, settings: Mapping[str, Any], available: Sequence[str], sources: str
) -> tuple[str, ...]:
    """Return the parameters that are filled at each call: those that are available.

    Args:
        setting: key of the configuration that names the function; its settings are the key `settings` beside it.
        spec: `module:function`, for messages.
        parameters: those of the function.
        settings: extra keyword arguments from the recipe.
        available: names that a parameter can have.
        sources: what a name can be, for messages: "an argument, ...".

    Raises:
        UserError: a parameter without default has no source, a parameter has two, or a setting has no parameter.
    """
    prefix = f"{setting.rpartition('.')[0]}.settings"
    if both := [name for name in settings if name in available]:
        raise UserError(
            f"'{both[0]}' of {setting} '{spec}' is a setting ({prefix}.{both[0]}) and also "
            f"{sources.replace(', ', ' or ')}: it would get one of them without a word.",
            f"Remove the setting, or rename it and the parameter, for instance '{both[0]}_setting'.",
        )
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in () if takes_any else settings:
        if name not in parameters:
            raise UserError(
                f"{prefix} has '{name}', which '{spec}' does not take{nearest(name, parameters)}.",
                f"It takes: {', '.join(parameters)}.",
            )
    found, names = [], ", ".join(dict.fromkeys(available))
    for name, parameter in parameters.items():
        if name in settings or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in available:
            found.append(name)
        elif parameter.default is parameter.empty:
            raise UserError(
                f"{setting} '{spec}' asks for '{name}', which is neither {sources} "
                f"nor a setting{nearest(name, available)}.",
                f"Available: {names}. Rename the parameter, or give '{name}' in {prefix}.",
            )
    return tuple(found)
