"""Rewards from servers in a training's tasks: the reward step and the held-out evaluation see the same columns."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.data.prompts import PromptTable
from penstock.engines.commands.forward import Scores
from penstock.rewards.source import open_scorer
from penstock.session.rollout.generation import Responses
from penstock.session.session import Stage, Training
from penstock.session.settings import settings_at
from penstock.state.experience import ExperienceRef, read_columns, write_columns
from penstock.state.manifest import Progress
from penstock.tasks.iteration import evaluate as evaluation
from penstock.tasks.iteration.reward import punished, reward, reward_metrics, score
from tests.rewards.scripted_server import chat_reply, scripted

TABLE = PromptTable(
    pd.DataFrame(
        {
            "prompt_id": ["p-000000", "p-000001"],
            "prompt_text": ["1+1=", "1+2="],
            "prompt_tokens": [np.arange(4, dtype=np.int32)] * 2,
            "answer": ["2", "3"],
        }
    ),
    dropped=0,
)
ROWS = {"sample_id": ["a", "b"], "prompt_id": ["p-000000", "p-000001"], "prompt": ["1+1=", "1+2="]}


def reward_of(url: str, **judge: Any) -> dict[str, Any]:
    """A reward section with a judge that is asked for the response itself."""
    asked = {"url": url, "model": "m", "template": "{response}", "retries": 0, **judge}
    return {"judge": asked, "max_failure_share": 0.5, "failure_value": -1.0}


def test_a_judges_parts_and_words_are_columns_in_held_out_evaluation_too(
    training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part and the judge's text; accuracy counts rewards of at least 1."""
    tokens = Ragged.of([np.array([5, 6]), np.array([5])], np.int32)
    texts, truncated_B = pa.array(["2", "4"], pa.large_string()), np.array([False, False])
    responses = Responses(np.arange(2), tokens, texts, truncated_B, 3, {}, tokens, {})
    monkeypatch.setattr(evaluation, "generate", lambda *_, **__: responses)
    reading = {"parser": "tests.rewards.reward_examples:judge_parser", "settings": {"bonus": 0.25}}
    with scripted(lambda body: chat_reply(body["messages"][0]["content"])) as seen:
        config = TrainConfig.model_validate({"reward": reward_of(seen.url, **reading)})
        training = training_with(config)
        session = training.session()
        session.prompts["heldout"] = TABLE
        with open_scorer(config.reward, ["prompt_id", "answer"]) as session.scorer:
            figures = evaluation.evaluate.fn(training, 3, 512)
            again = score(training, {**ROWS, "response": responses.texts.to_pylist()}, "heldout", "key")
    names = ["reward", "reward/same", "reward/bonus", "reward_answer", "reward_failure"]
    written = read_columns(training.run.evaluation(3), names)
    assert written["reward"].tolist() == [1.25, 0.25]
    assert written["reward/same"].tolist() == [1.0, 0.0]
    assert written["reward/bonus"].tolist() == [0.25, 0.25]
    assert written["reward_answer"] == ["2", "4"]
    assert written["reward_failure"] == [None, None]
    assert figures["heldout/accuracy"] == 0.5
    assert [item.reward for item in again] == [1.25, 0.25]
    assert reward_metrics(again)["reward/same_mean"] == 0.5


def test_a_training_stops_when_its_judge_writes_garbage(training_with: Callable[[TrainConfig], Training]) -> None:
    """Above the share; below it the sample has the failure's value, and the judge's words are kept with it."""
    with scripted(lambda body: chat_reply(body["messages"][0]["content"])) as seen:
        reward = {**reward_of(seen.url, pattern=r"(\d)"), "overlong": {"buffer_tokens": 4}}
        config = TrainConfig.model_validate({"reward": reward, "rollout": {"max_response_tokens": 8}})
        training = training_with(config)
        session = training.session()
        session.prompts["train"] = TABLE
        with open_scorer(config.reward, ["prompt_id", "answer"]) as session.scorer:
            scores = score(training, {**ROWS, "response": ["no", "4"]}, "train", "key")
            with pytest.raises(UserError, match=r"reward.judge 'm' failed for 2 of 2 samples(.|\n)*no match"):
                score(training, {**ROWS, "response": ["no", "idea"]}, "train", "key")
    assert [item.reward for item in scores] == [-1.0, 4.0]
    cut = punished(config, scores, np.array([8, 8]))
    assert [item.reward for item in cut] == [-1.0, 3.0]
    assert [item.answer for item in cut] == ["no", "4"]


def test_a_reward_models_scores_are_rewards_or_an_error(training_with: Callable[[TrainConfig], Training]) -> None:
    """Weights that are not finite would train towards nothing. Control: finite scores are the rewards."""
    training = training_with(TrainConfig.model_validate({"reward": {"model": "m"}}))
    session, scores = training.session(), np.array([0.5, 1.5], np.float32)
    session.groups = {"reward": SimpleNamespace(spec=SimpleNamespace(devices=[None]))}  # type: ignore[dict-item]
    session.call = lambda *_, **__: [Scores(scores)]  # type: ignore[method-assign]
    columns = {**ROWS, "response": ["a", "b"]}
    assert [item.reward for item in score(training, columns, "train", "1/reward")] == [0.5, 1.5]
    for wrong, words in ((np.nan, "is nan"), (np.inf, "is inf"), (3e38, r"is 3e\+38, beyond \+-1e\+12")):
        scores[1] = wrong
        with pytest.raises(UserError, match=f"reward.model 'm' gave 1 of 2 responses no score.*{words}"):
            score(training, columns, "train", "1/reward")


def test_responses_are_measured_only_where_their_length_matters(
    training_with: Callable[[TrainConfig], Training],
) -> None:
    """A file without tokens is enough for a judge; with `overlong` the missing ones are named, and there they count."""
    rows = {**ROWS, "response": ["2", "4"]}
    with scripted(lambda body: chat_reply(body["messages"][0]["content"])) as seen:

        def rewards(columns: dict[str, Any], **section: Any) -> dict[str, Any]:
            sections = {"reward": reward_of(seen.url, pattern=r"(\d)") | section, "rollout": {"max_response_tokens": 8}}
            config = TrainConfig.model_validate(sections)
            training = training_with(config)
            training.session().prompts["train"] = TABLE
            path = training.run.experience(1)
            write_columns(path, columns)
            stage = Stage(ExperienceRef(str(path), 2, 8, 11, 0), {})
            with open_scorer(config.reward, ["prompt_id", "answer"]) as training.session().scorer:
                reward.fn(training, settings_at(config, 1, Progress()), stage)
            return read_columns(path, ["reward"])

        overlong = {"buffer_tokens": 4}
        assert rewards(rows)["reward"].tolist() == [2.0, 4.0]
        with pytest.raises(KeyError, match="response_tokens"):
            rewards(rows, overlong=overlong)
        tokens = Ragged.of([np.arange(3), np.arange(8)], np.int32)
        assert rewards({**rows, "response_tokens": tokens}, overlong=overlong)["reward"].tolist() == [2.0, 3.0]
