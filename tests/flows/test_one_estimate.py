"""A start estimates memory once: what was compared with the free memory is what the session opens with.

A second estimate, of other free memory, could decide something that was never checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from penstock.checks import memory
from penstock.checks.memory import GroupEstimate
from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.flows.preference import preference
from penstock.flows.reward_model import reward_model
from penstock.flows.sft import sft
from penstock.flows.train import train
from penstock.session import opening

TINY = {"tiny": {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate_size": 96}}
DATA = {"max_prompt_tokens": 16, "arithmetic": {"digits": 1, "sft": 8, "train": 8, "heldout": 8}}
SHORT = {"rollout": {"max_response_tokens": 16}}
ROW = '{"prompt": "1+1=", "chosen": "2.", "rejected": "3."}\n'


class Opened(Exception):
    """The flow got as far as its session, with these estimates."""

    def __init__(self, memory: list[GroupEstimate]) -> None:
        self.memory = memory


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> list[list[GroupEstimate]]:
    """Every estimate that is made. No engine starts: a session only says what it was given."""
    made: list[list[GroupEstimate]] = []
    estimate: Callable[..., list[GroupEstimate]] = memory.estimate_groups

    def counted(*arguments: Any, **named: Any) -> list[GroupEstimate]:
        made.append(estimate(*arguments, **named))
        return made[-1]

    @contextmanager
    def opened(config: object, run: object, given: list[GroupEstimate], *_: object) -> Iterator[None]:
        raise Opened(given)
        yield

    monkeypatch.setattr(memory, "estimate_groups", counted)
    monkeypatch.setattr(opening, "open_session", opened)
    return made


@pytest.mark.usefixtures("prefect_harness")
@pytest.mark.parametrize(
    "kind", ["train", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sft", "preference", "reward-model"))]
)
def test_a_start_estimates_once(kind: str, estimated: list[list[GroupEstimate]], tmp_path: Path) -> None:
    """Control: one more check is one more estimate, and another object."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(ROW, encoding="utf-8")
    tree = {"model": TINY, "folder": str(tmp_path)}
    preferring = {**tree, "data": {"train": str(pairs)}}
    reward = {"function": "penstock.rewards.builtin:exact_match"}
    config = TrainConfig.model_validate({**tree, "data": DATA, "reward": reward, "sft": {}, **SHORT})
    starts: dict[str, Callable[[], object]] = {
        "train": lambda: train.fn(config),
        "sft": lambda: sft.fn(config),
        "preference": lambda: preference.fn(PreferenceConfig.model_validate(preferring)),
        "reward-model": lambda: reward_model.fn(RewardModelConfig.model_validate(preferring)),
    }
    with disable_run_logger(), pytest.raises(Opened) as session:
        starts[kind]()
    assert len(estimated) == 1
    assert session.value.memory is estimated[0]
    memory.check_memory(config)
    assert len(estimated) == 2
    assert session.value.memory is not estimated[1]
