"""Checks of memory and disk: what each rank will hold, and whether its machine has it.

What a machine of a pool has is known once its host has joined. Before, its memory counts as enough.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from penstock.base.errors import UserError
from penstock.base.files import check_possible
from penstock.base.nameless_files import NAME_ANOTHER, check_on_disk
from penstock.checks.model.parallel import check_expert_parallel, check_heads, check_tensor_parallel
from penstock.checks.model.shape import shape_of
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import Role
from penstock.configs.sections.trainer import SftConfig, TogetherConfig, TrainerConfig
from penstock.configs.tree.schedule import largest
from penstock.engines.commands.hosts import HostFacts
from penstock.engines.groups.machine import free_gpu_bytes, free_host_bytes, gpu_bytes, has_gated_mlp, visible_gpus
from penstock.engines.groups.placement import place
from penstock.engines.groups.spec import LOCAL, RankDevice
from penstock.engines.sizing.memory import (
    GIB,
    PHASES,
    Rank,
    RankMemory,
    Recomputed,
    choose_recomputed,
    decide_sleep,
    folder_bytes,
    offloaded_bytes,
    rank_memory,
    slot_bytes,
    weight_width,
)
from penstock.engines.sizing.optimizer_states import master_bytes, state_bytes


@dataclass(frozen=True)
class Elsewhere:
    """What is known of machines besides this one, and of other trainings on this one.

    Attributes:
        pools: GPUs of each machine of a work pool.
        hosts: what the machines of hosts have that have joined.
        mine: GPUs of this machine for groups that name none; None: all visible ones.
        others: GPUs of this machine that other trainings have, which are empty when it is this one's turn.
    """

    pools: Mapping[str, int] = field(default_factory=dict)
    hosts: Mapping[str, HostFacts] = field(default_factory=dict)
    mine: tuple[int, ...] | None = None
    others: frozenset[int] = frozenset()


class NoRoom(UserError):
    """A rank needs more memory than is free."""


NOWHERE = Elsewhere()
SPARED = 0.9  # share of a host's free memory that snapshots and all else may fill: pages of files need some


@dataclass(frozen=True)
class GroupEstimate:
    """Placement and estimated memory of one rank of a group."""

    group: str
    roles: tuple[Role, ...]
    devices: tuple[RankDevice, ...]
    memory: RankMemory
    recomputed: dict[str, Recomputed]  # by trained model
    sleep: bool | None  # of its rollout engine, on GPUs
    free: tuple[int | None, ...]  # bytes that each of its ranks may take; None: its host has not joined
    slots: int = 0  # bytes of its host's memory that snapshots of a rank take
    offloaded: int = 0  # that a rank on a GPU keeps there besides
    elastic: bool = False
    files: Mapping[str, int] = field(default_factory=dict)  # bytes that a rank keeps in files, by their folder


def check_memory(config: TrainConfig, elsewhere: Elsewhere = NOWHERE) -> list[GroupEstimate]:
    """Place the groups and compare each rank's estimated memory with what is free.

    Returns:
        The estimates, by which a session opens (penstock/session/session.py).

    Raises:
        UserError: a GPU does not exist, a rank would not fit, or see `check_zero_stage`.
    """
    shape = shape_of(config)
    needed = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if needed > shape.positions:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_response_tokens is {needed}, "
            f"the model has {shape.positions} positions",
            "lower one of them",
        )
    check_tensor_parallel(config.rollout.tensor_parallel, shape)
    estimates = estimate_groups(config, elsewhere=elsewhere)
    trained: tuple[tuple[str, TrainerConfig | None, Role], ...] = (
        ("actor", config.actor, "actor"),
        ("critic", config.critic, "critic"),
        ("sft", config.sft, "actor"),
    )
    for section, trainer, role in trained if config.trains else ():
        check_zero_stage(config, estimates, section, trainer, role)
        check_hpz(estimates, section, trainer, role)
        check_sequence_parallel(config, estimates, section, trainer, role)
    for estimate in estimates if config.trains else ():
        if "actor" in estimate.roles:
            check_expert_parallel(config, len(estimate.devices))
    _require_all(config, estimates, elsewhere)
    return estimates


def check_finetuning_memory(
    config: TrainConfig, section: str, scores: bool = False, elsewhere: Elsewhere = NOWHERE
) -> list[GroupEstimate]:
    """Place the ranks of an offline training and compare their estimated memory with what is free.

    Args:
        config: with the section `sft`, which alone is trained.
        section: what the user calls it.
        scores: whether it is a reward model, which has no language head.

    Returns:
        As `check_memory`: of every group, also those that nothing is trained in.

    Raises:
        UserError: as for `check_memory`.
    """
    estimates = estimate_groups(config, PHASES["sft"], scores, elsewhere)
    check_zero_stage(config, estimates, section, config.sft, "actor")
    check_hpz(estimates, section, config.sft, "actor")
    _require_all(config, [item for item in estimates if "actor" in item.roles], elsewhere, section)
    return estimates


def check_zero_stage(
    config: TrainConfig, estimates: list[GroupEstimate], section: str, trainer: TrainerConfig | None, role: Role
) -> None:
    """Check that DeepSpeed trains the weights of `role` at the section's stage.

    Raises:
        UserError: stage 0 for bfloat16 weights, beside which it keeps no float32 gradients there.
    """
    for estimate in estimates:
        device = "cpu" if estimate.devices[0].gpu is None else "cuda"
        if trainer is None or trainer.zero_stage or role not in estimate.roles or weight_width(config, device) == 4:
            continue
        ways = ["model.dtype=float32"]
        if trainer.optimizer.whole is None:
            ways.insert(0, f"{section}.zero_stage=1, which on a single rank is the same")
        raise UserError(
            f"{section}.zero_stage=0 is for float32 weights, and those of group '{estimate.group}' are bfloat16",
            f"set {', or '.join(ways)}",
        )


def check_hpz(estimates: list[GroupEstimate], section: str, trainer: TrainerConfig | None, role: Role) -> None:
    """Check that a model that is to be sharded within machines is on several, with several ranks each.

    Args:
        section: the key of the trained model's section.
        role: whose group it is trained in.

    Raises:
        UserError: it has no effect.
    """
    for estimate in estimates:
        if trainer is None or not trainer.hpz or role not in estimate.roles:
            continue
        ranks = Counter(device.host for device in estimate.devices)
        if len(ranks) == 1 or min(ranks.values()) == 1:
            why = "is on one machine" if len(ranks) == 1 else "has one rank on each machine"
            raise UserError(f"{section}.hpz has no effect: group '{estimate.group}' {why}", "remove it")


def check_sequence_parallel(
    config: TrainConfig, estimates: list[GroupEstimate], section: str, trainer: TrainerConfig | None, role: Role
) -> None:
    """Check that the ranks of a group make whole sets of those that compute a micro-batch together.

    Args:
        section: the key of the trained model's section.
        role: whose group it is trained in.

    Raises:
        UserError: they do not, or see `penstock.checks.model.parallel.check_heads`.
    """
    if not isinstance(trainer, TogetherConfig):
        return
    count = trainer.sequence_parallel
    check_heads(section, count, shape_of(config, role))
    for estimate in estimates:
        if role in estimate.roles and (ranks := len(estimate.devices)) % count:
            raise UserError(
                f"{section}.sequence_parallel={count} does not divide the {ranks} ranks of group '{estimate.group}'",
                "so many ranks compute each micro-batch together: change one of the two numbers",
            )


def _require_all(
    config: TrainConfig, estimates: list[GroupEstimate], elsewhere: Elsewhere, section: str | None = None
) -> None:
    """Compare the estimates with what is free.

    Args:
        section: the key that errors advise to change, the trained model's section; None: the section of the model that
            is trained in the fullest phase.
    """
    gpus, left = visible_gpus(), {LOCAL: free_host_bytes()}
    left |= {name: facts.free_bytes for name, facts in elsewhere.hosts.items()}
    for estimate in estimates:
        for device in estimate.devices:
            where = "this machine" if device.host == LOCAL else _machine(device.host, elsewhere)
            if device.gpu is not None:
                name = f"GPU {device.gpu}" if device.host == LOCAL else f"GPU {device.gpu} of {where}"
                if (free := _free_gpu(device, gpus, elsewhere)) is not None:
                    _require(config, estimate, free, name, section)
                if device.host in left and lives_on_host(config):
                    left[device.host] -= estimate.offloaded
            elif device.host in left:
                _require(config, estimate, left[device.host], where, section)
                left[device.host] -= estimate.memory.total
    if lives_on_host(config) and (lacking := min(left.values())) < 0:
        raise NoRoom(
            f"what lives in host memory takes {-lacking / GIB:.1f} GiB more than the machine of the ranks has free",
            f"use more machines, {section or 'actor'}.offload=optimizer where it is all, "
            f"{section or 'actor'}.offload_folder=/a/folder/on/a/local/disk where it is not given, a smaller "
            "micro_batch_tokens with offload_activations, or end what else uses the memory",
        )
    check_offload_folders(estimates, elsewhere)


def check_offload_folders(estimates: Sequence[GroupEstimate], elsewhere: Elsewhere = NOWHERE) -> None:
    """Check that files of states can be kept on this machine; ranks elsewhere see what their machine says.

    Raises:
        UserError: a folder is not there, is in memory itself or cannot be written to, or its disk has too little room.
            Room is not asked for while other trainings have GPUs that this one waits for: it may be theirs.
    """
    needed = Counter[str]()
    for estimate in estimates:
        for device in estimate.devices:
            needed.update(estimate.files if device.host == LOCAL else {})
    disks: dict[int, list[str]] = {}
    for folder in needed:
        _check_offload_folder(Path(folder))
        disks.setdefault(Path(folder).stat().st_dev, []).append(folder)
    for folders in disks.values() if not elsewhere.others else ():
        size, free = sum(needed[one] for one in folders), psutil.disk_usage(folders[0]).free
        if size > free:
            raise NoRoom(
                f"offload_folder {' and '.join(folders)}: states take {size / GIB:.1f} GiB, the disk has "
                f"{free / GIB:.1f} GiB free",
                "make room there, name a folder on a larger disk, or use more machines",
            )


def _check_offload_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"offload_folder {folder} is no folder here", NAME_ANOTHER)
    check_on_disk(folder)
    check_possible(folder, f"files in offload_folder {folder}", NAME_ANOTHER)


def lives_on_host(config: TrainConfig) -> bool:
    """Whether a trained model keeps states or inputs of blocks in host memory for good."""
    trained = [one for one in (config.actor, config.critic, config.sft) if one is not None] if config.trains else []
    return any(one.offload != "nothing" or one.offload_activations for one in trained)


def describe_offload(config: TrainConfig, estimates: Sequence[GroupEstimate]) -> list[str]:
    """Say what ranks on GPUs keep in their hosts' memory for good, in a sentence, or nothing."""
    if not lives_on_host(config):
        return []
    on_gpus = [item for item in estimates if item.devices[0].gpu is not None]
    filed = Counter[str]()
    for item in estimates:
        filed.update({folder: len(item.devices) * size for folder, size in item.files.items()})
    files = [f"offload: {size / GIB:.1f} GiB of files in {folder} of all machines" for folder, size in filed.items()]
    if not on_gpus:
        return files or ["offload: no effect on CPU ranks, whose memory is the host's"]
    needed = sum(len(item.devices) * item.offloaded for item in on_gpus) / GIB
    return [f"offload: {needed:.1f} GiB of the hosts' memory, beside snapshots", *files]


