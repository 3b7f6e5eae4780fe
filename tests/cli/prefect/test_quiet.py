"""What Prefect says during a flow does not land in the middle of the line that shows the flow's progress."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest
from prefect.logging.handlers import PrefectConsoleHandler

from penstock.base.errors import LogprobGapError, RewardTimeout
from penstock.cli.prefect.quiet import quiet_terminal
from penstock.session.saving.checkpoints import CheckpointWriteFailed


class Terminal(io.StringIO):
    """Text that says whether it is a terminal."""

    def __init__(self, *, is_one: bool) -> None:
        super().__init__()
        self.is_one = is_one
        self.rich_proxied_file: io.StringIO | None = None

    def isatty(self) -> bool:
        return self.is_one


@pytest.fixture
def handler() -> Iterator[PrefectConsoleHandler]:
    handler = PrefectConsoleHandler(stream=io.StringIO())
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def test_an_interruption_between_two_runs_is_not_said_twice(handler: PrefectConsoleHandler) -> None:
    """Until a task's run has a name another logger speaks of it. Control: a crash of another kind is said."""
    with quiet_terminal():
        for kind in ("flow_runs", "task_runs", "engine"):
            said = logging.getLogger(f"prefect.{kind}")
            said.error("Crash detected! Execution was aborted by an interrupt signal.")
            said.error("Crash detected! Execution was cancelled by %s", kind)
    lines = handler.stream.getvalue()
    assert "interrupt signal" not in lines
    assert [kind in lines for kind in ("by flow_runs", "by task_runs", "by engine")] == [True] * 3


@pytest.mark.parametrize(
    "kind", [RewardTimeout, CheckpointWriteFailed, LogprobGapError], ids=lambda kind: kind.__name__
)
def test_what_the_command_says_in_a_sentence_has_no_traceback_of_prefects(
    handler: PrefectConsoleHandler, kind: type[Exception]
) -> None:
    """Every kind of mistake and of failure in words. Control: a defect keeps its traceback, whatever it names."""
    said = logging.getLogger("prefect.task_runs")
    with quiet_terminal():
        for error in kind("the problem", "the remedy"), ZeroDivisionError(f"a defect, no {kind.__name__}"):
            name = type(error).__name__
            said.error("Task run failed with exception: %r", error, exc_info=error)
            said.error(f'Finished in state Failed("Task run encountered an exception {name}: {error}")')
            said.error(f'Finished in state Failed("Flow run encountered an exception: {name}: {error}")')
            said.error("Encountered exception during execution: %r", error)
            said.error(f"Crash detected! Execution was interrupted by an unexpected exception: {name}: {error}")
    lines = handler.stream.getvalue()
    assert "problem" not in lines
    assert lines.count("ZeroDivisionError: a defect") == 4 and lines.count("ZeroDivisionError(") == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_a_warning_takes_the_way_of_the_live_line(
    handler: PrefectConsoleHandler, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """On a terminal it goes to what rich has put in place of standard error, else where it always went; then, too."""
    monkeypatch.setattr(sys, "stderr", Terminal(is_one=terminal))
    with quiet_terminal():
        live = Terminal(is_one=terminal)
        live.rich_proxied_file = io.StringIO()  # as rich's own has, for its consoles to see through it
        monkeypatch.setattr(sys, "stderr", live)
        logging.getLogger("rewards").warning("during")
    logging.getLogger("rewards").warning("after")
    assert ("during" in live.getvalue()) == terminal
    assert ("during" in handler.stream.getvalue()) == (not terminal)
    assert "after" in handler.stream.getvalue()
    assert "after" not in live.getvalue()
