"""What `algorithm.settings` holds: the settings of the estimator, the loss and its choice, checked by their signatures.

A number of a function (`float`) may be a schedule, and may change during a run. Left out: what a setting is
(algorithms/declarations/settings.py), which names are shared (algorithms/registry.py), and settings that have no effect
beside others (configs/sections/algorithm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from algorithms.declarations.settings import REQUIRED, Setting
from algorithms.registry import every_setting
from configs.tree.annotations import is_nullable, options_of
from configs.tree.schedule import steps_of
from penstock.usercode.imports import nearest

FINITE = ConfigDict(allow_inf_nan=False)


def is_scheduled(setting: Setting) -> bool:
    """Whether a recipe may give steps `{0: 0.2, 100: 0.1}` instead of one value."""
    return float in options_of(setting.annotation)


def type_of(setting: Setting) -> Any:
    """Return what a recipe may give."""
    return steps_of(setting.annotation) if is_scheduled(setting) else setting.annotation


def checked(given: Mapping[str, Any], taken: Mapping[str, Setting], functions: str) -> dict[str, Any]:
    """Return the value of every setting: what a recipe gives, else the default.

    Args:
        given: `algorithm.settings`; null takes a value back where the setting cannot be null.
        taken: the settings of the functions in force.
        functions: what people call these functions, for messages.

    Raises:
        ValidationError: lists every setting that is unknown, is not given and has no default, is not of its type or
            outside of its bounds, or is of a kind that a recipe cannot hold.
    """
    kept = {name: value for name, value in given.items() if value is not None or not _taken_back(name, taken)}
    wrong = [_problem(name, _not_taken(name, taken, functions)) for name in kept if name not in taken]
    values: dict[str, Any] = {}
    for name, setting in taken.items():
        try:
            values[name] = _value(kept.get(name, setting.default), setting)
        except ValidationError as error:
            wrong += [_within(name, detail) for detail in error.errors(include_url=False)]
        except ValueError as error:
            wrong.append(_problem(name, str(error)))
    if wrong:
        raise ValidationError.from_exception_data("settings", wrong)
    return values


def _value(value: Any, setting: Setting) -> Any:
    if value is REQUIRED:
        raise ValueError("is required: your function has no default, or two functions have different ones")
    value = TypeAdapter(type_of(setting), config=FINITE).validate_python(value)
    if not isinstance(value, bool | int | float | str | list | dict | None):
        raise ValueError(
            f"is a {type(value).__name__}, which a recipe cannot hold: let your function take a number, text, true or "
            "false, null, a list or a mapping"
        )
    return value


def _taken_back(name: str, taken: Mapping[str, Setting]) -> bool:
    return not is_nullable(taken[name].annotation) if name in taken else name in every_setting()


def _not_taken(name: str, taken: Mapping[str, Setting], functions: str) -> str:
    theirs = f"{functions} take: {', '.join(taken) or 'none'}"
    if owners := every_setting().get(name):
        return f"has no effect with {functions}: remove it, it is a setting of {', '.join(owners)}; {theirs}"
    return f"unknown setting{nearest(name, taken)}; {theirs}"


def _problem(name: str, text: str) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError("value_error", "{text}", {"text": text}), loc=(name,), input=None)


def _within(name: str, detail: ErrorDetails) -> InitErrorDetails:
    where = (name, *detail["loc"])
    return InitErrorDetails(type=detail["type"], loc=where, input=detail["input"], ctx=detail.get("ctx", {}))


def _known() -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name, owners in every_setting().items():
        types = list(dict.fromkeys(type_of(setting) for setting in owners.values()))
        kind: Any = types[0]
        for other in types[1:]:
            kind = kind | other
        defaults = ", ".join(f"{owner} {_written(setting.default)}" for owner, setting in owners.items())
        described = min((setting.description for setting in owners.values()), key=len)
        fields[name] = (kind, Field(description=f"{described.rstrip('.')} (default: {defaults})"))
    return create_model("AlgorithmSettings", **fields)


def _written(default: Any) -> str:
    return "null" if default is None else str(default).lower() if isinstance(default, bool) else f"{default}"


KNOWN: type[BaseModel] = _known()  # settings of functions of ours, for lists of keys and for forms
