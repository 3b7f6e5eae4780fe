"""Drawing prompts: a killed and resumed training draws what one left alone draws, also where the sampler remembers.

No engine takes part: what a prompt earns is made up from its row and the iteration, as a policy that learns would have
it. Every iteration but the first has a further rollout, as of dynamic sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import pandas as pd
import pytest

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.data.prompts import PromptTable
from penstock.session.rollout.draw import draw, keep_memory, remember, restore_memory
from penstock.session.session import Training
from penstock.state.prompt_rewards import restore_prompt_rewards

SAMPLES, PROMPTS, FURTHER, ITERATIONS = 4, 6, 3, 8
CUSTOM = {"name": "tests.data.sampler_examples:by_topic", "settings": {"column": "area"}}
Start = Callable[[dict[str, Any]], Training]


@pytest.fixture
def start(training_with: Callable[[TrainConfig], Training]) -> Start:
    """Open a session with a sampler in the run folder, without anything of an earlier session's memory."""

    def make(sampler: dict[str, Any]) -> Training:
        training = training_with(
            TrainConfig.model_validate({"data": {"sampler": sampler}, "rollout": {"samples": SAMPLES}})
        )
        names = [f"train-{row:06d}" for row in range(3, 43)]  # as where long prompts were dropped
        frame = pd.DataFrame({"prompt_id": names, "area": np.arange(40) % 5, "level": np.arange(40) % 7})
        training.session().prompts["train"] = PromptTable(frame, 3)
        return training

    return make


def rollout(training: Training, iteration: int, number: int, cursor: int, count: int) -> list[int]:
    """Draw, and remember what the prompts earned: more in later iterations, another share for each row."""
    rows = draw(training, iteration, cursor, count)
    table = training.session().prompts["train"].frame
    ids = np.repeat(table["prompt_id"].to_numpy()[rows], SAMPLES).tolist()
    share = (np.repeat(rows, SAMPLES) * 7 % 40 + iteration) / 48
    rewards_B = (np.tile(np.arange(SAMPLES), count) / SAMPLES < share).astype(np.float64)
    remember(training, iteration, number, ids, rewards_B)
    return rows.tolist()


def play(training: Training, first: int, last: int) -> dict[int, list[int]]:
    """Run iterations `first` to `last`; return the rows that each drew."""
    drawn = {}
    for iteration in range(first, last + 1):
        cursor = (iteration - 1) * (PROMPTS + FURTHER)
        drawn[iteration] = rollout(training, iteration, 0, cursor, PROMPTS)
        drawn[iteration] += rollout(training, iteration, 1, cursor + PROMPTS, FURTHER)
        keep_memory(training, iteration)
    return drawn


SAMPLERS = [{}, {"name": "curriculum", "column": "level"}, {"name": "adaptive", "half_life": 3}, CUSTOM]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["shuffled", "curriculum", "adaptive", "custom"])
@pytest.mark.parametrize("checkpoint", [0, 3, 5])
def test_a_resumed_training_draws_what_one_left_alone_draws(
    start: Start, sampler: dict[str, Any], checkpoint: int, tmp_path: Path
) -> None:
    """Killed in iteration 6, in the middle of a line, with a checkpoint of 3, of 5, or none at all."""
    copies = tmp_path / "checkpoint"
    copies.mkdir()
    training = start(sampler)
    alone = play(training, 1, ITERATIONS)
    file = training.run.prompt_rewards
    whole = file.read_bytes() if file.exists() else None
    file.unlink(missing_ok=True)

    training = start(sampler)
    play(training, 1, checkpoint)
    if checkpoint and whole is not None:
        copyfile(file, copies / file.name)
    play(training, checkpoint + 1, 6)
    if whole is not None:
        with file.open("ab") as stream:
            stream.write(b'{"iteration": 7, "rollo')
    training = start(sampler)
    restore_memory(training, copies if checkpoint else None, checkpoint)
    resumed = play(training, checkpoint + 1, ITERATIONS)
    assert resumed == {iteration: alone[iteration] for iteration in resumed}
    assert (file.read_bytes() if file.exists() else None) == whole


@pytest.mark.parametrize("sampler", SAMPLERS[2:], ids=["adaptive", "custom"])
def test_without_its_memory_a_sampler_draws_others(start: Start, sampler: dict[str, Any]) -> None:
    """The control: what was earned matters, so that losing it would be seen above."""
    alone = play(start(sampler), 1, ITERATIONS)
    forgotten = play(start(sampler), 4, ITERATIONS)
    assert forgotten != {iteration: alone[iteration] for iteration in forgotten}


def test_memory_that_is_lost_is_noticed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A checkpoint without it, or with a line less, is none to go on from. Control: it is what the run had then."""
    copies, training = tmp_path_factory.mktemp("checkpoint"), start({"name": "adaptive"})
    play(training, 1, 4)
    lines = training.run.prompt_rewards.read_text(encoding="utf-8").splitlines(keepends=True)
    for left in ([], lines[1:], lines[:2], [lines[0], lines[2], lines[1]]):
        (copies / "prompts.jsonl").write_text("".join(left), encoding="utf-8")
        with pytest.raises(UserError, match=r"prompts.jsonl does not hold iterations 1 to 3"):
            restore_memory(start({"name": "adaptive"}), copies, 3)
    (copies / "prompts.jsonl").write_text("".join(lines[:3]), encoding="utf-8")
    assert list(restore_prompt_rewards(training.run, copies, 3)) == [1, 2, 3]
    assert training.run.prompt_rewards.read_text(encoding="utf-8") == "".join(lines[:3])


def test_memory_is_kept_only_for_those_who_ask(start: Start) -> None:
    """With the mean reward of every prompt drawn, those of the further rollout included; shuffled writes nothing."""
    training = start({"name": "adaptive"})
    drawn = play(training, 1, 1)
    (rollouts,) = restore_prompt_rewards(training.run, training.run.path, 1).values()
    entries = [entry for part in rollouts for entry in part]
    assert [name for name, _ in entries] == [f"train-{row + 3:06d}" for row in drawn[1]]
    means = [np.mean([n / SAMPLES < (row * 7 % 40 + 1) / 48 for n in range(SAMPLES)]) for row in drawn[1]]
    assert [reward for _, reward in entries] == means
    assert len(set(means)) > 2
    training.run.prompt_rewards.unlink()
    play(start({}), 1, 2)
    assert not training.run.prompt_rewards.exists()


def test_a_rollout_that_is_scored_again_replaces_itself(start: Start) -> None:
    """The reward task may be tried twice."""
    training = start({"name": "adaptive"})
    rollout(training, 1, 0, 0, PROMPTS)
    once = draw(training, 2, PROMPTS, PROMPTS)
    rollout(training, 1, 0, 0, PROMPTS)
    assert draw(training, 2, PROMPTS, PROMPTS).tolist() == once.tolist()


def test_a_sampler_that_answers_differently_is_refused(start: Start) -> None:
    """It would draw other prompts in a resumed run; noticed at the first draw."""
    with pytest.raises(UserError, match="returned other rows when asked the same again"):
        draw(start({"name": "tests.data.sampler_examples:forgetful"}), 1, 0, PROMPTS)
