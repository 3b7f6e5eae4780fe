"""What `penstock ui` lets MLflow's server say: all but advice that names options which our command has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import mlflow.server
import pytest
from mlflow.cli import cli

from penstock.trackers.mlflow_server import without_advice


@pytest.mark.parametrize(("made", "said"), [(without_advice, False), (lambda own: own, True)], ids=["ours", "control"])
def test_only_the_advice_on_other_machines_is_left_out(
    made: Callable[..., Any],
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """MLflow's own start, but for the server itself, which says something as an error does. Control: MLflow's echo."""
    monkeypatch.setenv("MLFLOW_ENABLE_WORKSPACES", "false")  # MLflow sets it
    monkeypatch.setattr(click, "echo", made(click.echo))
    monkeypatch.setattr(mlflow.server, "_run_server", lambda **_: click.echo("a real error", err=True))
    cli.main(["ui", "--artifacts-only"], standalone_mode=False)
    told = capsys.readouterr().err
    assert ("--allowed-hosts" in told, "a real error" in told) == (said, True)
