"""Every key of the configuration by its dotted name: to list them, to walk them, and to guess what a wrong one meant.

Left out: reading values (configs/loading.py).
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.schema import TrainConfig

PLAIN_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null", Any: "anything"}
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Key(NamedTuple):
    """One key as the documentation shows it; `default` is in YAML's notation, empty where the key is required."""

    name: str
    type: str
    default: str
    description: str


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section an annotation holds (`Section` or `Section | None`), or None."""
    for option in _options(annotation):
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
    return type(None) in _options(annotation)


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if section := section_in(field.annotation):
            yield from _walk(section, f"{prefix}{name}.")
        if table := table_in(field.annotation):
            yield from _walk(table, f"{prefix}{name}.<name>.")


def leaf_keys(tree: type[BaseModel]) -> set[str]:
    """Return every key of a tree that holds a value; sections are not among them."""
    fields = _walk(tree)
    return {name for name, field in fields if not section_in(field.annotation) and not table_in(field.annotation)}


def describe_keys(tree: type[BaseModel] = TrainConfig) -> list[Key]:
    """Return every key of a tree in the schema's order, sections included."""
    return [Key(name, _type_of(field), _default_of(field), field.description or "") for name, field in _walk(tree)]


def _type_of(field: FieldInfo) -> str:
    bounds = " and ".join(
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in BOUNDS.items()
        if getattr(rule, name, None) is not None
    )
    value, null, _ = _type_name(field.annotation).partition(" or null")
    return f"{value} {bounds}{null}" if bounds else value + null


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(_type_name(argument) for argument in arguments)}]"
    if origin is dict:
        key = "iteration" if arguments[0] is int else "name"
        return f"{{{key}: {_type_name(arguments[1])}}}"
    return PLAIN_TYPES.get(annotation, "section")


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    default = field.get_default(call_default_factory=True, validated_data={})
    return "" if isinstance(default, BaseModel) else json.dumps(default)


def below(annotation: Any, name: str) -> Any:
    """Return the annotation of the key `name` inside a value of type `annotation`; None where there is no such key."""
    if section := section_in(annotation):
        field = section.model_fields.get(name)
        return field.annotation if field else None
    if table := table_in(annotation):
        return table
    return Any if is_free(annotation) else None


def exists(parts: Sequence[str], tree: type[BaseModel] = TrainConfig) -> bool:
    """Whether the dotted name made of `parts` is a key of a tree."""
    return _annotation_at(parts, tree) is not None


def suggest(parts: Sequence[str], tree: type[BaseModel] = TrainConfig) -> str:
    """Guess which key a wrong dotted name meant: one beside it, else one elsewhere in the tree, else empty text."""
    name = parts[-1]
    section = section_in(_annotation_at(parts[:-1], tree))
    if near := _nearest(name, section.model_fields if section else ()):
        return f"did you mean '{near}'?"
    places: dict[str, list[str]] = {}
    for place, _ in _walk(tree):
        places.setdefault(place.rpartition(".")[2], []).append(place)
    if not (near := _nearest(name, places)):
        return ""
    inside = ".".join(parts[:-1]) + "."
    deeper = [place for place in places[near] if place.startswith(inside)]
    return f"'{near}' exists at {', '.join(deeper or places[near])}"


def _annotation_at(parts: Iterable[str], tree: type[BaseModel]) -> Any:
    annotation: Any = tree
    for part in parts:
        annotation = below(annotation, part)
    return annotation


def _nearest(name: str, names: Iterable[str]) -> str:
    candidates = list(names)
    if close := difflib.get_close_matches(name, candidates, n=1, cutoff=0.7):  # below it 'lr' is close to 'lora'
        return close[0]
    # `lr` for learning_rate: no edit distance finds initials.
    return {"".join(word[0] for word in candidate.split("_")): candidate for candidate in candidates}.get(name, "")
