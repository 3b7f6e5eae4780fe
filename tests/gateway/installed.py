"""Interpreters with libraries that do not go with ours, made from the package index once in a process of tests."""

from __future__ import annotations

import subprocess
import sys
import venv

import pytest

_MADE: dict[tuple[str, ...], str] = {}


def interpreter_with(packages: tuple[str, ...], folders: pytest.TempPathFactory) -> str:
    """Return the path of an interpreter that has `packages`; pip is ours, since that of an old Python is slow."""
    if packages not in _MADE:
        folder = folders.mktemp("interpreter")
        venv.create(folder)
        python = str(folder / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
        subprocess.run([*pip, "install", "-q", *packages], check=True, timeout=800)
        _MADE[packages] = python
    return _MADE[packages]
