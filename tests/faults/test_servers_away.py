"""A server that is away is noticed before anything starts; those that go later are tested where they are asked."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks.preferences import check_preferences
from penstock.checks.training import check_inputs, check_supervised
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.trackers.table import check_ready

TINY = {"model": {"tiny": {"max_positions": 32}}}  # and no data: that is the other mistake
CHECKS: dict[str, tuple[Callable[[Any], object], Callable[[], Any]]] = {
    "train": (check_inputs, lambda: TrainConfig.model_validate(TINY)),
    "sft": (check_supervised, lambda: TrainConfig.model_validate(TINY)),
    "preference": (check_preferences, lambda: PreferenceConfig.model_validate(TINY)),
}


@pytest.mark.parametrize("command", CHECKS)
def test_an_mlflow_server_that_does_not_answer_is_noticed_before_anything_starts(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the checks that the command makes first. Control: with a database the checks come to another mistake."""
    check, config = CHECKS[command]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    with pytest.raises(UserError, match=f"no MLflow server answers at http://127.0.0.1:{port} ") as away:
        check(config())
    assert "MLFLOW_TRACKING_URI" in away.value.problem
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    with pytest.raises(UserError) as other:
        check(config())
    assert "MLflow" not in other.value.problem


def test_a_trackers_server_is_asked_only_if_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's class is asked once its run begins. Control: the same address, of MLflow."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    check_ready("my_tracker:Lines")
    with pytest.raises(UserError, match="no MLflow server answers"):
        check_ready("mlflow")
