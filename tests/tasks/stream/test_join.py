"""Portions become the iteration's experience: every row once, in the engines' order, however they were complete."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.rollout import PartialResults
from penstock.engines.commands.update import SumGradient
from penstock.session.requests import BegunGeneration, Rollout, Round
from penstock.session.rollout.portions import Portions, StreamedRollout
from penstock.session.session import Stage, Training
from penstock.session.settings import next_settings
from penstock.state.deferred import Deferred
from penstock.state.experience import add_columns, origin_of, read_columns
from penstock.state.manifest import Progress
from penstock.tasks.iteration.rollout import sampled_with
from penstock.tasks.stream import join as module
from penstock.tasks.stream.join import join
from penstock.tasks.stream.portion import PORTIONS, portion
from penstock.tasks.stream.sum_gradient import sum_again, sum_gradient
from tests.echo import ended_responses

PROMPTS, SAMPLES, COUNT = 5, 2, 3
ORDER = (3, 1, 4, 0, 2)  # in which prompts are complete: portions of 1, 2 and 2
BEGUN = Rollout(1, "1/rollout")
APART = {"training": {"roles": ["actor"]}, "generating": {"roles": ["rollout"]}}


@pytest.fixture
def training(training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch) -> Training:
    """One whose engines have answered all prompts, the last first."""
    monkeypatch.setattr("penstock.tasks.iteration.rollout.generation_figures", lambda *_: {})  # of a GPU
    rollout = {"prompts": PROMPTS, "samples": SAMPLES, "stream": {"portions": COUNT}}
    reward = {"function": "tests.flows.reward_functions:low_digit", "max_failure_share": 0.1}
    made = training_with(config_from_mapping({"rollout": rollout, "groups": APART, "reward": reward}, "test"))
    made.run.experience(1).parent.mkdir(parents=True)
    begin(made, generated=True)
    return made


def begin(training: Training, generated: bool) -> None:
    """Let a rollout have begun, whose engines have told of all; or whose responses an earlier attempt has left."""
    names = [f"p{n}" for n in range(PROMPTS)]
    tokens = [np.array([10 * n + 1, 5], np.int32) for n in range(PROMPTS)]
    prompts = pd.DataFrame({"prompt_id": names, "prompt_text": names, "prompt_tokens": tokens})
    told, generation = Portions(PROMPTS, SAMPLES, COUNT, engines=1, policy_version=0), None
    if generated:
        for position in ORDER:
            rows = Ragged.of([[position] * (sample + 1) for sample in range(SAMPLES)], np.int32)
            texts = pa.array([f"{position}/{sample}" for sample in range(SAMPLES)], pa.large_string())
            told.hear(PartialResults(0, ended_responses([position] * SAMPLES, range(SAMPLES), rows, 0), texts))
        generation = BegunGeneration(SimpleNamespace(), Future())  # type: ignore[arg-type]
    this_round = Round(tuple(Deferred(n, 1) for n in range(PROMPTS)), PROMPTS, None)
    training.session().rollouts[BEGUN.key] = StreamedRollout(this_round, prompts, generation, told)


def learnt(training: Training) -> list[Stage]:
    """Make all portions, as if they were rewarded with their prompts' numbers and had advantages."""
    settings, stages = next_settings(training, Progress()), []
    for number in range(COUNT):
        stage = portion.fn(training, settings, BEGUN, number)
        columns = read_columns(stage.experience.path, ["prompt_id", "response_tokens"])
        tokens = columns["response_tokens"]
        rewards = np.asarray([float(name[1:]) for name in columns["prompt_id"]])
        advantages = Ragged(tokens.values_T.astype(np.float32), tokens.offsets_B1)
        parts = {"reward/form": rewards / 10} if number == 1 else {}
        failures = [None] * len(rewards)
        found = {"reward": rewards, "reward_failure": failures, "advantages": advantages, **parts}
        add_columns(Path(stage.experience.path), found)
        stages.append(Stage(stage.experience, stage.metrics | {"time/reward_s": 0.5, "reward/ahead_share": number / 2}))
    return stages