def _machine(host: str, elsewhere: Elsewhere) -> str:
    facts = elsewhere.hosts.get(host)
    return f"host {host}" if facts is None else f"host {host} ({facts.machine})"


def _free_gpu(device: RankDevice, gpus: list[int], elsewhere: Elsewhere) -> int | None:
    """Return the free memory of a rank's GPU; None where its host has not joined."""
    assert device.gpu is not None
    if device.host == LOCAL:
        return (gpu_bytes if device.gpu in elsewhere.others else free_gpu_bytes)(gpus[device.gpu])
    facts = elsewhere.hosts.get(device.host)
    return None if facts is None else facts.gpus[device.gpu].free_bytes


def estimate_groups(
    config: TrainConfig, phase: str | None = None, scores: bool = False, elsewhere: Elsewhere = NOWHERE
) -> list[GroupEstimate]:
    """Return every group's placement and memory, and what the memory that is free now decides.

    Args:
        phase: the only one that there is (of `PHASES`); None: all, and the fullest counts.
        scores: see `penstock.engines.sizing.memory.Rank`.

    Raises:
        UserError: a GPU does not exist, here or on a host that has joined.
    """
    gpus = visible_gpus()
    specs = place(config, len(gpus), Path(), elsewhere.pools, elsewhere.mine)
    everywhere = [device for spec in specs for device in spec.devices]
    check_gpus_elsewhere(everywhere, elsewhere)
    generating = sum(len(spec.devices) for spec in specs if "rollout" in spec.roles and not spec.elastic)
    estimates = []
    for spec in specs:
        each = tuple(_free(device, everywhere, gpus, elsewhere) for device in spec.devices)
        free = min((known for known in each if known is not None), default=sys.maxsize)
        on = "cpu" if spec.devices[0].gpu is None else "cuda"
        shapes = {role: shape_of(config, role) for role in config.roles if role in spec.roles}
        gated = on == "cuda" and all(_has_gated_mlp(device, gpus, elsewhere) for device in spec.devices)
        on_host = max(len(spec.ranks_on(host)) for host in spec.hosts)
        rank = Rank(shapes, len(spec.devices), on, weight_width(config, on), scores, gated, on_host, generating, free)
        recomputed = choose_recomputed(config, rank, free)
        decided = decide_sleep(config, rank, recomputed, free)
        memory = rank_memory(decided, rank, recomputed, phase)
        sleep = decided.rollout.sleep
        slots = slot_bytes(config, rank, on_host)
        offloaded = 0 if on == "cpu" else offloaded_bytes(config, rank)
        placed = (spec.name, spec.roles, spec.devices)
        files = folder_bytes(config, rank)
        estimates.append(GroupEstimate(*placed, memory, recomputed, sleep, each, slots, offloaded, spec.elastic, files))
    return estimates


