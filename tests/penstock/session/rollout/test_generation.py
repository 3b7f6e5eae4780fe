"""All engines get all prompts, and their responses come back in the order of the prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from configs.schema import TrainConfig
from engines.commands.rollout import EngineResponses
from penstock.base.ragged import Ragged
from penstock.session.requests import GenerationRequest
from penstock.session.rollout.generation import engine_figures, generate, rows_in_prompt_order
from penstock.session.session import Training
from tests.echo import GREEDY, NOTHING, Echo

SAMPLES = 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_responses_come_back_in_prompt_order(training_with: Callable[[TrainConfig], Training], ranks: int) -> None:
    """However many ranks there are, also more than prompts, and whichever rank answered."""
    training, group = training_with(TrainConfig()), Echo(ranks)
    training.session().groups["rollout"] = group  # type: ignore[assignment]
    training.session().model_folder = "model"
    prompts = pd.DataFrame({"prompt_tokens": [[10, 11], [20], [30, 31, 32], [40], [50, 51]]})
    responses = generate(training, GenerationRequest(prompts, "1/rollout", replace(GREEDY, samples=SAMPLES)))

    rows = [responses.tokens.row(row).tolist() for row in range(len(responses.tokens))]
    assert rows == [[10], [10, 10], [20], [20, 20], [30], [30, 30], [40], [40, 40], [50], [50, 50]]
    assert responses.texts.to_pylist() == [str(row[0]) for row in rows]
    assert responses.truncated_B.tolist() == [False, True] * 5
    assert responses.policy_version == 3

    (sent,) = group.commands
    assert sent["sampling"] == asdict(replace(GREEDY, samples=SAMPLES))
    assert (sent["key"], sent["tokenizer"]) == ("1/rollout", "model")
    assert len(sent["prompts"]["offsets_B1"]) == 6


def test_one_rank_replies_for_an_engine_of_several(training_with: Callable[[TrainConfig], Training]) -> None:
    """The others of a tensor-parallel engine have the same responses and send none."""
    training = training_with(TrainConfig())

    class Pairs(Echo):
        def call(self, command: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
            nothing: dict[str, Any] = {"reply": None, "usage": {}}
            return [reply for leader in super().call(command, key, **arguments) for reply in (leader, nothing)]

    training.session().groups["rollout"] = Pairs(2)  # type: ignore[assignment]
    prompts = pd.DataFrame({"prompt_tokens": [[10], [20], [30]]})
    responses = generate(training, GenerationRequest(prompts, "1/rollout", replace(GREEDY, samples=SAMPLES)))
    assert responses.texts.to_pylist() == ["10", "10", "20", "20", "30", "30"]


def test_a_prompt_that_is_lost_or_doubled_is_noticed() -> None:
    """The control: each exactly once is put in order, rows of a prompt side by side."""
    assert rows_in_prompt_order([np.array([2, 0]), np.array([1])], 3, 2).tolist() == [2, 3, 4, 5, 0, 1]
    for positions in ([np.array([2, 0])], [np.array([2, 0]), np.array([1, 0])], [np.array([2, 0]), np.array([1, 3])]):
        with pytest.raises(RuntimeError, match="1 of 3 prompts were not answered exactly once"):
            rows_in_prompt_order(positions, 3, 2)


def answer_of(request_seconds_B: np.ndarray, seconds: float, wake_seconds: float, tokens: int) -> EngineResponses:
    return replace(
        NOTHING,
        responses=Ragged(np.zeros(tokens, np.int32), np.array([0, tokens])),
        request_seconds_B=request_seconds_B,
        engine_seconds=seconds,
        wake_seconds=wake_seconds,
        prompt_tokens=40,
        cached_tokens=10,
    )


def test_figures_tell_how_long_requests_took_and_how_evenly_the_engines_worked() -> None:
    """Two engines over 10 s: one worked 4 of them, the other 8, and a quarter of the prompts' tokens was cached."""
    answers = [
        answer_of(np.arange(1, 5, dtype=np.float32), seconds=4.0, wake_seconds=0.5, tokens=100),
        answer_of(np.arange(5, 9, dtype=np.float32), seconds=8.0, wake_seconds=0.25, tokens=300),
    ]
    assert engine_figures(answers, 10.0) == pytest.approx(
        {
            "rollout/request_s_mean": 4.5,
            "rollout/request_s_p50": 4.5,
            "rollout/request_s_p95": 7.65,
            "rollout/request_s_max": 8.0,
            "rollout/wake_s": 0.5,  # all wait for the last
            "rollout/engine_idle_share": 0.4,
            "rollout/engine_balance": 0.5,
            "rollout/engine_tokens_min": 100.0,
            "rollout/engine_tokens_max": 300.0,
            "rollout/engine_prefix_hits": 0.25,
        }
    )
