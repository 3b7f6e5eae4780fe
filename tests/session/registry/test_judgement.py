"""Which version is best: better beyond chance on the same prompts, and refused where prompts or settings differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UserError
from penstock.checks.tokenized import note_tokenized
from penstock.configs.loading.load import config_from_mapping
from penstock.session.registry.judgement import check_comparable, judge, judge_and_promote
from penstock.session.registry.registering import deliver_version, final_version, new_version
from penstock.session.session import write_config
from penstock.state.experience import write_columns
from penstock.state.manifest import Tracked
from penstock.state.run_folder import RunFolder, append_metrics
from penstock.trackers.mlflow import MlflowTracker, default_tracking_uri
from penstock.trackers.registry import ACCURACY, DATA, ITERATION, PARENT, VERDICT, Version, best_of
from penstock.trackers.table import registry_in
from penstock.trackers.tracker import NewRun

PROMPTS, SAMPLES = 400, 2
CONFIG = {
    "model": {"tiny": {}},
    "data": {"arithmetic": {}},
    "reward": {"function": "penstock.rewards.builtin:exact_match"},
    "evaluate": {"temperature": 1.0, "samples": SAMPLES},
    "record": {"registered_model": "sums"},
}


@pytest.fixture(autouse=True)
def _store_beside_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def version(folder: Path, rewards_PN: np.ndarray, **config: Any) -> Version:
    """Register the model of a run that has ended, with these held-out rewards."""
    run = RunFolder(folder)
    tree = config_from_mapping({**CONFIG, **config}, "here")
    run.model("final").mkdir(parents=True)
    (run.model("final") / "config.json").write_text("{}")
    (run.model("final") / "model.safetensors").write_bytes(folder.name.encode())
    (folder / "data").mkdir()
    write_config(run, tree)
    note_tokenized(run, "prompts", tree)
    run.evaluation(3).parent.mkdir()
    ids = [f"heldout-{row:06d}" for row in range(len(rewards_PN)) for _ in range(SAMPLES)]
    write_columns(run.evaluation(3), {"prompt_id": ids, "reward": rewards_PN.reshape(-1)})
    mean = float(rewards_PN.mean())
    append_metrics(run, 3, {"heldout/accuracy": mean, "heldout/accuracy/low": mean, "heldout/accuracy/high": mean})
    tracked = MlflowTracker(default_tracking_uri(folder.parent)).open(NewRun(folder.name, "exp", {}))
    return deliver_version(final_version(run, tree, Tracked("mlflow", tracked)), folder.parent)


def rewards(share: float, seed: int = 0) -> np.ndarray:
    """Rewards of 0 and 1: the easiest prompts are answered, up to a share of them."""
    hard_P = np.random.default_rng(0).permutation(PROMPTS) / PROMPTS
    noise = np.random.default_rng(seed).normal(scale=0.05, size=(PROMPTS, SAMPLES))
    return (hard_P[:, None] + noise < share).astype(np.float64)


def test_better_is_better_beyond_the_interval(tmp_path: Path) -> None:
    """Three points more of the same prompts are promoted. Controls: nothing more, and less, are not."""
    best = version(tmp_path / "one", rewards(0.50))
    registry = registry_in(tmp_path)
    assert best_of(registry, "sums") == best  # the first
    assert str(judge(best, best)) == "models:/sums/1 is best: there is no other to compare it with"
    same, worse = version(tmp_path / "same", rewards(0.50, seed=1)), version(tmp_path / "worse", rewards(0.45))
    for other in (same, worse):
        judgement = judge_and_promote(registry, other, best)
        assert not judgement.better
        assert "is not better than models:/sums/1 (best)" in str(judgement)
        assert best_of(registry, "sums") == best
    more = version(tmp_path / "more", rewards(0.53, seed=1))
    judgement = judge_and_promote(registry, more, best)
    mean, low, high = judgement.difference
    assert 0 < low < mean < high < 0.08
    promoted = best_of(registry, "sums")
    assert promoted is not None
    assert (promoted.number, promoted.tags[VERDICT]) == (more.number, str(judgement))


def test_pairs_see_what_two_intervals_do_not(tmp_path: Path) -> None:
    """The interval of the difference is narrower than that of unpaired prompts. Control: prompts shuffled for one."""
    best, more = version(tmp_path / "one", rewards(0.50)), version(tmp_path / "more", rewards(0.53, seed=1))
    shuffled = version(tmp_path / "other", np.random.default_rng(3).permutation(rewards(0.53, seed=1)))
    assert judge(more, best).better
    assert not judge(shuffled, best).better
    assert judge(shuffled, best).difference[0] == pytest.approx(judge(more, best).difference[0])


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"evaluate": {"temperature": 0.5, "samples": SAMPLES}}, "evaluate.temperature"),
        ({"seed": 1}, "seed"),  # which makes the problems
        ({"data": {"arithmetic": {}, "template": "sum: {prompt}"}}, "data.template"),
        ({"reward": {"function": "penstock.rewards.builtin:exact_match", "settings": {"suffix": "."}}}, "reward"),
    ],
)
def test_what_is_not_measured_alike_is_refused(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    """Before a training, too. Control: what decides nothing about the measure may differ."""
    best = version(tmp_path / "one", rewards(0.5))
    other = version(tmp_path / "two", rewards(0.9), **config)
    with pytest.raises(UserError, match=f"not measured alike, {key} differs"):
        judge(other, best)
    registry = registry_in(tmp_path)
    with pytest.raises(UserError, match=f"this recipe cannot be compared with models:/sums/1: .*{key}"):
        check_comparable(config_from_mapping({**CONFIG, **config}, "here"), registry, "sums")
    free = {"iterations": 7, "reward": {**CONFIG["reward"], "workers": 3}}  # type: ignore[dict-item]
    check_comparable(config_from_mapping({**CONFIG, **free}, "here"), registry, "sums")
    assert judge(version(tmp_path / "three", rewards(0.9), **free), best).better


def test_without_the_run_of_the_best_nothing_is_judged(tmp_path: Path) -> None:
    """Its folder is gone: the message says what to do."""
    best, more = version(tmp_path / "one", rewards(0.5)), version(tmp_path / "two", rewards(0.9))
    (tmp_path / "one").rename(tmp_path / "away")
    with pytest.raises(UserError, match=r"models:/sums/1 cannot be compared: its run folder .* is not there"):
        judge(more, best)


def test_a_version_says_where_it_comes_from(tmp_path: Path) -> None:
    """Iteration, accuracy with its interval, the version that it started from, under the name that the recipe gives.

    Control: what is not known is no tag.
    """
    made = version(tmp_path / "one", rewards(0.5))
    assert (made.tags[ITERATION], made.tags[ACCURACY]) == (
        "3",
        "{0:.4f} [{0:.4f}, {0:.4f}]".format(rewards(0.5).mean()),
    )
    assert not made.tags.keys() & {DATA, PARENT}
    config = config_from_mapping({**CONFIG, "model": {"path": "x", "version": "models:/sums/1"}}, "here")
    registered_model = config.record.registered_model
    again = new_version(
        RunFolder(tmp_path / "one"), config, Tracked("mlflow", "r"), RunFolder(made.run).model("final"), 2
    )
    assert (again.name, again.tags[PARENT], again.tags[ITERATION]) == (registered_model, "models:/sums/1", "2")
    assert ACCURACY not in again.tags
