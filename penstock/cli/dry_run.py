"""What `--dry-run` prints: configuration, placement and memory; of `train` prompts and one reward, and of a run that is
to go on also what it would gain if nobody waited for its longest responses; of what trains in steps the data and disk.

Left out: the checks, which have passed before (penstock/checks/training.py, penstock/checks/preferences.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.console import Console
from rich.table import Table

from penstock.checks.memory import GroupEstimate, describe_offload, describe_snapshots
from penstock.checks.prompts import describe_prompts
from penstock.checks.steps import describe_disk, describe_model, describe_steps
from penstock.checks.trial_call import trial_call
from penstock.configs.idle import idle_settings, idle_steps
from penstock.configs.loading.load import to_yaml
from penstock.configs.preference import PairConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.schedule import largest
from penstock.doctor.model import examine_model
from penstock.engines.groups.placement import describe_strategy, reshard_strategy
from penstock.engines.groups.spec import LOCAL, RankDevice, device_name
from penstock.engines.sizing.memory import GIB
from penstock.reports.alarms import History
from penstock.reports.waiting import ahead_gain, carry_gain, gains, stream_gain, tail_gain
from penstock.state.run_folder import RunFolder

GAINS_NOTHING = 1.05  # times as fast
NOTHING_KNOWN = (
    "free ?: of a host that has not joined nothing is known yet; the start compares once it has, and refuses what does "
    "not fit"
)


def print_dry_run(
    config: TrainConfig, estimates: Sequence[GroupEstimate], gpus: str, history: History, console: Console
) -> None:
    """Print a training that could start, and what each rank would need; no engine starts.

    Args:
        gpus: which of this machine it would get now, or what it would wait for; empty without any.
        history: figures of the iterations that it has behind it.
    """
    console.print(to_yaml(config), highlight=False, markup=False, soft_wrap=True)
    print_placement(estimates, console)
    strategy = f"{reshard_strategy(config)} ({describe_strategy(config)})"
    for text in (
        *filter(None, [gpus]),
        *describe_actor(config),
        f"reshard: {strategy}",
        *describe_together(config),
        *describe_offload(config, estimates),
        describe_snapshots(estimates),
        *(() if history else idle_settings(config)),  # of a run that goes on all values are given, also defaults
        *describe_prompts(config),
        *trial_call(config),
        *describe_waiting(history, config.rollout_apart),
    ):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe_actor(config: TrainConfig) -> list[str]:
    """Return in words what the actor is, how it is trained and by what it is served; of a tiny model nothing."""
    lines = [] if config.model.path is None else examine_model(config.model.path, config.model.code)
    return [f"{line.subject}: {line.text}" for line in lines]


def describe_together(config: TrainConfig) -> list[str]:
    """Return a sentence for each model whose micro-batches, or whose experts, several ranks have together."""
    sections = {"actor": config.actor, "critic": config.critic}
    count = config.actor.expert_parallel
    experts = [f"actor: {count} ranks share out the experts of each layer"] if count > 1 else []
    return experts + [
        f"{name}: {section.sequence_parallel} ranks compute each micro-batch together, "
        f"{-(-largest(section.budget) // section.sequence_parallel):,} of {largest(section.budget):,} tokens each"
        for name, section in sections.items()
        if section is not None and section.sequence_parallel > 1
    ]


def print_dry_run_of_steps(
    config: TrainConfig | PairConfig,
    estimates: Sequence[GroupEstimate],
    gpus: str,
    going_on: RunFolder | None,
    console: Console,
) -> None:
    """Print an offline training that could start, as above.

    Args:
        gpus: likewise.
        going_on: the run, where one is to go on.
    """
    console.print(to_yaml(config), highlight=False, markup=False, soft_wrap=True)
    print_placement([_of_steps(item) for item in estimates if "actor" in item.roles], console)
    for text in (
        *filter(None, [gpus]),
        describe_snapshots(estimates),
        *(() if going_on else idle_steps(config)),
        *describe_model(config),
        *describe_steps(config, going_on),
        describe_disk(config),
    ):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _of_steps(estimate: GroupEstimate) -> GroupEstimate:
    """Return the estimate of the only model that steps train, which the engines call the actor's warm-up."""
    parts = {name.removeprefix("sft "): size for name, size in estimate.memory.parts.items()}
    memory = replace(estimate.memory, phase="the steps", parts=parts)
    return replace(estimate, roles=("actor",), memory=memory, recomputed={"model": estimate.recomputed["sft"]})


