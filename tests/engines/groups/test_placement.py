"""Placement names existing devices only, and each at most once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.schema import TrainConfig
from engines.groups.placement import STRATEGIES, describe_strategy, place, reference_is_base, reshard_strategy
from penstock.base.errors import UserError

LOGS = Path("logs")
PPO = {"algorithm": {"name": "ppo"}}


def _places(gpus: int, **sections: Any) -> dict[str, list[int | None]]:
    return {spec.name: [device.gpu for device in spec.devices] for spec in place(TrainConfig(**sections), gpus, LOGS)}


def test_without_groups_one_group_takes_all_there_is() -> None:
    """All visible GPUs, else one CPU rank; every role is in it, and the deadlines are the configured ones."""
    assert _places(4) == {"main": [0, 1, 2, 3]}
    assert _places(0) == {"main": [None]}
    deadlines = {"start_timeout_s": 6, "command_timeout_s": 7, "heartbeat_timeout_s": 8}
    (spec,) = place(TrainConfig(**PPO, engine=deadlines), 0, LOGS)
    assert spec.roles == ("actor", "critic", "rollout")
    assert (spec.log_dir, spec.worker) == (LOGS, "engines.ranks.worker:Worker")
    assert (spec.start_timeout_s, spec.command_timeout_s, spec.heartbeat_timeout_s) == (6.0, 7.0, 8.0)


def test_groups_get_the_devices_and_roles_they_name() -> None:
    """GPUs in the order given; roles in build order, whatever the order in the file."""
    groups = {
        "main": {"gpus": [2, 0], "roles": ["rollout", "actor"]},
        "critic": {"gpus": [1], "roles": ["critic"]},
    }
    specs = {spec.name: spec for spec in place(TrainConfig(**PPO, groups=groups), 4, LOGS)}
    assert [device.gpu for device in specs["main"].devices] == [2, 0]
    assert specs["main"].roles == ("actor", "rollout")
    assert [device.gpu for device in specs["critic"].devices] == [1]


def test_cpu_ranks_are_counted() -> None:
    """`ranks` says how many processes a group has on a machine without a GPU."""
    assert _places(0, groups={"main": {"ranks": 2, "roles": ["actor", "rollout"]}}) == {"main": [None, None]}


def test_cpu_ranks_beside_gpus_are_refused() -> None:
    """`ranks` on a machine with GPUs would train on the CPU without a word: it is refused."""
    with pytest.raises(UserError, match="this machine has 2 GPUs"):
        _places(2, groups={"main": {"ranks": 2, "roles": ["actor", "rollout"]}})


@pytest.mark.parametrize(("visible", "there"), [(0, "no GPU is visible"), (2, "GPUs 0 to 1 are visible")])
def test_a_gpu_that_is_not_there_is_refused(visible: int, there: str) -> None:
    """Found out before anything starts, with what there is. Control: on a larger machine the same file is fine."""
    groups = {"main": {"gpus": [0, 2], "roles": ["actor", "rollout"]}}
    with pytest.raises(UserError, match=there) as caught:
        _places(visible, groups=groups)
    assert "groups.main.gpus" in caught.value.problem
    assert "nvidia-smi" in caught.value.remedy
    assert _places(3, groups=groups) == {"main": [0, 2]}


def test_two_groups_never_share_a_gpu() -> None:
    """A group that names none would take all, also those of another. Control: without a GPU both get a CPU rank."""
    groups = {"main": {"gpus": [0], "roles": ["actor", "rollout"]}, "critic": {"roles": ["critic"]}}
    with pytest.raises(UserError, match="both take GPU 0"):
        _places(2, **PPO, groups=groups)
    unnamed = {"main": {"roles": ["actor", "rollout"]}, "critic": {"roles": ["critic"]}}
    with pytest.raises(UserError, match="'main' and 'critic'"):
        _places(1, **PPO, groups=unnamed)
    assert _places(0, **PPO, groups=unnamed) == {"main": [None], "critic": [None]}
    assert _places(2, **PPO, groups={**groups, "critic": {"gpus": [1], "roles": ["critic"]}})["critic"] == [1]


def test_rollout_engines_take_whole_shares_of_a_groups_ranks() -> None:
    """Ranks left over would have no engine. Control: a number that divides them, and groups without rollout."""
    groups: dict[str, Any] = {
        "train": {"ranks": 3, "roles": ["actor"]},
        "generate": {"ranks": 4, "roles": ["rollout"]},
    }
    assert len(_places(0, groups=groups, rollout={"tensor_parallel": 2})["generate"]) == 4
    with pytest.raises(UserError, match="tensor_parallel=3 does not divide the 4 ranks of group 'generate'"):
        _places(0, groups=groups, rollout={"tensor_parallel": 3})


TOGETHER = {"main": {"roles": ["rollout", "actor"]}}
APART = {"train": {"roles": ["actor"]}, "generate": {"roles": ["rollout"]}}


@pytest.mark.parametrize(
    ("groups", "stage", "tensor_parallel", "strategy"),
    [
        ({}, 2, 1, "shared"),
        (TOGETHER, 0, 1, "shared"),
        (TOGETHER, 1, 2, "local"),
        ({}, 3, 1, "gather"),
        (TOGETHER, 3, 2, "gather"),
        (APART, 2, 1, "broadcast"),
        (APART, 3, 2, "broadcast"),
    ],
)
def test_the_placement_decides_how_weights_are_resharded(
    groups: dict[str, Any], stage: int, tensor_parallel: int, strategy: str
) -> None:
    """The table of the design, and each strategy has its words."""
    config = TrainConfig(groups=groups, actor={"zero_stage": stage}, rollout={"tensor_parallel": tensor_parallel})
    assert reshard_strategy(config) == strategy
    assert strategy in STRATEGIES


def test_with_adapters_the_reference_beside_the_actor_is_its_base() -> None:
    """Elsewhere, or without adapters, it is a model of its own; the strategy says that something is merged."""
    plain, low = (TrainConfig.model_validate({"actor": {"lora": lora}}) for lora in (None, {}))
    assert reference_is_base(low, ("actor", "reference", "rollout"))
    assert not reference_is_base(low, ("reference",))
    assert not reference_is_base(plain, ("actor", "reference"))
    assert reshard_strategy(low) == reshard_strategy(plain) == "shared"
    assert describe_strategy(plain) == STRATEGIES["shared"]
    assert "merged" in describe_strategy(low)
