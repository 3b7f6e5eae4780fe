"""Responses that the engines tell of are scored under the names that the rollout gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from penstock.base.ragged import Ragged
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.data.prompts import PromptTable
from penstock.engines.commands.message import encode
from penstock.engines.commands.rollout import Generate
from penstock.engines.groups.spec import RankDevice
from penstock.rewards.ahead import Scorer
from penstock.rewards.pool import Score
from penstock.rewards.types import Sample
from penstock.session.rollout.score_ahead import ScorableResponse, ended_responses, scoring_ahead
from penstock.session.session import Training
from penstock.session.settings import next_settings
from penstock.state.manifest import Progress
from penstock.tasks.iteration.reward import reward
from penstock.tasks.iteration.rollout import begin_rollout, rollout
from tests.echo import GREEDY, Echo, partial_results

SAMPLES = 2


class Talking(Echo):
    """Two engines; the first tells of each response of its first prompt, then of its reply."""

    def call(self, command: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
        replies, on_news = super().call(command, key, **arguments), arguments["on_news"]
        first = replies[0]["reply"]
        for sample in reversed(range(SAMPLES)):
            texts = first["texts"][sample : sample + 1]
            on_news({"news": encode(partial_results(first["positions_P"][:1], [sample], texts))})
        on_news(replies[0])
        on_news({"reply": None, "usage": {}})  # of a rank that leaves the reply to the first of its engine
        return replies


class Source:
    """Scores a response with its number, and notes what it was asked for, call by call."""

    calls_ahead = 1

    def __init__(self) -> None:
        self.calls: list[list[Sample]] = []

    def score(self, samples: Sequence[Sample], tolerated: float = inf) -> list[Score]:
        """Note and score."""
        self.calls.append(list(samples))
        return [Score(float(sample.response) + sample.columns["bonus"], {}, None) for sample in samples]


def test_a_rollouts_news_are_scored_before_the_reward_task_asks(
    training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the data row of their prompt, and with the same rewards; the other engine's responses come afterwards."""
    monkeypatch.setattr("penstock.tasks.iteration.rollout.generation_figures", lambda *_: {})  # of a GPU
    changes = {"rollout": {"prompts": 4, "samples": SAMPLES}, "checkpoint": {"every": 0}}
    training = training_with(config_from_mapping(changes, "test"))
    training.run.experience(1).parent.mkdir(parents=True)
    session, source = training.session(), Source()
    names = [f"p-{number}" for number in range(4)]
    tokens = [np.array([10 * number + 1], np.int32) for number in range(4)]
    frame = pd.DataFrame(
        {"prompt_id": names, "prompt_text": names, "prompt_tokens": tokens, "bonus": [0.0, 0.25, 0.5, 0.75]}
    )
    session.prompts["train"] = PromptTable(frame, 0)
    session.groups["rollout"] = Talking(ranks=2, policy_version=0)  # type: ignore[assignment]
    with Scorer(source) as session.scorer:
        settings = next_settings(training, Progress())
        stage = rollout.fn(training, settings, begin_rollout(training, settings, Progress()))
        for begun in session.scorer._begun:
            begun.scores.result(20)
        ahead = [sample for call in source.calls for sample in call]
        stage = reward.fn(training, settings, stage)
    assert [len(call) for call in source.calls[:3]] == [1, 1, 2], "two by themselves, then the reply's others"
    assert len({sample.sample_id for sample in ahead}) == len(ahead) == 4, "each once"
    assert all(sample.sample_id.startswith(f"000001/{sample.prompt_id}/") for sample in ahead)
    (rest,) = source.calls[3:]
    assert {sample.sample_id for sample in rest}.isdisjoint(sample.sample_id for sample in ahead)
    assert stage.metrics["reward/ahead_share"] == 0.5
    expected = [10 * number + 1 + 0.25 * number for number in range(4)]
    assert stage.metrics["reward/mean"] == pytest.approx(np.mean(expected))


JUDGE = {"reward": {"judge": {"url": "http://127.0.0.1:9", "model": "m", "template": "{response}", "pattern": "(.)"}}}
FUNCTION = {"reward": {"function": "penstock.rewards.builtin:exact_match"}}
PLAYED = {"environment": {"type": "tests.engines.playground:Playground"}}


@pytest.mark.parametrize(
    ("sections", "gpu", "told"),
    [(JUDGE, None, True), (FUNCTION, 0, True), (FUNCTION, None, False), (JUDGE | PLAYED, 0, False), ({}, 0, False)],
)
def test_a_source_is_told_if_it_takes_single_responses_and_no_engines_cores(
    sections: dict[str, Any], gpu: int | None, told: bool, training_with: Callable[[TrainConfig], Training]
) -> None:
    """Not an environment; not a reward model in the engines, which is no source here; on the CPU no function."""
    training = training_with(config_from_mapping(sections, "test"))
    session = training.session()
    session.scorer = Scorer(Source()) if sections else None
    session.groups["rollout"] = SimpleNamespace(spec=SimpleNamespace(devices=(RankDevice(gpu),)))  # type: ignore[assignment]
    prompts = pd.DataFrame({"prompt_id": ["p"], "prompt_text": ["?"]})
    assert bool(scoring_ahead(training, 1, prompts)) == told


def test_a_reply_names_its_responses_by_their_order() -> None:
    """`samples` of each prompt side by side; news names them one by one, and a rank that leaves it to another none."""
    texts = pa.array(["a", "b", "c", "d"], pa.large_string())
    prompts = Ragged.of([[number] for number in range(5)], np.int32)
    asked = Generate(1, prompts, replace(GREEDY, samples=2), "model")
    answer = Echo(1).answer(asked, np.array([4, 1]))
    reply = ended_responses(replace(answer, texts=texts), 2)
    assert [(ended.position, ended.number, ended.text) for ended in reply] == [
        *((4, 0, "a"), (4, 1, "b")),
        *((1, 0, "c"), (1, 1, "d")),
    ]
    news = partial_results([4, 1], [1, 0], texts[:2])
    assert ended_responses(news, 2) == [ScorableResponse(4, 1, "a"), ScorableResponse(1, 0, "b")]
    assert ended_responses(None, 2) == []


def test_with_a_quota_rewards_begin_once_a_prompt_makes_the_batch(
    training_with: Callable[[TrainConfig], Training],
) -> None:
    """Its responses that were told of before then come, too. Control: those of a prompt that does not never do."""
    training = training_with(config_from_mapping(JUDGE | {"rollout": {"samples": SAMPLES}}, "test"))
    session, source = training.session(), Source()
    session.groups["rollout"] = SimpleNamespace(spec=SimpleNamespace(devices=(RankDevice(None),)))  # type: ignore[assignment]
    session.prompt_columns["train"] = {name: {} for name in "pq"}
    prompts = pd.DataFrame({"prompt_id": ["p", "q"], "prompt_text": ["?", "?"]})
    texts = pa.array(["a", "b"], pa.large_string())
    with Scorer(source) as scorer:
        session.scorer = scorer
        (hear,) = scoring_ahead(training, 1, prompts)
        hear(replace(partial_results([0, 1], [0, 1], texts), counted=[]))
        assert not scorer._begun
        hear(replace(partial_results([0], [1], texts[1:]), counted=[0]))
        (begun,) = scorer._begun
        assert [(sample.prompt_id, sample.response) for sample in begun.samples] == [("p", "a"), ("p", "b")]
