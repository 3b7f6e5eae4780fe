"""Finds a test by its name and says which words it and what it needs of tests/ contain; nothing is imported."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Place = tuple[Path, str]  # a file, and a name at its top


def words_of(test: str) -> frozenset[str]:
    """Return the words of the test "file::name", and of the fixtures, helpers and constants of tests/ that it needs.

    Docstrings do not count: a test shows a key by using it.

    Raises:
        LookupError: there is no such file, or no such test in it.
    """
    file, _, name = test.partition("::")
    first = (ROOT / file, name)
    if not name.startswith("test_") or name not in _definitions(first[0]):
        raise LookupError(f"{file} has no test {name}")
    words: set[str] = set()
    waiting, seen = [first], set()
    while waiting:
        place = waiting.pop()
        if place not in seen:
            seen.add(place)
            text, needed = _definition(*place)
            words.update(re.findall(r"\w+", text))
            waiting += needed
    return frozenset(words)


def _definition(file: Path, name: str) -> tuple[str, list[Place]]:
    """The text of what `name` is in a file, and the places of what it needs; neither where it is no name of tests/."""
    if (origin := _imports(file).get(name)) is not None:
        return "", [origin]
    if (node := _definitions(file).get(name)) is None:
        return "", []
    return ast.unparse(_bare(node)), [(file, used) for used in _names(node)]


@functools.cache
def _tree(file: Path) -> ast.Module:
    if not file.is_file():
        raise LookupError(f"there is no file {file}")
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def _definitions(file: Path) -> dict[str, ast.stmt]:
    return {name: node for node in _tree(file).body for name in _defined(node)}


@functools.cache
def _imports(file: Path) -> dict[str, Place]:
    """Where names come from that are imported from a module of tests/."""
    found = {}
    for node in _tree(file).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            origin = ROOT / f"{node.module}.py".replace(".", "/", (node.module or "").count("."))
            found |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names if origin.is_file()}
    return found


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    yield from (item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name))


def _names(node: ast.stmt) -> Iterator[str]:
    for item in ast.walk(node):
        if isinstance(item, ast.Name):
            yield item.id
        elif isinstance(item, ast.arg):  # a fixture
            yield item.arg


def _bare(node: ast.stmt) -> ast.stmt:
    for item in ast.walk(node):
        if isinstance(item, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(item) is not None:
            item.body = item.body[1:] or [ast.Pass()]
    return node
