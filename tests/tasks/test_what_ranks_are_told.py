"""What a recipe says is what the ranks are told: each key changes the arguments of the command that it is about.

The group only listens; what the arguments do is shown where the commands are (tests/engines).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from prefect.logging import disable_run_logger

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.declarations.settings import arguments, settings
from penstock.algorithms.policy_losses import CHOICES, POLICY_LOSSES
from penstock.algorithms.preference import PREFERENCE_LOSSES
from penstock.algorithms.registry import shared_settings
from penstock.base.ragged import Ragged
from penstock.checks.memory import GroupEstimate
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import Role
from penstock.data.prompts import PromptTable
from penstock.engines.commands.message import WrongMessage
from penstock.engines.commands.rollout import Sampling
from penstock.engines.groups.spec import RankDevice
from penstock.engines.sizing.memory import RankMemory, Recomputed
from penstock.rewards.pool import Score
from penstock.session import session as module
from penstock.session.requests import GenerationRequest
from penstock.session.rollout.generation import Responses
from penstock.session.session import Session, Stage, Training
from penstock.session.settings import settings_at
from penstock.state.experience import ExperienceRef, write_columns
from penstock.state.manifest import Progress
from penstock.tasks.finetuning.preferences import (
    begin_preferences,
    measure_heldout,
    preference_steps,
    preferences_file,
    reference_pass,
)
from penstock.tasks.finetuning.supervised import begin_supervised, supervised_steps
from penstock.tasks.iteration.evaluate import evaluate
from penstock.tasks.iteration.rollout import begin_rollout, rollout
from penstock.tasks.iteration.update import update_actor, update_critic
from tests.algorithms.values import other_value

ROWS = 40
MakeTraining = Callable[[TrainConfig], Training]


REPLIES: dict[str, Any] = {
    "preference_begin": {"attention": "some", "slower": []},
    "preference_measure": {"metrics": {}},
    "preference_steps": {"steps": []},
    "sft_steps": {"steps": []},
    "update_actor": {"metrics": {}},
    "update_critic": {"metrics": {}},
}


@dataclass(eq=False)
class Listener:
    """A group that keeps what it was told last; its replies say nothing of interest."""

    told: dict[str, Any] = field(default_factory=dict)
    spec = SimpleNamespace(devices=(RankDevice(None),))

    def call(self, command: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
        self.told = arguments
        return [{"usage": {"seconds": 1.0}, "reply": REPLIES.get(command)}]


def listening(training: Training) -> Listener:
    group = Listener()
    training.session().groups |= {"actor": group, "critic": group}  # type: ignore[dict-item]
    return group


def at(told: Any, place: str) -> Any:
    """Return what is at a dotted place."""
    for part in place.split("."):
        told = told[part]
    return told


def tree(key: str, value: Any, base: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `value` at a dotted key."""
    first, _, rest = key.partition(".")
    return {**base, first: tree(rest, value, base.get(first) or {}) if rest else value}


def update(make: MakeTraining, values: dict[str, Any], role: str) -> dict[str, Any]:
    """Return what the update of `role` in iteration 3 is told."""
    training = make(config_from_mapping(values, "test"))
    group, config = listening(training), training.config
    stage = Stage(ExperienceRef("experience.parquet", 1, 1, 1, 2), {})
    task: Any = update_actor if role == "actor" else update_critic
    task.fn(training, settings_at(config, 3, Progress()), stage)
    return group.told


class Asked(Exception):
    """What a generation was asked for: prompts, sampling and the seed."""


