"""Values that may change during a run: schedules, then live overrides, and never anything that is not allowed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.types import MAX_VARIABLE_NAME_LENGTH

from penstock.base.errors import UserError
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.session import settings as module
from penstock.session.session import Training, write_config
from penstock.session.settings import (
    LIVE_KEYS,
    apply_overrides,
    live_keys,
    live_overrides,
    next_settings,
    page_of_overrides,
    settings_at,
    smaller_micro_batches,
    variable_name,
    variable_to_set,
)
from penstock.state.manifest import Manifest, Progress, write_manifest
from penstock.state.run_folder import RunFolder, append_metrics

KL = {"kl": {"coefficient": 0.05, "target": 0.1}}


def config(**sections: Any) -> TrainConfig:
    """Return a configuration from nested values."""
    return config_from_mapping(sections, "test")


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What there is of Prefect's Variables, by name."""
    there: dict[str, Any] = {}
    monkeypatch.setattr(module.Variable, "get", lambda name, default: there.get(name, default))
    monkeypatch.setattr(module.Variable, "set", lambda name, value, overwrite: there.update({name: value}))
    return there


def test_schedules_hold_from_their_iteration_on() -> None:
    """Each value by its own schedule; the critic's are its own."""
    scheduled = config(
        algorithm={"name": "ppo", "mini_batches": 2, "settings": {"clip_high": {0: 0.2, 3: 0.3}}},
        rollout={"temperature": {0: 1.0, 2: 0.8}},
        actor={"optimizer": {"learning_rate": {0: 1e-3, 3: 1e-4}}, "micro_batch_tokens": {0: 64, 2: 128}},
        critic={"optimizer": {"learning_rate": {0: 1e-2, 2: 1e-5}}},
    )
    at = {number: settings_at(scheduled, number, Progress()) for number in (1, 2, 3)}
    assert [at[n].temperature for n in at] == [1.0, 0.8, 0.8]
    assert [at[n].algorithm["clip_high"] for n in at] == [0.2, 0.2, 0.3]
    assert [at[n].learning_rate for n in at] == [1e-3, 1e-3, 1e-4]
    assert [at[n].critic_learning_rate for n in at] == [1e-2, 1e-5, 1e-5]
    assert [at[n].micro_batch_tokens for n in at] == [64, 128, 128]


def test_an_adaptive_coefficient_comes_from_the_progress() -> None:
    """The recipe's value starts it; a fixed coefficient ignores what an earlier controller left."""
    progress = Progress(iteration=4, kl_coefficient=0.07)
    assert settings_at(config(algorithm=KL), 5, progress).kl_coefficient == 0.07
    assert settings_at(config(algorithm=KL), 1, Progress()).kl_coefficient == 0.05
    assert settings_at(config(algorithm={"kl": {"coefficient": 0.05}}), 5, progress).kl_coefficient == 0.05
    assert settings_at(config(), 5, progress).kl_coefficient == 0.0


def test_every_live_key_can_be_overridden() -> None:
    """The override replaces value and schedule; all else stays. Control: without overrides nothing changes."""
    algorithm = {"name": "ppo", "mini_batches": 2, "kl": {"coefficient": 0.05}}
    before = config(algorithm=algorithm, rollout={"temperature": {0: 1.0, 2: 0.5}})
    assert apply_overrides(before, {}) == before
    wanted = {key: 0.25 if "tokens" not in key else 512 for key in LIVE_KEYS}
    numbers = ("gamma", "gae_lambda", "clip_low", "clip_high", "dual_clip")
    wanted |= {f"algorithm.settings.{name}": 1.25 if name == "dual_clip" else 0.25 for name in numbers}
    assert set(live_keys(before)) == set(wanted)
    after = settings_at(apply_overrides(before, wanted), 3, Progress())
    assert after.temperature == after.kl_coefficient == 0.25
    assert after.learning_rate == after.critic_learning_rate == after.entropy_coefficient == 0.25
    assert after.algorithm == dict.fromkeys(numbers, 0.25) | {"dual_clip": 1.25, "whiten": True}
    assert after.micro_batch_tokens == after.critic_micro_batch_tokens == 512


def test_an_override_may_be_a_schedule_with_the_text_keys_of_json() -> None:
    """A Prefect Variable is JSON, where keys are text."""
    changed = apply_overrides(config(), {"rollout.temperature": {"0": 1.0, "5": 0.5}})
    assert [settings_at(changed, number, Progress()).temperature for number in (4, 5)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("sections", "lacking"),
    [
        ({}, {"critic.optimizer.learning_rate", "critic.micro_batch_tokens", "algorithm.kl.coefficient"}),
        ({"algorithm": {"name": "ppo", **KL}, "critic": {}}, {"algorithm.kl.coefficient"}),
        ({"algorithm": {"name": "ppo", "kl": {"coefficient": 0.05}}, "critic": {}}, set()),
    ],
    ids=["no critic", "adaptive", "all"],
)
def test_only_keys_of_sections_that_a_run_has_are_offered(
    tmp_path: Path, sections: dict[str, Any], lacking: set[str]
) -> None:
    """On its page in Prefect, and where another is refused. Control: a run that has them all."""
    recipe = config(**sections)
    offered = set(re.findall("^- `(.*)`$", page_of_overrides(RunFolder(tmp_path), recipe), re.MULTILINE))
    assert offered == set(live_keys(recipe)) - lacking
    with pytest.raises(UserError, match="cannot change during this run") as refused:
        apply_overrides(recipe, {"seed": 1})
    assert set(refused.value.remedy.removeprefix("keys that can: ").split(", ")) == offered


