"""Drafts for the last responses: what is drafted, how many steps that saves, and real engines that verify it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.benchmarks.reporting.result import read_result
from penstock.benchmarks.speculation import measuring, tail
from penstock.benchmarks.speculation.drafter import Drafter, Lookup
from penstock.benchmarks.speculation.stepping import Step, figures_of, of_decoding
from penstock.configs.sections.model import TinyModel
from penstock.engines.groups.environment import FORCED_VARIABLES
from penstock.engines.models.tiny import make_tiny_model
from penstock.state.experience import write_columns
from tests.processes import ROOT

RANDOM = np.random.default_rng(0).permutation(400).tolist()  # no token comes twice


def test_what_followed_the_last_tokens_is_drafted() -> None:
    """From where they stood last, and on and on where the text repeats. Control: tokens that never stood there."""
    text = Lookup([1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 1, 2, 3])
    assert text.after(text.last, 3) == [6, 7, 1]
    assert text.after((2, 3, 4), 2) == [5, 9]
    again = Lookup([7, 1, 2, 1, 2, 1])
    assert again.after(again.last, 5) == [2, 1, 2, 1, 2]
    assert Lookup(RANDOM).after(tuple(RANDOM[-3:]), 4) == []
    assert Lookup([1, 2]).after((1, 2), 4) == []


def test_few_sequences_are_drafted_for_and_many_are_not() -> None:
    """Nor is one that computes its prompt, nor beyond the longest length; a sequence in another's place is its own."""
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        model_config=SimpleNamespace(max_model_len=12),
        additional_config={"drafts_up_to": 2},
    )
    drafter = Drafter(config)
    tokens_BT = np.array([[1, 2, 3, 4, 1, 2, 3, 0, 0, 0, 0, 0], [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 0, 0]])
    assert drafter.propose([[3], [8]], np.array([7, 10]), tokens_BT) == [[4, 1, 2], [8]]
    assert drafter.propose([[3], []], np.array([7, 10]), tokens_BT) == [[4, 1, 2], []]
    assert drafter.propose([[3], [8], [8]], np.array([7, 10, 10]), tokens_BT) == [[], [], []]
    assert drafter.propose([[3]], np.array([7]), tokens_BT[:1]) == [[4, 1, 2]]
    assert drafter.propose([[9]], np.array([5]), np.array([[4, 1, 2, 3, 9, 0]])) == [[]]


