"""Whole trainings on images: whatever they go with, vLLM samples by the log-probs that the trainer has.

The trainer computes the log-probs of every iteration's tokens anew, from the experience and the images in the run
folder. Where tokens of one response may be of several policies the learning rate is next to nothing, so that those of
all policies are comparable.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.base.ragged import Ragged
from penstock.configs.loading.load import load_config
from penstock.environments.environment import Step
from penstock.flows.train import train
from penstock.state.experience import IMAGES, read_columns
from penstock.state.run_folder import RunFolder, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
EQUAL = 2e-5  # largest difference of a token's log-probs in float32
SMALL = (
    "data.squares={sft: 32, mistakes: 0.5, train: 32, heldout: 16}",
    "sft.steps=5",
    "sft.batch=16",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 12, max_sequences: 32, compare_every: 1}",
    "evaluate={every: 2, temperature: 1.0}",
)
SCORED = "reward.function=tests.flows.reward_functions:low_digits"
APART = "groups={train: {roles: [actor], ranks: 1}, generate: {roles: [rollout], ranks: 1}}"
PLAYED = "environment={type: 'tests.flows.images.test_images_flow:Twice', max_turns: 3}"
STILL = "actor.optimizer.learning_rate=1e-12"


class Twice:
    """Asks the policy a second time; the share of low digits in its second answer counts."""

    def reset(self, row: dict[str, object], seed: int) -> None:
        self.turns = 0

    def step(self, text: str) -> Step:
        self.turns += 1
        if self.turns == 1:
            return Step("12")
        return Step(done=True, reward=sum(character in "01234" for character in text) / max(1, len(text)))


def _trained(folder: Path, *overrides: str) -> RunFolder:
    config = load_config(ROOT / "configs" / "squares.yaml", [*SMALL, SCORED, *overrides])
    train(config, run_folder=str(folder))
    return RunFolder(folder)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((APART,), id="groups"),
        pytest.param(("actor.lora.rank=8",), id="lora"),
        pytest.param(("algorithm.name=ppo", "critic={}"), id="critic"),
        pytest.param(("algorithm.kl={estimator: full, coefficient: 0.05, refresh_every: 1}",), id="kl"),
        pytest.param(("model.train_encoder=true",), id="encoder"),
        pytest.param((PLAYED, "reward=null", "rollout.max_response_tokens=16"), id="environment"),
        pytest.param(("rollout.tail.extra=0.5",), id="tail"),
        pytest.param(("rollout.carry.extra=0.5", STILL), id="carry"),
        pytest.param((APART, "rollout.stream.staleness=2", STILL), id="stream"),
    ],
)
def test_vllm_and_trainer_see_the_same(
    prefect_harness: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    """Of every token of three iterations; and prompts with the same words have different images, which is the control
    that all of this could go wrong (tests/engines/families/test_images.py shows how far)."""
    monkeypatch.chdir(ROOT)
    run = _trained(tmp_path / "run", "iterations=3", "algorithm.correction={}", *settings)
    for iteration in (1, 2, 3):
        names = ["logprobs_old", "logprobs_rollout", "loss_mask", "prompt_tokens", IMAGES]
        read = read_columns(run.experience(iteration), names)
        own_T = read["loss_mask"].values_T > 0
        gaps_T = np.abs(read["logprobs_old"].values_T - read["logprobs_rollout"].values_T)[own_T]
        assert len(gaps_T) > 32 and gaps_T.max() < EQUAL
        assert _distinct(read["prompt_tokens"]) == 1 < _distinct(read[IMAGES])
    learnt = [
        record["metrics"]["actor/grad_norm"] for record in read_metrics(run) if "actor/grad_norm" in record["metrics"]
    ]
    assert len(learnt) == 3 and min(learnt) > 0


def _distinct(column: Ragged) -> int:
    return len({column.row(row).tobytes() for row in range(len(column))})


def test_a_resume_goes_on_with_the_encoder(
    prefect_harness: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two iterations and two more end in the bits of four; controls: it has moved in between, and in the warm-up."""
    monkeypatch.chdir(ROOT)
    settings = ("model.train_encoder=true", "checkpoint.every=2")
    whole = _trained(tmp_path / "whole", "iterations=4", *settings)
    halves = _trained(tmp_path / "halves", "iterations=2", *settings)
    halfway = load_file(halves.model("final") / "model.safetensors")
    train(resume=str(halves.path), changes=["iterations=4"])
    once, again = (load_file(run.model("final") / "model.safetensors") for run in (whole, halves))
    assert all(torch.equal(value, again[name]) for name, value in once.items())
    assert all(not torch.equal(value, halfway[name]) for name, value in once.items() if "visual" in name)
    first, warm = (load_file(whole.model(name) / "model.safetensors") for name in ("initial", "sft"))
    assert all(not torch.equal(value, warm[name]) for name, value in first.items() if "visual" in name)
