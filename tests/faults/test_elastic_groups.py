"""Elastic groups come and go, and nobody waits for them: the training neither stops nor becomes another one.

On the CPU a response depends on its prompt alone, not on the engine that answers it. So whatever an elastic group has
done or left undone, weights and figures are those of a training that never had one, bit for bit. Where timing decides,
what has to hold is that every batch is whole and no prompt is used twice. Left out: groups of pools
(tests/hosts/test_elastic_pools.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from penstock.configs.loading.load import load_config
from penstock.engines.groups.group import EngineGroup
from penstock.flows.train import train
from penstock.session.machines.elastic import ElasticGroups
from penstock.state.events import read_events
from penstock.state.experience import read_columns
from penstock.state.manifest import ended, read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from tests.comparing import memory, numbers, weights
from tests.faults.blows import Blow, blows_falling
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("faults")]

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS, PROMPTS, SAMPLES = 6, 8, 4
SMALL = (
    f"iterations={ITERATIONS}",
    "data.arithmetic={digits: 2, sft: 256, train: 100, heldout: 16}",
    "reward.function=tests.flows.reward_functions:low_digit",
    f"rollout={{prompts: {PROMPTS}, samples: {SAMPLES}, max_response_tokens: 20, max_sequences: 32}}",
    "evaluate={every: 3, temperature: 1.0}",
    "checkpoint.every=3",
    "sft=null",
    "engine={heartbeat_timeout_s: 3}",
)
STAYS = "learning: {ranks: 1, roles: [actor]}, staying: {ranks: 1, roles: [rollout]}"
ALONE = f"groups={{{STAYS}}}"
BESIDE = f"groups={{{STAYS}, spare: {{ranks: 1, roles: [rollout], elastic: true}}}}"
RECIPES = {
    "grpo": (
        "algorithm={name: grpo, mini_batches: 2, dynamic_sampling: {max_rollouts: 2}}",
        "data.sampler={name: adaptive, half_life: 5}",
        "actor.lora={rank: 4, alpha: 8}",
    ),
    "episodes": (
        "data.arithmetic={calls: 0.4, mistakes: 0}",
        "environment={type: penstock.environments.calculator:Calculator, max_turns: 2}",
    ),
}
BY_TIMING = {
    "carry": ("rollout.carry={extra: 0.5, staleness: 2}", "rollout.reproducible=false"),
    "portions": ("rollout.stream={portions: 2}", "algorithm.mini_batches=1", "rollout.reproducible=false"),
    "ahead": ("rollout.stream={staleness: 2, extra: 0.5}",),
}
JOINS = (1, 5)  # reshards, the first of them before any iteration, at which it is waited for until the group is ready


@pytest.fixture(scope="module")
def trained(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunFolder]:
    """Trains in this process, and lets the elastic group be there at the reshards of `JOINS`."""
    folder = tmp_path_factory.mktemp("runs")

    def run_of(name: str, recipe: Sequence[str], groups: str, struck: bool = False) -> RunFolder:
        """Kill the group's rank while its engine has prompts of iteration 3, if it is to be struck."""
        blows = [Blow("generate", "3/rollout", to="spare")] if struck else []
        run, reshards, ready = RunFolder(folder / name), [0], ElasticGroups.ready

        def awaited(elastic: ElasticGroups) -> list[EngineGroup]:
            reshards[0] += 1
            if reshards[0] < JOINS[-1] and any(blow.fallen for blow in blows):
                until(lambda: not elastic.members, 60, "its loss is known")  # else the training would recover from it
            if reshards[0] in JOINS:
                until(lambda: not elastic._ready.empty(), 60, "the elastic group is ready")
            return ready(elastic)

        with pytest.MonkeyPatch.context() as patch, blows_falling(blows):
            patch.chdir(ROOT)
            patch.setattr(ElasticGroups, "ready", awaited)
            train(load_config(ROOT / "configs" / "careless.yaml", [*SMALL, *recipe, groups]), run_folder=str(run.path))
        return run

    return run_of


@pytest.fixture(scope="module")
def alone(trained: Callable[..., RunFolder]) -> Iterator[Callable[[str], RunFolder]]:
    """The training of a recipe without an elastic group."""

    @cache
    def of(recipe: str) -> RunFolder:
        return trained(f"{recipe}-alone", RECIPES[recipe], ALONE)

    yield of


@pytest.mark.parametrize("recipe", ["grpo", pytest.param("episodes", marks=pytest.mark.exhaustive)])
def test_a_training_is_the_same_whatever_becomes_of_an_elastic_group(
    recipe: str, trained: Callable[..., RunFolder], alone: Callable[[str], RunFolder]
) -> None:
    """It is killed while it answers prompts, comes back, and answers others.

    Control: the engines that answered, by the figures; and that no recovery was needed, by the events.
    """
    run = trained(recipe, RECIPES[recipe], BESIDE, struck=True)
    assert ended(run)
    assert weights(run) == weights(alone(recipe))
    assert memory(run) == memory(alone(recipe))
    assert of_the_policy(run) == of_the_policy(alone(recipe))
    assert engines(run) == [2, 2, 1, 1, 2, 2]
    came_and_went(run)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("carry", marks=pytest.mark.exhaustive),
        pytest.param("portions", marks=pytest.mark.exhaustive),
        pytest.param("ahead", marks=pytest.mark.exhaustive),
    ],
)
def test_where_timing_decides_no_prompt_is_lost(recipe: str, trained: Callable[..., RunFolder]) -> None:
    """Batches are whole, and what waits in the end is what was drawn besides. Control: as above."""
    run = trained(recipe, BY_TIMING[recipe], BESIDE, struck=True)
    assert ended(run)
    taken = []
    for number in range(1, ITERATIONS + 1):
        columns = read_columns(run.experience(number), ["prompt_id", "policy_version"])
        assert len(columns["prompt_id"]) == PROMPTS * SAMPLES
        assert set(columns["policy_version"].tolist()) == {number - 1}
        taken += columns["prompt_id"][::SAMPLES]
    progress = read_manifest(run).progress
    assert max(Counter(taken).values()) == 1
    assert progress.prompt_cursor == len(taken) + len(progress.deferred)
    came_and_went(run)


def of_the_policy(run: RunFolder) -> list[tuple[int, dict[str, float]]]:
    """Return what was recorded, without what the number of engines decides: of each some tokens are compared."""
    of_engines = ("rollout/engines", "rollout/logprob_gap")
    return [(n, {k: v for k, v in found.items() if not k.startswith(of_engines)}) for n, found in numbers(run)]


def came_and_went(run: RunFolder) -> None:
    """Assert that the group was lost and joined again, and that nothing else happened."""
    events = [(event["event"], event["group"]) for event in read_events(run)]
    assert events == [("group joined", "spare"), ("group left", "spare"), ("group joined", "spare")]
    assert "SIGKILL" in read_events(run)[1]["reason"]


def engines(run: RunFolder) -> list[float]:
    """Return how many engines answered the prompts of each iteration in the end."""
    return [record["metrics"]["rollout/engines"] for record in read_metrics(run) if record["iteration"]]
