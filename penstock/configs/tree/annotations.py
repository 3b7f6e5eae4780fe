"""What the type of a key says: which section it holds, which keys are below it, whether null is a value of its own."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema


@dataclass(frozen=True)
class Knows:
    """Which keys a mapping of free keys (`dict[str, Any]`) is known to hold, among others: for lists and for forms.

    A form gets no defaults: it would send them all, and which of the keys apply depends on others.
    """

    keys: type[BaseModel]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        known = self.keys.model_json_schema()
        return handler(schema) | {"properties": known["properties"], "additionalProperties": True}


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section an annotation holds (`Section` or `Section | None`), or None."""
    for option in options_of(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def table_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section type of a table of named sections (`dict[str, Section]`), or None."""
    return section_in(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def is_free(annotation: Any) -> bool:
    """Whether the keys below are the user's own (`dict[str, Any]`)."""
    return annotation is Any or annotation == dict[str, Any]


def is_nullable(annotation: Any) -> bool:
    """Whether null is a value of its own here."""
    return annotation is Any or type(None) in options_of(annotation)


def options_of(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, each without its bounds; of anything else itself."""
    if get_origin(annotation) is Annotated:
        return options_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(option for branch in get_args(annotation) for option in options_of(branch))
    return (annotation,)


def below(annotation: Any, name: str) -> Any:
    """Return the annotation of the key `name` inside a value of type `annotation`; None where there is no such key."""
    if section := section_in(annotation):
        field = section.model_fields.get(name)
        return field.annotation if field else None
    if table := table_in(annotation):
        return table
    return Any if is_free(annotation) else None


def without_idle_nulls(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Drop nulls of keys that cannot be null; unknown keys and wrong values stay for validation to report."""
    kept = {}
    for key, value in values.items():
        annotation = below(model, key)
        if value is None and annotation is not None and not is_nullable(annotation):
            continue
        kept[key] = _clean(value, annotation)
    return kept


def _clean(value: Any, annotation: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if section := section_in(annotation):
        return without_idle_nulls(value, section)
    if table := table_in(annotation):
        return {name: _clean(entry, table) for name, entry in value.items() if entry is not None}
    return value
