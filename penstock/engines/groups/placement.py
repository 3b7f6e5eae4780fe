"""Which engine groups a training needs and on which devices: a pure function of the configuration and the machines.

Left out: starting them (penstock/engines/groups/group.py), the number of GPUs that exist
(penstock/engines/groups/machine.py), which machines of a pool come (penstock/session/machines/hosts.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import GroupConfig, Role
from penstock.engines.groups.spec import LOCAL, GroupSpec, RankDevice

NO_POOLS: Mapping[str, int] = MappingProxyType({})
JOINING = "hosts"  # stands for a pool where machines join by themselves
Strategy = Literal["shared", "local", "gather", "broadcast", "folder"]
STRATEGIES: dict[Strategy, str] = {
    "shared": "the rollout engine reads the actor's own weights",
    "local": "each rank copies its slices of the weights it holds",
    "gather": "the ranks gather ZeRO-3's shards into the rollout engine",
    "broadcast": "the actor's group sends its weights to the rollout group",
    "folder": "each rank reads its slices of a model folder",
}


def reshard_strategy(config: TrainConfig) -> Strategy:
    """Return how the actor's weights reach the rollout engine: the cheapest way that the placement allows.

    | actor and rollout | actor.zero_stage | rollout.tensor_parallel | strategy |
    | --- | --- | --- | --- |
    | one group | 0 to 2 | 1 | shared |
    | one group | 0 to 2 | more | local |
    | one group | 3 | any | gather |
    | two groups | any | any | broadcast |

    Where nothing is trained there is no actor to share with, and weights are read from the model's `folder`.

    Single parameters may need a copy where others are shared (a vocabulary that vLLM pads): `parameters_copied`.
    """
    if not config.trains:
        return "folder"
    together = not config.groups or any({"actor", "rollout"} <= set(group.roles) for group in config.groups.values())
    if not together:
        return "broadcast"
    if config.actor.zero_stage == 3:
        return "gather"
    return "shared" if config.rollout.tensor_parallel == 1 else "local"


def describe_strategy(config: TrainConfig) -> str:
    """Return what the strategy in force means."""
    meaning = STRATEGIES[reshard_strategy(config)]
    if config.actor.expert_parallel > 1:
        return f"{meaning}; experts are gathered and copied"
    return meaning if config.actor.lora is None else f"{meaning}; what has an adapter is merged and copied"


def reference_is_base(config: TrainConfig, roles: Container[Role]) -> bool:
    """Whether a group's reference is its actor without the adapters, so that no second model is loaded."""
    return config.actor.lora is not None and "actor" in roles


def place(
    config: TrainConfig,
    visible_gpus: int,
    log_dir: Path,
    pools: Mapping[str, int] = NO_POOLS,
    mine: Sequence[int] | None = None,
) -> list[GroupSpec]:
    """Return one spec per engine group.

    Without a `groups` section everything runs in one group "main": on all GPUs that there are for it, or on one CPU
    rank. Groups that say how many ranks they have take the first GPUs that no group names. A group of a pool takes the
    first of its machines on which the GPUs that it asks for are free, or the processors, which CPU ranks of two groups
    do not share.

    Args:
        visible_gpus: of this machine.
        pools: GPUs of each machine of a work pool.
        mine: GPUs of this machine for groups that name none; None: all visible ones.

    Raises:
        UserError: a GPU that does not exist (on a machine without one: any), or that two groups would take; ranks
            that do not divide into rollout engines.
    """
    groups = groups_of(config)
    named = {gpu for group in groups.values() if not group.hosts for gpu in group.gpus or ()}
    there = range(visible_gpus) if mine is None else mine
    unnamed = iter([gpu for gpu in there if gpu not in named])
    taken: dict[str, set[int | None]] = {}  # GPUs, or None for the processors, by machine of a pool
    specs = []
    for name, group in groups.items():
        if group.hosts:
            devices = _elsewhere(name, group, pools, taken)
        elif group.ranks is not None and visible_gpus:
            devices = _first(name, group.ranks, unnamed, visible_gpus)
        else:
            spare = len(there) % config.rollout.tensor_parallel if "rollout" in group.roles else 0
            devices = _devices(name, group, visible_gpus, there[: len(there) - spare] or there)
        specs.append(
            GroupSpec(
                name=name,
                roles=tuple(role for role in config.roles if role in group.roles),
                devices=devices,
                log_dir=log_dir,
                start_timeout_s=config.engine.start_timeout_s,
                command_timeout_s=config.engine.command_timeout_s,
                heartbeat_timeout_s=config.engine.heartbeat_timeout_s,
                elastic=group.elastic,
            )
        )
    _check_apart(specs)
    _check_engines(specs, config.rollout.tensor_parallel)
    return specs


