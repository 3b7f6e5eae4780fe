"""An interpreter with OpenEnv, made once per session from the package index; it takes a minute.

A conftest or test module that imports the fixture has it. PENSTOCK_OPENENV_PYTHON names one that is there already.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.installed import interpreter_with

VARIABLE = "PENSTOCK_OPENENV_PYTHON"
PACKAGES = ("openenv==0.10.0", "smolagents>=1.22,<2")  # the second is of its executor for Python


@pytest.fixture(scope="session")
def openenv_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of an interpreter that has OpenEnv."""
    if given := os.environ.get(VARIABLE):
        return given
    return interpreter_with(PACKAGES, tmp_path_factory)


def uvicorn(python: str, application: str, folder: Path, **env: str) -> dict[str, Any]:
    """The entry of `.openenv.json` for an application in a folder."""
    where = ["--host", "127.0.0.1", "--port", "{port}"]
    return {"command": python, "args": ["-m", "uvicorn", "--app-dir", str(folder), application, *where], "env": env}
