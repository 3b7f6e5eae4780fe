"""Events outlast a crash between any two bytes, and no other line takes their place."""

from __future__ import annotations

from pathlib import Path

from penstock.state.events import FAULT, append_event, losses, next_number, open_loss, read_events
from penstock.state.run_folder import RunFolder

EVENTS = [{"event": "RankLost", "number": 1, "reason": "exited"}, {"event": "recovered", "number": 1}]


def test_events_come_back_in_order(tmp_path: Path) -> None:
    """As they were; of a run that nothing happened to there are none, and no file."""
    run = RunFolder(tmp_path)
    assert read_events(run) == []
    assert not run.events.exists()
    for event in EVENTS:
        append_event(run, event)
    assert read_events(run) == EVENTS


def test_a_fault_of_the_numbers_is_no_loss(tmp_path: Path) -> None:
    """It has no number, and ends none. Control: what says how a loss ended does."""
    run = RunFolder(tmp_path)
    fault = {"event": FAULT, "iteration": 3, "name": "kl", "says": "it is 9", "action": "skip"}
    append_event(run, fault)
    assert (losses(run), next_number(run), open_loss(run)) == ([], 1, None)
    append_event(run, EVENTS[0])
    append_event(run, fault)
    assert (losses(run), next_number(run), open_loss(run)) == ([EVENTS[0]], 2, EVENTS[0])
    append_event(run, EVENTS[1])
    assert (losses(run), open_loss(run)) == ([EVENTS[0]], None)


def test_a_line_that_a_crash_has_cut_takes_no_other_along(tmp_path: Path) -> None:
    """Wherever it was cut, what is appended afterwards is whole; and so it is behind a line with a wrong byte."""
    run = RunFolder(tmp_path)
    append_event(run, EVENTS[0])
    line = run.events.read_bytes()
    for length in range(1, len(line)):
        run.events.write_bytes(line[:length])
        append_event(run, EVENTS[1])
        whole = [EVENTS[0]] if length == len(line) - 1 else []  # all but the end of the line
        assert read_events(run) == [*whole, EVENTS[1]]
    run.events.write_bytes(line.replace(b"RankLost", b"RankLast") + line)
    assert read_events(run) == [EVENTS[0]]
