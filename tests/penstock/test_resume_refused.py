"""A run that cannot be resumed is refused by the command itself: no server starts, no flow run is left in Prefect."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import UserError
from configs.preference import PreferenceConfig
from configs.schema import TrainConfig
from penstock import server
from penstock.cli import app
from state.manifest import Manifest, Progress, write_manifest
from state.run_folder import RunFolder, locked
from tasks.session import write_config

TINY = {"tiny": {}}
TRAINING = TrainConfig.model_validate({"model": TINY, "data": {"arithmetic": {}}, "sft": {}})
PREFERRING = PreferenceConfig.model_validate({"model": TINY, "data": {"train": "pairs.jsonl"}})


@pytest.mark.parametrize(("command", "config"), [("train", TRAINING), ("sft", TRAINING), ("preference", PREFERRING)])
def test_a_run_that_another_process_trains_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, config: TrainConfig | PreferenceConfig
) -> None:
    """Also while its engines start, before it has a manifest. Control: once the other is gone, that is what is said."""
    run = RunFolder(tmp_path)
    write_config(run, config)
    monkeypatch.setattr(server, "start_server", lambda: pytest.fail("a server is started"))
    with locked(run):
        for _ in range(2):
            with pytest.raises(UserError, match="is being trained by another process"):
                app([command, "--resume", str(run.path)], standalone_mode=False)
            write_manifest(run, Manifest(Progress(iteration=1), checkpoint="000001"))
    run.manifest.unlink()
    with pytest.raises(UserError, match=r"no manifest\.json"):
        app([command, "--resume", str(run.path)], standalone_mode=False)
