"""The next rollout begins while its iteration has not, once and with what the iteration would ask for."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from penstock.base.ragged import Ragged
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.rollout import EngineResponses, Generate
from penstock.session.requests import BegunRollout, Rollout
from penstock.session.rollout.carried import POLICY_VERSIONS, begun_before, not_begun
from penstock.session.rollout.draw import draw
from penstock.session.rollout.ended import EndedFile, origin_of_ended
from penstock.session.rollout.generation import await_rollouts
from penstock.session.session import Stage, Training
from penstock.session.settings import next_settings
from penstock.state import experience
from penstock.state.deferred import Deferred
from penstock.state.experience import ExperienceRef, column_names, consolidate, origin_of, read_columns
from penstock.state.manifest import Progress
from penstock.state.run_folder import drop_lost_experience
from penstock.tasks.iteration.rollout import (
    begin_next_rollout,
    begin_rollout,
    begin_rollout_ahead,
    further_rollout,
    rollout,
    sampled_with,
)
from tests.echo import Echo, ended_responses

PROMPTS, SAMPLES = 3, 2
NOTHING_CARRIED = not_begun(0, environment=False)


class Engines(Echo):
    """One rank of the policy that the iteration wants; it answers once it may."""

    def __init__(self) -> None:
        super().__init__(ranks=1)
        self.may_answer = threading.Event()
        self.behind = 0  # updates that the policy has not had

    def answer(self, asked: Generate, positions: np.ndarray) -> EngineResponses:
        """Answer as a rank whose policy is that of the iteration before."""
        assert self.may_answer.wait(10)
        self.policy_version = asked.sampling.seed[1] - 1 - self.behind
        return super().answer(asked, positions)


@pytest.fixture
def prepared(
    training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Training, Engines]]:
    """Make a training of five iterations with a table of seven prompts."""
    monkeypatch.setattr("penstock.tasks.iteration.rollout.generation_figures", lambda *_: {})  # of a GPU
    for module in ("penstock.tasks.iteration.rollout", "penstock.session.rollout.carried"):
        monkeypatch.setattr(f"{module}.get_run_logger", lambda: logging.getLogger("rollout"))

    def make(**sections: Any) -> tuple[Training, Engines]:
        apart = {"training": {"roles": ["actor"]}, "generating": {"roles": ["rollout"]}}
        changes = {"iterations": 5, "rollout": {"prompts": PROMPTS, "samples": SAMPLES}, "checkpoint": {"every": 0}}
        changes |= {"groups": apart} if "stream" in sections.get("rollout", {}) else {}
        training, engines = training_with(config_from_mapping(changes | sections, "test")), Engines()
        training.run.experience(1).parent.mkdir(parents=True, exist_ok=True)
        names = [f"p{n}" for n in range(7)]
        tokens = [np.array([10 * n + 1, 5], np.int32) for n in range(7)]
        frame = pd.DataFrame({"prompt_id": names, "prompt_text": names, "prompt_tokens": tokens})
        training.session().prompts["train"] = SimpleNamespace(frame=frame)  # type: ignore[assignment]
        training.session().groups["rollout"] = engines  # type: ignore[assignment]
        return training, engines

    return make


def at(iteration: int) -> Progress:
    """Return the progress after an iteration without resampling."""
    return Progress(iteration=iteration, policy_version=iteration, prompt_cursor=iteration * PROMPTS)


def rolled_out(training: Training, progress: Progress) -> Stage:
    """Return the rollout of the iteration after `progress`, begun where it is wanted."""
    settings = next_settings(training, progress)
    return rollout.fn(training, settings, begin_rollout(training, settings, progress))


def test_engines_work_on_the_next_rollout_before_its_task_runs(
    prepared: Callable[..., tuple[Training, Engines]],
) -> None:
    """What the task would have sent is sent once, and what it makes of the replies is the same."""
    training, engines = prepared()
    begun = begin_next_rollout(training, at(2))
    assert begun is not None
    while not engines.commands:
        time.sleep(0.001)
    engines.may_answer.set()
    stage = rollout.fn(training, next_settings(training, at(2)), begun)
    ahead = read_columns(training.run.experience(3), ["sample_id", "response", "prompt"])

    training.run.experience(3).unlink()
    rolled_out(training, at(2))
    first, asked = engines.commands
    assert (first["key"], first["sampling"]) == ("3/rollout", asked["sampling"])
    assert all(np.array_equal(first["prompts"][part], asked["prompts"][part]) for part in ("values_T", "offsets_B1"))
    assert ahead == read_columns(training.run.experience(3), ["sample_id", "response", "prompt"])
    assert stage.experience.policy_version == 2


def test_an_experience_file_says_in_the_same_bytes_what_its_responses_were_drawn_with(
    prepared: Callable[..., tuple[Training, Engines]],
) -> None:
    """A resume compares them with its own: of the seed only the training's, as purpose and iteration follow."""
    training, engines = prepared(seed=7)
    engines.may_answer.set()
    rolled_out(training, at(2))
    assert json.dumps(origin_of(training.run.experience(3))) == (
        '{"seed": 7, "samples": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 1024, '
        '"ignore_eos": false, "logprobs": false, "environment": null}'
    )
    assert engines.commands[0]["sampling"]["seed"] == [7, 3, 0]


