"""A numerical fault leaves its batch, and is told wherever a loss is: in the run folder, and to Prefect."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import GradientNotFinite, KlExploded
from penstock.configs.schema import TrainConfig
from penstock.reports.faults import Fault
from penstock.session import events
from penstock.session.session import Stage, Training
from penstock.state.events import read_events
from penstock.state.experience import ExperienceRef, read_columns, write_columns
from penstock.state.run_folder import append_metrics
from penstock.tasks.iteration import faults
from penstock.tasks.iteration.faults import batch_kept, meet, tell_of_skipped_steps

TOO_FAR = Fault("kl", "actor/kl", 9.0, "the KL to the reference is 9", "skip", undone=1, known_before=True)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What Prefect gets; outside a flow there is no logger of its own."""
    told: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(faults, "get_run_logger", lambda: logging.getLogger("faults"))
    monkeypatch.setattr(events, "emit_event", lambda name, resource, payload: told.append((name, payload)))
    return told


@pytest.fixture
def training(training_with: Callable[[TrainConfig], Training]) -> Training:
    """A training with the experience of iterations 1 to 3."""
    made = training_with(TrainConfig())
    made.run.experience(1).parent.mkdir()
    for number in (1, 2, 3):
        write_columns(made.run.experience(number), {"reward": np.full(2, float(number))})
    return made


def met(training: Training, number: int) -> dict[str, float]:
    stage = Stage(ExperienceRef(str(training.run.experience(number)), 2, 4, 4, 0), {})
    return meet.fn(training, number, TOO_FAR, stage, {"actor/kl": 9.0})


def test_a_fault_is_told_with_what_follows(training: Training, sent: list[tuple[str, dict[str, Any]]]) -> None:
    """Skipped, and where it is one too many in a row the end. The event names the batch that is kept."""
    for number in (1, 2):
        append_metrics(training.run, number, met(training, number))
    training.session().history = []
    with pytest.raises(KlExploded):
        met(training, 3)
    found = read_events(training.run)
    assert [(event["iteration"], event["name"], event["action"]) for event in found] == [
        (1, "kl", "skip"),
        (2, "kl", "skip"),
        (3, "kl", "stop"),
    ]
    assert sent == [("penstock.numerical-fault", event) for event in found]
    kept = training.run.path / found[1]["batch"]
    assert read_columns(kept, ["reward"])["reward"].tolist() == [2.0, 2.0]
    assert json.loads(kept.with_suffix(".json").read_text())["metrics"] == {"actor/kl": 9.0}


def test_gradients_that_are_not_finite_are_told(training: Training, sent: list[tuple[str, dict[str, Any]]]) -> None:
    """Steps that were not taken, and those that end the training. Control: where none was skipped, nothing is told."""
    tell_of_skipped_steps(training, 1, {"actor/skipped_steps": 0.0, "actor/loss": 1.0})
    assert sent == []
    tell_of_skipped_steps(training, 1, {"actor/skipped_steps": 2.0, "critic/skipped_steps": 1.0})
    with pytest.raises(GradientNotFinite), batch_kept(training, 2):
        raise GradientNotFinite("3 optimizer steps in a row were skipped")
    assert [(event["iteration"], event["says"][:22], event["action"]) for event in read_events(training.run)] == [
        (1, "2 optimizer steps of t", "skip"),
        (1, "1 optimizer steps of t", "skip"),
        (2, "3 optimizer steps in a", "stop"),
    ]
    assert len(sent) == 3
