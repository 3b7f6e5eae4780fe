"""What cannot be exported is refused with what to do, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import UserError
from state.manifest import Manifest, Progress, write_manifest
from state.run_folder import RunFolder, locked
from tasks.export_run import export_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that has begun and has no checkpoint yet."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("name: run\n")
    write_manifest(run, Manifest(Progress()))
    return run


def test_a_run_without_trained_weights_is_refused(run: RunFolder, tmp_path: Path) -> None:
    """Nothing is at the target then."""
    with pytest.raises(UserError, match="has no checkpoint yet"):
        export_run(run, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_a_run_in_training_is_refused(run: RunFolder, tmp_path: Path) -> None:
    """Its checkpoints come and go."""
    with locked(run), pytest.raises(UserError, match="is being trained"):
        export_run(run, tmp_path / "out", None)


@pytest.mark.parametrize("size", ["5", "5gb", "GB", "0GB", "-1GB", "5 GB"])
def test_a_size_must_be_a_size(run: RunFolder, tmp_path: Path, size: str) -> None:
    """The units are those of transformers."""
    with pytest.raises(UserError, match="is no size of a file"):
        export_run(run, tmp_path / "out", size)


def test_files_at_the_target_are_not_touched(run: RunFolder, tmp_path: Path) -> None:
    """Neither in a folder nor in place of one."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    for target in (tmp_path / "out", tmp_path / "out" / "mine"):
        with pytest.raises(UserError, match="not an empty folder"):
            export_run(run, target, None)
    assert (tmp_path / "out" / "mine").read_text() == "kept"