def test_its_seconds_are_those_that_the_engines_worked_and_not_those_they_waited(
    prepared: Callable[..., tuple[Training, Engines]],
) -> None:
    """What was done ahead counts as rollout; a task that comes late adds nothing. Control: none after the last."""
    training, engines = prepared()
    engines.may_answer.set()
    begun = begin_next_rollout(training, at(2))
    assert begun is not None
    generation = training.session().rollouts[begun.key].generation
    assert generation is not None
    generation.replies.result()
    time.sleep(2.0)
    training.session().clock.lap()
    metrics = rollout.fn(training, next_settings(training, at(2)), begun).metrics
    assert 0 < metrics["rollout/ahead_s"] < metrics["time/rollout_s"] < 1.9
    (span,) = training.session().clock.lap().spans
    assert span.seconds == metrics["time/rollout_s"]
    assert begin_next_rollout(training, at(5)) is None


def test_it_does_not_begin_where_it_would_be_in_the_way_or_in_vain(
    prepared: Callable[..., tuple[Training, Engines]],
) -> None:
    """Before a checkpoint that ranks write, after the last iteration, and where an earlier attempt left experience.

    Control: before one that hosts write from a snapshot it begins.
    """
    training, engines = prepared(checkpoint={"every": 2})
    training.session().snapshots = False
    engines.may_answer.set()
    rolled_out(training, at(3))
    before = len(engines.commands)
    for done in (2, 3, 4, 5):
        begin_next_rollout(training, at(done))
    assert len(engines.commands) == before
    begin_next_rollout(training, Progress(iteration=3, policy_version=7))  # another policy's: not to be used
    begin_next_rollout(training, at(1))
    training.session().snapshots = True
    begin_next_rollout(training, at(2))
    begun = training.session().rollouts
    assert [key for key, rollout in begun.items() if rollout.generation] == ["4/rollout", "2/rollout", "3/rollout"]


