"""An interpreter with verifiers, made once per session from the package index; it takes one to two minutes.

A conftest or test module that imports the fixture has it. PENSTOCK_VERIFIERS_PYTHON names one that is there already.
"""

from __future__ import annotations

import os

import pytest

from tests.gateway.installed import interpreter_with

PACKAGES = ("verifiers[ta]==0.4.0",)


@pytest.fixture(scope="session")
def verifiers_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of an interpreter in which verifiers and TextArena are installed."""
    if there := os.environ.get("PENSTOCK_VERIFIERS_PYTHON"):
        return there
    return interpreter_with(PACKAGES, tmp_path_factory)
