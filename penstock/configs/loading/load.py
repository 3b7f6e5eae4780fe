"""From recipes, overrides and flow parameters to one validated tree (mostly `TrainConfig`), and back to YAML.

Every mistake becomes one `UserError` that lists each wrong key with what was probably meant.

Null has one meaning everywhere: for a key that may be null it is that value, for any other it takes back what a base
recipe gave, so that the default is in force (`groups=null`).

Left out: YAML itself and `base:` (penstock/configs/tree/recipes.py), dropping nulls
(penstock/configs/tree/annotations.py), the list of keys (penstock/configs/loading/keys.py), and checks that need the
machine or the data (penstock/checks/training.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.base.errors import UserError
from penstock.base.names import nearest_name
from penstock.configs.loading.keys import describe_keys, exists, suggest
from penstock.configs.schema import TrainConfig
from penstock.configs.tree import recipes
from penstock.configs.tree.annotations import below, section_in
from penstock.configs.tree.recipes import read_tree
from penstock.configs.tree.section import Recipe

__all__ = ["config_from_mapping", "describe_keys", "load_config", "load_saved", "load_tree", "read_tree", "to_yaml"]

Tree = TypeVar("Tree", bound=Recipe)

MAPPING = re.compile(r"a valid dictionary( or instance of \w+)?")
NAME = re.compile(r"'([^']*)'")
# Pydantic's words for the types, and what it says of the text that it tried to read as one.
TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
}
TYPE = re.compile(rf"a valid ({'|'.join(TYPES)})(, (unable to|got a number with a fractional part).*)?$")
EVERY_KEY = "penstock keys lists every valid key"


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration of a recipe with overrides laid over it.

    Args:
        path: a YAML recipe; its `base` recipes come first.
        overrides: `section.key=value`, the value in YAML; `section=null` removes a section.

    Raises:
        UserError: a file, an override or a value is wrong.
    """
    return load_tree(path, overrides, TrainConfig)


def load_tree(path: Path, overrides: Sequence[str], kind: type[Tree]) -> Tree:
    """Return a recipe of another kind than a training; otherwise as `load_config`.

    Raises:
        UserError: a file, an override or a value is wrong.
    """
    return tree_of(read_tree(path), [parse_override(override, kind) for override in overrides], str(path), kind)


def tree_of(lower: Mapping[str, Any], upper: Sequence[Mapping[str, Any]], source: str, kind: type[Tree]) -> Tree:
    """Return the configuration of a tree with others laid over it, one after the other.

    Args:
        source: what to call the first in an error.

    Raises:
        UserError: lists every wrong key.
    """
    for tree in upper:
        lower = recipes.merge(lower, tree)
    return _validated(lower, source, kind)


def load_saved(path: Path, kind: type[Tree]) -> Tree:
    """Return the resolved configuration that a run folder keeps; a `base` in it is one of a form.

    Raises:
        UserError: the file or a value is wrong.
    """
    return _validated(recipes.read_mapping(path), str(path), kind)


def config_from_mapping(values: Mapping[str, Any], source: str) -> TrainConfig:
    """Return the configuration a tree describes; a `base` in it is looked for in the working directory.

    Args:
        values: keys as in a recipe; schedule keys may be text, as JSON leaves them.
        source: what to call the tree in an error.

    Raises:
        UserError: lists every wrong key.
    """
    return _validated(values, source, TrainConfig)


def _validated(values: Mapping[str, Any], source: str, kind: type[Tree]) -> Tree:
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        problems = _explain(error, kind)
        count = "one setting is" if len(problems) == 1 else f"{len(problems)} settings are"
        raise UserError(f"{source}: {count} wrong\n    " + "\n    ".join(problems), _every_key(kind)) from None


def _every_key(kind: type[BaseModel]) -> str:
    if kind is TrainConfig:
        return EVERY_KEY
    return "penstock keys preference and penstock keys reward-model list every valid key"


def to_yaml(config: BaseModel) -> str:
    """Return the whole tree as YAML in the schema's order; it loads back to an equal configuration."""
    return recipes.dump(config.model_dump(exclude={"base"}))


def parse_override(text: str, kind: type[BaseModel]) -> dict[str, Any]:
    """Return the tree that holds the one key of `section.key=value`.

    Raises:
        UserError: it is not that, or there is no such key.
    """
    name, equals, value = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts) or not value.strip():
        raise UserError(f"the override '{text}' is not section.key=value", "for example rollout.samples=16")
    if not exists(parts, kind):
        raise UserError(f"the override '{text}' names no key{_hint(parts, kind)}", _every_key(kind))
    tree = recipes.parse(value, f"the override '{text}'")
    for part in reversed(parts):
        tree = {part: tree}
    return tree


def _explain(error: ValidationError, kind: type[BaseModel]) -> list[str]:
    """Return one line per wrong key; the branches of a union count as one."""
    found: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False, include_context=False):
        found.setdefault(_key_of(detail["loc"], kind), []).append(detail)
    return [_line(key, details, kind) for key, details in found.items()]


def _key_of(location: tuple[int | str, ...], kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the key an error is at, without pydantic's names for the branches of a union."""
    key: list[str] = []
    annotation: Any = kind
    for part in location:
        if annotation is Any and not isinstance(part, int):  # of a free key's value the branches are no keys
            break
        inside = below(annotation, str(part))
        if inside is not None or section_in(annotation) or isinstance(part, int):
            key.append(str(part))
        if inside is None:
            break
        annotation = inside
    return tuple(key)


def _line(key: tuple[str, ...], details: list[ErrorDetails], kind: type[BaseModel]) -> str:
    if details[0]["type"] == "extra_forbidden":
        return f"{'.'.join(key)}: unknown key{_hint(key, kind)}"
    # Of a union's branches the one that got furthest says most: it accepted the type and refused the content.
    telling = [detail for detail in details if not detail["type"].endswith("_type")] or details
    what = " or ".join(dict.fromkeys(_sentence(detail) for detail in telling))
    return f"{'.'.join(key)}: {what}" if key else what


def _sentence(detail: ErrorDetails) -> str:
    if detail["type"] == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "missing":
        return "is required"
    what = MAPPING.sub("a mapping of keys", detail["msg"].replace("Input should be", "must be"))
    what = TYPE.sub(lambda found: TYPES[found[1]], what)
    given = detail["input"]
    names = sorted(NAME.findall(what)) if detail["type"] == "literal_error" else []  # none where it is of numbers
    if names and isinstance(given, str):
        near = nearest_name(given, names)
        guess = f"; did you mean '{near}'?" if near else ""
        return f"must be {', '.join(map(repr, names[:-1]))} or {names[-1]!r} (given: {given!r}{guess})"
    return f"{what} (given: {given!r})" if isinstance(given, str | int | float) else what


def _hint(parts: Sequence[str], kind: type[BaseModel]) -> str:
    guess = suggest(parts, kind)
    return f"; {guess}" if guess else ""
