"""A training whose actor learns while responses are generated ends where one does that waits for all.

On the CPU: two with the same two engine groups, and one whose ranks generate and learn at the same time. The gradient
is that of the whole batch, but its numbers are added in another order: so the tokens are the same as long as no last
bit decides one, and figures agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.configs.loading.load import load_config
from penstock.flows.replay import replay
from penstock.flows.train import train
from penstock.session.rollout.carried import POLICY_VERSIONS
from penstock.state.experience import column_names, origin_of, read_columns
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.tasks.iteration.rollout import ANSWERED, UNUSED, WAITING
from penstock.tasks.stream.portion import PORTIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 3
SMALL = (
    f"iterations={ITERATIONS}",
    "data.arithmetic={digits: 2, sft: 128, train: 40, heldout: 16}",
    "sft.steps=5",
    "sft.batch=32",
    "reward.function=tests.flows.reward_functions:low_digit",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 40, max_sequences: 8}",
    "actor.optimizer={learning_rate: 1e-3, warmup_steps: 0}",
    "evaluate={every: 1, temperature: 1.0}",
    "algorithm={name: grpo, mini_batches: 1, kl: {place: loss, coefficient: 0.05}}",
)
APART = "groups={training: {ranks: 1, roles: [actor, reference]}, generating: {ranks: 1, roles: [rollout]}}"
PORTIONS_OF = "rollout.stream.portions=4"


@pytest.fixture(scope="module")
def trained(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunFolder]:
    """Trains in this process."""

    def run(*more: str) -> RunFolder:
        folder = tmp_path_factory.mktemp("runs") / "run"
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            train(load_config(ROOT / "configs" / "quickstart.yaml", [*SMALL, *more]), run_folder=str(folder))
        return RunFolder(folder)

    return run


@pytest.fixture(scope="module")
def runs(trained: Callable[..., RunFolder]) -> dict[bool, RunFolder]:
    """A training that waits for all responses, and one that does not."""
    return {False: trained(APART), True: trained(APART, PORTIONS_OF)}


def test_it_learns_the_same(runs: dict[bool, RunFolder]) -> None:
    """The same experience, column by column, and the same figures, to rounding; nothing of a portion is left."""
    for number in range(1, ITERATIONS + 1):
        waited, streamed = (run.experience(number) for run in runs.values())
        assert sorted(column_names(waited)) == sorted(column_names(streamed))
        for name in column_names(waited):
            one, other = (read_columns(path, [name])[name] for path in (waited, streamed))
            if name in ("prompt_tokens", "response_tokens", "loss_mask"):
                assert np.array_equal(one.values_T, other.values_T) and np.array_equal(one.offsets_B1, other.offsets_B1)
            elif isinstance(one, list):
                assert one == other, name
            else:
                values = [getattr(column, "values_T", column) for column in (one, other)]
                np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-5, err_msg=name)
        portions = origin_of(streamed)[PORTIONS]
        assert sorted(sum(portions, [])) == list(range(8)) and len(portions) == 4
    assert any(portion != sorted(sum(portions, []))[2 * n : 2 * n + 2] for n, portion in enumerate(portions))
    assert not [*runs[True].path.rglob("*portion-*")]
    waited_figures, figures = ([record["metrics"] for record in read_metrics(run)] for run in runs.values())
    for one, other in zip(waited_figures, figures, strict=True):
        timed = {"rollout/portion_wait_s", "rollout/portion_after_s"}
        assert other.keys() - one.keys() == (timed if "time/rollout_s" in other else set())
        assert not one.keys() - other.keys()
        of_learning = ("actor/", "reward/", "advantage/", "heldout/", "rollout/response")
        for name in (name for name in one if name.startswith(of_learning)):
            if not name.endswith(("_s", "micro_batches", "computed_share", "branched_share")):
                assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


def test_its_figures_are_of_the_whole_batch(runs: dict[bool, RunFolder]) -> None:
    """Work of all portions, seconds of both groups: the generation's and the update's overlap."""
    for record in read_metrics(runs[True])[1:]:
        figures = record["metrics"]
        assert figures["actor/micro_batches"] >= 4
        assert 0 < figures["actor/update_s"] <= figures["time/update_actor_s"]
        assert 0 < figures["rollout/portion_after_s"] < figures["time/iteration_s"]
        assert figures["time/rollout_s"] < figures["time/iteration_s"]
        assert figures["share/update_actor"] > 0 and figures["share/rollout"] > 0


def test_a_replay_adds_in_the_same_order(runs: dict[bool, RunFolder], prefect_harness: None) -> None:
    """Rollout, passes, advantages and the update of the second iteration, to the last bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        done = replay(str(runs[True].path), 2)
    assert {row.task for row in done.rows} >= {"rollout", "reward", "advantage", "reference_logprobs", "update_actor"}
    assert done.equal, [row for row in done.rows if not row.equal]