def groups_of(config: TrainConfig) -> Mapping[str, GroupConfig]:
    """Return the groups of a training by name; one that places none has one with all roles."""
    return config.groups or {"main": GroupConfig(roles=list(config.roles))}


def hosts_of(specs: list[GroupSpec]) -> dict[str | None, list[str]]:
    """Return the hosts that groups need besides this machine's, by pool; None: they join by themselves."""
    found: dict[str | None, list[str]] = {}
    for host in dict.fromkeys(host for spec in specs for host in spec.hosts if host != LOCAL):
        pool = host.rpartition("/")[0]
        found.setdefault(None if pool == JOINING else pool, []).append(host)
    return found


def _elsewhere(
    name: str, group: GroupConfig, pools: Mapping[str, int], taken: dict[str, set[int | None]]
) -> tuple[RankDevice, ...]:
    """Return the devices of a group on machines of a pool, or on some that join by themselves."""
    wanted = _on_each(name, group, pools)
    free = (host for host in _machines(group.pool or JOINING) if taken.setdefault(host, set()).isdisjoint(wanted))
    hosts = [next(free) for _ in range(group.hosts or 1)]
    for host in hosts:
        taken[host].update(wanted)
    return tuple(RankDevice(gpu, host) for host in hosts for gpu in wanted)


def _on_each(name: str, group: GroupConfig, pools: Mapping[str, int]) -> list[int | None]:
    """Return the devices of a group on each of its machines: GPU indices, or None for each CPU rank."""
    if group.ranks is not None:
        return [None] * group.ranks
    there = None if group.pool is None else pools.get(group.pool)
    if group.gpus is None:
        if there is None:
            raise UserError(
                f"groups.{name} names neither 'gpus' nor 'ranks', and nothing is known of the machines of pool "
                f"'{group.pool}'",
                f"say what each has: penstock deploy --pool {group.pool} --hosts N --gpus M, or give the group 'gpus'",
            )
        return [*range(there)] or [None]
    if there is not None and (missing := [gpu for gpu in group.gpus if not 0 <= gpu < there]):
        raise UserError(
            f"groups.{name}.gpus names GPU {missing[0]}, but the machines of pool '{group.pool}' have {there} GPUs",
            "name others, or tell with 'penstock deploy --pool' what the machines have",
        )
    return list(group.gpus)


def _machines(pool: str) -> Iterator[str]:
    return (f"{pool}/{number}" for number in count())


def _check_engines(specs: list[GroupSpec], tensor_parallel: int) -> None:
    for spec in specs:
        ranks = min(len(spec.ranks_on(host)) for host in spec.hosts)
        if "rollout" in spec.roles and ranks % tensor_parallel:
            each = "of group" if len(spec.hosts) == 1 else "that each machine has of group"
            raise UserError(
                f"rollout.tensor_parallel={tensor_parallel} does not divide the {ranks} ranks {each} {spec.name!r}",
                "every rollout engine takes that many ranks of its group on one machine: change one of the two numbers",
            )


def _check_apart(specs: list[GroupSpec]) -> None:
    owner: dict[RankDevice, str] = {}
    for spec in specs:
        for device in spec.devices:
            if device.gpu is not None and owner.setdefault(device, spec.name) != spec.name:
                raise UserError(
                    f"groups {owner[device]!r} and {spec.name!r} would both take GPU {device.gpu}",
                    "give every group its own 'gpus', or 'ranks': a group without them takes all that there are",
                )


def _first(name: str, ranks: int, unnamed: Iterator[int], visible_gpus: int) -> tuple[RankDevice, ...]:
    """Return the next GPUs that no group names."""
    devices = tuple(RankDevice(gpu) for gpu in islice(unnamed, ranks))
    if len(devices) < ranks:
        raise UserError(
            f"groups.{name}.ranks asks for {ranks} GPUs, and of {visible_gpus} visible ones {len(devices)} are left",
            "lower it, or hide all GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU",
        )
    return devices


def _devices(name: str, group: GroupConfig, visible_gpus: int, there: Sequence[int]) -> tuple[RankDevice, ...]:
    if group.gpus is None and visible_gpus == 0:
        return (RankDevice(None),) * (group.ranks or 1)
    wanted = group.gpus if group.gpus is not None else there
    if missing := [index for index in wanted if not 0 <= index < visible_gpus]:
        shown = f"GPUs 0 to {visible_gpus - 1} are visible" if visible_gpus else "no GPU is visible"
        raise UserError(
            f"groups.{name}.gpus names GPU {missing[0]}, but {shown}",
            "name GPUs that 'nvidia-smi -L' lists and CUDA_VISIBLE_DEVICES allows, or remove 'gpus' to use all",
        )
    return tuple(RankDevice(index) for index in wanted)
