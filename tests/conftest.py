"""Spreads the tests over two processes: files go where there is room, those that share engines stay together."""

from __future__ import annotations

from pathlib import Path

import pytest

ENGINES_ALONE = {"test_channel.py", "test_group.py"}  # they start groups of their own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test in the group that one worker process runs: its file, or all files on the shared engines."""
    for item in items:
        path = Path(item.path)
        together = path.parent.name == "engines" and path.name not in ENGINES_ALONE
        item.add_marker(pytest.mark.xdist_group("engines" if together else str(path)))
