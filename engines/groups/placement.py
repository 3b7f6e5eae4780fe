"""Which engine groups a training needs and on which devices: a pure function of the configuration and the machine.

Left out: starting them (engines/groups/group.py), the number of GPUs that exist (engines/groups/machine.py).
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Literal

from configs.schema import TrainConfig
from configs.sections.run import GroupConfig, Role
from engines.groups.group import GroupSpec, RankDevice
from penstock.base.errors import UserError

Strategy = Literal["shared", "local", "gather", "broadcast"]
STRATEGIES: dict[Strategy, str] = {
    "shared": "the rollout engine reads the actor's own weights",
    "local": "each rank copies its slices of the weights it holds",
    "gather": "the ranks gather ZeRO-3's shards into the rollout engine",
    "broadcast": "the actor's group sends its weights to the rollout group",
}


def reshard_strategy(config: TrainConfig) -> Strategy:
    """Return how the actor's weights reach the rollout engine: the cheapest way that the placement allows.

    | actor and rollout | actor.zero_stage | rollout.tensor_parallel | strategy |
    | --- | --- | --- | --- |
    | one group | 0 to 2 | 1 | shared |
    | one group | 0 to 2 | more | local |
    | one group | 3 | any | gather |
    | two groups | any | any | broadcast |

    Single parameters may need a copy where others are shared (a vocabulary that vLLM pads): `parameters_copied`.
    """
    together = not config.groups or any({"actor", "rollout"} <= set(group.roles) for group in config.groups.values())
    if not together:
        return "broadcast"
    if config.actor.zero_stage == 3:
        return "gather"
    return "shared" if config.rollout.tensor_parallel == 1 else "local"


def describe_strategy(config: TrainConfig) -> str:
    """Return what the strategy in force means."""
    meaning = STRATEGIES[reshard_strategy(config)]
    return meaning if config.actor.lora is None else f"{meaning}; what has an adapter is merged and copied"


def reference_is_base(config: TrainConfig, roles: Container[Role]) -> bool:
    """Whether a group's reference is its actor without the adapters, so that no second model is loaded."""
    return config.actor.lora is not None and "actor" in roles


def place(config: TrainConfig, visible_gpus: int, log_dir: Path) -> list[GroupSpec]:
    """Return one spec per engine group.

    Without a `groups` section everything runs in one group "main": on all visible GPUs, or on one CPU rank.

    Raises:
        UserError: a GPU that does not exist (on a machine without one: any), or that two groups would take; ranks
            that do not divide into rollout engines.
    """
    groups = config.groups or {"main": GroupConfig(roles=list(config.roles))}
    specs = [
        GroupSpec(
            name=name,
            roles=tuple(role for role in config.roles if role in group.roles),
            devices=_devices(name, group, visible_gpus),
            log_dir=log_dir,
            start_timeout_s=config.engine.start_timeout_s,
            command_timeout_s=config.engine.command_timeout_s,
            heartbeat_timeout_s=config.engine.heartbeat_timeout_s,
        )
        for name, group in groups.items()
    ]
    _check_apart(specs)
    _check_engines(specs, config.rollout.tensor_parallel)
    return specs


def _check_engines(specs: list[GroupSpec], tensor_parallel: int) -> None:
    for spec in specs:
        if "rollout" in spec.roles and len(spec.devices) % tensor_parallel:
            raise UserError(
                f"rollout.tensor_parallel={tensor_parallel} does not divide the {len(spec.devices)} ranks of group "
                f"{spec.name!r}",
                "every rollout engine takes that many ranks of its group: change one of the two numbers",
            )


def _check_apart(specs: list[GroupSpec]) -> None:
    owner: dict[int, str] = {}
    for spec in specs:
        for gpu in (device.gpu for device in spec.devices if device.gpu is not None):
            if owner.setdefault(gpu, spec.name) != spec.name:
                raise UserError(
                    f"groups {owner[gpu]!r} and {spec.name!r} would both take GPU {gpu}",
                    "give every group its own 'gpus': a group without them takes all that are visible",
                )


def _devices(name: str, group: GroupConfig, visible_gpus: int) -> tuple[RankDevice, ...]:
    if group.gpus is None and visible_gpus == 0:
        return (RankDevice(None),) * (group.ranks or 1)
    if group.ranks is not None:
        raise UserError(
            f"groups.{name}.ranks asks for CPU ranks, but this machine has {visible_gpus} GPUs",
            "name GPUs with 'gpus', or hide them with CUDA_VISIBLE_DEVICES= to train on the CPU",
        )
    wanted = group.gpus if group.gpus is not None else list(range(visible_gpus))
    if missing := [index for index in wanted if not 0 <= index < visible_gpus]:
        there = f"GPUs 0 to {visible_gpus - 1} are visible" if visible_gpus else "no GPU is visible"
        raise UserError(
            f"groups.{name}.gpus names GPU {missing[0]}, but {there}",
            "name GPUs that 'nvidia-smi -L' lists and CUDA_VISIBLE_DEVICES allows, or remove 'gpus' to use all",
        )
    return tuple(RankDevice(index) for index in wanted)
