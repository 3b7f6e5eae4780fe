"""A form whose empty fields say nothing, from the schema of a flow's parameters.

Prefect's page sends the default of whatever it shows, untouched or not: all of the schema's defaults would go over the
recipe. So no field keeps one. Three kinds of fields send a value also without: switches are false, fields without any
type and tables without named fields are null. The first become a choice of true and false, the last get an empty list
of names, which leaves the page's JSON input for them.

What may be null has two fields in the page, one of which says "None". Where the other is a plain value it stays alone:
Prefect's server takes null for each value without a default. And a section's required keys may come from the recipe.

Left out: what a value may be, which stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NULL = {"type": "null"}
NAMED = ("properties", "definitions")  # what is below them has names, not keywords
OF_THE_SERVER = ("default", "required")
CLOSED, OPEN = "As in the recipe", "Every key"


def blank(schema: Mapping[str, Any], choices: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the schema of a form whose empty fields are not sent.

    Args:
        schema: of a flow's parameters, as Prefect makes it. What holds sections is put last.
        choices: parameters by name, and the values to choose from. The deployment has one of each.
    """
    form = _blank({**schema, "definitions": _without_base(schema.get("definitions", {}))})
    for name, values in choices.items():
        form["properties"][name] |= {"enum": list(values)}
    form["required"] = list(choices)
    for name, item in form["properties"].items():
        if "$ref" in item:
            form["properties"][name] = _folded(item, len(form["properties"]))
            form["definitions"][item["$ref"].rpartition("/")[2]]["title"] = OPEN
    return dict(form)


def plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a form of a flow without sections: each parameter one field, called as people write.

    Args:
        schema: of a flow's parameters, as Prefect makes it. Defaults and what is required stay.
    """
    return {**schema, "properties": {name: _plain(name, item) for name, item in schema["properties"].items()}}


def _plain(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    field = {key: value for key, value in item.items() if key != "default" or value is not None}
    if "anyOf" in field:
        field = _of_options(field)
    field["title"] = _as_sentence(name.replace("_", " "))
    if "description" in field:
        field["description"] = _as_sentence(field["description"])
    return field


def _as_sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _folded(item: dict[str, Any], position: int) -> dict[str, Any]:
    """Return a section that is opened by a button: its fields would push the page's own button far down."""
    rest = {key: value for key, value in item.items() if key != "$ref"}
    return rest | {"anyOf": [NULL | {"title": CLOSED}, {"$ref": item["$ref"]}], "position": position}


def _without_base(definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Drop `base`: a form names its recipe apart."""
    return {
        name: {**item, "properties": {key: value for key, value in item["properties"].items() if key != "base"}}
        if "properties" in item
        else item
        for name, item in definitions.items()
    }


def _blank(item: Any) -> Any:
    if isinstance(item, list):
        return [_blank(entry) for entry in item]
    if not isinstance(item, Mapping):
        return item
    field = {
        key: {name: _blank(entry) for name, entry in value.items()} if key in NAMED else _blank(value)
        for key, value in item.items()
        if key not in OF_THE_SERVER
    }
    if "anyOf" in field:
        field = _of_options(field)
    if field.get("type") == "boolean":
        return {key: value for key, value in field.items() if key != "type"} | {"enum": [True, False, None]}
    if field.get("type") == "object":
        return {"properties": {}} | field
    return field


def _of_options(field: dict[str, Any]) -> dict[str, Any]:
    """Return a field with the one option that is not null in its place, unless that is a section."""
    options = [option for option in field["anyOf"] if option != NULL]
    nullable = len(options) < len(field["anyOf"])
    if len(options) > 1 or (nullable and "$ref" in options[0] and "position" not in field):
        return field | {"anyOf": options + [NULL] * nullable}
    rest = {key: value for key, value in field.items() if key != "anyOf"}
    only = options[0]
    if nullable and "enum" in only and None not in only["enum"]:
        only = only | {"enum": [*only["enum"], None]}
    return only | rest
