"""Settings of estimators, losses and their choices: the keyword-only parameters of their functions.

A parameter says all there is to know of a setting. Its annotation is the type, with bounds as `annotated_types` has
them (`Annotated[float, Ge(0)]`), its default is the setting's default, and its entry below `Args:` in the docstring
describes it. So a recipe, the form and the documentation cannot disagree with the function.

Left out: checking what a recipe gives (penstock/configs/sections/function_settings.py), and which functions belong
together (penstock/algorithms/registry.py).
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.base.errors import UserError

REQUIRED = inspect.Parameter.empty  # the default of a setting that has none
HEADER = re.compile(r"^(\w+):$")
ENTRY = re.compile(r"^(\w+): ")


@dataclass(frozen=True)
class Setting:
    """One setting of a function.

    Args:
        name: the parameter's.
        annotation: its type with bounds; `Any` where the parameter has no annotation.
        default: its default, or `REQUIRED`.
        description: from the docstring, on one line; empty where it says nothing.
    """

    name: str
    annotation: Any
    default: Any
    description: str


@cache
def settings(function: Callable[..., Any]) -> Mapping[str, Setting]:
    """Return the settings of a function in the order written.

    Raises:
        UserError: an annotation names what its file does not import.
    """
    parameters = inspect.signature(function).parameters.values()
    keywords = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    annotations, described = _annotations(function, keywords), arguments_described(function)
    found = {
        keyword.name: Setting(
            keyword.name, annotations.get(keyword.name, Any), keyword.default, described.get(keyword.name, "")
        )
        for keyword in keywords
    }
    return types.MappingProxyType(found)


def arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a function, each the value of its name."""
    return {name: values[name] for name in settings(function)}


def _annotations(function: Callable[..., Any], keywords: list[inspect.Parameter]) -> dict[str, Any]:
    # Of the keywords alone: the type of the inputs may be imported for type checkers only.
    written = {keyword.name: keyword.annotation for keyword in keywords if keyword.annotation is not REQUIRED}
    holder = types.SimpleNamespace(__annotations__=written)
    names = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return typing.get_type_hints(holder, globalns=names, include_extras=True)
    except NameError as error:
        raise UserError(
            f"the annotation of a setting of {function.__module__}.{function.__qualname__} does not evaluate: {error}",
            "import what it names, also when the program runs (not below `if TYPE_CHECKING`)",
        ) from error


# ---- docstrings ----------------------------------------------------------------------------------------------------


def sections(function: Callable[..., Any]) -> dict[str, list[str]]:
    """Return the lines of a docstring's sections (`Args:`, `Note:`, ...) by their names, what is before them as ``.

    Lines of a section lose its indentation of four.
    """
    found: dict[str, list[str]] = {"": []}
    lines = found[""]
    for line in (inspect.getdoc(function) or "").splitlines():
        if header := HEADER.match(line):
            lines = found.setdefault(header[1], [])
        else:
            lines.append(line.removeprefix("    ") if len(found) > 1 else line)
    return found


def summary(function: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return _paragraphs(sections(function)[""])[0]


def note(function: Callable[..., Any]) -> str:
    """Return the section `Note:` of a docstring, on one line."""
    return _paragraphs(sections(function).get("Note", []))[0]


def arguments_described(function: Callable[..., Any]) -> dict[str, str]:
    """Return the entries below `Args:` by name, each on one line."""
    entries = re.split(r"\n(?=\w+: )", "\n".join(sections(function).get("Args", [])).strip())
    return {match[1]: " ".join(entry[match.end() :].split()) for entry in entries if (match := ENTRY.match(entry))}


def _paragraphs(lines: list[str]) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", "\n".join(lines).strip())]
