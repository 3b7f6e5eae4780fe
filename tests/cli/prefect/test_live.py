"""Live values from the command line: of a run that reads them, and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.cli.prefect import live
from penstock.cli.prefect.live import clear_overrides, set_overrides
from penstock.configs.schema import TrainConfig
from penstock.session.session import write_config
from penstock.state.manifest import Manifest, Progress, write_manifest
from penstock.state.run_folder import RunFolder


def test_a_complete_run_is_refused(tmp_path: Path) -> None:
    """Before anything is asked of a server; the wrong value is not even looked at."""
    run = RunFolder(tmp_path)
    write_config(run, TrainConfig(iterations=2))
    write_manifest(run, Manifest(Progress(iteration=2), checkpoint="000002"))
    run.model("final").mkdir(parents=True)
    run.summary.write_text('{"status": "completed"}')
    with pytest.raises(UserError, match="is complete, nothing will read this"):
        set_overrides(run.path, ["rollout.temperature=hot"])
    with pytest.raises(UserError, match="is complete, nothing will read this"):
        clear_overrides(run.path)


@pytest.mark.parametrize(
    ("pair", "message"),
    [("rollout.temprature=0.9", "'rollout.temprature' cannot change"), ("rollout.temperature", "is not key=value")],
)
def test_a_wrong_key_is_refused_before_a_server_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: str, message: str
) -> None:
    """Control: of a right one the server is asked, and does not answer."""
    run = RunFolder(tmp_path)
    write_config(run, TrainConfig(iterations=2))

    def away() -> None:
        raise UserError("no Prefect server answers")

    monkeypatch.setattr(live, "check_server", away)
    with pytest.raises(UserError, match=message):
        set_overrides(run.path, [pair])
    with pytest.raises(UserError, match="no Prefect server answers"):
        set_overrides(run.path, ["rollout.temperature=0.9"])
