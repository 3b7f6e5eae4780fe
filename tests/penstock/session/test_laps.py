"""An iteration's seconds reach from the end of the one before to its own end, without checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.session import figures as laps


def test_nothing_between_two_laps_is_lost_and_checkpoints_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laps add up to all the time there was; without the block out of the lap the second would have its seconds."""
    now = [100.0]
    monkeypatch.setattr(laps.time, "perf_counter", lambda: now[0])
    session = SimpleNamespace(lap_began=0.0)
    training: Any = SimpleNamespace(session=lambda: session)
    laps.lap(training)
    now[0] += 3.0
    assert laps.lap(training) == 3.0
    now[0] += 0.5
    with laps.out_of_lap(training):
        now[0] += 60.0
    now[0] += 2.0
    assert laps.lap(training) == 2.5
