"""What a replay is given: columns, settings and models, or a sentence that says which iterations have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import UserError
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.session.session import Training, write_config
from penstock.session.settings import live_figures, live_overrides_in, next_settings
from penstock.state.experience import write_columns
from penstock.state.manifest import Manifest, Progress, seal_checkpoint, write_manifest
from penstock.state.run_folder import RunFolder, append_metrics
from penstock.tasks.replay.inputs import following, inputs_of, outputs_of, planned, tasks_of

GRPO = {"iterations": 8, "data": {"train": "p.jsonl"}, "model": {"path": "m"}, "reward": {"function": "r:f"}}
COLUMNS = ("response", "response_tokens", "reward", "reward/part", "reward_greedy", "logprobs_old", "kl", "advantages")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of 8 iterations with checkpoints of the last two fourth ones, and no experience of iterations 1 and 6."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    write_config(run, config())
    model = run.model("initial")
    model.mkdir(parents=True)
    (model / "config.json").touch()
    run.experience(1).parent.mkdir()
    for number in (2, 3, 4, 5, 7, 8):
        write_columns(run.experience(number), dict.fromkeys(COLUMNS, np.zeros(2)))
    for number in (4, 8):
        aside = run.checkpoints / f".{number:06d}.partial"
        aside.mkdir(parents=True)
        (aside / "state").write_text("x", encoding="utf-8")
        progress = Progress(number, number, number * 64)
        seal_checkpoint(aside, run.checkpoint(number), run, Manifest(progress, f"{number:06d}", str(model)))
    write_manifest(run, Manifest(Progress(8, 8, 512), "000008", str(model), kind="train"))
    return run


def config(**changes: object) -> TrainConfig:
    """Return a small configuration of GRPO."""
    return config_from_mapping(GRPO | changes, "a test")


def test_the_newest_checkpoint_before_is_where_the_models_come_from(run: RunFolder) -> None:
    """Iteration 5 follows a checkpoint; a task that needs no models has one for the settings alone."""
    plan = planned(run.path, 5, ["update_actor"])
    assert (plan.start.iteration, plan.checkpoint, list(plan.between)) == (4, run.checkpoint(4), [])
    assert plan.state
    assert plan.engines
    advantage = planned(run.path, 7, ["advantage", "reward"])
    assert (advantage.tasks, advantage.state, advantage.engines) == (("reward", "advantage"), False, False)
    assert planned(run.path, 3, ["advantage"]).start == Progress()


@pytest.mark.parametrize(
    ("iteration", "tasks", "says"),
    [
        (9, ["reward"], "holds no experience of iteration 9\n  iterations that can be replayed: 2 to 5, 7 to 8"),
        (6, ["reward"], "holds no experience of iteration 6"),
        (7, ["update-actor"], "models before iteration 7 are gone.*not all experience since checkpoint 000004"),
        (3, ["update_actor"], "not all experience since the start\n  iterations that can be replayed: 5$"),
        (5, ["values"], "'values' is no task of this training.*\n  one of: rollout, reward, advantage, update_actor"),
        (5, ["reward", "rollouts"], "'rollouts' is no task"),
    ],
)
def test_what_cannot_be_replayed_is_said_with_what_can(
    run: RunFolder, iteration: int, tasks: list[str], says: str
) -> None:
    """A user's mistake, before anything starts."""
    with pytest.raises(UserError, match=says):
        planned(run.path, iteration, tasks)


def test_a_run_of_another_command_and_an_iteration_that_broke_off_are_refused(run: RunFolder) -> None:
    """And one whose experience is damaged is not taken for what was written."""
    write_columns(run.experience(5), {"response": ["a"], "response_tokens": [0]})
    with pytest.raises(UserError, match="ended before 'advantage': its experience has no column 'reward'"):
        planned(run.path, 5, ["advantage"])
    assert planned(run.path, 5, ["reward"]).iteration == 5
    data = bytearray(run.experience(5).read_bytes())
    data[10] ^= 1
    run.experience(5).write_bytes(bytes(data))
    with pytest.raises(UserError, match="is damaged"):
        planned(run.path, 5, ["reward"])
    write_manifest(run, Manifest(Progress(), kind="sft"))
    with pytest.raises(UserError, match="run of 'penstock sft'"):
        planned(run.path, 5, ["reward"])