def snapshots_fit(estimates: Sequence[GroupEstimate], elsewhere: Elsewhere = NOWHERE) -> bool:
    """Whether the hosts have room for snapshots beside all that their ranks need; one that has not joined has."""
    free = {LOCAL: free_host_bytes()} | {name: facts.free_bytes for name, facts in elsewhere.hosts.items()}
    left = {host: int(SPARED * size) for host, size in free.items()}
    for estimate in estimates:
        for device in estimate.devices:
            own = estimate.memory.total if device.gpu is None else estimate.offloaded
            left[device.host] = left.get(device.host, sys.maxsize) - own - estimate.slots
    return min(left.values()) >= 0


def describe_snapshots(estimates: Sequence[GroupEstimate], elsewhere: Elsewhere = NOWHERE) -> str:
    """Say what snapshots take of the hosts' memory, or that it has no room for them."""
    needed = sum(len(item.devices) * item.slots for item in estimates) / GIB
    if snapshots_fit(estimates, elsewhere):
        return f"snapshots: {needed:.2f} GiB of the hosts' memory; checkpoints are written from them"
    return (
        f"snapshots: off, the hosts' memory has no room for {needed:.2f} GiB; a checkpoint holds up the training until "
        "the ranks have written it, and recovery goes back to the newest one"
    )


