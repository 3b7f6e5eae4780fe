"""What ever more ranks and hosts cost the flow: a command to all of them, watching them, and their start.

Ranks without a model on hosts of eight, all on this machine, which dial as those of others do; what is measured is the
flow's end of it: channel, engine group, hosts. A training sends about ten commands an iteration, so a step waits for
ten times `command_ms`; `watch_cores` is what echoes and deadlines take of the flow while a command runs.

Left out: what replies hold (`penstock bench replies`), the network, and what ranks do.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import BenchResult, new_result
from penstock.engines.commands.message import Command, encode, name_of
from penstock.engines.groups.channel import Tell
from penstock.engines.groups.group import EngineGroup, GroupSpec, RankDevice
from penstock.engines.groups.host import HostStart
from penstock.engines.groups.hosts import Hosts, start_host
from penstock.reports.progress import TrainingProgress

RANKS_PER_HOST = 8
WATCHED_S = 5.0
START_TIMEOUT_S, COMMAND_TIMEOUT_S, SILENCE_S = 600.0, 120.0, 120.0


@dataclass(frozen=True)
class Pause(Command[None]):
    """Do nothing for some seconds."""

    seconds: float


class Idle:
    """A rank that does nothing."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        pass

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Carry out `Pause`, the only command."""
        time.sleep(arguments["seconds"])
        return {"reply": None}

    def after_reply(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is held."""


def measure(command: str, *, counts: Sequence[int], rounds: int) -> BenchResult:
    """Send `rounds` empty commands to each number of ranks; medians.

    Raises:
        UserError: a number is no multiple of the ranks of a host, but for less than one host's.
    """
    for count in counts:
        if count > RANKS_PER_HOST and count % RANKS_PER_HOST:
            raise UserError(f"{count} ranks do not fill hosts of {RANKS_PER_HOST}", "give multiples of it")
    details = []
    with TrainingProgress() as progress:
        for count in counts:
            progress.phase(f"starting {count} ranks")
            details.append(_measured(count, rounds))
    names = [name for name in details[0] if name not in ("ranks", "hosts")]
    figures = {f"{name}_{row['ranks']}": row[name] for row in details for name in names}
    settings = {"rounds": rounds, "ranks_per_host": RANKS_PER_HOST, "watched_s": WATCHED_S}
    return new_result("fan-in", command, figures, settings=settings, details=details)


def _measured(count: int, rounds: int) -> dict[str, Any]:
    flow, began = psutil.Process(), time.perf_counter()
    with _group(count) as (group, hosts):
        group.wait_ready()
        start_s = time.perf_counter() - began
        _send(group, "warm-up", 0.0)
        before = _cpu_s(flow)
        seconds = [_send(group, str(number), 0.0) for number in range(rounds)]
        command_cpu_s = (_cpu_s(flow) - before) / rounds
        before = _cpu_s(flow)
        _send(group, "watched", WATCHED_S)
        watch_cores = (_cpu_s(flow) - before) / WATCHED_S
    return {
        "ranks": count,
        "hosts": hosts,
        "command_ms": statistics.median(seconds) * 1000,
        "command_cpu_ms": command_cpu_s * 1000,
        "watch_cores": watch_cores,
        "start_s": start_s,
    }


def _send(group: EngineGroup, key: str, pause_s: float) -> float:
    command, began = Pause(pause_s), time.perf_counter()
    group.call(name_of(Pause), key=key, **encode(command))
    return time.perf_counter() - began


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _group(count: int) -> Iterator[tuple[EngineGroup, int]]:
    """Start ranks on as many hosts as they need; yield them and the number of hosts."""
    names = [f"bench/{number}" for number in range(-(-count // RANKS_PER_HOST))]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        log = stack.enter_context((folder / "hosts.log").open("ab"))
        hosts = stack.enter_context(Hosts(folder, expected=names, silence_s=SILENCE_S))
        for name in names:
            keeper = start_host(HostStart(name, hosts.address, silence_s=SILENCE_S), log)
            stack.callback(keeper.wait)
            stack.callback(keeper.terminate)
        devices = tuple(RankDevice(None, names[rank // RANKS_PER_HOST]) for rank in range(count))
        spec = GroupSpec(
            name="idle",
            roles=(),
            devices=devices,
            log_dir=folder,
            start_timeout_s=START_TIMEOUT_S,
            command_timeout_s=COMMAND_TIMEOUT_S,
            heartbeat_timeout_s=SILENCE_S,
            worker="penstock.benchmarks.fan_in:Idle",
        )
        yield stack.enter_context(EngineGroup(spec, hosts)), len(names)
