"""How long a training stands still is read from what it records, of a rank that was really killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.recovery import NEEDED, _in_ranks, measure
from penstock.state.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
LOG = """
2026-11-24 22:22:45,216 INFO __main__: rank 0 of 1, group main, epoch 0
2026-11-24 22:23:00,356 INFO __main__: importing libraries: 15.1 s
2026-11-24 22:24:15,144 INFO penstock.engines.ranks.build: starting the rollout engine: 62.2 s
2026-11-24 22:25:28,901 INFO __main__: rank 0 of 1, group main, epoch 1
2026-11-24 22:25:29,101 INFO __main__: importing libraries: 0.2 s
2026-11-24 22:26:31,476 INFO penstock.engines.ranks.build: starting the rollout engine: 39.6 s
"""


def test_the_ranks_of_the_last_epoch_say_how_they_started(tmp_path: Path) -> None:
    """Not those that were lost, whose start is in the same file."""
    run = RunFolder(tmp_path)
    run.logs.mkdir()
    (run.logs / "main-rank0.log").write_text(LOG, encoding="utf-8")
    (run.logs / "other-rank0.log").write_text(LOG[: LOG.index("2026-11-24 22:25")], encoding="utf-8")
    assert _in_ranks(run) == {"importing libraries": 0.2, "starting the rollout engine": 39.6}


def test_too_few_iterations_are_refused_before_anything_starts() -> None:
    """One has to be struck, one to follow with the new engines, one to be left alone."""
    with pytest.raises(UserError, match=f"give iterations={NEEDED}"):
        measure(ROOT / "configs" / "quickstart.yaml", [f"iterations={NEEDED - 1}"], "penstock bench recovery", None)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_rank_is_noticed_replaced_and_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order. Control: what the training recorded as the place that it went on from."""
    monkeypatch.chdir(tmp_path)
    changes = ["sft=null", f"iterations={NEEDED + 4}", "rollout.prompts=8", "data.arithmetic.heldout=8"]
    result = measure(ROOT / "configs" / "quickstart.yaml", changes, "penstock bench recovery", tmp_path / "run")
    figures = result.figures
    assert 0 < figures["noticed_s"] < figures["recovered_s"] < figures["update_s"] < figures["next_s"]
    assert result.settings["goes_on_from"] == f"snapshot {result.settings['struck'] - 1:06d}"
    assert "starting the rollout engine" in result.settings["in_ranks"]
