"""Deadlines hold on a machine of one's own, and stolen time is not held against a test."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from tests import waiting
from tests.waiting import came_true, until


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two processors whose clock moves when a test sleeps, and the seconds that are stolen of each meanwhile."""
    seen = SimpleNamespace(clock_s=100.0, steal=7.0, stolen_share=0.0)

    def sleep(seconds: float) -> None:
        seen.clock_s += seconds
        seen.steal += 2 * seconds * seen.stolen_share

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: seen.clock_s, sleep=sleep))
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(steal=seen.steal))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    return seen


@pytest.mark.parametrize(("stolen_share", "waited_s"), [(0.0, 10), (0.75, 40)])
def test_a_deadline_counts_the_time_that_the_machine_was_there(
    machine: SimpleNamespace, stolen_share: float, waited_s: float
) -> None:
    """Ten seconds are ten seconds (the control), and forty where three quarters of the processors are taken away."""
    machine.stolen_share = stolen_share
    assert not came_true(lambda: False, 10)
    assert machine.clock_s - 100 == pytest.approx(waited_s, abs=0.5)


def test_what_did_not_happen_is_named(machine: SimpleNamespace) -> None:
    """And nothing is said of what did, or does at the last look."""
    with pytest.raises(AssertionError, match="not within 3 s: the rank is gone"):
        until(lambda: False, 3, "the rank is gone")
    until(lambda: machine.clock_s > 101, 3, "a second passes")
    assert machine.clock_s < 107


def test_without_such_a_count_the_clock_is_the_usual_one(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Systems other than Linux do not say what is stolen."""
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(user=1.0))
    machine.stolen_share = 0.75
    assert not came_true(lambda: False, 10)
    assert machine.clock_s == pytest.approx(110, abs=0.5)
