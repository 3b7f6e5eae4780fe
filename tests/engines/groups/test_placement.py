"""Placement names existing devices only, and each at most once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.placement import (
    STRATEGIES,
    describe_strategy,
    hosts_of,
    place,
    reference_is_base,
    reshard_strategy,
)

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
    assert (spec.log_dir, spec.worker) == (LOGS, "penstock.engines.ranks.worker:Worker")
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


def test_ranks_beside_gpus_take_those_that_no_group_names() -> None:
    """Each another one, and more than there are is refused. Control: on the CPU `ranks` of any number fit."""
    groups: dict[str, Any] = {
        "main": {"ranks": 2, "roles": ["actor", "rollout"]},
        "critic": {"gpus": [1], "roles": ["critic"]},
    }
    assert _places(4, **PPO, groups=groups) == {"main": [0, 2], "critic": [1]}
    counted = {**groups, "critic": {"ranks": 2, "roles": ["critic"]}}
    assert _places(4, **PPO, groups=counted) == {"main": [0, 1], "critic": [2, 3]}
    assert _places(0, **PPO, groups=counted) == {"main": [None] * 2, "critic": [None] * 2}
    with pytest.raises(UserError, match=r"groups.critic.ranks asks for 2 GPUs, and of 3 visible ones 1 are left"):
        _places(3, **PPO, groups=counted)


def test_groups_that_name_no_gpus_take_those_of_the_training() -> None:
    """What other trainings have is not among them. Control: GPUs that are named are taken as they are."""
    ranks: dict[str, Any] = {"main": {"ranks": 2, "roles": ["actor", "rollout"]}}
    named = {"main": {"gpus": [0], "roles": ["actor", "rollout"]}}
    for groups, expected in (({}, [1, 3]), (ranks, [1, 3]), (named, [0])):
        (spec,) = place(TrainConfig(groups=groups), 4, LOGS, mine=(1, 3))
        assert [device.gpu for device in spec.devices] == expected


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


def test_who_takes_all_gpus_takes_whole_rollout_engines() -> None:
    """Of three GPUs two where an engine has two. Controls: a group without a rollout, and too few for one engine."""
    assert len(_places(3, rollout={"tensor_parallel": 2})["main"]) == 2
    groups = {"train": {"gpus": [0], "roles": ["actor"]}, "generate": {"ranks": 2, "roles": ["rollout"]}}
    assert len(_places(3, groups=groups, rollout={"tensor_parallel": 2})["generate"]) == 2
    with pytest.raises(UserError, match="does not divide the 3 ranks"):
        _places(3, rollout={"tensor_parallel": 4})


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


# ---- other machines ------------------------------------------------------------------------------------------------

ACTOR, CRITIC, ROLLOUT = {"roles": ["actor"]}, {"roles": ["critic"]}, {"roles": ["rollout"]}


def _hosts(pools: dict[str, int], **groups: Any) -> dict[str, list[tuple[str, int | None]]]:
    specs = place(TrainConfig(**PPO, groups=groups), 0, LOGS, pools)
    return {spec.name: [(device.host, device.gpu) for device in spec.devices] for spec in specs}


def test_a_group_of_a_pool_has_its_gpus_on_each_of_its_machines() -> None:
    """All that a machine has, unless it names some; ranks of a machine are neighbours."""
    placed = _hosts(
        {"h200": 2},
        train={"pool": "h200", "hosts": 2, **ACTOR},
        critic={"pool": "h200", "gpus": [1], **CRITIC},
        generate={"pool": "l4", "gpus": [0], **ROLLOUT},
    )
    assert placed["train"] == [("h200/0", 0), ("h200/0", 1), ("h200/1", 0), ("h200/1", 1)]
    assert placed["critic"] == [("h200/2", 1)], "the first machine on which that GPU is free"
    assert placed["generate"] == [("l4/0", 0)]


def test_groups_share_machines_where_their_gpus_differ() -> None:
    """And need no more of them than that. Control: one GPU in common, and they do."""
    apart = {"pool": "h200", "hosts": 2, "gpus": [0, 1]}
    placed = _hosts({"h200": 4}, train=apart | ACTOR, critic=apart | {"gpus": [2]} | CRITIC, generate=apart | ROLLOUT)
    assert {host for host, _ in placed["critic"]} == {"h200/0", "h200/1"}
    assert {host for host, _ in placed["generate"]} == {"h200/2", "h200/3"}


def test_cpu_ranks_of_two_groups_share_no_machine() -> None:
    """Each group's count on all of its machine's processors. Control: beside ranks on GPUs there is room."""
    pool = {"pool": "mixed", "hosts": 2}
    placed = _hosts(
        {},
        train=pool | {"ranks": 2} | ACTOR,
        critic=pool | {"ranks": 1, "hosts": 1} | CRITIC,
        generate=pool | {"gpus": [0]} | ROLLOUT,
    )
    assert [host for host, _ in placed["train"]] == ["mixed/0", "mixed/0", "mixed/1", "mixed/1"]
    assert placed["critic"] == [("mixed/2", None)]
    assert placed["generate"] == [("mixed/0", 0), ("mixed/1", 0)]


def test_groups_stay_on_this_machine_beside_others() -> None:
    """A critic here, the rest on CPU ranks of two machines that join by themselves."""
    placed = _hosts({}, main={"hosts": 2, "ranks": 1, "roles": ["actor", "rollout"]}, critic={**CRITIC})
    assert placed == {"main": [("hosts/0", None), ("hosts/1", None)], "critic": [("local", None)]}


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"pool": "h200"}, "nothing is known of the machines of pool 'h200'"),
        ({"pool": "cpu", "gpus": [0]}, "machines of pool 'cpu' have 0 GPUs"),
        ({"pool": "four", "hosts": 2, "gpus": [0, 1, 2]}, "does not divide the 3 ranks that each machine has"),
    ],
)
def test_what_a_pool_cannot_give_is_refused(group: dict[str, Any], said: str) -> None:
    """Six ranks of two machines would be three engines of two, one of them on both. Control: four ranks."""
    tree: dict[str, Any] = {"rollout": {"tensor_parallel": 2}}
    roles = {"roles": ["actor", "rollout"]}
    pools = {"cpu": 0, "four": 4}
    with pytest.raises(UserError, match=said):
        place(TrainConfig(**tree, groups={"main": group | roles}), 0, LOGS, pools)
    fits = {"pool": "four", "hosts": 2, "gpus": [0, 1]}
    (spec,) = place(TrainConfig(**tree, groups={"main": fits | roles}), 0, LOGS, pools)
    assert len(spec.devices) == 4


def test_hosts_are_told_by_pool() -> None:
    """Those that somebody has to start, and those that join by themselves; this machine is neither."""
    groups = {
        "train": {"pool": "h200", "hosts": 2, "gpus": [0], **ACTOR},
        "critic": {**CRITIC},
        "generate": {"hosts": 1, "ranks": 1, **ROLLOUT},
    }
    specs = place(TrainConfig(**PPO, groups=groups), 0, LOGS)
    assert hosts_of(specs) == {"h200": ["h200/0", "h200/1"], None: ["hosts/0"]}


def test_the_ranks_of_an_offline_training_are_on_the_machines_of_a_pool() -> None:
    """Its `devices` are those of its one group."""
    config = PreferenceConfig(devices={"pool": "h200", "hosts": 2, "gpus": [0]}, hosts={"join_timeout_s": 5})
    (spec,) = place(config.engines(), 0, LOGS)
    assert spec.hosts == ("h200/0", "h200/1")
    assert config.engines().hosts == config.hosts
    with pytest.raises(ValueError, match="'hosts' has no effect"):
        PreferenceConfig(hosts={"join_timeout_s": 5})