def check_gpus_elsewhere(devices: list[RankDevice], elsewhere: Elsewhere) -> None:
    """Check that hosts which have joined have the GPUs that are asked of them.

    Raises:
        UserError: one has fewer.
    """
    for device in devices:
        facts = elsewhere.hosts.get(device.host)
        if facts is not None and device.gpu is not None and device.gpu >= len(facts.gpus):
            raise UserError(
                f"{_machine(device.host, elsewhere)} has {len(facts.gpus)} GPUs, and GPU {device.gpu} is asked of it",
                "let the pool's workers run where the GPUs are, or name GPUs that every machine of the pool has",
            )


def _free(device: RankDevice, everywhere: list[RankDevice], gpus: list[int], elsewhere: Elsewhere) -> int | None:
    """Return the memory that a rank may take, its GPU's or its share of the machine's; None: no host has joined."""
    if device.gpu is not None:
        return _free_gpu(device, gpus, elsewhere)
    if device.host != LOCAL and device.host not in elsewhere.hosts:
        return None
    free = free_host_bytes() if device.host == LOCAL else elsewhere.hosts[device.host].free_bytes
    return free // sum(other.gpu is None and other.host == device.host for other in everywhere)


def _has_gated_mlp(device: RankDevice, gpus: list[int], elsewhere: Elsewhere) -> bool:
    assert device.gpu is not None
    if device.host == LOCAL:
        return has_gated_mlp(gpus[device.gpu])
    facts = elsewhere.hosts.get(device.host)
    return facts is not None and facts.gpus[device.gpu].gated_mlp