@pytest.fixture
def generation(training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return what a rollout or an evaluation asks for with a configuration, in iteration 3."""

    def hear(training: Training, request: GenerationRequest, *_: Any) -> None:
        told = {"prompts": len(request.prompts), "first": list(request.prompts["prompt_id"])[:8]}
        raise Asked({**asdict(request.sampling), **told})

    monkeypatch.setattr("penstock.tasks.iteration.rollout.begin_generation", hear)
    monkeypatch.setattr("penstock.tasks.iteration.evaluate.generate", hear)

    def ask(values: dict[str, Any], evaluation: bool) -> dict[str, Any]:
        training = training_with(config_from_mapping(values, "test"))
        frame = pd.DataFrame({"prompt_id": [f"{number:03d}" for number in range(200)]})
        training.session().prompts |= {"train": PromptTable(frame, 0), "heldout": PromptTable(frame, 0)}
        training.session().groups |= {"rollout": Listener()}  # type: ignore[dict-item]
        with pytest.raises(Asked) as asked:
            if evaluation:
                evaluate.fn(training, 3, 512)
            else:
                settings = settings_at(training.config, 3, Progress())
                rollout.fn(training, settings, begin_rollout(training, settings, Progress()))
        found: dict[str, Any] = asked.value.args[0]
        return found

    return ask


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("rollout.prompts", 7, "prompts"),
        ("rollout.samples", 7, "samples"),
        ("rollout.temperature", 0.5, "temperature"),
        ("rollout.top_p", 0.5, "top_p"),
        ("rollout.top_k", 7, "top_k"),
        ("rollout.max_response_tokens", 7, "max_tokens"),
        ("rollout.ignore_eos", True, "ignore_eos"),
        ("data.sampler.name", "sequential", "first"),
        ("seed", 7, "seed"),
    ],
)
def test_of_a_rollout(key: str, value: Any, place: str, generation: Callable[..., dict[str, Any]]) -> None:
    """Which prompts, how many of them, and how their responses are drawn."""
    before, after = generation({}, False), generation(tree(key, value, {}), False)
    assert before[place] != after[place]
    assert after[place] == {"first": [f"{number:03d}" for number in range(8)], "seed": [7, 3, 0]}.get(place, value)


def test_experts_are_asked_for_where_they_are_replayed(generation: Callable[..., dict[str, Any]]) -> None:
    """Of what is learnt from, and not of an evaluation."""
    replayed = {"actor": {"routing": "replay"}}
    asked = generation({}, False), generation(replayed, False), generation(replayed, True)
    assert [one["routes"] for one in asked] == [False, True, False]


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("evaluate.prompts", 7, "prompts"),
        ("evaluate.samples", 7, "samples"),
        ("evaluate.temperature", 0.5, "temperature"),
        ("rollout.max_response_tokens", 7, "max_tokens"),
        ("seed", 7, "seed"),
    ],
)
def test_of_an_evaluation(key: str, value: Any, place: str, generation: Callable[..., dict[str, Any]]) -> None:
    """The rollout's sampling is not the evaluation's."""
    base = {"evaluate": {"temperature": 0.25}}  # several samples need one
    before, after = generation(base, True), generation(tree(key, value, base), True)
    assert before[place] != after[place]
    assert after[place] == ([7, 3, 1] if place == "seed" else value)
    assert generation(tree("rollout.temperature", 0.5, base), True) == before


SAMPLED = {"temperature": 0.5, "samples": 2}


def test_a_greedy_evaluation_is_asked_for_beside_the_other(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One greedy response per prompt, whose accuracy is a figure of its own.

    Controls: without the key nothing more is asked, nor where all responses are greedy anyway.
    """
    asked: list[tuple[str, int, float]] = []

    def answer(training: Training, prompts: pd.DataFrame, sampling: Sampling, key: str, *_: Any) -> Any:
        asked.append((key, sampling.samples, sampling.temperature))
        count = len(prompts) * sampling.samples
        empty = Ragged.of([[1]] * count, np.int32)
        responses = Responses(np.arange(2), empty, pa.array(["x"] * count), np.zeros(count, bool), 0, {}, empty, {})
        columns = {"prompt_id": ["a"] * count, "prompt": ["x"] * count, "response": ["1"] * count}
        return columns, responses, [Score(1.0 - sampling.temperature, {}, None)] * count

    monkeypatch.setattr("penstock.tasks.iteration.evaluate.answered", answer)
    row = {"prompt_id": ["a"], "prompt_text": ["x"], "prompt_tokens": [[1]]}
    for greedy, sampling in ((False, SAMPLED), (True, SAMPLED), (True, {})):
        asked.clear()
        values = {"evaluate": {**sampling, "greedy": greedy, "evaluators": []}}
        training = training_with(config_from_mapping(values, "test"))
        training.session().prompts["heldout"] = PromptTable(pd.DataFrame(row), 0)
        metrics = evaluate.fn(training, 3, 512)
        if sampling:
            assert asked == [("3/evaluate", 2, 0.5), ("3/evaluate-greedy", 1, 0.0)][: 1 + greedy]
            assert metrics.get("heldout/greedy_accuracy") == (1.0 if greedy else None)
            assert metrics["heldout/accuracy"] == 0.0
        else:
            assert asked == [("3/evaluate", 1, 0.0)]


SEVERAL = {"mini_batches": 2}  # steps per iteration: with one every ratio is 1, and what acts on ratios is refused
KL = {"kl": {"coefficient": 0.5}}
BOUNDED = {"policy_loss": "tests.own_algorithm:bounded", "advantage": "rloo"}


@pytest.mark.parametrize(
    ("key", "value", "place", "algorithm"),
    [
        ("actor.optimizer.learning_rate", 0.5, "learning_rate", {}),
        ("actor.micro_batch_tokens", 77, "split.micro_batch_tokens", {}),
        ("rollout.temperature", 0.5, "loss.temperature", {}),
        ("rollout.samples", 3, "split.together", {**SEVERAL, "mini_batch_of": "prompts"}),
        ("algorithm.mini_batch_of", "samples", "split.together", {**SEVERAL, "mini_batch_of": "prompts"}),
        ("rollout.max_response_tokens", 77, "split.max_response_tokens", {}),
        ("algorithm.mini_batches", 2, "split.mini_batches", {}),
        ("algorithm.epochs", 2, "split.epochs", {}),
        ("algorithm.aggregation", "token-sum", "split.aggregation", {}),
        ("algorithm.entropy_coefficient", 0.5, "loss.entropy_coefficient", {}),
        ("algorithm.router_loss_coefficient", 0.5, "loss.router_loss_coefficient", {}),
        ("algorithm.policy_loss", "gspo", "loss.policy_loss", {}),
        ("algorithm.settings", {"steepness": 2.0}, "loss.settings", BOUNDED),
        ("algorithm.settings.clip_low", 0.5, "loss.settings.clip_low", SEVERAL),
        ("algorithm.settings.clip_high", 0.5, "loss.settings.clip_high", SEVERAL),
        ("algorithm.settings.dual_clip", 7.0, "loss.settings.dual_clip", SEVERAL),
        ("algorithm.settings.log_clip_low", 0.5, "loss.settings.log_clip_low", {"name": "gmpo", **SEVERAL}),
        ("algorithm.settings.log_clip_high", 0.5, "loss.settings.log_clip_high", {"name": "gmpo", **SEVERAL}),
        ("algorithm.settings.gate_positive", 0.5, "loss.settings.gate_positive", {"name": "sapo", **SEVERAL}),
        ("algorithm.settings.gate_negative", 0.5, "loss.settings.gate_negative", {"name": "sapo", **SEVERAL}),
        ("algorithm.settings.covariance_share", 0.5, "loss.choice_settings.covariance_share", {"name": "clip_cov"}),
        ("algorithm.settings.covariance_low", 0.5, "loss.choice_settings.covariance_low", {"name": "clip_cov"}),
        ("algorithm.settings.covariance_high", 9.0, "loss.choice_settings.covariance_high", {"name": "clip_cov"}),
        ("algorithm.settings.covariance_pull", 0.5, "loss.settings.covariance_pull", {"name": "kl_cov"}),
        ("algorithm.settings.divergence", "kl", "loss.settings.divergence", {"name": "dppo", **SEVERAL}),
        ("algorithm.settings.divergence_bound", 0.5, "loss.settings.divergence_bound", {"name": "dppo", **SEVERAL}),
        ("algorithm.settings.weight_bound", 7.0, "loss.settings.weight_bound", {"name": "dppo", **SEVERAL}),
        ("algorithm.kl.estimator", "k1", "loss.kl_estimator", KL),
        ("algorithm.kl.coefficient", 0.25, "loss.kl_coefficient", KL),
        ("algorithm.kl.place", "reward", "loss.kl_estimator", KL),
        ("seed", 7, "split.seed", {}),
    ],
)
def test_of_the_actors_update(
    key: str, value: Any, place: str, algorithm: dict[str, Any], training_with: MakeTraining
) -> None:
    """The value itself, but for a KL in the reward, which takes its estimator from the loss, a seed, and words."""
    before = update(training_with, {"algorithm": algorithm}, "actor")
    after = update(training_with, tree(key, value, {"algorithm": algorithm}), "actor")
    assert at(before, place) != at(after, place)
    if key not in ("algorithm.kl.place", "algorithm.mini_batch_of", "seed"):
        assert at(after, place) == value


LOSSES = [(loss, place) for loss in POLICY_LOSSES for place in ("settings", "choice_settings")]


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_setting_reaches_its_function(advantage: str, training_with: MakeTraining) -> None:
    """Of each estimator, loss and choice: the values of `algorithm.settings`, and none besides its own."""
    agents = {"data": {"agents": {"column": "role", "names": ["solver"]}}} if advantage == "ippo" else {}
    for loss, place in LOSSES:
        function = (POLICY_LOSSES if place == "settings" else CHOICES).get(loss)
        own = {} if function is None else settings(function)
        together = {"estimator": ADVANTAGES[advantage]} | ({} if function is None else {"loss": function})
        both = {name: other_value(setting) for name, setting in shared_settings(together).items()}
        algorithm = {"advantage": advantage, "policy_loss": loss, "settings": both, **SEVERAL}
        values = {"algorithm": algorithm, **agents}
        assert update(training_with, values, "actor")["loss"][place] == {name: both[name] for name in own}
        in_force = settings_at(config_from_mapping(values, "test"), 3, Progress()).algorithm
        expected = {name: both[name] for name in settings(ADVANTAGES[advantage])}
        assert arguments(ADVANTAGES[advantage], in_force) == expected


def test_a_setting_is_not_what_has_its_name_elsewhere(training_with: MakeTraining) -> None:
    """A loss with names that a recipe or an iteration has too gets the values of `algorithm.settings`."""
    given = {"temperature": 0.25, "clip_low": 0.4}
    own = {"policy_loss": "tests.own_algorithm:namesake", "settings": given}
    told = update(training_with, {"algorithm": own, "seed": 3, "rollout": {"temperature": 0.75}}, "actor")
    assert told["loss"]["settings"] == given | {"seed": 7}
    assert told["loss"]["temperature"] == 0.75


def test_a_number_of_a_loss_follows_its_schedule(training_with: MakeTraining) -> None:
    """Of ours, of a choice, and of a user's. Control: before its step the value was another."""
    steps = {0: 0.1, 3: 0.3, 4: 0.5}
    for algorithm, name, place in (
        (SEVERAL, "clip_low", "settings"),
        ({"name": "clip_cov"}, "covariance_share", "choice_settings"),
        (BOUNDED, "steepness", "settings"),
    ):
        values = {"algorithm": {**algorithm, "settings": {name: steps}}}
        assert update(training_with, values, "actor")["loss"][place][name] == 0.3
        assert settings_at(config_from_mapping(values, "test"), 2, Progress()).algorithm[name] == 0.1


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("critic.optimizer.learning_rate", 0.5, "learning_rate"),
        ("critic.micro_batch_tokens", 77, "split.micro_batch_tokens"),
        ("critic.value_clip", 0.5, "clip"),
        ("critic.value_clip", None, "clip"),
    ],
)
def test_of_the_critics_update(key: str, value: Any, place: str, training_with: MakeTraining) -> None:
    """The actor's settings are not the critic's."""
    ppo = {"algorithm": {"name": "ppo", **SEVERAL}, "critic": {}}
    before = update(training_with, ppo, "critic")
    after = update(training_with, tree(key, value, ppo), "critic")
    assert at(before, place) != at(after, place) == value
    actor = update(training_with, tree(key, value, ppo), "actor")
    assert actor.get(place) == update(training_with, ppo, "actor").get(place)


