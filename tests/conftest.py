"""Spreads the tests over two processes: flows in one from the start, the rest in the other and where there is room."""

from __future__ import annotations

from pathlib import Path

import pytest

ENGINES_ALONE = {"test_channel.py", "test_group.py"}  # they start groups of their own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the group that one process runs: a file, all flows, or all files on the shared engines.

    Flows start whole trainings: two at a time would fight for the cores, so they take turns, and begin first.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(Path(item.path))))
    items.sort(key=lambda item: Path(item.path).parent.name != "flows")


def _group(path: Path) -> str:
    room = path.parent.name
    if room == "flows" or (room == "engines" and path.name not in ENGINES_ALONE):
        return room
    return str(path)