@pytest.mark.parametrize("restarted", [True, False])
def test_an_interrupted_rollout_is_taken_over_unless_the_machine_was_restarted(
    prepared: Callable[..., tuple[Training, Engines]], monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """Then its tokens may not have reached the disk: it is done again. Control: a killed process lost nothing."""
    training, engines = prepared()
    engines.may_answer.set()
    rolled_out(training, at(3))
    before = len(engines.commands)
    if restarted:
        monkeypatch.setattr(experience, "_boot", lambda: "later")
    rolled_out(training, at(3))
    assert len(engines.commands) - before == restarted
    path = training.run.experience(4)
    assert len(read_columns(path, ["response_tokens"])["response_tokens"]) == len(
        read_columns(path, ["group"])["group"]
    )


@pytest.mark.parametrize(
    ("changed", "overrides", "said"),
    [
        ({}, {"rollout.temperature": 0.7}, "temperature 1.0 instead of 0.7"),
        ({"rollout": {"prompts": PROMPTS, "samples": 3}}, {}, "samples 2 instead of 3, other prompts"),
        ({"rollout": {"prompts": 2, "samples": SAMPLES}}, {}, "other prompts"),
        ({"rollout": {"prompts": PROMPTS, "samples": SAMPLES, "top_p": 0.5}}, {}, "top_p 1.0 instead of 0.5"),
        ({"seed": 3}, {}, "seed 0 instead of 3, other prompts"),
        ({"actor": {"optimizer": {"learning_rate": 0.5}}}, {"algorithm.entropy_coefficient": 0.1}, None),
    ],
)
def test_responses_drawn_otherwise_are_not_taken_over(
    prepared: Callable[..., tuple[Training, Engines]],
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    overrides: dict[str, Any],
    said: str | None,
) -> None:
    """What is trained is what these settings draw, and as many prompts as are counted. Control: the loss's settings."""
    training, engines = prepared()
    engines.may_answer.set()
    rolled_out(training, at(3))
    consolidate(training.run.experience(4))  # as after an iteration that was recorded
    training, engines = prepared(**changed)
    engines.may_answer.set()
    progress = at(3).advanced(overrides=overrides)
    experience = rolled_out(training, progress).experience
    assert len(engines.commands) == (said is not None)
    config = training.config.rollout
    assert (experience.prompts, experience.samples) == (config.prompts, config.prompts * config.samples)
    assert (said in caplog.text) if said else not caplog.text


TAIL = {"rollout": {"prompts": PROMPTS, "samples": SAMPLES, "tail": {"extra": 0.5, "max_wait": 9}}}


def test_what_a_rollout_leaves_waits_for_a_round_of_its_own(prepared: Callable[..., tuple[Training, Engines]]) -> None:
    """Five prompts are begun, three make the batch, two wait; with four that wait the next round is theirs.

    The file says which wait, so that an interrupted iteration that is taken over leaves the same.
    """
    training, engines = prepared(**TAIL)
    engines.may_answer.set()
    table = training.session().prompts["train"].frame
    first = draw(training, 1, 0, 5)
    engines.longest = tuple(int(table["prompt_tokens"].iloc[row][0]) for row in first[1:3])
    stage = rolled_out(training, Progress())
    assert [command["wanted"] for command in engines.commands] == [PROMPTS]
    assert stage.experience.deferred == tuple(Deferred(int(row), 1) for row in first[1:3])
    assert (stage.experience.samples, stage.experience.prompts) == (PROMPTS * SAMPLES, 5)
    asked = table["prompt_id"].iloc[first[[0, 3, 4]]].repeat(SAMPLES)
    assert read_columns(training.run.experience(1), ["prompt_id"])["prompt_id"] == list(asked)
    assert stage.metrics["rollout/deferred_share"] == 0.4

    again = rolled_out(training, Progress())
    assert len(engines.commands) == 1, "the responses of the interrupted attempt are taken over"
    assert again.experience == stage.experience

    waiting = (*stage.experience.deferred, Deferred(0, 2), Deferred(1, 2))
    progress = Progress(iteration=2, policy_version=2, prompt_cursor=10, deferred=waiting)
    stage = rolled_out(training, progress)
    assert stage.experience.deferred == waiting[3:]
    assert (stage.experience.samples, stage.experience.prompts) == (PROMPTS * SAMPLES, 0)
    assert engines.commands[-1]["wanted"] is None


def test_responses_of_a_rollout_that_put_others_off_are_taken_over_by_its_like(
    prepared: Callable[..., tuple[Training, Engines]], caplog: pytest.LogCaptureFixture
) -> None:
    """Which prompts wait would be another answer otherwise. Control: one that puts off none takes none over."""
    training, engines = prepared(**TAIL)
    engines.may_answer.set()
    rolled_out(training, Progress())
    training, engines = prepared()
    engines.may_answer.set()
    assert rolled_out(training, Progress()).experience.deferred == ()
    assert len(engines.commands) == 1
    assert "prompts_begun 5 instead of None" in caplog.text


CARRY = {"rollout": {"prompts": PROMPTS, "samples": SAMPLES, "carry": {"extra": 0.5, "staleness": 2}}}


def test_a_rollout_goes_on_with_what_the_one_before_has_left(
    prepared: Callable[..., tuple[Training, Engines]], caplog: pytest.LogCaptureFixture
) -> None:
    """Five prompts are under way, three make the batch; two go on in the next, and are waited for in the one after.

    Each token has the version of the policy that sampled it. An interrupted iteration is taken over with what it has
    left. Control: if that is another, the responses are generated anew.
    """
    training, engines = prepared(**CARRY)
    engines.may_answer.set()
    table = training.session().prompts["train"].frame
    first = draw(training, 1, 0, 5)
    slow = first[1:3]
    engines.longest = tuple(int(table["prompt_tokens"].iloc[row][0]) for row in slow)
    progress, required, stages = Progress(), [], []
    for iteration in (1, 2, 3):
        stages.append(rolled_out(training, progress))
        required.append(engines.commands[-1]["required"])
        progress = at(iteration).advanced(
            prompt_cursor=5 + 3 * (iteration - 1), deferred=stages[-1].experience.deferred
        )
        if iteration == 2:
            engines.longest = ()
    assert required == [0, 0, 2]
    assert [stage.experience.prompts for stage in stages] == [5, 3, 3]
    assert all(stage.experience.deferred == tuple(Deferred(int(row), 1) for row in slow) for stage in stages[:2])
    assert [stage.metrics["rollout/unused_share"] for stage in stages] == [0, 0, 0]

    def by_prompt(iteration: int) -> dict[str, list[tuple[list[int], list[int]]]]:
        names = ["prompt_id", "response_tokens", "policy_versions"]
        ids, *columns = read_columns(training.run.experience(iteration), names).values()
        rows: dict[str, list[tuple[list[int], list[int]]]] = {}
        for row, name in enumerate(ids):
            tokens, versions = (column.row(row).tolist() for column in columns)
            rows.setdefault(name, []).append((tokens, versions))
        return rows

    (kept,) = (command["carried"] for command in engines.commands[1:2])
    assert kept["versions_T"].tolist() == [0] * 4
    third = by_prompt(3)
    for row in slow:
        name, token = table["prompt_id"].iloc[row], int(table["prompt_tokens"].iloc[row][0])
        assert third[name] == [([token] * 3, [0, 1, 2]), ([token] * 4, [0, 1, 2, 2])]
    assert all(set(versions) == {0} for rows in by_prompt(1).values() for _, versions in rows)
    assert stages[2].metrics["rollout/staleness_max"] == 2.0
    assert stages[0].metrics["rollout/off_policy_share"] == 0.0

    before, asked = Progress(), len(engines.commands)
    again = rolled_out(training, before)
    assert len(engines.commands) == asked, "the responses of the interrupted attempt are taken over"
    assert again.experience == stages[0].experience
    training.run.carried(2).rename(training.run.carried(1))
    rolled_out(training, before)
    assert len(engines.commands) == asked + 1
    assert "000001.carried.parquet beside them, which is another now" in caplog.text


DYNAMIC = {"algorithm": {"dynamic_sampling": {}}}


@pytest.mark.parametrize("way", [CARRY, TAIL])
def test_what_is_under_way_anyway_replaces_refused_groups(
    prepared: Callable[..., tuple[Training, Engines]], way: dict[str, Any]
) -> None:
    """Of a rollout that left two prompts one is complete first: it comes, and as many wait as before.

    What they have of responses is kept: for the next iteration, or with a tail for the next rollout of this one. Then
    only what is left in the end was sampled in vain, and all tokens are of one policy. Control: where nothing is put
    off as many prompts are drawn as should be enough, and all of them are waited for.
    """
    training, engines = prepared(**way, **DYNAMIC)
    engines.may_answer.set()
    table = training.session().prompts["train"].frame
    rows = draw(training, 1, 0, 6)
    tokens = [int(table["prompt_tokens"].iloc[row][0]) for row in rows]
    engines.longest = tuple(tokens[1:3])
    settings, stage = next_settings(training, Progress()), rolled_out(training, Progress())
    experience, path = stage.experience, training.run.experience(1)
    lost = 2 * SAMPLES if way is TAIL else 0  # a token of each response that is put off
    assert stage.metrics["rollout/unused_share"] == lost / (lost + experience.response_tokens)
    assert (POLICY_VERSIONS in column_names(path)) == (way is CARRY)
    engines.longest = (tokens[1], tokens[5])
    further = further_rollout(training, settings, experience, cursor=5, missing=1, more=2, number=1)
    asked = engines.commands[-1]
    assert (asked["wanted"], asked["required"], len(asked["prompts"]["offsets_B1"])) == (1, 0, 1 + 3)
    assert further.drawn == 1
    assert further.unused_tokens == (SAMPLES if way is TAIL else 0)  # one prompt has a second token, another its first
    assert further.columns["response_tokens"].lengths_B.tolist() == [2, 3], "it went on from a token"
    assert set(further.columns["prompt_id"]) == {table["prompt_id"].iloc[rows[2]]}
    waiting = [[int(rows[1]), 1, 1], [int(rows[5]), 1, 1]]
    assert further.origin.keys() == {"waiting", "carried"} and further.origin["waiting"] == waiting
    left = begun_before(training, 1, [Deferred(*prompt) for prompt in waiting])
    assert left is not None
    assert [left.tokens.row(row).tolist() for row in range(4)] == [
        [tokens[1]] * 2,
        [tokens[1]] * 2,
        [tokens[5]],
        [tokens[5]],
    ]

    training, engines = prepared()
    engines.may_answer.set()
    nobody_waits = replace(experience, deferred=())
    further = further_rollout(training, settings, nobody_waits, cursor=5, missing=1, more=2, number=1)
    assert (engines.commands[-1]["wanted"], engines.commands[-1]["carried"], further.drawn) == (None, None, 2)
    assert further.origin == {} and len(further.columns["prompt_id"]) == 2 * SAMPLES


def test_a_round_in_between_puts_off_again_and_is_taken_over(
    prepared: Callable[..., tuple[Training, Engines]],
) -> None:
    """It begins those that were put off once, takes the first to be complete, and puts off the others once more.

    An interrupted attempt's responses are taken over; those of other prompts are not. What it leaves replaces no group,
    since it was begun for an earlier iteration: new prompts are drawn, and waited for.
    """
    twice = {"rollout": {"prompts": PROMPTS, "samples": SAMPLES, "tail": {"extra": 0.5, "deferrals": 2}}}
    training, engines = prepared(**twice, **DYNAMIC)
    engines.may_answer.set()
    table = training.session().prompts["train"].frame
    waiting = tuple(Deferred(row, 1 + row // 3) for row in range(5))
    progress = Progress(iteration=2, policy_version=2, prompt_cursor=10, deferred=waiting)
    engines.longest = tuple(int(table["prompt_tokens"].iloc[row][0]) for row in (1, 4))
    stage = rolled_out(training, progress)
    (asked,) = engines.commands
    assert (asked["wanted"], len(asked["prompts"]["offsets_B1"]), stage.experience.prompts) == (PROMPTS, 1 + 5, 0)
    assert stage.experience.deferred == (Deferred(1, 1, 2), Deferred(4, 2, 2))
    assert (stage.metrics["rollout/long_round"], stage.metrics["rollout/prompts_drawn"]) == (0, 0)

    assert rolled_out(training, progress).experience == stage.experience
    assert len(engines.commands) == 1, "the responses of the interrupted attempt are taken over"
    others = replace(progress, deferred=(Deferred(6, 1), *waiting[1:]))
    rolled_out(training, others)
    assert len(engines.commands) == 2, "of another prompt of the batch they are not"

    settings = next_settings(training, progress)
    further = further_rollout(training, settings, stage.experience, cursor=10, missing=1, more=2, number=1)
    assert (engines.commands[-1]["wanted"], engines.commands[-1]["carried"], further.drawn) == (None, None, 2)
    assert further.origin["waiting"] == [[1, 1, 2], [4, 2, 2]]


def test_prompts_that_wait_for_a_later_round_replace_no_group(
    prepared: Callable[..., tuple[Training, Engines]],
) -> None:
    """Nothing is under way of them: those of earlier policies, and after a long round there is nobody else.

    They wait on. Control: what this iteration has begun goes on.
    """
    training, engines = prepared(**TAIL, **DYNAMIC)
    engines.may_answer.set()
    settings, earlier = next_settings(training, at(2)), Deferred(6, 1)
    experience = ExperienceRef("", 6, 6, 6, 2, prompts=5, deferred=(earlier, Deferred(0, 3), Deferred(1, 3)))
    further = further_rollout(training, settings, experience, cursor=12, missing=1, more=2, number=1)
    asked = engines.commands[-1]
    assert (asked["wanted"], len(asked["prompts"]["offsets_B1"])) == (1, 1 + 3)
    assert (
        further.origin["waiting"][0] == [earlier.row, earlier.since, earlier.begun]
        and len(further.origin["waiting"]) == 3
    )

    alone = ExperienceRef("", 6, 6, 6, 2, prompts=5, deferred=(earlier,))
    further = further_rollout(training, settings, alone, cursor=12, missing=1, more=2, number=1)
    asked = engines.commands[-1]
    assert (asked["wanted"], asked["carried"], further.drawn) == (None, None, 2)
    assert further.origin["waiting"] == [[earlier.row, earlier.since, earlier.begun]]


def test_what_ends_the_engines_ends_the_rollout(prepared: Callable[..., tuple[Training, Engines]]) -> None:
    """The error comes out where the responses are wanted."""
    training, engines = prepared()

    def lost(command: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
        raise RuntimeError("rank 0 exited")

    engines.call = lost  # type: ignore[method-assign]
    begun = begin_next_rollout(training, at(2))
    assert begun is not None
    with pytest.raises(RuntimeError, match="rank 0 exited"):
        rollout.fn(training, next_settings(training, at(2)), begun)


# ---- ahead of the update -------------------------------------------------------------------------------------------


def ahead_of(training: Training, progress: Progress, stage: Stage, scored: bool = False) -> BegunRollout | None:
    """Begin the rollout after the one of `stage`, while `progress` is before its update."""
    begun = begin_rollout_ahead(training, progress, stage, scored=scored)
    return None if begun is None else training.session().rollouts[begun.key]


def test_a_rollout_begins_before_the_update_on_the_one_before(
    prepared: Callable[..., tuple[Training, Engines]],
) -> None:
    """With the prompts that follow those of the batch, carried ones first, and as experience of the next update.

    A resume between the two asks for the same. Control: where the recipe waits, and after the last iteration, none.
    """
    training, engines = prepared(rollout={"prompts": PROMPTS, "samples": SAMPLES, "stream": {"staleness": 2}})
    engines.may_answer.set()
    stage = rolled_out(training, at(2))
    assert len(stage.experience.deferred) == 1
    engines.behind = 1
    ahead = ahead_of(training, at(2), stage)
    assert ahead is not None and ahead.generation is not None
    responses = ahead.generation.replies.result().ranks[0]
    assert responses is not None and responses.policy_version == 2
    assert ahead.round.begun[0] == stage.experience.deferred[0]
    assert ahead.round.drawn == PROMPTS and ahead.round.required == 1
    after = at(2).advanced(
        iteration=3,
        policy_version=3,
        prompt_cursor=at(2).prompt_cursor + stage.experience.prompts,
        deferred=stage.experience.deferred,
    )
    settings = next_settings(training, after)
    made = rollout.fn(training, settings, Rollout(4, "4/rollout"))
    assert made.experience.policy_version == 3
    assert made.metrics["rollout/staleness_max"] >= 1
    assert made.metrics["rollout/engine_pause_s"] >= 0 and made.metrics["rollout/batch_wait_s"] >= 0
    asked = engines.commands[-1]
    training.run.experience(4).unlink()
    begin_rollout(training, settings, after)
    training.session().rollouts["4/rollout"].generation.replies.result()  # type: ignore[union-attr]
    again = engines.commands[-1]
    assert again["key"] == asked["key"] == "4/rollout" and again["sampling"] == asked["sampling"]
    assert np.array_equal(again["prompts"]["values_T"], asked["prompts"]["values_T"])

    last = at(4)
    assert ahead_of(training, last, replace(stage, experience=replace(stage.experience, policy_version=4))) is None
    waiting, engines = prepared()
    engines.may_answer.set()
    assert ahead_of(waiting, at(2), rolled_out(waiting, at(2)), scored=True) is None


def test_a_rollout_ahead_is_awaited_before_older_weights_come(
    prepared: Callable[..., tuple[Training, Engines]],
) -> None:
    """A rollback brings them; its tokens would be of policies in no order, and older than they may be."""
    training, engines = prepared(rollout={"prompts": PROMPTS, "samples": SAMPLES, "stream": {"staleness": 1}})
    engines.may_answer.set()
    stage = rolled_out(training, at(2))
    engines.may_answer.clear()
    ahead = ahead_of(training, at(2), stage)
    assert ahead is not None and ahead.generation is not None
    waiting = threading.Thread(target=await_rollouts, args=(training,))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not ahead.generation.replies.done()
    engines.may_answer.set()
    waiting.join(10)
    assert ahead.generation.replies.done() and "4/rollout" in training.session().rollouts


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "grpo", "dynamic_sampling": {}}},
        {"algorithm": {"name": "remax"}},
        {"data": {"sampler": {"name": "adaptive"}}},
    ],
)
def test_it_does_not_begin_before_rewards_that_matter_to_it(
    prepared: Callable[..., tuple[Training, Engines]], sections: dict[str, Any]
) -> None:
    """Where more prompts may be needed, greedy responses come first, or rewards decide what is drawn. Then it begins.

    Control: the test above, where it does before.
    """
    stream = {"prompts": PROMPTS, "samples": SAMPLES, "stream": {"staleness": 1}}
    training, engines = prepared(rollout=stream, **sections)
    engines.may_answer.set()
    stage = rolled_out(training, at(2))
    assert ahead_of(training, at(2), stage) is None
    assert ahead_of(training, at(2), stage, scored=True) is not None


