"""A recipe as Prefect's form needs it: every key of the schema, with the recipe's value or else the schema's default.

The form lays a deployment's parameters over the schema's defaults and sends all keys; what is sent goes over `base`.
So of parameters that name a recipe as `base` the form would make a run of the defaults. Here every key is given, and
`base` is null.

Settings that validation fills in stay null: with a changed key they are filled in anew. Left out: checking values
(configs/loading/load.py), and who puts this on a server (penstock/cli/prefect/deploy.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.tree.annotations import below, section_in, table_in, without_idle_nulls
from configs.tree.recipes import compose
from configs.tree.section import Recipe


def form_values(values: Mapping[str, Any], kind: type[Recipe], folder: Path) -> dict[str, Any]:
    """Return every key of `kind`: what `values` over the recipes in their `base` give, else its default.

    Args:
        values: part of a tree, with or without `base`.
        kind: the tree's type.
        folder: where the recipes of `base` are looked for first.

    Raises:
        UserError: a recipe in `base` cannot be read.
    """
    return _every_key(without_idle_nulls(compose(values, folder), kind), kind)


def _every_key(values: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Return `values`, unknown keys among them for validation to report, and the default of every key they lack."""
    defaults = {
        name: field.get_default(call_default_factory=True, validated_data={})
        for name, field in kind.model_fields.items()
        if not field.is_required()
    }
    whole = {name: {} if isinstance(default, BaseModel) else default for name, default in defaults.items()}
    whole |= values
    return {name: _value(value, below(kind, name)) for name, value in whole.items()}


def _value(value: Any, annotation: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, Mapping):
        return value
    if section := section_in(annotation):
        return _every_key(value, section)
    if table := table_in(annotation):
        return {name: _every_key(entry, table) for name, entry in value.items()}
    return {str(key): _value(entry, Any) for key, entry in value.items()}  # a schedule's iterations are text in JSON
