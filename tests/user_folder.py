"""The folder of a test module as the working directory, whose modules other processes can import, as a user's would be.

A conftest that imports the fixture has it for all modules beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def in_this_folder(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(request.path.parent)
        yield
