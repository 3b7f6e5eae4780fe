"""Of a run's experience the best responses, or the best and the worst, with the columns of their prompts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from penstock.base.errors import UserError
from penstock.data.prompts import PromptTable
from penstock.data.selection import best_and_worst, best_responses, write_selection
from penstock.state.experience import write_columns
from penstock.state.run_folder import RunFolder

# prompt, response, reward, cut off, failed
FIRST = [("a", "a1", 0.5, 0, None), ("a", "a2", 1.0, 0, None), ("b", "b1", 0.0, 0, None), ("b", "b2", 9.0, 1, None)]
SECOND = [("a", "a2", 1.0, 0, None), ("a", "a3", 1.0, 0, None), ("c", "c1", 0.7, 0, None), ("c", "c2", 8.0, 0, "slow")]


def written(run: RunFolder, iteration: int, rows: list[tuple[str, str, float, int, str | None]]) -> None:
    """Write the experience of an iteration."""
    prompts, responses, rewards, truncated, failures = (list(column) for column in zip(*rows, strict=True))
    columns = {
        "sample_id": [f"{iteration:06d}/{name}/{number}" for number, name in enumerate(prompts)],
        "prompt_id": prompts,
        "response": responses,
        "reward": np.asarray(rewards),
        "reward_failure": failures,
        "truncated": np.asarray(truncated, np.uint8),
    }
    run.experience(iteration).parent.mkdir(exist_ok=True)
    write_columns(run.experience(iteration), columns)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with the experience of two iterations, and prompts in another order."""
    run = RunFolder(tmp_path)
    written(run, 1, FIRST)
    written(run, 2, SECOND)
    ids = ["c", "b", "a"]
    frame = pd.DataFrame({"prompt_id": ids, "prompt_text": ids, "prompt_tokens": [np.asarray([1], np.int32)] * 3})
    frame["question"] = ["C?", "B?", "A?"]
    frame["messages"] = [[{"role": "user", "content": name}] for name in ids]
    frame["response"] = ["old"] * 3
    run.prompts("train").parent.mkdir(exist_ok=True)
    PromptTable(frame, 0).save(run.prompts("train"))
    return run


def test_the_highest_rewards_of_each_prompt_are_taken(run: RunFolder, tmp_path: Path) -> None:
    """Each text once, the earlier first; none that was cut off or failed, though its reward is the highest.

    Controls: with a least reward a prompt may have none; two of a prompt are two rows.
    """
    found = best_responses(run, best=1, least=None, column="response")
    assert list(zip(found.rows["question"], found.rows["response"], strict=True)) == [
        ("C?", "c1"),
        ("B?", "b1"),
        ("A?", "a2"),
    ]
    assert (found.prompts, found.responses, found.rewards) == (3, 8, (0.0, 1.0))
    two = best_responses(run, best=2, least=0.6, column="answer").rows
    assert two["answer"].tolist() == ["c1", "a2", "a3"]
    assert two["response"].tolist() == ["old"] * 3
    for name in ("best.jsonl", "best.parquet"):
        write_selection(two, tmp_path / name)
    read = [json.loads(line) for line in (tmp_path / "best.jsonl").read_text(encoding="utf-8").splitlines()]
    assert read[0]["messages"] == [{"role": "user", "content": "c"}]
    assert (
        [row["reward"] for row in read]
        == pd.read_parquet(tmp_path / "best.parquet")["reward"].tolist()
        == [0.7, 1.0, 1.0]
    )


def test_the_best_and_the_worst_of_a_prompt_make_a_pair(run: RunFolder) -> None:
    """Where their rewards differ. Control: by more than any do, there is none."""
    found = best_and_worst(run, margin=0.1).rows
    pairs = found[["question", "chosen", "rejected", "reward", "reward_rejected"]]
    assert pairs.to_numpy().tolist() == [["A?", "a2", "a1", 1.0, 0.5]]
    with pytest.raises(UserError, match="no two rewards of a prompt differ by 0.6"):
        best_and_worst(run, margin=0.6)


def test_what_cannot_be_taken_is_said(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="of 8 responses none is taken: the highest reward is 1"):
        best_responses(run, best=1, least=1.5, column="response")
    (tmp_path / "there.jsonl").touch()
    with pytest.raises(UserError, match="is there already"):
        write_selection(pd.DataFrame({"a": [1]}), tmp_path / "there.jsonl")
    with pytest.raises(UserError, match="has no scored responses"):
        best_responses(RunFolder(tmp_path / "empty"), best=1, least=None, column="response")
    columns = {"turns": np.asarray([2]), "sample_id": ["s"], "prompt_id": ["a"], "response": ["r"]}
    columns |= {"reward": np.asarray([1.0]), "reward_failure": [None], "truncated": np.asarray([0], np.uint8)}
    write_columns(run.experience(3), columns)
    with pytest.raises(UserError, match="episodes of several turns"):
        best_responses(run, best=1, least=None, column="response")
