"""All engines get all prompts, and their responses come back in the order of the prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.message import encode
from penstock.engines.commands.rollout import EngineResponses
from penstock.engines.groups.group import RankLost, RolloutStalled
from penstock.session.requests import GenerationRequest
from penstock.session.rollout.generation import (
    begin_generation,
    engine_figures,
    generate,
    rows_in_prompt_order,
    take_responses,
)
from penstock.session.session import Training
from tests.echo import GREEDY, NOTHING, Echo, partial_results

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


def test_a_generation_that_misses_its_deadline_says_how_far_it_was(
    training_with: Callable[[TrainConfig], Training],
) -> None:
    """Under a name of its own, which is a loss as well. Controls: a rank that is gone keeps its name; news go on."""
    training, heard = training_with(TrainConfig()), list[int]()
    late = RankLost("rollout", 1, "no reply to 'generate' within 5 s", Path("log"), flow_stacks="thread MainThread:")
    gone = RankLost("rollout", 1, "exited with code 1", Path("log"))

    def lost(loss: RankLost, told: int) -> RankLost:
        class Stalls(Echo):
            def call(self, command: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
                for row in range(told):
                    news = partial_results([row], [0], pa.array(["1"], pa.large_string()))
                    arguments["on_news"]({"news": encode(news)})
                raise loss

        training.session().groups["rollout"] = Stalls(2)  # type: ignore[assignment]
        prompts = pd.DataFrame({"prompt_tokens": [[10], [20], [30]]})
        request = GenerationRequest(prompts, "1/rollout", replace(GREEDY, samples=SAMPLES))
        with pytest.raises(RankLost) as caught:
            take_responses(training, begin_generation(training, request, [lambda news: heard.append(1)]))
        return caught.value

    assert lost(gone, told=0) is gone
    stalled = lost(late, told=0)
    assert isinstance(stalled, RolloutStalled)
    assert stalled.reason == "no reply to 'generate' within 5 s: no response of 6 has ended"
    assert (stalled.group, stalled.rank, stalled.flow_stacks) == ("rollout", 1, "thread MainThread:")
    assert "2 of 6 responses had ended, the last news 0 s ago" in lost(late, told=2).reason
    assert len(heard) == 2


def test_a_prompt_that_is_lost_or_doubled_is_noticed() -> None:
    """The control: each exactly once is put in order, rows of a prompt side by side."""
    assert rows_in_prompt_order([np.array([2, 0]), np.array([1])], 3, 2).tolist() == [2, 3, 4, 5, 0, 1]
    for positions in ([np.array([2, 0])], [np.array([2, 0]), np.array([1, 0])], [np.array([2, 0]), np.array([1, 3])]):
        with pytest.raises(RuntimeError, match="1 of 3 prompts were not answered exactly once"):
            rows_in_prompt_order(positions, 3, 2)


def answer_of(request_seconds_B: np.ndarray, seconds: float, wake_seconds: float, tokens: int) -> EngineResponses:
    return replace(
        NOTHING,
        positions_P=np.arange(2),
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
            "rollout/prompt_s_p80": 6.8,  # of the four prompts, two samples of each
            "rollout/prompt_s_max": 8.0,
            "rollout/wake_s": 0.5,  # all wait for the last
            "rollout/engine_idle_share": 0.4,
            "rollout/engine_balance": 0.5,
            "rollout/engine_tokens_min": 100.0,
            "rollout/engine_tokens_max": 300.0,
            "rollout/engine_prefix_hits": 0.25,
        }
    )
