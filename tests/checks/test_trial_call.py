"""A reward function that cannot work shows before anything starts, in a process that may be lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.checks.trial_call import trial_call
from penstock.configs.schema import TrainConfig

FUNCTIONS = """
import os

def parts(response, question, row):
    assert row == {"question": question, "answer": "2"}
    return {"length": len(response), "ok": question == "1+1="}

def text(response):
    return "1.0"

def hangs(response):
    while True:
        pass

def dies(response):
    os._exit(3)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("parts", "27, length 26, ok 1"),
        ("text", "it failed, TypeError: the reward is a str, not a number"),
        ("hangs", "it failed, timed out after 0.5 s"),
        ("dies", "it failed, the worker process died (exit code 3)"),
    ],
)
def test_what_a_call_gives_is_said(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number with its parts, or why there is none; this process survives either."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"trial_{name}.py").write_text(FUNCTIONS)
    (tmp_path / "train.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    reward = {"function": f"trial_{name}:{name}", "timeout_s": 0.5}
    config = TrainConfig.model_validate({"data": {"train": "train.jsonl", "prompt": "question"}, "reward": reward})
    (line,) = trial_call(config)
    assert line.startswith("reward.function") and line.endswith(said)


def test_where_rewards_come_from_elsewhere_nothing_is_called() -> None:
    """A reward model, or an environment's own."""
    assert trial_call(TrainConfig.model_validate({"reward": {"model": "folder"}})) == []