@pytest.mark.parametrize("drafts", [1, 3, 4])
def test_a_step_brings_the_right_drafts_and_one_token_more(drafts: int) -> None:
    """Every token comes once. Controls: a text that never repeats takes a step a token, whatever is drafted of others
    that are unlike it.
    """
    repeated = [5] * 40
    assert tail.steps_of([5, 5, 5, 5], repeated, 0, drafts) == -(-40 // (drafts + 1))
    assert tail.steps_of([], RANDOM, 0, drafts) == 400
    assert tail.steps_of([], RANDOM, 390, drafts) == 10
    assert tail.steps_of([], RANDOM, 3, drafts, Lookup(RANDOM)) == -(-397 // (drafts + 1))
    assert tail.steps_of([], RANDOM, 3, drafts, Lookup(RANDOM[::-1])) == 397


def test_drafts_count_up_to_the_first_wrong_one() -> None:
    assert tail.accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert tail.accepted([1, 9, 3], [1, 2, 3, 4]) == 1
    assert tail.accepted([1, 2, 3], [1, 2]) == 2
    assert tail.accepted([], [1]) == tail.accepted([9], [1]) == 0


def test_the_last_responses_of_an_experience_are_drafted_for(tmp_path: Path) -> None:
    """From when the others have ended: one that repeats itself saves steps, those that say nothing twice save none."""
    long = RANDOM[:100]
    responses = [[*long[:60], 401], long, long[:20], [5] * 70, RANDOM[200:300], RANDOM[200:260]]
    file = _experience(tmp_path, responses, np.array([0, 0, 0, 1, 2, 3]))
    result = tail.measure(file, "command", left=3, drafts=4)
    assert result.settings["begin"] == 61
    found = {row["response"]: (row["tokens"], row["steps_own"], row["steps_group"]) for row in result.details}
    assert found == {3: (9, 2, 2), 1: (39, 39, 39), 4: (39, 39, 39)}
    assert (result.figures["tail_tokens"], result.figures["tail_steps"], result.figures["steps_own"]) == (87, 39, 39)
    assert result.figures["accepted_own"] == pytest.approx(87 / 80 - 1)


def test_ended_responses_help_those_of_their_prompt(tmp_path: Path) -> None:
    """What they said comes again in the tail of one that is longer: in a fifth of the steps with four drafts."""
    said = RANDOM[:50]
    longer = [*RANDOM[100:150], *said]
    file = _experience(tmp_path, [said, longer, RANDOM[300:320]], np.array([0, 0, 1]))
    figures = tail.measure(file, "command", left=1, drafts=4).figures
    assert (figures["tail_steps"], figures["steps_own"]) == (50, 50)
    assert figures["steps_group"] == 3 + -(-47 // 5)  # after three tokens that tell it
    other = _experience(tmp_path, [said, longer, RANDOM[300:320]], np.array([1, 0, 1]))
    assert tail.measure(other, "command", left=1, drafts=4).figures["steps_group"] == 50


def test_an_experience_without_a_tail_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        tail.measure(tmp_path / "absent.parquet", "command", left=1, drafts=4)
    file = _experience(tmp_path, [[1, 2], [3, 4]], np.zeros(2))
    with pytest.raises(UserError, match="2 responses, and 2 would be the last"):
        tail.measure(file, "command", left=2, drafts=4)
    with pytest.raises(UserError, match="the last 2 responses of .* end together"):
        tail.measure(file, "command", left=1, drafts=4)
    played = _experience(tmp_path, [[1, 2], [3, 4, 5]], np.zeros(2), mask=0)
    with pytest.raises(UserError, match="has episodes"):
        tail.measure(played, "command", left=1, drafts=4)


def _experience(folder: Path, responses: list[list[int]], groups_B: np.ndarray, mask: int = 1) -> Path:
    file = folder / "000001.parquet"
    rows = Ragged.of(responses, np.int32)
    write_columns(
        file,
        {
            "prompt_tokens": Ragged.of([[500]] * len(responses), np.int32),
            "response_tokens": rows,
            "group": groups_B.astype(np.int64),
            "loss_mask": Ragged(np.full(len(rows.values_T), mask, np.uint8), rows.offsets_B1),
        },
    )
    return file


def test_steps_count_in_which_every_sequence_decodes() -> None:
    """Neither those of prompts, nor those after a sequence has ended, nor the first after either."""
    prompts, decode = Step(0.0, 2, 64, 0, 2), [Step(float(at), 2, 6, 4, 2 + at % 3) for at in (1, 2, 4)]
    fewer, last = Step(9.0, 1, 3, 2, 1), Step(20.0, 2, 6, 4, 6)
    steps = [prompts, *decode, fewer, last]
    assert [(seconds, step.ended) for seconds, step in of_decoding(steps, 2)] == [(1.0, 2.0), (2.0, 4.0)]
    figures = figures_of(steps, 2)
    assert (figures["step_s"], figures["drafted"], figures["accepted"]) == (1.5, 2.0, 0.75)
    assert figures["tokens_per_s"] == pytest.approx(2 * 1.75 / 1.5)


def test_drafting_pays_once_it_brings_more_than_it_takes() -> None:
    """At the break-even both ways make as many tokens a second; a step that is no longer needs no draft accepted."""
    needed = measuring.pays_from(0.0025, 0.004)
    assert (1 + needed) / 0.004 == pytest.approx(1 / 0.0025)
    assert measuring.pays_from(0.0025, 0.002) == 0


def test_what_pays_is_told_of_steps_of_the_same_text() -> None:
    """Verifying takes a step of as many tokens, and where it comes in turns what these take more."""
    seconds = {("ahead", 2): 2.0, ("ahead", 10): 3.0, ("in turns", 2): 2.5, ("drafting", 2): 5.0}
    details = [
        {"way": way, "text": "repeats", "rows": rows, "step_s": step_s, "accepted": 0.5 * (way == "drafting")}
        for (way, rows), step_s in seconds.items()
    ]
    details += [
        {"way": way, "text": "random", "rows": rows, "step_s": step_s, "accepted": 0.0}
        for way, rows, step_s in (("ahead", 2, 9.0), ("ahead", 16, 4.0), ("drafting", 16, 5.0))
    ]
    figures = measuring._figures(details, [2], batch=16, drafts=4)
    assert (figures["step_s_2"], figures["accepted_2"]) == (2.0, 0.5)
    assert (figures["drafting_pays_from_2"], figures["verify_pays_from_2"]) == (1.5, 0.5)
    assert (figures["verify_in_turns_step_s_2"], figures["verify_in_turns_pays_from_2"]) == (3.5, 0.75)
    assert (figures["step_s_16"], figures["drafting_step_s_16"], figures["batch_slower"]) == (4.0, 5.0, 0.25)


@pytest.mark.parametrize(
    ("rows", "batch", "message"),
    [([1], 512, "there is no model in"), ([1, 4], 19, "4 sequences with 4 drafts each are more tokens")],
)
def test_work_that_cannot_be_measured_is_refused(tmp_path: Path, rows: list[int], batch: int, message: str) -> None:
    if batch < 512:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        measuring.measure(tmp_path, "command", rows=rows, batch=batch, drafts=4, prompt=8, response=8)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_engines_say_the_same_with_drafts_and_without(tmp_path: Path) -> None:
    """Greedy tokens are equal, in float32, though drafts are accepted in their midst, and sequences end where they do.

    Control: most drafts are wrong, so that tokens would differ if they were not verified. For a full batch nothing is
    drafted.
    """
    tiny = TinyModel(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=64, max_positions=256)
    make_tiny_model(tmp_path / "model", tiny, 512, eos=1, pad=0, seed=0)
    out = tmp_path / "result.json"
    sizes = ["--rows", "1", "--rows", "3", "--batch", "16", "--prompt", "16", "--response", "96"]
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "speculation", str(tmp_path / "model"), *sizes]
    subprocess.run([*command, "--out", str(out)], check=True, cwd=ROOT, capture_output=True)
    result = read_result(out)
    greedy = [row for row in result.details if row["text"] == "repeats"]
    assert {row["way"] for row in greedy} == {"ahead", "in turns", "drafting"}
    assert all(row["same_tokens"] == 1 for row in greedy)
    rows = {(row["way"], row["text"], row["rows"]): row for row in result.details}
    for count in (1, 3):
        drafting = rows["drafting", "repeats", count]
        assert 0 < drafting["accepted"] < drafting["drafted"]
        assert rows["ahead", "repeats", count]["accepted"] == rows["ahead", "repeats", count]["drafted"] == 0
    assert rows["drafting", "random", 16]["drafted"] == 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_verified_drafts_change_no_distribution(tmp_path: Path) -> None:
    """Sampled tokens, their log-probs and where responses end are the model's own, most drafts being wrong.

    Control: the same of vLLM's CPU build as it is, which samples drafted tokens at temperatures that it has not got.
    """
    tiny = TinyModel(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=64, max_positions=64)
    make_tiny_model(tmp_path, tiny, 64, eos=1, pad=0, seed=0)
    found = {}
    for kind in ("repaired", "as it is"):
        command = [sys.executable, "-m", "tests.benchmarks.speculation.verified", str(tmp_path), "2560", kind]
        environment = os.environ | FORCED_VARIABLES
        ended = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, env=environment)
        found[kind] = json.loads(ended.stdout.splitlines()[-1])
    right, wrong = found["repaired"], found["as it is"]
    assert right["accepted"] > 0, found
    assert right["ends"]
    assert right["gap"] < 1e-4
    assert abs(right["z"]) < 4
    assert wrong["gap"] > 0.01
    assert wrong["z"] > 10
