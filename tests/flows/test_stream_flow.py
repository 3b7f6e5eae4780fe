"""A training whose actor learns while others generate ends where one does that waits for all.

Both have the same two engine groups on the CPU. The gradient is that of the whole batch, but its numbers are added in
another order: so the tokens are the same as long as no last bit decides one, and figures agree to rounding.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.configs.loading.load import load_config
from penstock.flows.replay import replay
from penstock.flows.train import train
from penstock.state.experience import column_names, origin_of, read_columns
from penstock.state.run_folder import RunFolder, read_metrics
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
    "groups={training: {ranks: 1, roles: [actor, reference]}, generating: {ranks: 1, roles: [rollout]}}",
)


@pytest.fixture(scope="module")
def runs(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, RunFolder]:
    """A training that waits for all responses, and one that does not."""
    made = {}
    for streams in (False, True):
        folder = tmp_path_factory.mktemp("runs") / ("stream" if streams else "in-turns")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            more = ["rollout.stream.portions=4"] if streams else []
            train(load_config(ROOT / "configs" / "quickstart.yaml", [*SMALL, *more]), run_folder=str(folder))
        made[streams] = RunFolder(folder)
    return made


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
