"""Recipes: YAML files, the recipes they build on (`base:`), and how one tree is laid over another.

Why a loader of our own: PyYAML keeps the last of two equal keys without a word and reads `1e-6` as text. Here the
first is an error with its line, and the second a number.

A file that a person names may be anywhere, and so may its `base`. A tree from elsewhere, as from a form, names
recipes alone: `.yaml` or `.yml` files in the working folder, in this one, or in those that the environment variable
`PENSTOCK_RECIPE_FOLDERS` lists, and so do they. No error quotes a file.

Left out: which keys exist and what they mean (penstock/configs/loading/load.py, penstock/configs/schema.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.base.errors import UserError
from penstock.base.home import RECIPES, shipped_recipe

CORRECT_IT = "correct the YAML there; text with { } [ ] : # or % goes in quotes"
FOLDERS_VARIABLE = "PENSTOCK_RECIPE_FOLDERS"
SUFFIXES = (".yaml", ".yml")
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
        problem = f"{source}{line}: {error.problem or error.context}"
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no text, a date that does not exist
        problem = f"{source}: {str(error).splitlines()[0]}"
    except RecursionError:
        problem = f"{source}: it is nested too deeply"
    raise UserError(problem, CORRECT_IT)  # without its cause, which quotes the lines around


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
    """Return the tree of a recipe that a person named, laid over those in its `base`; the result has no `base`.

    Raises:
        UserError: a file is missing, is not a YAML mapping, or leads back to itself.
    """
    return _read(path, (), None)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return what one file says, its `base` included.

    Raises:
        UserError: it is missing, or no YAML mapping.
    """
    path = shipped_recipe(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder", "give the path of a recipe, a YAML file")
    if not path.is_file():
        raise UserError(f"the recipe {path} does not exist", "give the path of a YAML file")
    tree = parse(path.read_bytes(), str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys to values, not a {type(tree).__name__}", "see configs/")
    return tree


def compose(values: Mapping[str, Any], folder: Path, source: str = "base") -> dict[str, Any]:
    """Lay `values` over the recipes its `base` names, the later over the earlier; the result has no `base`.

    Args:
        values: a tree, with or without `base` (a path or a list of paths).
        folder: where those paths are looked for first; then in the working directory.
        source: what to call the tree in an error.

    Raises:
        UserError: as for `read_tree`, or a recipe lies elsewhere than in this folder, the working directory, ours, or
            those of the operator.
    """
    theirs = [Path(entry) for entry in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if entry]
    within = tuple(place.resolve() for place in (folder, Path(), RECIPES, *theirs))
    return _compose(values, folder, source, (), within)


def _compose(
    values: Mapping[str, Any], folder: Path, source: str, chain: tuple[Path, ...], within: tuple[Path, ...] | None
) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name in _base_names(values.get("base"), source):
        tree = merge(tree, _read(_find(name, folder, source, within), chain, within))
    return merge(tree, {key: value for key, value in values.items() if key != "base"})


def _base_names(base: Any, source: str) -> list[str]:
    names = [base] if isinstance(base, str) else base or []
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    raise UserError(f"{source}: 'base' is {base!r}", "give the path of a recipe, or a list of paths")


def _find(name: str, folder: Path, source: str, within: tuple[Path, ...] | None) -> Path:
    """Return the recipe of that name; what lies outside of `within` is not looked at, not even whether it exists."""
    places = [
        place
        for place in (folder / name, shipped_recipe(Path(name)))
        if within is None or _lies_in(place.resolve(), within)
    ]
    if not places:
        raise UserError(
            f"{source}: the recipe '{name}' is not in a folder that recipes are read from",
            f"put it into {Path.cwd()}, or list its folder where the worker is started: {FOLDERS_VARIABLE}=FOLDER",
        )
    for place in places:
        if place.suffix not in SUFFIXES or place.resolve().suffix not in SUFFIXES:
            raise UserError(f"{source}: the recipe '{name}' is no .yaml or .yml file", "give the path of a recipe")
        if place.is_file():
            return place
    raise UserError(
        f"{source}: the recipe '{name}' does not exist in {folder.resolve()} or in {Path.cwd()}",
        "give its path relative to the recipe that names it, or to the working directory",
    )


def _lies_in(place: Path, folders: tuple[Path, ...]) -> bool:
    return any(place.is_relative_to(folder) for folder in folders)


def _read(path: Path, chain: tuple[Path, ...], within: tuple[Path, ...] | None) -> dict[str, Any]:
    path = shipped_recipe(path)
    identity = path.resolve()
    if identity in chain:
        round_trip = " -> ".join(place.name for place in (*chain[chain.index(identity) :], identity))
        raise UserError(f"{path}: 'base' leads back to itself: {round_trip}", "remove one 'base' of this circle")
    return _compose(read_mapping(path), path.parent, str(path), (*chain, identity), within)
