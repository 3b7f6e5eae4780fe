"""`penstock select` refuses options that would have no effect, and a file that is there, before it reads the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.cli.runs.selecting import select
from penstock.configs.loading.load import to_yaml
from penstock.configs.schema import TrainConfig
from penstock.state.manifest import Manifest, Progress, write_manifest
from penstock.state.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run without any experience."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.write_text(to_yaml(TrainConfig()), encoding="utf-8")
    write_manifest(folder, Manifest(Progress(), kind="train"))
    return folder.path


@pytest.mark.parametrize(
    ("best", "least", "pairs", "margin", "said"),
    [
        (2, None, True, None, "'best' and 'least' have no effect with 'pairs'"),
        (None, 0.5, True, None, "'best' and 'least' have no effect with 'pairs'"),
        (None, None, False, 0.5, "'margin' has no effect without 'pairs'"),
    ],
)
def test_options_without_effect_are_refused(
    run: Path, best: int | None, least: float | None, pairs: bool, margin: float | None, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        select(run, run / "to.jsonl", best, least, pairs, margin)


def test_a_file_that_is_there_stays(run: Path) -> None:
    """Control: another one is not made either, where the run has nothing to select."""
    (run / "there.jsonl").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="is there already"):
        select(run, run / "there.jsonl", None, None, False, None)
    assert (run / "there.jsonl").read_text(encoding="utf-8") == "mine"
    with pytest.raises(UserError):
        select(run, run / "new.jsonl", None, None, False, None)
    assert not (run / "new.jsonl").exists()
