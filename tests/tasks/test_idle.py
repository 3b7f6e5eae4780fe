"""A training says at its start what it is too short for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.configs.schema import TrainConfig
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.session.session import Training
from penstock.tasks.start import load_prompts


def test_the_start_says_what_has_no_effect(
    training_with: Callable[[TrainConfig], Training],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, key by key. Control: of what this training reaches nothing is said."""
    monkeypatch.setattr("penstock.tasks.start.get_run_logger", lambda: logging.getLogger("prepare"))
    make_byte_tokenizer(tmp_path / "model")
    data = {"arithmetic": {"digits": 1, "sft": 8, "train": 8, "heldout": 8}}
    tree = {"iterations": 3, "data": data, "rollout": {"prompts": 4}, "checkpoint": {"every": 2}}
    config = TrainConfig.model_validate(tree | {"evaluate": {"every": 4}})
    load_prompts.fn(training_with(config), str(tmp_path / "model"))
    assert caplog.messages == ["'evaluate.every' (4) has no effect: the training has 3 iterations"]
