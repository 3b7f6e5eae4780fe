"""A training without engines: its folder and its session, which is all that the pure parts of tasks look at; and the
shortest with engines.

A conftest that imports the fixture has it for all modules beside and below it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.configs.schema import TrainConfig
from penstock.session import session as module
from penstock.session.session import Session, Training
from penstock.state.run_folder import RunFolder

SHORTEST = (  # overrides of the quickstart: a whole training of seconds, evaluated at its end
    "iterations=2",
    "data.arithmetic={digits: 2, train: 40, heldout: 16}",
    "sft=null",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 6, max_sequences: 32}",
    "reward.function=tests.flows.reward_functions:low_digit",
    "evaluate={every: 2, temperature: 1.0}",
)


@pytest.fixture
def training_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainConfig], Training]:
    """Make the handle of a training with a configuration."""

    def make(config: TrainConfig) -> Training:
        training = Training(str(tmp_path))
        monkeypatch.setitem(module._SESSIONS, training.folder, Session(config, RunFolder(tmp_path)))
        return training

    return make