def test_ranks_that_generate_and_learn_at_the_same_time_end_at_the_same_bits(
    runs: dict[bool, RunFolder], trained: Callable[..., RunFolder]
) -> None:
    """As where the actor has a group of its own: the same portions, responses, figures and weights.

    Control: where all responses are waited for the weights differ in their last bits.
    """
    beside = trained(PORTIONS_OF)
    apart, waited = runs[True], runs[False]
    for number in range(1, ITERATIONS + 1):
        assert_same_columns(*(run.experience(number) for run in (apart, beside)))
    found, expected, other = (_weights(run) for run in (beside, apart, waited))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(value, expected[name]) for name, value in found.items())
    assert any(not np.array_equal(value, other[name]) for name, value in found.items())


ROUNDS = ("deferred", "deferred_age_max", "deferred_share", "unused_share", "prompts_drawn")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("way", "figures"),
    [
        ("rollout.tail={extra: 0.25, max_wait: 2}", ("long_round", *ROUNDS)),
        ("rollout.carry={extra: 0.5, staleness: 2}", ("staleness_mean", "staleness_max", *ROUNDS)),
    ],
)
def test_the_same_prompts_wait_or_go_on(way: str, figures: tuple[str, ...], trained: Callable[..., RunFolder]) -> None:
    """As where the batch is complete before anything is learnt from it: the same prompts, responses, versions of tokens
    and figures of the rounds, weights to rounding. A replay computes and learns in the same portions, to the
    last bit. Control: rounds differ.
    """
    waited, beside = trained(way), trained(way, PORTIONS_OF)
    seen = []
    for number in range(1, ITERATIONS + 1):
        paths = [run.experience(number) for run in (waited, beside)]
        assert sorted(column_names(paths[0])) == sorted(column_names(paths[1]))
        of_tokens = [name for name in ("response_tokens", POLICY_VERSIONS) if name in column_names(paths[0])]
        one, other = (read_columns(path, ["prompt_id", *of_tokens]) for path in paths)
        assert one["prompt_id"] == other["prompt_id"]
        assert all(np.array_equal(one[name].values_T, other[name].values_T) for name in of_tokens)
        origins = [origin_of(path) for path in paths]
        assert all(origins[0].get(name) == origins[1].get(name) for name in (ANSWERED, WAITING, UNUSED))
        portions = origins[1][PORTIONS]
        assert sorted(sum(portions, [])) == list(range(8)) and len(portions) == 4
        values = [
            [read_metrics(run)[number]["metrics"][f"rollout/{name}"] for name in figures] for run in (waited, beside)
        ]
        assert values[0] == values[1]
        seen.append(values[1][0])
    assert len(set(seen)) > 1
    found, expected = (_weights(run) for run in (beside, waited))
    assert max(float(np.abs(value - expected[name]).max()) for name, value in found.items()) < 1e-3
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        done = replay(str(beside.path), 2)
    assert done.equal, [row for row in done.rows if not row.equal]


def _weights(run: RunFolder) -> dict[str, np.ndarray]:
    return load_file(run.path / "models" / "final" / "model.safetensors")


def assert_same_columns(one: Path, other: Path) -> None:
    """Check that two files of experience hold the same, to the last bit."""
    names = column_names(one)
    assert sorted(names) == sorted(column_names(other))
    for name in names:
        columns = [read_columns(path, [name])[name] for path in (one, other)]
        values = [getattr(column, "values_T", column) for column in columns]
        assert np.array_equal(*map(np.asarray, values)), name
    assert origin_of(one)[PORTIONS] == origin_of(other)[PORTIONS]
