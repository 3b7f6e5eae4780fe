"""Which engine groups a training needs and on which devices: a pure function of the configuration and the machine.

Left out: starting them (engines/group.py), the number of GPUs that exist (engines/machine.py).
"""

from __future__ import annotations

from pathlib import Path

from configs.errors import UserError
from configs.schema import GroupConfig, TrainConfig
from engines.group import GroupSpec, RankDevice


def place(config: TrainConfig, visible_gpus: int, log_dir: Path) -> list[GroupSpec]:
    """Return one spec per engine group.

    Without a `groups` section everything runs in one group "main": on all visible GPUs, or on one CPU rank.

    Raises:
        UserError: a GPU that does not exist (on a machine without one: any), or that two groups would take.
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
    return specs


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
