"""Rollout log-probs from the engines' replies to the update: in order, through a resample, and as old log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.rollout import EngineResponses, Generate
from penstock.session.requests import GenerationRequest
from penstock.session.rollout.generation import generate
from penstock.session.session import Stage, Training
from penstock.session.settings import settings_at
from penstock.state.experience import ExperienceRef, column_names, read_columns, write_columns
from penstock.state.manifest import Progress
from penstock.tasks.iteration.advantage import advantage
from penstock.tasks.iteration.resample import replaced
from penstock.tasks.iteration.rollout import ROLLOUT_LOGPROBS, sampling
from penstock.tasks.iteration.update import update_actor
from tests.session.rollout.test_generation import SAMPLES, Echo

MakeTraining = Callable[[TrainConfig], Training]
OFFSETS_B1 = np.array([0, 2, 3, 5, 6])
DRAWN_T = np.log(np.linspace(0.1, 0.9, 6)).astype(np.float32)


class Scored(Echo):
    """As Echo, each token with its own number, negative, as log-prob."""

    def answer(self, asked: Generate, positions: np.ndarray) -> EngineResponses:
        answer = super().answer(asked, positions)
        drawn_T = -answer.responses.values_T.astype(np.float32)
        return replace(answer, logprobs_T=drawn_T if asked.sampling.logprobs else None)


class Updated(Echo):
    """Ranks that note the command and report what an update reports."""

    def call(self, command: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
        self.commands.append({"command": command, **arguments})
        return [{"usage": {"seconds": 2.0}, "reply": {"metrics": {"loss": 0.5, "mismatch/kl_k3": 0.01}}}]


def config_with(correction: dict[str, Any] | None) -> TrainConfig:
    return TrainConfig.model_validate({"algorithm": {"name": "grpo", "correction": correction}})


@pytest.mark.parametrize("ranks", [1, 3])
def test_log_probs_follow_their_tokens_into_prompt_order(training_with: MakeTraining, ranks: int) -> None:
    """Whichever engine answered. Control: without a correction nobody asks, and none come."""
    prompts = pd.DataFrame({"prompt_tokens": [[10, 11], [20], [30, 31, 32], [40]]})
    for correction in ({}, None):
        config = config_with(correction)
        training, group = training_with(config), Scored(ranks)
        training.session().groups["rollout"] = group  # type: ignore[assignment]
        asked = replace(sampling(training, settings_at(config, 1, Progress())), samples=SAMPLES)
        responses = generate(training, GenerationRequest(prompts, "1/rollout", asked))
        assert group.commands[0]["sampling"]["logprobs"] == (correction is not None)
        if correction is None:
            assert responses.logprobs is None
            continue
        assert responses.logprobs is not None
        np.testing.assert_array_equal(responses.logprobs.values_T, -responses.tokens.values_T)
        np.testing.assert_array_equal(responses.logprobs.offsets_B1, responses.tokens.offsets_B1)


def test_resampling_takes_a_groups_log_probs_with_it() -> None:
    """Two groups of two; the second of the first rollout makes room for the second of the further one."""

    def columns(first: int) -> dict[str, Any]:
        tokens = Ragged(np.arange(first, first + 6, dtype=np.int32), OFFSETS_B1)
        drawn = Ragged(-tokens.values_T.astype(np.float32), OFFSETS_B1)
        return {"group": np.array([0, 0, 1, 1]), "response_tokens": tokens, ROLLOUT_LOGPROBS: drawn}

    merged = replaced(columns(0), columns(100), np.array([False, True, True, False]), 2)
    assert merged["response_tokens"].values_T.tolist() == [0, 1, 2, 103, 104, 105]
    np.testing.assert_array_equal(merged[ROLLOUT_LOGPROBS].values_T, -merged["response_tokens"].values_T)


def experience(path: Path) -> Stage:
    write_columns(
        path,
        {
            "reward": np.array([1.0, 0.0, 2.0, 2.0]),
            "group": np.array([0, 0, 1, 1]),
            "response_tokens": Ragged(np.arange(6, dtype=np.int32), OFFSETS_B1),
            "loss_mask": Ragged(np.ones(6, np.uint8), OFFSETS_B1),
            ROLLOUT_LOGPROBS: Ragged(DRAWN_T, OFFSETS_B1),
        },
    )
    return Stage(ExperienceRef(str(path), 4, 4, 6, 0), {})


def test_the_rollouts_log_probs_become_the_old_ones_where_the_ratio_is_to_them(
    training_with: MakeTraining, tmp_path: Path
) -> None:
    """For the estimator, the loss and what chooses tokens alike. Control: with recomputed ones there is no column."""
    path = tmp_path / "experience.parquet"
    for correction in ({"proximal": "rollout"}, {"weights": "token"}):
        config = config_with(correction)
        stage = advantage.fn(training_with(config), settings_at(config, 1, Progress()), experience(path), [])
        assert ("logprobs_old" in column_names(stage.experience.path)) == ("proximal" in correction)
        if "proximal" in correction:
            np.testing.assert_array_equal(read_columns(path, ["logprobs_old"])["logprobs_old"].values_T, DRAWN_T)


def test_the_update_gets_the_correction_in_force_and_its_figures_keep_their_name(
    training_with: MakeTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defaults filled in; without the section there is nothing."""
    monkeypatch.setattr("penstock.tasks.iteration.update.role_figures", lambda *_: {})  # of real ranks' time and memory
    correction = {"weights": "sequence", "reject": {"seq_mean_k3": 0.1}}
    in_force = {"proximal": "recomputed", "cap": 2.0, "band": None, "normalize": False}
    for given, sent in ((correction, correction | in_force), (None, None)):
        config = config_with(given)
        training, group = training_with(config), Updated(1)
        training.session().groups["actor"] = group  # type: ignore[assignment]
        settings = settings_at(config, 1, Progress())
        metrics = update_actor.fn(training, settings, experience(tmp_path / "experience.parquet"))
        assert group.commands[0]["loss"]["correction"] == sent
        assert (metrics["actor/loss"], metrics["mismatch/kl_k3"]) == (0.5, 0.01)
