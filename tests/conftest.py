"""Spreads the tests over two processes: flows in one, hosts and engines in the other, the rest where there is room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
os.environ["PENSTOCK_ALLOWED_MODULES"] = "tests"  # functions and classes of the tests are named in configurations
LONGEST_FIRST = {"flows": 0, "hosts": 1, "engines": 2}
ENGINES_ALONE = {"test_channel.py", "test_group.py", "test_group_ends.py"}  # they start groups of their own


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the group that one process runs: a file, all flows, or all files on the shared engines.

    Flows start whole trainings: two at a time would fight for the cores, so they take turns, and those over several
    machines, which wait for each other most of the time, are beside them. They take longest and begin first, and beside
    them the engines. A test elsewhere that starts a training, or engines of its own, says that it belongs to the flows,
    `pytest.mark.xdist_group("flows")`.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(Path(item.path))))
    items.sort(key=lambda item: LONGEST_FIRST.get(_said(item), len(LONGEST_FIRST)))


def _said(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])


def _group(path: Path) -> str:
    room = path.relative_to(TESTS).parts[0]
    if room in ("flows", "hosts") or (room == "engines" and path.name not in ENGINES_ALONE):
        return room
    return str(path)