def test_a_checkpoint_that_is_not_whole_is_not_taken(run: RunFolder) -> None:
    """Its hashes are looked at before engines start."""
    (run.checkpoint(4) / "state").write_text("y", encoding="utf-8")
    with pytest.raises(UserError, match="000004/state is damaged"):
        planned(run.path, 5, ["update_actor"])


def test_a_resume_that_changed_the_configuration_holds_for_what_came_after_it(run: RunFolder) -> None:
    """The next checkpoint has what was in force; after the last one the run's own has."""
    write_config(run, config(iterations=20))
    assert planned(run.path, 5, ["reward"]).config.iterations == 8
    write_columns(run.experience(9), dict.fromkeys(COLUMNS, np.zeros(2)))
    assert planned(run.path, 9, ["reward"]).config.iterations == 20


def test_a_task_sees_what_was_there_before_it(run: RunFolder) -> None:
    """So a replay that wrote nothing would be noticed."""
    assert inputs_of(COLUMNS, "reward") == ["response", "response_tokens"]
    assert inputs_of(COLUMNS, "greedy_baseline") == ["response", "response_tokens", "reward", "reward/part"]
    assert inputs_of(COLUMNS, "old_logprobs") == [*COLUMNS[:5]]
    assert inputs_of(COLUMNS, "update_actor") == [*COLUMNS]
    written = {task: outputs_of(COLUMNS, task) for task in ("reward", "old_logprobs", "advantage", "update_actor")}
    assert written == {
        "reward": ["reward", "reward/part"],
        "old_logprobs": ["logprobs_old", "kl"],
        "advantage": ["advantages"],
        "update_actor": [],
    }


def test_the_tasks_are_those_of_the_algorithm() -> None:
    """A critic and several steps bring passes; GRPO with one step has none."""
    assert tasks_of(config()) == ["rollout", "reward", "advantage", "update_actor"]
    ppo = config(algorithm={"name": "ppo", "mini_batches": 2})
    assert {"old_logprobs", "values", "update_critic"} <= set(tasks_of(ppo))
    apart = {"learning": {"roles": ["actor"]}, "generating": {"roles": ["rollout"]}}
    for staleness, first in ((0, "rollout"), (1, "reward")):  # whose weights change on the way comes out otherwise
        stream = config(rollout={"stream": {"staleness": staleness}}, groups=apart)
        assert tasks_of(stream)[0] == first
    for keeps, first in ((False, "rollout"), (True, "reward")):  # nor does a later process have older keys
        assert tasks_of(config(rollout={"carry": {"keep_kv_cache": keeps}}))[0] == first


def test_live_overrides_come_back_from_the_figures(
    run: RunFolder, training_with: Callable[[TrainConfig], Training]
) -> None:
    """Also where the iteration lies between two checkpoints; control: one before has the recipe's value."""
    training = training_with(config())
    overrides = {
        "rollout.temperature": {0: 0.5, 6: 0.25},
        "actor.micro_batch_tokens": 4096,
        "algorithm.entropy_coefficient": None,  # taken back
    }
    figures = live_figures(training, Progress(5, overrides=overrides))
    assert figures == {"live/rollout.temperature": 0.25, "live/actor.micro_batch_tokens": 4096.0}
    assert live_figures(training, Progress(5)) == {}
    append_metrics(run, 5, {"reward/mean": 0.5, "rollout/prompts_drawn": 70.0})
    append_metrics(run, 6, figures)
    write_columns(run.experience(6), dict.fromkeys(COLUMNS, np.zeros(2)))
    plan = planned(run.path, 6, ["update_actor"])
    progress = following(training, plan, plan.start)
    assert (progress.iteration, progress.prompt_cursor) == (5, 4 * 64 + 70)
    assert progress.overrides == live_overrides_in(figures)
    settings = next_settings(training, progress)
    assert (settings.temperature, settings.micro_batch_tokens) == (0.25, 4096)
    assert next_settings(training, plan.start).temperature == 1.0
