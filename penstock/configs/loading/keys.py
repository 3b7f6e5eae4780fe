"""Every key of the configuration by its dotted name: to list them, to walk them, and to guess what a wrong one meant.

Left out: reading values (penstock/configs/loading/load.py).
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.base.names import nearest_name
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.annotations import Knows, below, section_in, table_in

PLAIN_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null", Any: "anything"}
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Key(NamedTuple):
    """One key as the documentation shows it; `default` is in YAML's notation, empty where the key is required."""

    name: str
    type: str
    default: str
    description: str


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if section := section_in(field.annotation):
            yield from _walk(section, f"{prefix}{name}.")
        if table := table_in(field.annotation):
            yield from _walk(table, f"{prefix}{name}.<name>.")
        for rule in field.metadata:
            if isinstance(rule, Knows):
                yield from _walk(rule.keys, f"{prefix}{name}.")


def describe_keys(tree: type[BaseModel] = TrainConfig) -> list[Key]:
    """Return every key of a tree in the schema's order, sections included."""
    return [Key(name, _type_of(field), _default_of(field), field.description or "") for name, field in _walk(tree)]


def _type_of(field: FieldInfo) -> str:
    union = get_origin(field.annotation) in (Union, types.UnionType)
    options = get_args(field.annotation) if union else (field.annotation,)
    value = " or ".join(_type_name(option) for option in options if option is not type(None))
    return _bounded(value, field.metadata) + (" or null" if type(None) in options else "")


def _bounded(value: str, rules: Sequence[Any]) -> str:
    bounds = " and ".join(
        f"{sign} {getattr(rule, name):g}"
        for rule in rules
        for name, sign in BOUNDS.items()
        if getattr(rule, name, None) is not None
    )
    return f"{value} {bounds}" if bounds else value


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(_type_name(arguments[0]), arguments[1:])
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(_type_name(argument) for argument in arguments)}]"
    if origin in (dict, Mapping):
        key = "iteration" if arguments[0] is int else "name"
        return f"{{{key}: {_type_name(arguments[1])}}}"
    return PLAIN_TYPES.get(annotation, "section")


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    default = field.get_default(call_default_factory=True, validated_data={})
    return "" if isinstance(default, BaseModel) else json.dumps(default)


def exists(parts: Sequence[str], tree: type[BaseModel] = TrainConfig) -> bool:
    """Whether the dotted name made of `parts` is a key of a tree."""
    return _annotation_at(parts, tree) is not None


def suggest(parts: Sequence[str], tree: type[BaseModel] = TrainConfig) -> str:
    """Guess which key a wrong dotted name meant: one beside it, else one elsewhere in the tree, else empty text."""
    name = parts[-1]
    section = section_in(_annotation_at(parts[:-1], tree))
    if near := _nearest_key(name, section.model_fields if section else ()):
        return f"did you mean '{'.'.join([*parts[:-1], near])}'?"
    places: dict[str, list[str]] = {}
    for place, _ in _walk(tree):
        places.setdefault(place.rpartition(".")[2], []).append(place)
    if not (near := _nearest_key(name, places)):
        return ""
    inside = ".".join(parts[:-1]) + "."
    deeper = [place for place in places[near] if place.startswith(inside)]
    return f"'{near}' exists at {', '.join(deeper or places[near])}"


def _annotation_at(parts: Iterable[str], tree: type[BaseModel]) -> Any:
    annotation: Any = tree
    for part in parts:
        annotation = below(annotation, part)
    return annotation


def _nearest_key(name: str, keys: Iterable[str]) -> str:
    """Return what a wrong key probably is, also where it is made of initials; empty if nothing is near."""
    candidates = list(keys)
    # `lr` for learning_rate: no edit distance finds initials.
    initials = {"".join(word[:1] for word in candidate.split("_")): candidate for candidate in candidates}
    return nearest_name(name, candidates) or initials.get(name, "")