def rows(path: Path) -> None:
    column = Ragged.of([[1, 2]] * ROWS, np.int32)
    write_columns(path, {"prompt_tokens": column, "response_tokens": column})


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("sft.batch", 5, "batches"),
        ("sft.micro_batch_tokens", 77, "budget"),
        ("sft.optimizer.learning_rate", 0.5, "learning_rate"),
        ("data.sampler.name", "sequential", "batches"),
        ("seed", 7, "batches"),
    ],
)
def test_of_supervised_steps(key: str, value: Any, place: str, training_with: MakeTraining) -> None:
    """Rows of a batch, their order, the token budget and the rate."""

    def told(values: dict[str, Any]) -> Any:
        training = training_with(config_from_mapping(values, "test"))
        rows(training.run.prompts("sft"))
        group = listening(training)
        supervised_steps.fn(training, ROWS, 0, 2)
        return at(group.told, place)

    base = {"sft": {"batch": 4}}
    before, after = told(base), told(tree(key, value, base))
    assert not np.array_equal(before, after)
    if place != "batches":
        assert after == value
    elif key == "sft.batch":
        assert after.shape == (2, 5)
    elif key == "data.sampler.name":
        assert after.ravel().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.dtype", "float32"),
        ("model.attention", "sdpa"),
        ("sft.zero_stage", 2),
        ("sft.gradient_checkpointing", True),
        ("sft.steps", 7),
    ],
)
def test_of_the_model_to_train(key: str, value: Any, training_with: MakeTraining) -> None:
    """The section itself, with what was decided for this machine; supervised and on preferences."""
    values = tree(key, value, {"sft": {}})
    training = training_with(config_from_mapping(values, "test"))
    group = listening(training)
    begin_supervised.fn(training, "folder")
    place = key if key.startswith("model.") else f"model.trainer.{key.partition('.')[2]}"
    assert at(group.told, place) == value

    preference = PreferenceConfig.model_validate(tree(key.replace("sft.", "trainer."), value, {}))
    training = training_with(preference.engines())
    group = listening(training)
    with disable_run_logger():
        begin_preferences.fn(training, preference, "folder")
    assert at(group.told, place) == value