def joined(training: Training, stages: list[Stage], monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Make the iteration's experience, without figures of engines."""
    monkeypatch.setattr(module, "_left", lambda *_: ({}, {}))
    return join.fn(training, next_settings(training, Progress()), BEGUN, stages)


def test_portions_become_one_experience(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in the engines' order with all their columns, groups numbered anew, seconds added up; no portion is left."""
    stages = learnt(training)
    assert [stage.experience.samples for stage in stages] == [2, 4, 4]
    stage, path = joined(training, stages, monkeypatch), training.run.experience(1)
    names = ["prompt_id", "sample_id", "group", "response", "response_tokens", "advantages", "reward", "reward/form"]
    columns = read_columns(path, names)
    assert columns["prompt_id"] == [f"p{n}" for n in range(PROMPTS) for _ in range(SAMPLES)]
    assert columns["response"] == [f"{n}/{sample}" for n in range(PROMPTS) for sample in range(SAMPLES)]
    assert columns["sample_id"] == [f"000001/p{n}/{sample}" for n in range(PROMPTS) for sample in range(SAMPLES)]
    assert columns["group"].tolist() == columns["reward"].tolist() == [n for n in range(PROMPTS) for _ in range(2)]
    assert columns["advantages"].values_T.tolist() == columns["response_tokens"].values_T.tolist()
    np.testing.assert_array_equal(columns["reward/form"], [np.nan] * 2 + [0.1] * 2 + [np.nan] * 4 + [0.4] * 2)
    assert origin_of(path)[PORTIONS] == [[3], [1, 4], [0, 2]]
    assert stage.experience.prompts == PROMPTS and stage.experience.samples == PROMPTS * SAMPLES
    assert stage.experience.portion is None
    assert stage.metrics["time/reward_s"] == 1.5 and stage.metrics["reward/mean"] == 2.0
    assert stage.metrics["reward/form_mean"] == 0.25
    assert stage.metrics["reward/ahead_share"] == pytest.approx((4 * 0.5 + 4 * 1.0) / 10)
    assert [one.name for one in path.parent.iterdir() if "portion" in one.name] == []


def test_what_an_earlier_attempt_left_comes_in_the_same_portions(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rollout's columns alone. Control: the engines are asked for nothing."""
    first = joined(training, learnt(training), monkeypatch)
    names = ["sample_id", "group", "response", "response_tokens", "loss_mask", "truncated", "policy_version", "reward"]
    before = read_columns(first.experience.path, names)
    begin(training, generated=False)
    stages = learnt(training)
    again = read_columns(stages[1].experience.path, ["prompt_id", "group"])
    assert again["prompt_id"] == ["p1", "p1", "p4", "p4"] and again["group"].tolist() == [0, 0, 1, 1]
    second = joined(training, stages, monkeypatch)
    after = read_columns(second.experience.path, names)
    for name, column in before.items():
        values = [getattr(one, "values_T", one) for one in (column, after[name])]
        assert list(values[0]) == list(values[1]), name
    assert origin_of(second.experience.path)[PORTIONS] == [[3], [1, 4], [0, 2]]


def test_a_stream_takes_over_no_more_than_its_like(training: Training) -> None:
    """Experience in other portions, or in none, would be summed in another order: it says in how many it was made."""
    this_round = training.session().rollouts[BEGUN.key].round
    origin = sampled_with(training, next_settings(training, Progress()), this_round)
    assert origin["portion_count"] == COUNT
    alone = training.config.rollout.model_copy(update={"stream": None})
    object.__setattr__(training.session(), "config", training.config.model_copy(update={"rollout": alone}))
    assert "portion_count" not in sampled_with(training, next_settings(training, Progress()), this_round)


def test_failures_are_those_of_the_whole_batch(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of ten are more than a tenth, and none of a portion is looked at before; one is not. The step never comes."""
    for count, refused in ((1, False), (2, True)):
        begin(training, generated=True)
        stages = learnt(training)
        path = Path(stages[1].experience.path)
        failures = [f"late {n}" if n < count else None for n in range(4)]
        add_columns(path, {"reward_failure": failures})
        if not refused:
            joined(training, stages, monkeypatch)
            continue
        with pytest.raises(UserError, match="failed for 2 of 10 samples") as caught:
            joined(training, stages, monkeypatch)
        assert "sample 000001/p1/0: late 0" in str(caught.value)


def test_the_gradient_is_summed_in_the_order_of_the_portions(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first begins a sum, the last ends it, each is a call of its own. Done again, from the whole experience."""
    asked: list[tuple[SumGradient, str]] = []

    def call(_: Any, role: str, command: SumGradient, key: str) -> list[None]:
        assert role == "actor"
        asked.append((command, key))
        return [None]

    monkeypatch.setattr("penstock.session.session.Session.call", call)
    settings, stages = next_settings(training, Progress()), learnt(training)
    stages = [sum_gradient.fn(training, settings, stage, number) for number, stage in enumerate(stages)]
    assert all("time/update_actor_s" in stage.metrics for stage in stages)
    whole = joined(training, stages, monkeypatch)
    sum_again(training, settings, whole)
    keys = [f"1/update_actor/{number}" for number in range(COUNT)]
    assert [key for _, key in asked] == keys * 2
    assert [command.first for command, _ in asked] == [True, False, False] * 2
    assert [command.last for command, _ in asked] == [False, False, True] * 2
    assert [command.groups for command, _ in asked] == [None] * 3 + [[3], [1, 4], [0, 2]]
    assert {command.path for command, _ in asked[3:]} == {str(training.run.experience(1))}
