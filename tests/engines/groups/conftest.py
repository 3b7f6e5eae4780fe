"""Engine groups of small ranks, started for the tests beside this file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engines.groups.group import EngineGroup
from tests.engines.groups.small_ranks import spec


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineGroup]:
    """One healthy group for every test that does it no harm."""
    with EngineGroup(spec(tmp_path_factory.mktemp("logs"))) as group:
        yield group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[EngineGroup]:
    """A group of its own for a test that breaks it."""
    with EngineGroup(spec(tmp_path)) as group:
        yield group
