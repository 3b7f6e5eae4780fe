"""Agents over HTTP play, and train, as an environment inside the loop does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.configs.loading.load import load_config
from penstock.flows.replay import replay
from penstock.flows.train import train
from penstock.state.experience import origin_of, read_columns
from penstock.state.run_folder import RunFolder, read_metrics
from tests.comparing import numbers, weights

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flows")]

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "iterations=2",
    "data.arithmetic={digits: 2, calls: 0.4, sft: 1000, train: 200, heldout: 32}",
    "sft.steps=60",
    "sft.batch=64",
    "rollout={prompts: 16, samples: 8, max_response_tokens: 20, max_sequences: 128}",
    "evaluate={every: 2, temperature: 1.0}",
    "algorithm.correction={}",
)
COMPARED = ("prompt_tokens", "response_tokens", "loss_mask", "turns", "reward", "advantages", "logprobs_rollout")


@pytest.mark.usefixtures("prefect_harness")
def test_the_calculator_over_http_is_the_calculator(tmp_path: Path) -> None:
    """Tokens, masks, rewards and trained weights are equal to the last bit. Control: many episodes have two turns."""
    runs = {}
    for name, kind in (("inside", None), ("asked", "penstock.environments.calculator:CalculatorAgent")):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            other = [] if kind is None else [f"environment.type={kind}"]
            train(load_config(ROOT / "configs" / "calculator.yaml", [*SMALL, *other]), run_folder=str(tmp_path / name))
        runs[name] = RunFolder(tmp_path / name)
    inside, asked = (read_columns(run.experience(2), [*COMPARED]) for run in runs.values())
    for name in COMPARED:
        for ours, theirs in zip(
            *(np.atleast_1d(getattr(c[name], "values_T", c[name])) for c in (inside, asked)), strict=True
        ):
            assert ours == theirs, name
    assert 0.2 < float((asked["turns"] == 2).mean()) < 0.95
    assert weights(runs["inside"]) == weights(runs["asked"])
    (figures,) = [item["metrics"] for item in read_metrics(runs["asked"]) if item["iteration"] == 2]
    assert figures["rollout/unbridged_turns"] == 0 == figures["rollout/environment_failures"]
    without = [
        (n, {k: v for k, v in item.items() if not k.endswith("unbridged_turns")}) for n, item in numbers(runs["asked"])
    ]
    assert without == numbers(runs["inside"])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("prefect_harness")
@pytest.mark.timeout(900)
def test_it_is_learnt_from_by_portions_as_well(tmp_path: Path) -> None:
    """With `rollout.stream` experience, whose prompts are the agent's, portions and weights are those of the calculator
    inside to the last bit, in a replay, too. Control: portions are no prompts in their order.
    """
    more = (
        *("rollout.stream.portions=4", "algorithm.mini_batches=1", "evaluate={every: 0, temperature: 1.0}"),
        "groups={training: {ranks: 1, roles: [actor]}, generating: {ranks: 1, roles: [rollout]}}",
    )
    runs = {}
    for name, other in (
        ("inside", ()),
        ("asked", ("environment.type=penstock.environments.calculator:CalculatorAgent",)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            config = load_config(ROOT / "configs" / "calculator.yaml", [*SMALL, *more, *other])
            train(config, run_folder=str(tmp_path / name))
            runs[name] = RunFolder(tmp_path / name)
            assert name == "inside" or replay(str(runs[name].path), 2).equal
    inside, asked = (read_columns(run.experience(2), [*COMPARED, "prompt"]) for run in runs.values())
    for name in (*COMPARED, "prompt"):
        ours, theirs = (np.atleast_1d(getattr(columns[name], "values_T", columns[name])) for columns in (inside, asked))
        assert np.array_equal(ours, theirs), name
    portions = [origin_of(run.experience(2))["portions"] for run in runs.values()]
    assert portions[0] == portions[1] and sum(portions[0], []) != list(range(16))
    assert 0.2 < float((asked["turns"] == 2).mean()) < 0.95
    assert weights(runs["inside"]) == weights(runs["asked"])
