"""The tree with which engines of an evaluation start: a training's, without what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.checks.memory import estimate_groups
from penstock.configs.evaluation import EvaluationConfig, evaluation_config
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.placement import place, reshard_strategy
from tests.engines.shared_ranks import Shape

GPUS = {
    "main": {"gpus": [0, 1], "roles": ["actor", "rollout", "reference"]},
    "critic": {"gpus": [2], "roles": ["critic"]},
}


def derived(reference: Path | None = Path("base"), **values: Any) -> EvaluationConfig:
    return evaluation_config(TrainConfig.model_validate(values), Path("model"), reference)


def test_groups_keep_their_devices_and_lose_what_trains() -> None:
    """The critic's group goes; actor and reference stay for `kl` alone. Control: the training has them all."""
    ppo = {"algorithm": {"name": "ppo", "kl": {}}, "groups": GPUS}
    assert derived(**ppo).groups["main"].roles == ["actor", "rollout", "reference"]
    lean = derived(**ppo, evaluate={"evaluators": ["rewards"]})
    assert {name: (group.gpus, group.roles) for name, group in lean.groups.items()} == {"main": ([0, 1], ["rollout"])}
    assert set(TrainConfig.model_validate(ppo).groups) == {"main", "critic"}


def test_an_elastic_group_and_a_stream_are_left_out() -> None:
    """Nothing is updated meanwhile, and nobody waits for machines that may come."""
    groups = {
        "actor": {"gpus": [0], "roles": ["actor"]},
        "rollout": {"gpus": [1], "roles": ["rollout"]},
        "more": {"pool": "spot", "gpus": [0], "roles": ["rollout"], "elastic": True},
    }
    found = derived(groups=groups, rollout={"stream": {}})
    assert list(found.groups) == ["rollout"]
    assert (found.hosts, found.rollout.stream) == (None, None)


@pytest.mark.parametrize("values", [{}, {"algorithm": {"kl": {}}}, {"actor": {"lora": {}}}, {"sft": {}}])
def test_a_second_reading_changes_nothing(values: dict[str, Any]) -> None:
    """Ranks read the tree that the flow has dumped."""
    found = derived(**values)
    assert EvaluationConfig.model_validate(found.model_dump(mode="json")) == found
    assert found.actor.lora is None
    assert found.sft is None
    assert (found.model.path, found.reference) == ("model", "base")


def test_engines_read_a_folder_and_need_no_memory_to_train(tmp_path: Path) -> None:
    """One group, one rank; weights and a KV cache alone. Control: a training of the same tree."""
    Shape("qwen2", tied=True).write(tmp_path)
    training = TrainConfig.model_validate({"model": {"path": str(tmp_path)}, "rollout": {"max_sequences": 4}})
    found = evaluation_config(training, tmp_path, None)
    assert [spec.roles for spec in place(found, 0, Path())] == [("rollout",)]
    assert (reshard_strategy(found), reshard_strategy(training)) == ("folder", "shared")
    (ours,), (theirs,) = estimate_groups(found), estimate_groups(training)
    assert ours.memory.phase == "rollout"
    assert set(ours.memory.parts) == {"rollout weights", "KV cache", "libraries"}
    assert ours.memory.total < theirs.memory.total
    assert (ours.slots, ours.recomputed) == (0, {})