def test_of_an_encoder_that_learns_in_the_warm_up(training_with: MakeTraining) -> None:
    """Control: one that rests."""
    for learns in (True, False):
        sections = {"sft": {}, "data": {"images": "pictures"}, "model": {"train_encoder": learns}}
        training = training_with(config_from_mapping(sections, "test"))
        group = listening(training)
        begin_supervised.fn(training, "folder")
        assert group.told["model"]["train_encoder"] is learns


@pytest.mark.parametrize(("logits", "told"), [(True, False), (False, True)])
def test_of_logits_that_are_kept(logits: bool, told: bool, training_with: MakeTraining) -> None:
    """As decided for this machine. Control: a model of which nothing was decided keeps none."""
    preference = PreferenceConfig()
    for training, begin in (
        (training_with(config_from_mapping({"sft": {}}, "test")), lambda at: begin_supervised.fn(at, "folder")),
        (training_with(preference.engines()), lambda at: begin_preferences.fn(at, preference, "folder")),
    ):
        group = listening(training)
        training.session().recomputed = {"sft": Recomputed(False, logits)}
        with disable_run_logger():
            begin(training)
        assert group.told["model"]["keep_logits"] is told
        assert not training.session().keeps_logits("actor")


@pytest.mark.parametrize("device", [None, 0])
@pytest.mark.parametrize("asked", [None, True, False])
def test_of_a_kv_cache_that_stays(asked: bool | None, device: int | None, training_with: MakeTraining) -> None:
    """As decided for this machine's GPUs, also with the rollout in a group of its own; on a CPU as the recipe says."""
    sleep = device is not None and asked is not False
    config = config_from_mapping(tree("rollout.sleep", asked, {}), "test")
    session = training_with(config).session()
    memory = RankMemory("rollout", {})
    groups: tuple[tuple[tuple[Role, ...], bool | None], ...] = ((("actor",), None), (("rollout",), sleep))
    session.decide(
        [
            GroupEstimate("group", roles, (RankDevice(device),), memory, {}, decided, (None,))
            for roles, decided in groups
        ]
    )
    assert session.kv_cache_stays is (None if device is None else not sleep)
    assert session.engine_config()["rollout"]["sleep"] is (asked if device is None else sleep)