def describe_waiting(history: History, apart: bool = False) -> list[str]:
    """Return a sentence about what ways not to wait would gain; nothing where the figures do not say it.

    Args:
        apart: whether the actor has GPUs of its own, on which it could learn meanwhile.
    """
    tail, carry = gains(history, tail_gain), gains(history, carry_gain)
    if not tail:
        return []
    stream, ahead = (median(gains(history, gain)) if apart else 1.0 for gain in (stream_gain, ahead_gain))
    if max(median(tail), median(carry), stream, ahead) < GAINS_NOTHING:
        return ["waiting: by the run's own figures nothing would be gained by not waiting for the longest responses"]
    expected = f"would make an iteration {median(tail):.2f} times as fast (median of the last {len(tail)})"
    said = f"waiting: by the run's own figures rollout.tail={{extra: 0.25}} {expected}"
    said = f"{said}, rollout.carry={{extra: 0.25, staleness: 2}} {median(carry):.2f} times"
    if not apart:
        return [said]
    return [f"{said}, rollout.stream={{}} {stream:.2f} times, rollout.stream={{staleness: 1}} {ahead:.2f} times"]


def print_placement(estimates: Sequence[GroupEstimate], console: Console) -> None:
    """Print which rank is on which device of which host, with what it needs and may take; then each group's memory."""
    console.print(_ranks(estimates))
    if any(None in item.free for item in estimates):
        console.print(NOTHING_KNOWN, highlight=False)
    console.print(_memory(estimates))


def _ranks(estimates: Sequence[GroupEstimate]) -> Table:
    """Return a table of all ranks, host by host and there GPU by GPU."""
    table = Table("host", "device", "rank", "roles", title="placement and memory estimate, GiB")
    for heading in ("needs", "free"):
        table.add_column(heading, justify="right", no_wrap=True)
    seats = [
        _Seat(device, f"{item.group} {rank}", item, free)
        for item in estimates
        for rank, (device, free) in enumerate(zip(item.devices, item.free, strict=True))
    ]
    for host in dict.fromkeys(seat.device.host for seat in seats):
        name = "this machine" if host == LOCAL else host
        for seat in sorted((seat for seat in seats if seat.device.host == host), key=_Seat.place):
            free = "?" if seat.free is None else _gib(seat.free)
            roles, needs = ", ".join(seat.of.roles), _gib(seat.of.memory.total)
            roles = f"{roles} (elastic)" if seat.of.elastic else roles
            table.add_row(name, device_name(seat.device), seat.rank, roles, needs, free)
            name = ""
        table.add_section()
    return table


@dataclass(frozen=True)
class _Seat:
    """A rank on its device."""

    device: RankDevice
    rank: str
    of: GroupEstimate
    free: int | None

    def place(self) -> int:
        """Return what ranks of a host are sorted by; those on the CPU keep their order."""
        return -1 if self.device.gpu is None else self.device.gpu


def _memory(estimates: Sequence[GroupEstimate]) -> Table:
    """Return a table of what a rank of each group needs its memory for, in its fullest phase."""
    table = Table("group", "fullest in", "of which", "recomputed in the backward pass", title="memory per rank, GiB")
    for item in estimates:
        parts = "\n".join(f"{_gib(size)} {name}" for name, size in item.memory.parts.items())
        recomputed = "\n".join(f"{name}: {value}" for name, value in item.recomputed.items())
        table.add_row(item.group, item.memory.phase, parts, recomputed)
        table.add_section()
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
