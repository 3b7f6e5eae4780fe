"""Collectives over the links between ranks, and how fast they are: an engine group that does nothing else.

Its ranks are those of a training as far as addresses, environment and devices go: gloo between CPU ranks, NCCL between
GPUs, on the interface of their hosts. Left out: which sizes are worth looking at, and what is to be said of them
(penstock/benchmarks/nccl.py, penstock/doctor/pool.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.engines.commands.message import Command, decode, decode_reply, encode, name_of
from penstock.engines.groups import interface
from penstock.engines.groups.channel import Tell
from penstock.engines.groups.group import EngineGroup
from penstock.engines.groups.spec import GroupSpec, RankDevice

Collective = Literal["all_gather", "broadcast", "all_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
MIB = 1 << 20
WIDTH = 2  # bytes of a bfloat16
WARM_UP = 3
START_TIMEOUT_S, COMMAND_TIMEOUT_S, HEARTBEAT_TIMEOUT_S = 300.0, 300.0, 120.0


@dataclass(frozen=True)
class Measured:
    """Median seconds of one collective on one rank."""

    seconds: float


@dataclass(frozen=True)
class Measure(Command[Measured]):
    """Run one collective over `size` bytes of bfloat16, after a warm-up `rounds` times.

    For an all-gather `size` counts what every rank holds afterwards.
    """

    collective: Collective
    size: int
    rounds: int


class Collectives:
    """A rank that runs collectives and nothing else."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        import torch

        self.rank, self.world_size = rank, world_size
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        if gpu is not None:
            torch.cuda.set_device(gpu)
        interface.init_process_group("gloo" if gpu is None else "cpu:gloo,cuda:nccl")

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Carry out `Measure`, the only command."""
        return {"reply": encode(self._measured(decode(Measure, arguments, command)))}

    def _measured(self, asked: Measure) -> Measured:
        import torch

        share = asked.size // WIDTH // self.world_size
        buffer = torch.zeros(share * self.world_size, dtype=torch.bfloat16, device=self.device)
        own = buffer.narrow(0, self.rank * share, share)
        calls = {
            "all_gather": lambda: torch.distributed.all_gather_into_tensor(buffer, own),
            "broadcast": lambda: torch.distributed.broadcast(buffer, src=0),
            "all_reduce": lambda: torch.distributed.all_reduce(buffer),
        }
        call = calls[asked.collective]
        for _ in range(WARM_UP):
            call()
        torch.distributed.barrier()
        return Measured(statistics.median(self._seconds(call) for _ in range(asked.rounds)))

    def _seconds(self, call: Any) -> float:
        import torch

        if self.device.type == "cpu":
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def after_reply(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Leave the process group."""
        import torch

        torch.distributed.destroy_process_group()


def group_of(devices: Sequence[RankDevice], log_dir: Path, start_timeout_s: float = START_TIMEOUT_S) -> GroupSpec:
    """Return the group that runs collectives on these devices."""
    return GroupSpec(
        name="collectives",
        roles=(),
        devices=tuple(devices),
        log_dir=log_dir,
        start_timeout_s=start_timeout_s,
        command_timeout_s=COMMAND_TIMEOUT_S,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        worker=f"{__name__}:{Collectives.__name__}",
    )


def seconds_of(group: EngineGroup, collective: Collective, size: int, rounds: int) -> tuple[int, float]:
    """Run a collective over `size` bytes, less a remainder that ranks cannot share; return the bytes and the seconds.

    Raises:
        EngineError, RankLost: as `EngineGroup.replies`.
    """
    size -= size % (WIDTH * len(group.spec.devices))
    asked = Measure(collective, size, rounds)
    answers = group.call(name_of(Measure), key=f"{collective}/{size}", **encode(asked))
    # a collective has ended where the last rank has it
    return size, max(decode_reply(Measure, answer["reply"]).seconds for answer in answers)


def bus_bandwidth(collective: str, size: int, seconds: float, ranks: int) -> float:
    """Return bytes per second over the busiest link of a ring, by nccl-tests' factors."""
    factor = {"all_gather": (ranks - 1) / ranks, "broadcast": 1.0, "all_reduce": 2 * (ranks - 1) / ranks}
    return size / seconds * factor[collective]
