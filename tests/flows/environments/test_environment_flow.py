"""The calculator recipe as a whole: a policy that seldom asks learns to ask, because right answers are rewarded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.configs.loading.load import load_config
from penstock.environments.calculator import calculated
from penstock.flows.train import train
from penstock.state.experience import read_columns
from penstock.state.run_folder import RunFolder, read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
ITERATIONS = 6
SMALL = (
    f"iterations={ITERATIONS}",
    "data.arithmetic={digits: 2, calls: 0.4, sft: 4000, train: 2000, heldout: 64}",
    "sft.steps=220",
    "sft.batch=64",
    "rollout={prompts: 32, samples: 8, max_response_tokens: 20, max_sequences: 256}",
    "actor.optimizer={learning_rate: 5e-4, warmup_steps: 0}",
    "evaluate={every: 0, temperature: 1.0, samples: 2}",
)


@pytest.fixture(scope="module")
def learned(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training."""
    folder = tmp_path_factory.mktemp("runs") / "calculator"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        train(load_config(ROOT / "configs" / "calculator.yaml", list(SMALL)), run_folder=str(folder))
    return RunFolder(folder)


def asked(path: Path) -> float:
    """Share of episodes in which the policy used the calculator."""
    return float((read_columns(path, ["turns"])["turns"] > 1).mean())


def test_it_learns_to_use_the_tool(learned: RunFolder) -> None:
    """Nothing but right answers is rewarded; calls and held-out rewards rise together."""
    first, last = learned.experience(1), learned.experience(ITERATIONS)
    assert asked(last) > asked(first) + 0.15
    rewards = [
        record["metrics"]["heldout/reward"]
        for record in read_metrics(learned)
        if record["iteration"] in (0, ITERATIONS)
    ]
    assert rewards[1] > rewards[0] + 0.1
    assert asked(learned.evaluation(ITERATIONS)) > asked(learned.evaluation(0)) + 0.1


def test_observations_are_the_tools_and_teach_nothing(learned: RunFolder) -> None:
    """What stands between the turns is what the calculator says; it has neither mask nor advantage."""
    names = ["response", "response_tokens", "loss_mask", "advantages", "turns", "reward", "environment_reward"]
    columns = read_columns(learned.experience(ITERATIONS), names)
    given = np.nan_to_num(columns["environment_reward"])  # not given where the last turn was a call
    np.testing.assert_array_equal(columns["reward"], given)
    several = [row for row in np.flatnonzero(columns["turns"] == 2) if columns["reward"][row] == 1]
    assert len(several) > 50
    for row in several:
        call, _, rest = columns["response"][row].partition("]")
        observation = calculated(call.rpartition("[")[2])
        assert rest.startswith(observation)
        mask = columns["loss_mask"].row(row)
        begin = len(call) + 1
        assert mask.tolist() == [1] * begin + [0] * len(observation) + [1] * (len(mask) - begin - len(observation))
    own_T = columns["loss_mask"].values_T > 0
    assert (columns["advantages"].values_T[~own_T] == 0).all()
    assert columns["advantages"].values_T[own_T].any()


def test_the_figures_of_episodes_are_recorded(learned: RunFolder) -> None:
    """They are those of the experience file."""
    (metrics,) = [record["metrics"] for record in read_metrics(learned) if record["iteration"] == 1]
    columns = read_columns(learned.experience(1), ["turns", "loss_mask"])
    assert metrics["rollout/turns_mean"] == columns["turns"].mean()
    assert metrics["rollout/observation_share"] == pytest.approx((columns["loss_mask"].values_T == 0).mean())
    assert metrics["rollout/environment_failures"] == 0
