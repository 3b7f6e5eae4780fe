"""Recipes: YAML files, the recipes they build on (`base:`), and how one tree is laid over another.

Why a loader of our own: PyYAML keeps the last of two equal keys without a word and reads `1e-6` as text. Here the
first is an error with its line, and the second a number.

Left out: which keys exist and what they mean (configs/loading.py, configs/schema.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from configs.errors import UserError

CORRECT_IT = "correct the YAML there; text with { } [ ] : # or % goes in quotes"
FLOAT_TAG = "tag:yaml.org,2002:float"
# YAML 1.2 floats that YAML 1.1 (PyYAML) takes for text: an exponent without a dot or without a sign.
EXPONENT = re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")


class RecipeLoader(yaml.SafeLoader):
    """PyYAML's safe loader that refuses duplicate keys and reads `1e-6` as a number."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            identity = (key.tag, str(key.value))
            if identity in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' is given twice", problem_mark=key.start_mark)
            seen.add(identity)
        return node


class RecipeDumper(yaml.SafeDumper):
    """PyYAML's safe dumper; text with several lines becomes a block, text that looks like `1e-6` is quoted."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


RecipeLoader.add_implicit_resolver(FLOAT_TAG, EXPONENT, list("-+.0123456789"))
RecipeDumper.add_implicit_resolver(FLOAT_TAG, EXPONENT, list("-+.0123456789"))
RecipeDumper.add_representer(str, _represent_text)


def parse(text: str | bytes, source: str) -> Any:
    """Return the value of a YAML document.

    Args:
        text: the document; bytes are UTF-8.
        source: what to call it in an error, for instance the file's path.

    Raises:
        UserError: it is not YAML, or a key is given twice; names the source and the line.
    """
    try:
        return yaml.load(text, Loader=RecipeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{source}{line}: {error.problem or error.context}", CORRECT_IT) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no text, a date that does not exist
        raise UserError(f"{source}: {str(error).splitlines()[0]}", CORRECT_IT) from error


def dump(tree: Mapping[str, Any]) -> str:
    """Return a tree as YAML that `parse` reads back to an equal tree (tuples come back as lists)."""
    return yaml.dump(dict(tree), Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=110)


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `upper` over `lower`: sections merge key by key; anything else, a null included, replaces what was there.

    A schedule such as `{0: 1.0, 100: 0.5}` is a value, not a section: it replaces the schedule below it.
    """
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping) and not _is_schedule({**below, **value}):
            value = merge(below, value)
        merged[key] = value
    return merged


def _is_schedule(value: Mapping[Any, Any]) -> bool:
    return any(str(key).isdecimal() for key in value)


def read_tree(path: Path) -> dict[str, Any]:
    """Return a recipe's tree, laid over the recipes it names in `base`; the result has no `base`.

    Raises:
        UserError: a file is missing, is not a YAML mapping, or leads back to itself.
    """
    return _read(path, ())


def compose(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Lay `values` over the recipes its `base` names, the later over the earlier; the result has no `base`.

    Args:
        values: a tree, with or without `base` (a path or a list of paths).
        folder: where those paths are looked for first; then in the working directory.

    Raises:
        UserError: as for `read_tree`.
    """
    return _compose(values, folder, "base", ())


def _compose(values: Mapping[str, Any], folder: Path, source: str, chain: tuple[Path, ...]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name in _base_names(values.get("base"), source):
        tree = merge(tree, _read(_find(name, folder, source), chain))
    return merge(tree, {key: value for key, value in values.items() if key != "base"})


def _base_names(base: Any, source: str) -> list[str]:
    names = [base] if isinstance(base, str) else base or []
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    raise UserError(f"{source}: 'base' is {base!r}", "give the path of a recipe, or a list of paths")


def _find(name: str, folder: Path, source: str) -> Path:
    places = [folder / name, Path(name)]
    for place in places:
        if place.is_file():
            return place
    raise UserError(
        f"{source}: the base recipe '{name}' does not exist in {folder.resolve()} or in {Path.cwd()}",
        "give its path relative to the recipe that names it, or to the working directory",
    )


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"the recipe {path} does not exist", "give the path of a YAML file")
    identity = path.resolve()
    if identity in chain:
        round_trip = " -> ".join(place.name for place in (*chain[chain.index(identity) :], identity))
        raise UserError(f"{path}: 'base' leads back to itself: {round_trip}", "remove one 'base' of this circle")
    tree = parse(path.read_bytes(), str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys to values, not a {type(tree).__name__}", "see configs/")
    return _compose(tree, path.parent, str(path), (*chain, identity))