PAIRS: dict[str, Any] = {"trainer": {"batch": 4}, "data": {}}


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("trainer.batch", 5, "batches"),
        ("trainer.micro_batch_tokens", 77, "budget"),
        ("trainer.optimizer.learning_rate", 0.5, "learning_rate"),
        ("data.shuffle", False, "batches"),
        ("seed", 7, "batches"),
        ("loss.name", "orpo", "loss.name"),
        ("loss.settings.beta", 0.5, "loss.settings.beta"),
        ("loss.settings.label_smoothing", 0.25, "loss.settings.label_smoothing"),
    ],
)
def test_of_steps_on_preferences(
    key: str, value: Any, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of a batch, their order, the token budget, the rate and the loss."""

    def told(values: dict[str, Any]) -> Any:
        config = PreferenceConfig.model_validate(values)
        training = preferring(config, tmp_path, monkeypatch)
        group = listening(training)
        preference_steps.fn(training, config, ROWS // 2, 0, 2)
        return at(group.told, place)

    before, after = told(PAIRS), told(tree(key, value, PAIRS))
    assert not np.array_equal(before, after)
    if place != "batches":
        assert after == value
    elif key == "trainer.batch":
        assert after.shape == (2, 5)
    elif key == "data.shuffle":
        assert after.ravel().tolist() == list(range(8))


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_every_setting_reaches_its_preference_loss(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of `loss.settings`, and none besides its own."""
    own = {setting: other_value(found) for setting, found in settings(PREFERENCE_LOSSES[name]).items()}
    config = PreferenceConfig.model_validate({**PAIRS, "loss": {"name": name, "settings": own}})
    training = preferring(config, tmp_path, monkeypatch)
    group = listening(training)
    preference_steps.fn(training, config, ROWS // 2, 0, 2)
    assert group.told["loss"] == {"name": name, "settings": own}


def test_of_the_token_budget_of_passes_without_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out figures and the reference pass take it from `trainer.micro_batch_tokens`, too."""
    config = PreferenceConfig.model_validate({"trainer": {"micro_batch_tokens": 77}})
    training = preferring(config, tmp_path, monkeypatch)
    group = listening(training)
    rows(preferences_file(training, "train"))
    with pytest.raises(WrongMessage, match="the reply to logprobs"):  # the listener computes nothing
        reference_pass.fn(training, config, "train")
    assert group.told["budget"] == 77
    monkeypatch.setattr("penstock.tasks.finetuning.preferences.append_record", lambda *arguments: True)
    measure_heldout.fn(training, config, 0)
    assert group.told["budget"] == 77


def preferring(config: PreferenceConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    training = Training(str(folder))
    monkeypatch.setitem(module._SESSIONS, training.folder, Session(config.engines(), training.run))
    return training
