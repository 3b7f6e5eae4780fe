"""A replay gives tasks the portions that the run gave them, in their order, and puts together what comes of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.ragged import Ragged
from penstock.session.session import Stage, Training
from penstock.session.settings import next_settings
from penstock.state.experience import column_names, origin_of, read_columns, write_columns
from penstock.state.manifest import Progress
from penstock.state.run_folder import RunFolder
from penstock.tasks.replay.inputs import Plan
from penstock.tasks.replay.portions import by_portions, was_in_portions
from tests.tasks.stream.test_join import PORTIONS, SAMPLES, joined, learnt
from tests.tasks.stream.test_join import training as training

OF_TASKS = ("reward", "reward/form", "reward_failure", "advantages")


@pytest.fixture
def replayed(training: Training, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Plan, list[Any], Any]:
    """A run that learnt from portions, with the columns that each had, and the figures of its batch."""
    stages = learnt(training)
    seen = [_columns(stage) for stage in stages]
    stage = joined(training, stages, monkeypatch)
    run = RunFolder(tmp_path / "run")
    shutil.copytree(training.run.experience(1).parent, run.experience(1).parent)
    plan = Plan(run, training.config, 1, 1, ("reward",), Progress(), None, Path(), {}, state=False, engines=False)
    return plan, seen, stage.metrics


def test_a_task_sees_each_portion_as_the_run_had_it(replayed: tuple[Plan, list[Any], Any], training: Training) -> None:
    """Rows, groups and order; every call has a key of its own. What is made is the batch's, and so are the figures."""
    plan, seen, figures = replayed
    stages: list[Stage] = []

    def rewarded(stage: Stage) -> Mapping[str, Any]:
        portion = _columns(stage)
        (expected,) = (one for one in seen if one["sample_id"] == portion["sample_id"])
        assert portion.keys() == expected.keys() - set(OF_TASKS)
        for name, column in portion.items():
            assert _plain(column) == _plain(expected[name]), name
        stages.append(stage)
        return {name: expected[name] for name in expected if name.startswith("reward")}

    made, again = by_portions(training, plan, next_settings(training, Progress()), "reward", rewarded)
    sizes = [len(groups) * SAMPLES for groups in origin_of(plan.run.experience(1))[PORTIONS]]
    assert [stage.experience.samples for stage in stages] == sizes == [2, 4, 4]
    assert [stage.experience.key(1, "reward") for stage in stages] == [f"1/reward/{number}" for number in range(3)]
    stored = read_columns(plan.run.experience(1), ["reward", "reward/form", "reward_failure"])
    assert made.keys() == stored.keys()
    assert all(_plain(made[name]) == _plain(column) for name, column in stored.items())
    for name in ("reward/mean", "reward/std", "reward/form_mean", "reward/failures"):
        assert again[name] == figures[name]
    assert not [*training.run.path.rglob("*portion-*")]


def test_a_batch_that_was_whole_stays_whole(replayed: tuple[Plan, list[Any], Any]) -> None:
    """Its experience tells. Control: of one in portions a task of the models' state gets the batch as well."""
    plan, _, _ = replayed
    assert [was_in_portions(plan, task) for task in ("reference_logprobs", "values", "rollout", "update_actor")] == [
        True,
        True,
        False,
        False,
    ]
    path = plan.run.experience(1)
    write_columns(path, read_columns(path, column_names(path)), {})
    assert not was_in_portions(plan, "reference_logprobs")


def _columns(stage: Stage) -> dict[str, Any]:
    return read_columns(stage.experience.path, column_names(stage.experience.path))


def _plain(column: Any) -> Any:
    """Return a column in types that compare, NaN as a text."""
    if isinstance(column, Ragged):
        return column.offsets_B1.tolist(), column.values_T.tolist()
    return [str(value) for value in np.asarray(column).tolist()] if isinstance(column, np.ndarray) else list(column)
