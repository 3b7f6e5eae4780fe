"""What an evaluation hands to evaluators, and what becomes of one that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.data.prompts import PromptTable
from penstock.rewards.pool import Score
from penstock.session.rollout.generation import Responses
from penstock.session.session import Training
from penstock.tasks.iteration import evaluate as module
from penstock.tasks.iteration.evaluate import evaluated, held_out, numbered

BROKEN = "tests.evaluators.evaluator_examples:Raises"


def two_of_two(training: Training) -> tuple[dict[str, list[str]], Responses, list[Score]]:
    """Two responses to each of two prompts, in the order in which generate and score return them."""
    frame = pd.DataFrame(
        {"prompt_id": ["a", "b"], "prompt_text": ["x", "y"], "prompt_tokens": [[1], [2]], "answer": [7, 8]}
    )
    training.session().prompts["heldout"] = PromptTable(frame, 0)
    columns = {"prompt_id": ["a", "a", "b", "b"], "prompt": ["x", "x", "y", "y"], "response": ["1", "2", "3", "4"]}
    tokens = Ragged.of([[1], [2, 2], [3], [4]], np.int32)
    truncated_B = np.asarray([False, True, False, False])
    responses = Responses(np.arange(2), tokens, columns["response"], truncated_B, 0, {}, tokens, {})
    return columns, responses, [Score(float(value), {}, None) for value in (0, 1, 1, 1)]


def config(**values: object) -> TrainConfig:
    return TrainConfig.model_validate({"evaluate": {"samples": 2, "temperature": 1.0, **values}})


def test_rows_keep_their_prompts(training_with: Callable[[TrainConfig], Training]) -> None:
    """Each response stands with its own prompt, data row, tokens and reward; a prompt's lie side by side."""
    training = training_with(config())
    heldout = held_out(training, *two_of_two(training))
    assert [row["answer"] for row in heldout.rows] == [7, 7, 8, 8]
    assert heldout.per_prompt(heldout.rewards_B).tolist() == [[0.0, 1.0], [1.0, 1.0]]
    figures = evaluated(training, heldout)
    assert figures["heldout/worst_at_2"] == 0.5
    assert figures["heldout/truncated_share"] == 0.25
    assert "heldout/evaluator_failures" not in figures, "built-in ones do not fail"


def test_several_responses_of_a_prompt_have_names_of_their_own() -> None:
    """One alone has the prompt's."""
    assert numbered(["a", "b"], 1) == ["a", "b"]
    assert numbered(["a", "a", "b", "b"], 2) == ["a/0", "a/1", "b/0", "b/1"]


def test_an_evaluator_that_fails_is_logged_and_counted(
    training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The figures of the others are there, and the training goes on."""
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("evaluate"))
    training = training_with(config(evaluators=["rewards", BROKEN]))
    figures = evaluated(training, held_out(training, *two_of_two(training)))
    assert figures["heldout/evaluator_failures"] == 1.0
    assert figures["heldout/best_at_2"] == 1.0
    assert f"{BROKEN} failed" in caplog.messages[0]
    assert "LookupError: no such thing" in caplog.messages[0]