def test_null_takes_an_override_back() -> None:
    """The recipe's value and schedule are in force again, not the schema's default. Control: its neighbour stays."""
    before = config(
        rollout={"temperature": 0.7}, algorithm={"mini_batches": 2, "settings": {"clip_low": {0: 0.1, 5: 0.3}}}
    )
    wanted = {"rollout.temperature": None, "algorithm.settings.clip_low": None, "algorithm.settings.clip_high": 0.4}
    after = apply_overrides(before, wanted)
    assert (after.rollout.temperature, after.algorithm.settings["clip_low"]) == (0.7, {0: 0.1, 5: 0.3})
    assert after.algorithm.settings["clip_high"] == 0.4


@pytest.mark.parametrize(
    ("overrides", "algorithm", "message"),
    [
        ("hot", {}, "'hot' is no object of keys"),
        (["rollout.temperature"], {}, "is no object of keys"),
        ({"rollout.temperature": 1e999}, {}, "must be finite"),
        ({"rollout.samples": 4}, {}, "'rollout.samples' cannot change during this run"),
        ({"rollout.temperature": -1.0}, {}, "must not be negative"),
        ({"actor.micro_batch_tokens": "many"}, {}, "actor.micro_batch_tokens: must be a whole number"),
        ({"critic.micro_batch_tokens": 64}, {}, "has no effect in this run"),
        ({"algorithm.settings.clip_low": 0.1}, {"name": "reinforce"}, "clip_low' cannot change during this run"),
        ({"algorithm.settings.clip_low": None}, {"name": "reinforce"}, "clip_low' cannot change during this run"),
        ({"algorithm.settings.whiten": False}, {"name": "ppo"}, "whiten' cannot change during this run"),
        ({"algorithm.settings.gamma": 1.5}, {"name": "ppo"}, "settings.gamma: must be less than or equal to 1"),
        ({"algorithm.settings.clip_low": 0.1}, {}, "clip_low' has no effect with one step per iteration"),
        ({"algorithm.kl.coefficient": 0.1}, {}, "has no effect in this run"),
        ({"algorithm.kl.coefficient": 0.1}, KL, "has no effect in this run"),
    ],
)
def test_what_is_not_allowed_or_has_no_effect_is_refused(
    overrides: Any, algorithm: dict[str, Any], message: str
) -> None:
    """Also a fixed coefficient for an adaptive controller, which would set it again in the next iteration."""
    with pytest.raises(UserError, match=message):
        apply_overrides(config(algorithm=algorithm), overrides)


def test_a_run_that_reads_no_overrides_takes_none(training_with: Callable[[TrainConfig], Training]) -> None:
    """Supervised steps alone. Controls: the same folder of a training, and of a version that did not say."""
    training = training_with(config(iterations=7))
    run = training.run
    write_config(run, training.config)
    write_manifest(run, Manifest(Progress(), kind="sft"))
    with pytest.raises(UserError, match="is a run of 'penstock sft', not of 'penstock train'"):
        variable_to_set(run)
    for kind in ("train", None):
        write_manifest(run, Manifest(Progress(), kind=kind))
        assert variable_to_set(run) == variable_name(run)


@pytest.mark.parametrize(
    ("variable", "temperature"),
    [
        (None, 0.5),  # a resumed run on another server keeps what its checkpoint holds
        ({}, 1.0),
        ({"rollout.temperature": 0.9}, 0.9),
        ({"rollout.temperature": "hot"}, 0.5),
        ("hot", 0.5),
    ],
)
def test_the_variable_of_the_run_decides_unless_it_is_wrong(
    training_with: Callable[[TrainConfig], Training],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    variable: Any,
    temperature: float,
) -> None:
    """A bad override is reported and changes nothing: the values in force stay in force."""
    training = training_with(config(iterations=7))
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    variables[variable_name(training.run)] = variable
    progress = live_overrides.fn(training, Progress(iteration=6, overrides={"rollout.temperature": 0.5}))
    settings = next_settings(training, progress)
    assert settings.temperature == temperature
    assert settings.iteration == 7
    assert ("is refused, the run goes on as before" in caplog.text) == ("hot" in str(variable))


