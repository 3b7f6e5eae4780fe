"""What the terminal shows of a training is also in Prefect's log of its flow runs, and there alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from penstock.configs.schema import TrainConfig
from penstock.session.progress import show_progress
from penstock.session.session import Training

TRAINING, ITERATION = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"


class Kept(logging.Handler):
    """Keeps what Prefect's server would get: a flow run and a line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[tuple[str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.add((record.flow_run_id, record.getMessage()))  # type: ignore[attr-defined]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    logger, handler = logging.getLogger("prefect.flow_runs"), Kept()
    monkeypatch.setattr(logger, "handlers", [handler])
    level = logger.level
    logger.setLevel(logging.WARNING)  # as under the command line
    yield handler
    logger.setLevel(level)


HELDOUT = {"heldout/accuracy": 0.25, "heldout/temperature": 1.0}


def _train(training: Training, enter: Callable[[], None]) -> None:
    with show_progress(training):
        session = training.session()
        assert session.progress is not None
        session.say("reading prompts")
        session.progress.start(2)
        enter()
        session.say("rollout")
        session.progress.advance(1, {"reward/mean": 0.5, **HELDOUT, "time/iteration_s": 1.5})


def test_phases_and_iterations_are_lines_of_the_pages_that_show_them(
    kept: Kept,
    training_with: Callable[[TrainConfig], Training],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The training's page has all, an iteration's its own; the terminal's log has neither."""
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", TRAINING)
    _train(training_with(TrainConfig()), lambda: monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", ITERATION))
    line = "iteration 1/2, reward 0.500, held-out accuracy 25.0% (sampled at temperature 1), 1.50 s"
    assert kept.lines == {
        (TRAINING, "opening the record"), (TRAINING, "reading prompts"), (TRAINING, line), (ITERATION, line),
    }  # fmt: skip
    assert caplog.messages == []


def test_without_a_flow_run_there_is_no_page(kept: Kept, training_with: Callable[[TrainConfig], Training]) -> None:
    """Control: what the test above finds comes from the flow runs."""
    _train(training_with(TrainConfig()), lambda: None)
    assert kept.lines == set()
