"""From what a form or an API gave a flow to the configuration that `penstock train RECIPE key=value` would make.

    recipe <- fields, overrides, advanced section

No order decides among the three: where two of them give a key different values the run is refused, since nobody can
mean both. A run that goes on has its own configuration, so beside it all of them are refused, but for the recipe, which
a deployment always gives.

Left out: what the fields are (penstock/configs/loading/fields.py), which of them a flow has (parameters.py beside it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from penstock.base.errors import UserError
from penstock.configs.loading.load import parse_override, tree_of
from penstock.configs.tree.recipes import compose, merge
from penstock.configs.tree.section import Recipe

Tree = TypeVar("Tree", bound=Recipe)
FIELDS, OVERRIDES, ADVANCED = "the field", "overrides", "the advanced section"


def config_from_form(
    kind: type[Tree],
    recipe: str | None,
    fields: Mapping[str, Any],
    overrides: Sequence[str] | None,
    advanced: Tree | Mapping[str, Any] | None,
    resume: str | None = None,
) -> Tree:
    """Return the configuration of a new run; beside a run that goes on the defaults, which nobody looks at.

    Args:
        kind: its type.
        recipe: a YAML file, where recipes are read from; None: the defaults of every key.
        fields: values by the keys that they are for; None leaves what the recipe says.
        overrides: `section.key=value`, the value in YAML.
        advanced: part of a tree, in which an empty section says nothing. Or a whole configuration, checked already.
        resume: the folder of a run that goes on.

    Raises:
        UserError: a recipe, a key or a value is wrong, or one key has two values.
    """
    whole = advanced if isinstance(advanced, kind) else None
    part = _without_empty(dict(advanced or {})) if whole is None else {}
    given = [(FIELDS, _nested(key, value)) for key, value in fields.items() if value is not None]
    given += [(OVERRIDES, parse_override(override, kind)) for override in overrides or ()]
    given += [(ADVANCED, part)] * bool(part)
    if resume is not None:
        _refuse_beside(resume, given, whole)
        return kind()
    if whole is not None:
        if recipe or given:
            raise UserError("a whole configuration leaves nothing to a recipe or other settings", "give it alone")
        return whole
    if "base" in part:
        raise UserError("the advanced section has 'base'", "name the recipe as 'recipe'")
    _refuse_contradictions(given)
    lower = compose({"base": recipe}, Path(), "the form") if recipe else {}
    return tree_of(lower, [tree for _, tree in given], recipe or "the form", kind)


def _refuse_beside(resume: str, given: Sequence[tuple[str, Mapping[str, Any]]], whole: Recipe | None) -> None:
    if not given and whole is None:
        return
    what = f"'{_first_key(given[0][1])}', given by {given[0][0]}," if given else "a configuration"
    raise UserError(
        f"{what} is for a new run, and {resume} goes on with its own configuration",
        "take it back; some keys of a training may change, by 'changes'",
    )


def _first_key(tree: Mapping[str, Any]) -> str:
    name, value = next(iter(tree.items()))
    return f"{name}.{_first_key(value)}" if isinstance(value, Mapping) and value else str(name)


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _without_empty(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drop empty sections: a page leaves one behind where something was typed and deleted."""
    kept = {key: _without_empty(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return {key: value for key, value in kept.items() if value != {}}


def _refuse_contradictions(given: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse two trees whose order would matter; overrides follow each other as on the command line.

    Raises:
        UserError: names the key, both values and where they are from.
    """
    for (one, lower), (other, upper) in combinations(given, 2):
        found = None if one == other else _first_difference(merge(upper, lower), merge(lower, upper))
        if found is not None:
            key, first, second = found
            raise UserError(
                f"'{key}' is given twice: {first!r} by {one}, {second!r} by {other}", "take one of them back"
            )


def _first_difference(one: Any, other: Any, key: str = "") -> tuple[str, Any, Any] | None:
    if one == other:
        return None
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        inside = (_first_difference(one[name], other[name], f"{key}.{name}" if key else name) for name in one)
        return next(found for found in inside if found is not None)
    return key, one, other
