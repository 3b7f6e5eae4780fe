"""Values for settings, made from their types: a new setting needs no line in a test."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from penstock.algorithms.declarations.settings import Setting

CANDIDATES: tuple[Any, ...] = (0.35, 3, 7.0, True, False, {"right": 0.5}, "text")


def other_value(setting: Setting) -> Any:
    """Return a value that a setting takes, and that is not its default."""
    literal = get_origin(setting.annotation) is Literal
    for value in get_args(setting.annotation) if literal else CANDIDATES:
        try:
            valid = TypeAdapter(setting.annotation).validate_python(value, strict=isinstance(value, bool))
        except ValidationError:
            continue
        if valid != setting.default:
            return valid
    raise AssertionError(f"no value is known for {setting}")