def disk_bytes(config: TrainConfig) -> int:
    """Return about how many bytes the checkpoints and the exported model of a run take.

    A checkpoint holds weights and the optimizer's float32 state of every trained role, and the weights of a reference
    that is refreshed; one more than is kept exists while it is written. Left out: experience, which depends on what is
    said.
    """
    trained = _trained_bytes(config, config.actor, "actor")
    if config.critic is not None:
        trained += max(1, len(config.agents)) * _trained_bytes(config, config.critic, "critic")
    kl, weights = config.algorithm.kl, model_bytes(config)
    reference = weights if kl is not None and kl.refresh_every is not None else 0
    checkpoints = config.checkpoint.keep + 1 if config.checkpoint.every else 0
    return checkpoints * (trained + reference) + weights


def checkpoint_bytes(config: TrainConfig) -> int:
    """Return about how many bytes a checkpoint of supervised steps takes: weights and the optimizer's float32 state."""
    assert config.sft is not None
    return _trained_bytes(config, config.sft, "actor")


def _trained_bytes(config: TrainConfig, trainer: TrainerConfig, role: Role) -> int:
    shape, width = shape_of(config, role), weight_width(config, "cuda" if visible_gpus() else "cpu")
    return width * shape.trained_parameters(trainer.lora) + master_bytes(trainer, shape) + state_bytes(trainer, shape)


def model_bytes(config: TrainConfig) -> int:
    """Return about how many bytes the weights of the trained model take on disk."""
    return shape_of(config).parameters * weight_width(config, "cuda" if visible_gpus() else "cpu")


def _require(config: TrainConfig, estimate: GroupEstimate, free: int, place_name: str, section: str | None) -> None:
    memory = estimate.memory
    if memory.total <= free:
        return
    model = next((name for name, phase in PHASES.items() if phase == memory.phase), "actor")
    section = section or model
    part = max(memory.parts, key=lambda name: memory.parts[name])
    trainer: TrainerConfig = getattr(config, model)
    sharding = f"use more ranks or a higher {section}.zero_stage"
    if trainer.optimizer.whole is not None:
        sharding = f"use {section}.optimizer.name=adamw or sgd, more ranks and a higher {section}.zero_stage"
    training = (
        f"{sharding}, {_smaller_passes(config, model, section)}, "
        f"{section}.gradient_checkpointing=true where it is false, or end what else uses the memory"
    )
    caching = "lower rollout.kv_cache_gib or rollout.max_sequences, remove rollout.sleep=false where it is given, or "
    if not config.trains:
        training = "use a higher rollout.tensor_parallel or more ranks, or end what else uses the memory"
    raise NoRoom(
        f"group '{estimate.group}' needs about {memory.total / GIB:.1f} GiB per rank ({memory.phase}), "
        f"{place_name} has {free / GIB:.1f} GiB free "
        f"(largest part: {part}, {memory.parts[part] / GIB:.1f} GiB)",
        (caching if part == "KV cache" else "") + training,
    )


def _smaller_passes(config: TrainConfig, model: str, section: str) -> str:
    """Say what makes the largest micro-batch smaller: its budget, or where one row alone exceeds that the row."""
    trainer: TrainerConfig = getattr(config, model)
    if isinstance(trainer, SftConfig):
        longest, keys = trainer.max_tokens, f"{section}.max_tokens"
    else:
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        keys = "data.max_prompt_tokens or rollout.max_response_tokens"
    if isinstance(trainer, TogetherConfig):  # no row is cut, but ranks can share it out
        keys = f"{keys}, a higher {section}.sequence_parallel"
    return f"a smaller {keys if longest >= largest(trainer.budget) else f'{section}.micro_batch_tokens'}"
