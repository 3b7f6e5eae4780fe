"""Events of a training say which flow was asked for, so that triggers of prefect.yaml leave out their own runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import flow
from prefect.server.events.schemas.events import Resource, ResourceSpecification

from penstock.configs.schema import TrainConfig
from penstock.session import events as module
from penstock.session.events import announce, flow_asked_for
from penstock.session.session import Training

ROOT = Path(__file__).resolve().parents[2]


def triggers() -> list[dict[str, Any]]:
    """Return the examples of prefect.yaml."""
    entries = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    return [trigger for entry in entries for trigger in entry.get("triggers", ())]


@pytest.mark.parametrize(("asked_for", "starts"), [("retrain", False), ("train", True), ("", True)])
def test_triggers_on_events_of_runs_leave_out_those_of_retrainings(
    training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch, asked_for: str, starts: bool
) -> None:
    """By the server's own matching. Control: events of any other training match; a training without a flow is one."""
    sent: list[dict[str, str]] = []
    monkeypatch.setattr(module, "emit_event", lambda name, resource, payload: sent.append(resource))
    training = training_with(TrainConfig())
    training.session().asked_for = asked_for
    announce(training, "alarm.reward_collapse", {})
    of_runs = [trigger for trigger in triggers() if "penstock.data.added" not in trigger["expect"]]
    assert len(of_runs) == 2
    for trigger in of_runs:
        assert ResourceSpecification(trigger["match"]).matches(Resource(sent[0])) == starts


def test_triggers_expect_events_that_there_are() -> None:
    """A misspelt name would wait for ever; that of new data is the user's to send. All of them sleep."""
    from penstock.reports.alarms import RULES
    from penstock.state.events import GIVEN_UP

    ours = {f"penstock.alarm.{rule.name}" for rule in RULES} | {f"penstock.{GIVEN_UP.replace(' ', '-')}"}
    expected = {name for trigger in triggers() for name in trigger["expect"]}
    assert expected - ours == {"penstock.data.added"}
    assert not any(trigger["enabled"] for trigger in triggers())


def test_the_flow_asked_for_is_the_outermost(prefect_harness: None) -> None:
    """Also for a flow two below it. Control: a flow that nobody has called is its own."""

    @flow(name="iterate")
    def iterate() -> str:
        return flow_asked_for()

    @flow(name="practise")
    def practise() -> list[str]:
        return [flow_asked_for(), iterate()]

    @flow(name="repeat")
    def repeat() -> list[str]:
        return practise()

    assert repeat() == ["repeat", "repeat"]
    assert practise() == ["practise", "practise"]
