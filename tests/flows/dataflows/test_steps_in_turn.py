"""The steps of a dataflow come in an order that makes sense, each once; a mistake says where and what was done."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import penstock
from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.flows.parts import own_steps
from penstock.session.logged import with_logged
from penstock.session.requests import Rollout
from penstock.session.session import Stage, Training
from penstock.session.settings import next_settings
from penstock.state.experience import ExperienceRef, read_columns, write_columns
from penstock.state.manifest import Progress
from penstock.state.run_folder import RunFolder
from tests.training import training_with

__all__ = ["training_with"]

CONFIG = TrainConfig(dataflow="orders:usual")
OWN = np.asarray([1.0, 0.0, 0.5])
REWARDS = {"reward": OWN, "reward/own": OWN, "reward_failure": [None, None, None]}
Step = penstock.Iteration


@pytest.fixture
def step(training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch) -> Step:
    """An iteration whose rollout and reward are there already: a file with three responses."""
    training = training_with(CONFIG)
    path = training.run.experience(1)
    path.parent.mkdir()

    def there(*_: object) -> Stage:
        write_columns(path, {"response": ["a", "b", "c"], **REWARDS})
        return Stage(ExperienceRef(str(path), 3, 3, 3, 0), {})

    monkeypatch.setattr(own_steps, "rollout", there)
    monkeypatch.setattr(own_steps, "rewarded", lambda *given: given[-1])
    progress = Progress()
    return Step(training, next_settings(training, progress), progress, Rollout(1, "1/rollout"))


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([Step.reward], "step.reward comes after step.rollout\n.*so far: nothing"),
        ([lambda step: step.read("response")], "step.read comes after step.rollout"),
        ([Step.rollout, Step.advantage], "step.advantage comes after step.reward\n.*so far: rollout"),
        ([Step.rollout, Step.reward, Step.update], "step.update comes after step.advantage\n.*so far: rollout, reward"),
        ([Step.rollout, Step.rollout], "step.rollout was there already: an iteration has each step once"),
        ([Step.rollout, lambda step: step.add_reward("a", [1])], r"step.add_reward\('a'\) comes after step.reward"),
        ([Step.rollout, lambda step: step.logprobs("critic")], "no 'critic' that gives log-probs\n.*has: actor"),
        ([Step.rollout, lambda step: step.logprobs("reference")], "no 'reference' that gives log-probs"),
        ([Step.rollout, lambda step: step.read("text")], "no column 'text' yet\n.*has: response, reward"),
        ([Step.end], "it has ended without step.rollout"),
    ],
)
def test_a_step_out_of_turn_says_so(step: Step, calls: list[Callable[[Step], object]], said: str) -> None:
    """Control: those before it are taken."""
    for call in calls[:-1]:
        call(step)
    with pytest.raises(UserError, match=f"(?s){said}"):
        calls[-1](step)


@pytest.mark.parametrize(
    ("name", "scores", "settings", "said"),
    [
        ("short", [1.0, 2.0], None, r"shape \(2,\), and there are 3 responses"),
        ("short", [[1.0], [2.0], [3.0]], None, r"shape \(3, 1\)"),
        ("short", ["x", "y", "z"], None, "are no numbers"),
        ("short", [1.0, float("nan"), 1e300], None, "2 of 3 scores of 'short' can be no reward; the first is nan"),
        ("short", [1.0, 2.0, 3.0], {"limit": 3}, "are numbers and take no settings"),
        ("too short", [1.0, 2.0, 3.0], None, "cannot be called 'too short'"),
    ],
)
def test_scores_that_are_no_reward_are_refused(
    step: Step, name: str, scores: list[object], settings: dict[str, object] | None, said: str
) -> None:
    """Nothing is changed then. Control: three numbers are added, once."""
    step.rollout()
    step.reward()
    with pytest.raises(UserError, match=said):
        step.add_reward(name, scores, settings=settings)  # type: ignore[arg-type]
    path = RunFolder(step._training.run.path).experience(1)
    assert read_columns(path, ["reward"])["reward"].tolist() == [1.0, 0.0, 0.5]
    step.add_reward("long", [1, 2, 3], weight=0.5)
    assert step.read("reward")["reward"].tolist() == [1.5, 1.0, 2.0]
    with pytest.raises(UserError, match=r"step.add_reward\('long'\) was there already"):
        step.add_reward("long", [1, 2, 3])
    with pytest.raises(UserError, match="the reward has a part 'own' already"):
        step.add_reward("own", [1, 2, 3])
    assert step.end()[1]["reward/long_mean"] == 2.0


def test_figures_of_a_users_own_are_recorded_with_the_iteration(step: Step) -> None:
    """The last value counts; they are taken once. Controls: names and values that no tracker takes, one of ours."""
    logged = step._training.session().logged
    step.log("mine/length", 3)
    penstock.log("mine/length", np.float32(4.5))
    assert with_logged({"reward/mean": 1.0}, logged) == {"reward/mean": 1.0, "mine/length": 4.5}
    assert with_logged({"reward/mean": 1.0}, logged) == {"reward/mean": 1.0}
    for name, value, said in (("", 1, "cannot be called"), ("a,b", 1, "cannot be called"), ("a", "b", "no number")):
        with pytest.raises(UserError, match=said):
            penstock.log(name, value)  # type: ignore[arg-type]
    penstock.log("reward/mean", 2.0)
    with pytest.raises(UserError, match="the training has one of that name"):
        with_logged({"reward/mean": 1.0}, logged)


def test_without_a_training_nothing_is_logged() -> None:
    with pytest.raises(UserError, match="no training runs in this process"):
        penstock.log("mine/length", 1.0)


def test_with_dynamic_sampling_the_batch_is_whole_after_the_reward(
    training_with: Callable[[TrainConfig], Training],
) -> None:
    """Its rows change until then. Control: without, log-probs may come before (`orders.usual`)."""
    config = TrainConfig.model_validate({"dataflow": "a:b", "algorithm": {"dynamic_sampling": {"max_rollouts": 2}}})
    progress, training = Progress(), training_with(config)
    step = Step(training, next_settings(training, progress), progress, Rollout(1, "1/rollout"))
    with pytest.raises(UserError, match="comes after step.reward"):
        step.logprobs()
