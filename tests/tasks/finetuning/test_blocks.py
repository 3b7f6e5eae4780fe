"""Steps of an offline training are commanded in blocks, which together are all steps, each once."""

from __future__ import annotations

import pytest

from penstock.configs.sections.trainer import SftConfig
from penstock.configs.tree.schedule import value_at
from penstock.tasks.finetuning.checkpoints import STEPS_PER_COMMAND, blocks, checkpoint_due


@pytest.mark.parametrize("checkpoint_every", [0, 1, 7, 40, 1000])
@pytest.mark.parametrize("steps", [1, STEPS_PER_COMMAND - 1, STEPS_PER_COMMAND, STEPS_PER_COMMAND + 1, 450])
def test_blocks_cover_every_step_once(steps: int, checkpoint_every: int) -> None:
    """In order, without an empty block, and with a block's end wherever a checkpoint is due."""
    config = SftConfig(steps=steps, checkpoint_every=checkpoint_every)
    cut = list(blocks(config))
    assert [step for first, count in cut for step in range(first, first + count)] == list(range(steps))
    assert all(1 <= count <= STEPS_PER_COMMAND for _, count in cut)
    due = {step for step in range(1, steps) if checkpoint_every and step % checkpoint_every == 0}
    due |= {steps} if checkpoint_every else set()
    ends = {first + count for first, count in cut}
    assert due == {end for end in ends if checkpoint_due(config, end)}
    for done in due:
        assert list(blocks(config, done)) == [block for block in cut if block[0] >= done], "a resume cuts likewise"


def test_nothing_is_left_after_the_last_step() -> None:
    """The control. A checkpoint is due then where the run may go on for longer: not in a warm-up, nor without any."""
    config = SftConfig(steps=50, checkpoint_every=25)
    assert list(blocks(config, 50)) == []
    assert [done for done in range(1, 51) if checkpoint_due(config, done)] == [25, 50]
    assert [done for done in range(1, 51) if checkpoint_due(config, done, alone=False)] == [25]
    never = SftConfig(steps=50, checkpoint_every=0)
    assert not any(checkpoint_due(never, done) for done in range(1, 51))


def test_a_block_ends_where_a_scheduled_value_changes() -> None:
    """Every step gets the value of its step. Control: a plain value leaves the blocks as they are."""
    config = SftConfig(steps=60, checkpoint_every=0, optimizer={"learning_rate": {0: 1e-3, 10: 1e-4, 40: 1e-5}})
    assert list(blocks(config)) == [(0, 10), (10, 15), (25, 15), (40, 10), (50, 10)]
    for first, count in blocks(config):
        rates = {value_at(config.optimizer.learning_rate, step) for step in range(first, first + count)}
        assert rates == {value_at(config.optimizer.learning_rate, first)}
    assert list(blocks(SftConfig(steps=60, checkpoint_every=0))) == [(0, 25), (25, 25), (50, 10)]