def test_after_the_last_iteration_nobody_asks(
    training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An override then would be announced for an iteration that never comes. Control: before it, it is asked for."""
    training = training_with(config(iterations=7))
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(module.Variable, "get", lambda name, default: {"rollout.temperature": 0.5})
    asked = {done: live_overrides.fn(training, Progress(iteration=done)).overrides for done in (6, 7)}
    assert asked == {6: {"rollout.temperature": 0.5}, 7: None}


def test_the_name_of_the_variable_is_one_that_prefect_takes(tmp_path: Path) -> None:
    """Lower case letters, digits, dashes and underscores, no more than it allows for the longest name of a folder."""
    for name in ("Quickstart-20260101.2", "a" * 255, "\u00fcben"):
        variable = variable_name(RunFolder(tmp_path / name))
        assert re.fullmatch(r"[a-z0-9_-]+", variable)
        assert len(variable) <= MAX_VARIABLE_NAME_LENGTH
    readable = variable_name(RunFolder(tmp_path / "Quickstart-20260101.2"))
    assert re.fullmatch("penstock-live-quickstart-20260101-2-[0-9a-f]{6}", readable)


def test_every_folder_has_a_variable_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal last parts, and names that differ in what a Variable's name cannot hold. Control: one folder has one."""
    names = ("runs/sums", "old/sums", "runs/Sums", "runs/sums.1", "runs/sums-1")
    assert len({variable_name(RunFolder(tmp_path / name)) for name in names}) == len(names)
    monkeypatch.chdir(tmp_path)
    assert variable_name(RunFolder(Path("old/../runs/sums"))) == variable_name(RunFolder(tmp_path / "runs/sums"))


def test_a_complete_run_takes_no_overrides(training_with: Callable[[TrainConfig], Training]) -> None:
    """Nothing would read them. Controls: before its engines are up, during the training, and with iterations added."""
    training = training_with(config(iterations=7))
    run = training.run
    write_config(run, training.config)
    assert variable_to_set(run) == variable_name(run)
    write_manifest(run, Manifest(Progress(iteration=7), checkpoint="000007"))
    assert variable_to_set(run) == variable_name(run)
    run.model("final").mkdir(parents=True)
    run.summary.write_text('{"status": "completed"}')
    with pytest.raises(UserError, match="is complete, nothing will read this"):
        variable_to_set(run)
    write_config(run, config(iterations=8))
    assert variable_to_set(run) == variable_name(run)


def test_micro_batches_become_smaller_for_the_command_that_had_no_memory(
    training_with: Callable[[TrainConfig], Training], variables: dict[str, Any]
) -> None:
    """Half, but not below the longest row, and beside what a person has set; None where none can be smaller.

    Controls: the other budget stays, and where no recipe's budget counts, or another flow's, nothing is set.
    """
    rows = {"data": {"max_prompt_tokens": 100}, "rollout": {"max_response_tokens": 300}}
    trainers = {"actor": {"micro_batch_tokens": {0: 4096, 2: 1500}}, "critic": {"micro_batch_tokens": 1000}}
    training = training_with(config(iterations=7, algorithm={"name": "ppo"}, **rows, **trainers))
    name = variable_name(training.run)
    variables[name] = {"rollout.temperature": 0.9}
    append_metrics(training.run, 1, {})

    def lowered(command: str) -> tuple[str, int] | None:
        """As in a training, which reads the Variable before it goes on."""
        found = smaller_micro_batches(training, command)
        training.session().overrides = variables[name]
        return found

    assert lowered("update_actor") == ("actor.micro_batch_tokens", 750)
    assert lowered("logprobs_and_kl") == ("actor.micro_batch_tokens", 400)
    assert lowered("sum_gradient") is None
    assert variables[name] == {"rollout.temperature": 0.9, "actor.micro_batch_tokens": 400}
    assert lowered("values") == ("critic.micro_batch_tokens", 500)
    assert variables[name]["actor.micro_batch_tokens"] == 400
    set_so_far = dict(variables[name])
    assert [smaller_micro_batches(training, command) for command in ("generate", "sft_steps", "build")] == [None] * 3
    training.session().kind = "preference"
    assert smaller_micro_batches(training, "update_critic") is None
    assert variables[name] == set_so_far


@pytest.mark.parametrize(
    ("asked", "then"),
    [
        ({"actor.micro_batch_tokens": 400}, {"actor.micro_batch_tokens": 400}),  # what a person has set meanwhile
        ({"actor.micro_batch_tokens": 9000}, {"actor.micro_batch_tokens": 2048}),
        ({"rollout.temperature": "hot"}, {"rollout.temperature": 0.9, "actor.micro_batch_tokens": 2048}),
        ("hot", {"rollout.temperature": 0.9, "actor.micro_batch_tokens": 2048}),
        (None, {"rollout.temperature": 0.9, "actor.micro_batch_tokens": 2048}),  # deleted
    ],
)
def test_smaller_micro_batches_begin_with_what_is_in_force(
    training_with: Callable[[TrainConfig], Training], variables: dict[str, Any], asked: Any, then: dict[str, Any]
) -> None:
    """Whatever the Variable says by then: what was refused, or is gone, changes nothing, and what is smaller holds."""
    training = training_with(config(iterations=7, actor={"micro_batch_tokens": 8192}))
    variables[variable_name(training.run)] = asked
    training.session().overrides = {"rollout.temperature": 0.9, "actor.micro_batch_tokens": 4096}
    assert smaller_micro_batches(training, "update_actor") == (
        "actor.micro_batch_tokens",
        then["actor.micro_batch_tokens"],
    )
    assert variables[variable_name(training.run)] == then
