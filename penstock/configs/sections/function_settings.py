"""What `algorithm.settings` and `loss.settings` hold: settings of functions, checked by the functions' signatures.

Left out: what a setting is (penstock/algorithms/declarations/settings.py), which names are shared
(penstock/algorithms/registry.py), and settings that have no effect beside others
(penstock/configs/sections/algorithm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from penstock.algorithms.declarations.settings import REQUIRED, Setting
from penstock.algorithms.registry import is_own
from penstock.configs.tree.annotations import is_nullable, options_of
from penstock.configs.tree.schedule import steps_of
from penstock.usercode.imports import nearest

FINITE = ConfigDict(allow_inf_nan=False)


def own_function(name: str) -> str:
    """Return the name of a user's function, for a key that takes names of ours beside.

    Raises:
        ValueError: it is not written as one.
    """
    if not is_own(name):
        raise ValueError("a function of yours, 'module:function'")
    return name


def is_scheduled(setting: Setting) -> bool:
    """Whether a recipe may give steps `{0: 0.2, 100: 0.1}` instead of one value, where schedules are followed."""
    return float in options_of(setting.annotation)


@dataclass(frozen=True)
class FunctionSettings:
    """A mapping of settings in the tree.

    Args:
        title: what a form calls it.
        ours: every setting of functions of ours by its name, and then by the name of each function that has it.
        scheduled: whether a number (`float`) may be a schedule.
    """

    title: str
    ours: Mapping[str, Mapping[str, Setting]]
    scheduled: bool

    def checked(self, given: Mapping[str, Any], taken: Mapping[str, Setting], functions: str) -> dict[str, Any]:
        """Return the value of every setting: what a recipe gives, else the default.

        Args:
            given: the mapping in the recipe; null takes a value back where the setting cannot be null.
            taken: the settings of the functions in force.
            functions: what people call these functions, for messages.

        Raises:
            ValidationError: lists every setting that is unknown, is not given and has no default, is not of its type
                or outside of its bounds, or is of a kind that a recipe cannot hold.
        """
        kept = {name: value for name, value in given.items() if value is not None or not self._taken_back(name, taken)}
        wrong = [_problem(name, self._not_taken(name, taken, functions)) for name in kept if name not in taken]
        values: dict[str, Any] = {}
        for name, setting in taken.items():
            try:
                values[name] = self._value(kept.get(name, setting.default), setting)
            except ValidationError as error:
                wrong += [_within(name, detail) for detail in error.errors(include_url=False)]
            except ValueError as error:
                wrong.append(_problem(name, str(error)))
        if wrong:
            raise ValidationError.from_exception_data("settings", wrong)
        return values

    @cached_property
    def known(self) -> type[BaseModel]:
        """The settings of functions of ours as fields, for lists of keys and for forms."""
        fields: dict[str, Any] = {}
        for name, owners in self.ours.items():
            types = list(dict.fromkeys(self._type_of(setting) for setting in owners.values()))
            kind: Any = types[0]
            for other in types[1:]:
                kind = kind | other
            defaults = ", ".join(f"{owner} {_written(setting.default)}" for owner, setting in owners.items())
            described = min((setting.description for setting in owners.values()), key=len)
            fields[name] = (kind, Field(description=f"{described.rstrip('.')} (default: {defaults})"))
        return create_model(self.title, **fields)

    def _type_of(self, setting: Setting) -> Any:
        return steps_of(setting.annotation) if self.scheduled and is_scheduled(setting) else setting.annotation

    def _value(self, value: Any, setting: Setting) -> Any:
        if value is REQUIRED:
            raise ValueError("is required: your function has no default, or two functions have different ones")
        value = TypeAdapter(self._type_of(setting), config=FINITE).validate_python(value)
        if not isinstance(value, bool | int | float | str | list | dict | None):
            raise ValueError(
                f"is a {type(value).__name__}, which a recipe cannot hold: let your function take a number, text, true "
                "or false, null, a list or a mapping"
            )
        return value

    def _taken_back(self, name: str, taken: Mapping[str, Setting]) -> bool:
        return not is_nullable(taken[name].annotation) if name in taken else name in self.ours

    def _not_taken(self, name: str, taken: Mapping[str, Setting], functions: str) -> str:
        theirs = f"settings of {functions}: {', '.join(taken) or 'none'}"
        if owners := self.ours.get(name):
            return f"has no effect with {functions}: remove it, it is a setting of {', '.join(owners)}; {theirs}"
        return f"unknown setting{nearest(name, taken)}; {theirs}"


def _problem(name: str, text: str) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError("value_error", "{text}", {"text": text}), loc=(name,), input=None)


def _within(name: str, detail: ErrorDetails) -> InitErrorDetails:
    where = (name, *detail["loc"])
    return InitErrorDetails(type=detail["type"], loc=where, input=detail["input"], ctx=detail.get("ctx", {}))


def _written(default: Any) -> str:
    return "null" if default is None else str(default).lower() if isinstance(default, bool) else f"{default}"
