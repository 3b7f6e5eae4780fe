"""Dynamic sampling: refused groups make room, the batch stays full, and what is drawn is determined.

Invariants: as many groups as before, each whole and with numbers of its own; no group is lost to one that is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.data.prompts import PromptTable
from penstock.flows.parts import rewards
from penstock.rewards.pool import Score
from penstock.session.session import Stage, Training
from penstock.session.settings import settings_at
from penstock.state.experience import RESAMPLED, ExperienceRef, read_columns, write_columns
from penstock.state.manifest import Progress
from penstock.tasks.iteration import resample as module
from penstock.tasks.iteration.resample import groups_to_replace, prompts_to_draw, replaced, resample
from penstock.tasks.iteration.rollout import FurtherRollout, _is_whole


def columns_of(rewards: list[list[float]], name: str, resample_number: int = 0) -> dict[str, Any]:
    """Experience with one list of rewards per group; responses are one token long and name their group and sample."""
    samples = len(rewards[0])
    ids = [f"{name}{group}" for group in range(len(rewards)) for _ in range(samples)]
    tokens = np.arange(len(ids), dtype=np.int32) + 100 * resample_number
    return {
        "sample_id": [f"{prompt}/{n % samples}" for n, prompt in enumerate(ids)],
        "prompt_id": ids,
        "prompt": ids,
        "response": ids,
        "group": np.repeat(np.arange(len(rewards)), samples),
        "reward": np.asarray(rewards).reshape(-1),
        "reward_failure": [None] * len(ids),
        "prompt_tokens": Ragged(tokens, np.arange(len(ids) + 1)),
        "response_tokens": Ragged(tokens, np.arange(len(ids) + 1)),
        "policy_version": np.full(len(ids), 6),
        RESAMPLED: np.full(len(ids), resample_number),
    }


PRESENT = [[1.0, 0.0], [1.0, 1.0], [0.1, 0.1], [0.0, 0.5]]


def kept(merged: dict[str, Any]) -> list[str]:
    """Prompts of the groups, after a look whether groups are whole, numbered, and every column went along."""
    ids = merged["prompt_id"]
    assert ids[::2] == ids[1::2]
    assert merged["group"].tolist() == np.repeat(np.arange(len(ids) // 2), 2).tolist()
    assert merged["sample_id"] == [f"{prompt}/{n % 2}" for n, prompt in enumerate(ids)]
    firsts = [100 * (name[0] == "b") + 2 * int(name[1:]) for name in ids[::2]]
    assert merged["response_tokens"].values_T[::2].tolist() == firsts
    return ids[::2]


def merged_with(further: list[list[float]], **columns: Any) -> dict[str, Any]:
    """`PRESENT` and further groups; those of equal rewards are refused."""
    refused_G = np.array([first == second for first, second in PRESENT + further])
    return replaced(columns_of(PRESENT, "a"), columns_of(further, "b", 1) | columns, refused_G, 2)


def test_refused_groups_make_room_in_the_order_drawn() -> None:
    """Two are wanted, three come, the second is refused again: the first and third take their place."""
    merged = merged_with([[0, 1], [1, 1], [1, 0]])
    assert kept(merged) == ["a0", "a3", "b0", "b2"]
    assert merged[RESAMPLED].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert merged["reward"].tolist() == [1, 0, 0, 0.5, 0, 1, 1, 0]


def test_where_too_few_come_the_batch_is_filled_with_refused_groups() -> None:
    """The earliest of them stay: advantage 0, and the size that mini-batches divide."""
    merged = merged_with([[1, 1], [0, 1]])
    assert kept(merged) == ["a0", "a1", "a3", "b1"]


def test_more_than_enough_are_left_out() -> None:
    merged = merged_with([[0, 1], [0, 1], [0, 1]])
    assert kept(merged) == ["a0", "a3", "b0", "b1"]


def test_a_part_of_the_reward_that_one_side_lacks_is_nan_there() -> None:
    merged = merged_with([[0, 1], [0, 1]], **{"reward/form": np.array([1.0, 2.0, 3.0, 4.0])})
    np.testing.assert_array_equal(merged["reward/form"], [np.nan] * 4 + [1, 2, 3, 4])
    merged = merged_with([[0, 1], [0, 1]], reward_answer=["7", "8", "9", "10"])
    assert merged["reward_answer"] == [None] * 4 + ["7", "8", "9", "10"]


@pytest.mark.parametrize("name", ["reward/form", "environment/steps"])
def test_a_part_that_only_the_first_rollout_has_stays(name: str) -> None:
    """Of the rewards as of the episodes: an environment names a part when there is something to say of it."""
    part = {name: np.arange(8.0)}
    refused_G = np.array([False, True, True, False, False, False])
    merged = replaced(columns_of(PRESENT, "a") | part, columns_of([[0, 1], [0, 1]], "b", 1), refused_G, 2)
    np.testing.assert_array_equal(merged[name], [0, 1, 6, 7] + [np.nan] * 4)


def test_what_a_later_task_left_in_an_earlier_attempt_is_dropped() -> None:
    """Its rewards may have been others (a judge's), so that no group was refused then."""
    present = columns_of(PRESENT, "a")
    left = {"advantages": present["response_tokens"], "accepted": np.ones(8, np.uint8)}
    further = columns_of([[0, 1], [0, 1]], "b", 1)
    refused_G = np.array([False, True, True, False, False, False])
    merged = replaced(present | left, further, refused_G, 2)
    assert kept(merged) == ["a0", "a3", "b0", "b1"]
    assert merged.keys() == further.keys()


@pytest.mark.parametrize(
    ("missing", "full", "drawn"), [(2, 4, 4), (1, 4, 2), (3, 4, 4), (4, 4, 4), (10, 100, 12), (1, 100, 2)]
)
def test_as_many_prompts_are_drawn_as_should_be_enough(missing: int, full: int, drawn: int) -> None:
    """10 of 100 are missing and 9 of 10 are of use: 12. Never more than a batch."""
    assert prompts_to_draw(missing, full) == drawn


def test_resampling_draws_on_from_the_cursor_and_a_resumed_run_starts_over(
    training_with: Callable[[TrainConfig], Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second resample draws behind the first; a file that holds a resample is not taken for the first rollout's."""
    values = {"rollout": {"prompts": 4, "samples": 2}, "algorithm": {"name": "dapo", "dynamic_sampling": {}}}
    config = TrainConfig.model_validate(values)
    training, path = training_with(config), tmp_path / "experience.parquet"
    training.session().prompts["train"] = PromptTable(pd.DataFrame({"prompt_id": ["a0"]}), 0)
    first = columns_of(PRESENT, "a")
    del first[RESAMPLED]
    write_columns(path, first)
    assert _is_whole(path, 6)
    drawn: list[tuple[int, int, int, int]] = []
    answers = [columns_of([[1, 1], [0, 1], [2, 2], [3, 3]], "b"), columns_of([[0, 1], [0, 1]], "c")]

    def further_rollout(
        _: Training, __: Any, ___: ExperienceRef, cursor: int, missing: int, more: int, number: int
    ) -> FurtherRollout:
        drawn.append((cursor, missing, more, number))
        columns = answers[len(drawn) - 1]
        columns["response"] = pa.array(columns["response"], pa.large_string())
        return FurtherRollout(columns, more, 0, {})

    def score(_: Training, columns: dict[str, Any], *__: str) -> list[Score]:
        return [Score(reward, {}, None) for reward in columns.pop("reward").tolist()]

    monkeypatch.setattr(module, "further_rollout", further_rollout)
    monkeypatch.setattr(module, "score", score)
    progress = Progress(iteration=6, prompt_cursor=40)
    settings = settings_at(config, 7, progress)
    stage = Stage(ExperienceRef(str(path), 8, 8, 8, 6, prompts=4), {"rollout/tokens": 8.0})
    assert groups_to_replace(training, stage) == 2
    stage = resample.fn(training, settings, progress, stage, 1)
    assert groups_to_replace(training, stage) == 1
    stage = resample.fn(training, settings, progress, stage, 2)
    assert groups_to_replace(training, stage) == 0
    assert drawn == [(44, 2, 4, 1), (48, 1, 2, 2)]
    assert read_columns(path, ["prompt_id"])["prompt_id"][::2] == ["a0", "a3", "b1", "c0"]
    assert stage.experience.prompts == stage.metrics["rollout/prompts_drawn"] == 10
    assert stage.metrics["rollout/tokens"] == 8 + 8 + 4
    assert not _is_whole(path, 6)


@pytest.mark.parametrize("max_rollouts", [2, 5])
def test_rollouts_of_an_iteration_are_bounded(
    max_rollouts: int, training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is one of them. Control: where nothing is to be replaced there is no further one."""
    numbers: list[int] = []

    def further(training: Training, settings: Any, progress: Progress, stage: Stage, number: int) -> Stage:
        numbers.append(number)
        return stage

    config = TrainConfig.model_validate({"algorithm": {"dynamic_sampling": {"max_rollouts": max_rollouts}}})
    stage = Stage(ExperienceRef("experience.parquet", 1, 1, 1, 0), {})
    settings = settings_at(config, 1, Progress())
    monkeypatch.setattr(rewards, "resample", further)
    for refused, expected in ((True, list(range(1, max_rollouts))), (False, [])):
        numbers.clear()
        monkeypatch.setattr(rewards, "groups_to_replace", lambda training, stage, refused=refused: refused)
        rewards.resampled(training_with(config), settings, Progress(), stage)
        assert numbers == expected
