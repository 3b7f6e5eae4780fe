"""Trainings on a taskset of verifiers whose agent compacts its history: what it says behind the summary is learnt, too.

The teacher answers and summarises rightly and is wrong where it takes up the summary, so that there is nothing to learn
but on the path that begins there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.data.tokenizer import load_tokenizer
from penstock.engines.batches.packing import read_rows
from penstock.environments.verifiers import FILE
from penstock.state.experience import read_columns
from penstock.state.run_folder import RunFolder, read_metrics
from tests.gateway.chat_training import (
    DIGITS,
    ITERATIONS,
    check_that_it_ended_alike,
    check_that_it_learnt,
    killed_and_resumed,
    trained,
)
from tests.gateway.verifiers_interpreter import verifiers_python as verifiers_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("verifiers"),
    pytest.mark.timeout(1800),
]

TASKSET = Path(__file__).with_name("verifiers_trees.py")
SAID = (
    "import json; from verifiers.v1.harnesses.utils import compaction as c;"
    "print(json.dumps([c.CHECKPOINT_COMPACTION_PROMPT, c.POST_COMPACTION_FRAMING]))"
)
STEPS = 120
BETWEEN = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def learned_with(folder: Path, python: str, max_paths: int) -> RunFolder:
    """Train in a folder; what the teacher is asked is verifiers' own words."""
    asked = subprocess.run([python, "-c", SAID], capture_output=True, text=True, check=True).stdout
    checkpoint, framing = json.loads(asked)

    def says(row: dict[str, Any], right: bool, generator: np.random.Generator) -> list[dict[str, Any]]:
        said = f"It is {row['wanted']}."
        last = row["wanted"] if right else generator.integers(0, 2 * DIGITS - 1)
        first = {**row, "response": [f"{said}<|im_end|>", BETWEEN.format(checkpoint), said]}
        return [first, {**row, "prompt": f"{framing}\n\n{said}", "response": [f"It is {last}."]}]

    shutil.copy(TASKSET, folder)
    taskset = {"id": TASKSET.stem, "largest": DIGITS - 1}
    (folder / FILE).write_text(json.dumps({"tasksets": {"trees": {"python": python, "taskset": taskset}}}))
    environment = {"type": "penstock.environments.verifiers:Taskset", "settings": {"name": "trees"}, "timeout_s": 300}
    paths = {"max_turns": 6, "max_paths": max_paths}
    return trained(folder, {**environment, **paths}, says, tokens=288, longest=112, steps=STEPS, words=1024)


@pytest.fixture(scope="module")
def learned(prefect_harness: None, verifiers_python: str, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training with two paths."""
    return learned_with(tmp_path_factory.mktemp("compacting"), verifiers_python, 2)


def test_the_held_out_reward_rises(learned: RunFolder) -> None:
    """Of right answers behind a summary, which alone are worth anything."""
    check_that_it_learnt(learned)


def test_a_path_begins_behind_each_summary(learned: RunFolder) -> None:
    """Both paths of a sample are branches that verifiers counts, with as many drawn tokens as it counts, one reward and
    one advantage. Control: there are samples whose last turn is wrong.
    """
    tokenizer = load_tokenizer(str(learned.path.parent / "model"))
    rows = read_rows(str(learned.experience(1)), ["advantages"])
    names = ["reward", "unbridged_turns", "environment/branches", "environment/sampled", "environment/right"]
    columns = read_columns(learned.experience(1), names)
    assert rows.paths is not None and not columns["unbridged_turns"].any()
    assert (columns["environment/branches"] == rows.paths.counts_B).all() and (rows.paths.counts_B == 2).mean() > 0.9
    assert (columns["reward"] == columns["environment/right"]).all() and 0.1 < columns["reward"].mean() < 0.8
    for row in range(len(rows)):
        learnt = rows.mask.row(row) > 0
        assert learnt.sum() == columns["environment/sampled"][row]
        assert len({*rows.columns["advantages"].row(row)[learnt].tolist()}) == 1
        first, second = rows.paths.of_rows(np.array([row])).tolist()[:2]
        summary = tokenizer.decode(rows.sequences.responses.row(first)).rpartition("assistant\n")[2]
        prompt = tokenizer.decode(rows.sequences.prompts.row(second))
        assert summary.removesuffix("<|im_end|>").strip() in prompt and rows.sequences.mask.row(second).all()
    figures = {item["iteration"]: item["metrics"] for item in read_metrics(learned)}
    assert all(figures[iteration]["rollout/paths"] >= 2 for iteration in range(1, ITERATIONS + 1))


def test_a_killed_training_ends_as_one_left_alone(learned: RunFolder) -> None:
    """Its process ended with it, and another one played the episodes that were lost, and those that came after."""
    check_that_it_ended_alike(killed_and_resumed(learned.path.parent, "verifiers_runner.py"), learned)


@pytest.mark.usefixtures("prefect_harness")
def test_with_one_path_what_is_said_behind_a_summary_is_not_learnt(
    verifiers_python: str, tmp_path: Path, learned: RunFolder
) -> None:
    """It is counted, and the held-out reward ends below that of the training with two."""
    alone = learned_with(tmp_path, verifiers_python, 1)
    columns = read_columns(alone.experience(1), ["turns", "unbridged_turns"])
    assert (columns["unbridged_turns"] >= 1).mean() > 0.9
    one, two = ({item["iteration"]: item["metrics"] for item in read_metrics(run)} for run in (alone, learned))
    assert one[0]["heldout/accuracy"] == two[0]["heldout/accuracy"]
    assert one[ITERATIONS]["heldout/accuracy"] < two[ITERATIONS]["heldout/accuracy"] - 0.1
