"""What may change when a run goes on: by command, and nothing that would make another run."""

from __future__ import annotations

import pytest

from penstock.base.errors import UserError
from penstock.configs.loading.resuming import OF_PAIRS, OF_SFT, OF_TRAIN, Resumable, course_changes, resumed_config
from penstock.configs.preference import PairConfig, PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig

TRAIN = TrainConfig.model_validate({"iterations": 10, "sft": {"steps": 10}})
PREFERENCE = PreferenceConfig.model_validate({"trainer": {"steps": 10}, "data": {"train": "pairs.jsonl"}})
REWARD_MODEL = RewardModelConfig.model_validate({"trainer": {"steps": 10}, "data": {"train": "pairs.jsonl"}})
Tree = TrainConfig | PairConfig


@pytest.mark.parametrize(
    ("config", "may", "changes"),
    [
        (TRAIN, OF_TRAIN, ["iterations=20", "faults.entropy={limit: 0.1}", "groups.main={roles: [actor, rollout]}"]),
        (
            TRAIN,
            OF_TRAIN,
            ["iterations=20", "actor.sequence_parallel=2", "actor.expert_parallel=2", "actor.zero_stage=2"],
        ),
        (TRAIN, OF_SFT, ["sft.steps=20", "sft.zero_stage=2", "sft.micro_batch_tokens=512", "engine.restarts=0"]),
        (PREFERENCE, OF_PAIRS, ["trainer.steps=20", "trainer.checkpoint_every=5", "devices.ranks=2"]),
        (REWARD_MODEL, OF_PAIRS, ["trainer.steps=20", "trainer.gradient_checkpointing=true"]),
    ],
)
def test_how_long_and_where_may_change(config: Tree, may: Resumable, changes: list[str]) -> None:
    """The length is that asked for, and the class stays. Control: without changes the configuration is equal."""
    changed = resumed_config(config, changes, 10, may)
    assert type(changed) is type(config)
    assert may.length(changed) == 20
    assert resumed_config(config, [], 10, may) == config


@pytest.mark.parametrize(
    ("config", "may", "change", "said"),
    [
        (TRAIN, OF_TRAIN, "sft.steps=20", "'sft.steps' cannot change"),
        (TRAIN, OF_TRAIN, "actor.optimizer.name=sgd", "'actor.optimizer.name' cannot change"),
        (TRAIN, OF_SFT, "iterations=20", "'iterations' cannot change"),
        (TRAIN, OF_SFT, "sft.batch=4", "'sft.batch' cannot change"),
        (PREFERENCE, OF_PAIRS, "loss.name=ipo", "'loss.name' cannot change"),
        (PREFERENCE, OF_PAIRS, "trainer.optimizer.learning_rate=1e-3", "cannot change"),
        (PREFERENCE, OF_PAIRS, "trainer.steps=9", "has done 10 already"),
        (PREFERENCE, OF_PAIRS, "trainer.stps=20", "names no key"),
        (REWARD_MODEL, OF_PAIRS, "trainer.steps=none", "trainer.steps"),
        (REWARD_MODEL, OF_PAIRS, "trainer.steps", "is not section.key=value"),
    ],
)
def test_what_would_make_another_run_is_refused(config: Tree, may: Resumable, change: str, said: str) -> None:
    """Controls: the test above, and a value that the run has already, which is no change."""
    with pytest.raises(UserError, match=said):
        resumed_config(config, [change], 10, may)
    assert resumed_config(config, ["seed=0"], 10, may) == config


def test_a_learning_rate_that_decays_follows_another_course() -> None:
    """It is said by section. Controls: a constant rate, and another change than of the length."""
    decaying = {"steps": 10, "optimizer": {"decay": "cosine"}}
    config = PreferenceConfig.model_validate({"trainer": decaying, "data": {"train": "pairs.jsonl"}})
    longer = resumed_config(config, ["trainer.steps=20"], 10, OF_PAIRS)
    (said,) = course_changes(config, longer, OF_PAIRS)
    assert "trainer.optimizer.decay is 'cosine'" in said
    assert "of 20 steps, and what is done was of 10" in said
    assert course_changes(config, resumed_config(config, ["trainer.zero_stage=2"], 10, OF_PAIRS), OF_PAIRS) == []
    assert course_changes(PREFERENCE, resumed_config(PREFERENCE, ["trainer.steps=20"], 10, OF_PAIRS), OF_PAIRS) == []
