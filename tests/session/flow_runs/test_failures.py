"""How a flow run ends that failed: its state says what the command line says, and its caller gets the exception."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.context import FlowRunContext

from penstock.base.errors import FailedInWords, UserError
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.group import EngineError, RankLost
from penstock.engines.groups.hosts import HostFailed
from penstock.flows.compare import compare
from penstock.flows.evaluate import evaluate
from penstock.flows.export import export
from penstock.flows.preference import preference
from penstock.flows.reward_model import reward_model
from penstock.flows.sft import sft
from penstock.flows.sweep import sweep
from penstock.flows.train import train
from penstock.session.flow_runs.failures import SAID, ends_in_words

LOG = Path("runs/mine/logs/main-rank0.log")
TOLD = [
    (UserError("no such column", "name another"), "no such column\n  name another"),
    (RankLost("main", 0, "exited with signal 9 (SIGKILL)", LOG), f"out of memory?\n  log: {LOG}"),
    (EngineError("main", 1, "update_actor", "Traceback\nValueError: odd", LOG), "'update_actor' raised\n  Traceback"),
    (HostFailed("gpu-7", "it is silent"), "host gpu-7:\n  it is silent"),
    (FailedInWords("1 of 2 trainings failed"), "1 of 2 trainings failed"),
    (OSError(28, "No space left on device", "/runs/x"), "/runs/x: No space left on device; make room"),
]


def failing(error: Exception, **options: Any) -> Any:
    """Return a flow that ends by an exception, in words."""

    @flow(name="failing", **options)
    @ends_in_words
    def fails(config: TrainConfig = TrainConfig(), often: int = 1) -> str:  # noqa: B008
        raise error

    return fails


@pytest.mark.usefixtures("prefect_harness")
@pytest.mark.parametrize(("error", "said"), TOLD, ids=[type(error).__name__ for error, _ in TOLD])
def test_the_state_says_what_the_command_line_says(error: Exception, said: str) -> None:
    """With what to do and with notes, and nothing of Prefect's before it."""
    error.add_note("It goes on with: penstock train --resume runs/mine")
    state = failing(error)(return_state=True)
    assert state.is_failed()
    assert said in state.message
    assert "encountered an exception" not in state.message
    assert state.message.endswith("\n  It goes on with: penstock train --resume runs/mine")


@pytest.mark.usefixtures("prefect_harness")
def test_a_defect_keeps_its_traceback() -> None:
    """The control: Prefect says its class, and the log has where it was."""
    state = failing(KeyError("odd"))(return_state=True)
    assert state.message == "Flow run encountered an exception: KeyError: 'odd'"


@pytest.mark.usefixtures("prefect_harness")
def test_who_calls_the_flow_gets_the_exception() -> None:
    """The same one, with its notes and where it was raised; by it a command ends, and a recovery begins."""
    error = RankLost("main", 0, "it is silent", LOG)
    with pytest.raises(RankLost) as caught:
        failing(error)()
    assert caught.value is error
    assert "raise error" in str(caught.traceback[-1].statement)


@pytest.mark.usefixtures("prefect_harness")
def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    """The sentence, without a traceback, also where a worker's engine gets the exception. Control: a defect's."""
    for error in (UserError("no such column", "name another"), KeyError("odd")):
        caplog.clear()
        with pytest.raises(type(error)):
            failing(error)()
        logging.getLogger("prefect.engine").error("exited with unexpected exception", exc_info=error)
        told = [record for record in caplog.records if record.name.startswith("prefect")]
        assert any(record.exc_info for record in told) == isinstance(error, KeyError)
        assert len([record for record in told if getattr(record, SAID, False)]) == isinstance(error, UserError)


@pytest.mark.usefixtures("prefect_harness")
def test_a_flow_run_that_is_tried_again_is_tried_again() -> None:
    """Prefect sees its exception as ever."""
    attempts = []

    @flow(retries=1)
    @ends_in_words
    def fails_once() -> int:
        context = FlowRunContext.get()
        assert context is not None
        attempts.append(context.flow_run)
        if len(attempts) == 1:
            raise UserError("not yet")
        return len(attempts)

    assert fails_once() == 2


@pytest.mark.usefixtures("prefect_harness")
@pytest.mark.parametrize(
    ("flow_", "given", "said"),
    [
        (evaluate, {"models": ["absent"]}, "name a Hugging Face folder, a run, or a checkpoint of one"),
        (export, {"run": "absent"}, "absent"),
        (sweep, {"recipe": "absent.yaml", "settings": ["seed=0,1"]}, "give its path relative to the recipe"),
        (compare, {"folder": "absent"}, "name the directory that holds the run folders"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_mistake_in_the_form_of_a_flow_that_trains_nothing_itself_is_told(
    flow_: Any, given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its state, as a sentence with what to do, and nothing is left. Control: the defect above keeps Prefect's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    state = flow_(**given, return_state=True)
    assert state.is_failed()
    assert said in state.message
    assert "encountered an exception" not in state.message
    assert not list(tmp_path.iterdir())


FLOWS = [train, sft, preference, reward_model, evaluate, export, sweep, compare]


@pytest.mark.parametrize("told", FLOWS, ids=lambda told: told.name)
def test_the_form_of_a_flow_is_that_of_its_function(told: Any) -> None:
    """Parameters, their types and descriptions: as if nothing stood between."""
    inner: Callable[..., Any] = told.fn.__wrapped__
    plain = flow(name=told.name)(inner)
    assert told.parameters == plain.parameters
    assert told.description == plain.description
    assert told.parameters.properties
