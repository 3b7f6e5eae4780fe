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
        UserError: a GPU that does not exist, GPUs asked for on a machine without one, or CPU ranks beside GPUs.
    """
    groups = config.groups or {"main": GroupConfig(roles=list(config.roles))}
    return [
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


def _devices(name: str, group: GroupConfig, visible_gpus: int) -> tuple[RankDevice, ...]:
    if group.gpus is None and (visible_gpus == 0 or group.ranks is not None):
        return (RankDevice(None),) * (group.ranks or 1)
    wanted = group.gpus if group.gpus is not None else list(range(visible_gpus))
    if missing := [index for index in wanted if not 0 <= index < visible_gpus]:
        there = f"GPUs 0 to {visible_gpus - 1} are visible" if visible_gpus else "no GPU is visible"
        raise UserError(
            f"groups.{name}.gpus names GPU {missing[0]}, but {there}",
            "name GPUs that 'nvidia-smi -L' lists and CUDA_VISIBLE_DEVICES allows, or remove 'gpus' to use what is there",
        )
    return tuple(RankDevice(index) for index in wanted)
