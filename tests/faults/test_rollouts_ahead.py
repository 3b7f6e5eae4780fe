"""Rollouts that begin before the update on the one before lose no prompt and use none twice, whatever is killed when.

When their weights change is another moment each time, so no two such trainings are equal. Nor are two that go on with
keys of older weights (`rollout.carry.keep_kv_cache`), which an engine that was lost has had alone. What has to hold:
each batch is whole and was drawn once, each token's policy is one that it may be of, and what waits in the end is what
was drawn and not used. Left out: that tokens are of the policy that they say (test_ended.py,
tests/engines/ranks/serving), and responses that had ended before a kill (test_ended.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from penstock.configs.loading.load import load_config
from penstock.engines.groups.group import RankLost
from penstock.flows.replay import replay
from penstock.flows.train import train
from penstock.session.rollout.carried import POLICY_VERSIONS
from penstock.state.events import read_events
from penstock.state.experience import read_columns
from penstock.state.manifest import ended, read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from tests.faults.blows import HOST, Blow, blows_falling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("faults")]

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS, PROMPTS, SAMPLES = 4, 8, 4
SMALL = (
    f"iterations={ITERATIONS}",
    "data.arithmetic={digits: 2, sft: 256, train: 100, heldout: 16}",
    "reward.function=tests.flows.reward_functions:low_digit",
    f"rollout={{prompts: {PROMPTS}, samples: {SAMPLES}, max_response_tokens: 20, max_sequences: 32}}",
    "evaluate={every: 2, temperature: 1.0}",
    "checkpoint.every=2",
    "sft=null",
    "engine={restarts: 10, heartbeat_timeout_s: 3}",
)
RECIPES = {
    "grpo": (
        "rollout.stream={staleness: 2, extra: 0.5}",
        "groups={learning: {ranks: 1, roles: [actor, reference]}, generating: {ranks: 1, roles: [rollout]}}",
        "algorithm={name: grpo, mini_batches: 2, kl: {place: loss, coefficient: 0.05, refresh_every: 2}, "
        "dynamic_sampling: {max_rollouts: 2}}",
    ),
    "ppo": (
        "rollout.stream={staleness: 1}",
        "groups={learning: {ranks: 1, roles: [actor, critic, reference]}, generating: {ranks: 1, roles: [rollout]}}",
        "algorithm={name: ppo, mini_batches: 2, "
        "kl: {place: reward, estimator: k1, coefficient: 0.05, target: 0.01, horizon: 100}}",
        "data.sampler={name: adaptive, half_life: 5}",
    ),
    "lora": (
        "rollout.stream={staleness: 3, extra: 0.5, keep_kv_cache: true}",
        "groups={learning: {ranks: 1, roles: [actor]}, generating: {ranks: 2, roles: [rollout]}}",
        "actor.lora={rank: 4, alpha: 8}",
    ),
    "episodes": (
        "rollout.stream={staleness: 2, extra: 0.5}",
        "groups={learning: {ranks: 1, roles: [actor]}, generating: {ranks: 1, roles: [rollout]}}",
        "data.arithmetic={calls: 0.4, mistakes: 0}",
        "environment={type: penstock.environments.calculator:Calculator, max_turns: 2}",
    ),
    "agents": (
        "rollout.stream={staleness: 3, extra: 0.5, keep_kv_cache: true}",
        "groups={learning: {ranks: 1, roles: [actor]}, generating: {ranks: 1, roles: [rollout]}}",
        "data.arithmetic={calls: 0.4, mistakes: 0}",
        "environment={type: penstock.environments.calculator:CalculatorAgent, max_turns: 2}",
    ),
    "keys": (
        "rollout.carry={staleness: 2, extra: 0.5, keep_kv_cache: true}",
        "groups={learning: {ranks: 1, roles: [actor]}, generating: {ranks: 2, roles: [rollout]}}",
    ),
}
STALENESS = {"grpo": 2, "ppo": 1, "lora": 3, "episodes": 2, "agents": 3, "keys": 2}
SEVERAL_DRAWS = {"grpo"}  # of an iteration: what is refused is drawn and not used
DRAWS_TWICE = {"ppo"}  # the sampler may draw a prompt again


@pytest.fixture(scope="module")
def trained(prefect_harness: None) -> Callable[..., None]:
    """Trains in this process."""

    def begin(run: RunFolder, recipe: str, *changes: str, blows: Sequence[Blow]) -> None:
        with pytest.MonkeyPatch.context() as patch, blows_falling(blows):
            patch.chdir(ROOT)
            config = load_config(ROOT / "configs" / "careless.yaml", [*SMALL, *RECIPES[recipe], *changes])
            train(config, run_folder=str(run.path))

    return begin


def resume(run: RunFolder, *blows: Blow) -> None:
    """Resume a training in this process."""
    with pytest.MonkeyPatch.context() as patch, blows_falling(blows):
        patch.chdir(ROOT)
        train(resume=str(run.path))


def assert_whole(run: RunFolder, recipe: str) -> None:
    """Assert that every batch is what it should be, and that what waits is what was drawn besides."""
    assert ended(run)
    taken = []
    for number in range(1, ITERATIONS + 1):
        columns = read_columns(run.experience(number), ["prompt_id", "policy_version", POLICY_VERSIONS])
        assert len(columns["prompt_id"]) == PROMPTS * SAMPLES
        assert set(columns["policy_version"].tolist()) == {number - 1}
        versions = columns[POLICY_VERSIONS]
        assert all((np.diff(versions.row(row)) >= 0).all() for row in range(len(versions)))
        assert max(0, number - 1 - STALENESS[recipe]) <= versions.values_T.min()
        assert versions.values_T.max() <= number - 1
        taken += columns["prompt_id"][::SAMPLES]
    progress = read_manifest(run).progress
    if recipe not in DRAWS_TWICE:
        assert max(Counter(taken).values()) == 1
    if recipe not in SEVERAL_DRAWS:
        assert progress.prompt_cursor == len(taken) + len(progress.deferred)
    assert not [file for left in ("*.partial", "*.part", "*.ended.arrows") for file in run.path.rglob(left)]
    figures = [record["metrics"] for record in read_metrics(run) if "rollout/tokens" in record["metrics"]]
    assert len(figures) == ITERATIONS
    assert all(of["rollout/staleness_max"] <= STALENESS[recipe] for of in figures)


@pytest.mark.parametrize(
    "recipe",
    [
        "grpo",
        pytest.param("ppo", marks=pytest.mark.exhaustive),
        pytest.param("lora", marks=pytest.mark.exhaustive),
        pytest.param("episodes", marks=pytest.mark.exhaustive),
        pytest.param("agents", marks=pytest.mark.exhaustive),
        pytest.param("keys", marks=pytest.mark.exhaustive),
    ],
)
def test_whatever_is_lost_no_prompt_is(recipe: str, trained: Callable[..., None], tmp_path: Path) -> None:
    """The rank that generates ahead, the one that learns, and the host of both: each in an update.

    Control: batches are off-policy, so rollouts did begin before.
    """
    blows = [
        Blow("penstock.flows.parts.learning.update", "2", "generating"),
        Blow("update_actor", "3/", "learning"),
        Blow("update_actor", "4/", HOST),
    ]
    run = RunFolder(tmp_path / "run")
    trained(run, recipe, blows=blows)
    assert_whole(run, recipe)
    events = read_events(run)
    assert [event["event"] for event in events][::2] == ["RankLost", "RankLost", "HostLost"]
    assert [event["event"] for event in events][1::2] == ["recovered"] * 3
    assert any(record["metrics"].get("rollout/off_policy_share", 0) > 0 for record in read_metrics(run))


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["ppo", "episodes", "agents"])
def test_a_training_that_ends_with_a_rollout_ahead_is_resumed(
    recipe: str, trained: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in the same update: its batch, which was complete, is the same. A replay has that update again."""
    run, blow = RunFolder(tmp_path / "run"), partial(Blow, "update_actor", "3/", "learning")
    with pytest.raises(RankLost):
        trained(run, recipe, "engine.restarts=0", blows=[blow()])
    names = ["prompt_id", "response", "policy_version"]
    batch = read_columns(run.experience(3), names)
    with pytest.raises(RankLost):
        resume(run, blow())
    resume(run)
    again = read_columns(run.experience(3), names)
    assert batch["prompt_id"] == again["prompt_id"] and batch["response"] == again["response"]
    assert_whole(run, recipe)
    monkeypatch.chdir(ROOT)
    replayed = replay(str(run.path), 3)
    assert replayed.equal, [row for row in replayed.rows if not row.equal]
    assert {row.task for row in replayed.rows} >= {"reward", "advantage", "update_actor"}
