"""Supervised steps are commanded in blocks, which together are all steps, each once."""

from __future__ import annotations

import pytest

from configs.loading import config_from_mapping
from configs.schema import TrainConfig
from tasks.supervise import STEPS_PER_COMMAND, blocks


@pytest.mark.parametrize("steps", [1, STEPS_PER_COMMAND - 1, STEPS_PER_COMMAND, STEPS_PER_COMMAND + 1, 450])
def test_blocks_cover_every_step_once(steps: int) -> None:
    """In order and without an empty block."""
    config = config_from_mapping({"sft": {"steps": steps}}, "test")
    cut = list(blocks(config))
    assert [step for first, count in cut for step in range(first, first + count)] == list(range(steps))
    assert all(1 <= count <= STEPS_PER_COMMAND for _, count in cut)


def test_without_a_section_there_is_nothing_to_do() -> None:
    """The control."""
    assert list(blocks(TrainConfig())) == []