def test_what_had_ended_of_a_rollout_ahead_is_found_by_the_next_attempt(
    prepared: Callable[..., tuple[Training, Engines]],
) -> None:
    """Killed during the update: its engines have the weights of before again, and what these had sampled is taken over.

    What was sampled with the weights after that update, which is lost, is not. Control: where rollouts wait for the
    update, what a later one had ended is of a policy that is lost.
    """
    training, engines = prepared(rollout={"prompts": PROMPTS, "samples": SAMPLES, "stream": {"staleness": 1}}, seed=3)
    engines.may_answer.set()
    stage = rolled_out(training, at(2))
    ahead = ahead_of(training, at(2), stage)
    assert ahead is not None and ahead.generation is not None
    ahead.generation.replies.result()
    settings = next_settings(training, at(3))
    origin = origin_of_ended(sampled_with(training, settings, ahead.round), None, ahead.prompts, NOTHING_CARRIED)
    kept = EndedFile(training.run.ended(4), origin)
    kept.add(ended_responses([0], [1], Ragged.of([[7, 8]], np.int32), version=2))
    kept.add(ended_responses([1], [0], Ragged.of([[9]], np.int32), version=3))
    kept.close()
    drop_lost_experience(training.run, 2)
    assert training.run.ended(4).exists() and training.run.experience(3).exists()
    again = ahead_of(training, at(2), stage)
    assert again is not None and again.generation is not None and again.generation.request.ended is not None
    assert again.generation.request.ended.positions.tolist() == [0]
    assert again.generation.request.ended.responses.versions_T.tolist() == [2, 2]

    again.generation.replies.result()
    waiting, engines = prepared()
    engines.may_answer.set()
    waiting.run.ended(4).touch()
    begin_rollout(waiting, next_settings(waiting, at(2)), at(2))
    assert not waiting.run.ended(4).exists()
