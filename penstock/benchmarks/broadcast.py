"""What sending a bucket of weights costs its sender and its receivers, by the number of receivers.

The ranks form the group of a reshard to rollout engines elsewhere (penstock/engines/weights/joint.py) and do what it
does: rank 0 broadcasts, all others receive. On a CPU the kernel says how many bytes left each rank by TCP, so that
`copies` are counted: 1 is a bucket sent once, and a sender that served its receivers one by one would send as many
copies as there are receivers. On GPUs the seconds alone tell.

Left out: checksums and slices of a reshard (`bench reshard`), links between several machines.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import BenchResult, new_result
from penstock.engines.commands.message import Command, decode, decode_reply, encode, name_of
from penstock.engines.groups import interface
from penstock.engines.groups.channel import Tell
from penstock.engines.groups.group import EngineGroup, GroupSpec, RankDevice
from penstock.engines.groups.links import COMMAND_TIMEOUT_S, HEARTBEAT_TIMEOUT_S, MIB, START_TIMEOUT_S
from penstock.engines.groups.machine import visible_gpus
from penstock.engines.weights.joint import Joint, process_group
from penstock.reports.progress import TrainingProgress

WARM_UP = 2
TCP_INFO_BYTES, BYTES_SENT = 256, 200  # of struct tcp_info in linux/tcp.h: where bytes_sent and bytes_retrans are


@dataclass(frozen=True)
class Broadcast:
    """What a rank saw: median seconds until it had the bucket and all others had, and bytes that it sent each time."""

    seconds: float
    sent_bytes: float


@dataclass(frozen=True)
class SendBucket(Command[Broadcast]):
    """Broadcast `size` bytes from rank 0, after a warm-up `rounds` times."""

    size: int
    rounds: int


class Sharing:
    """A rank of the joint group of a reshard, and nothing else."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        import torch

        torch.set_num_threads(1)
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        if gpu is not None:
            torch.cuda.set_device(gpu)
        address, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=60)
        self.store = interface.connect_store(address, port, timeout) if rank else interface.open_store(timeout, port)[0]
        self.joint = Joint(process_group(self.device, self.store, rank, world_size, timeout), world_size)
        self._together()

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Carry out `SendBucket`, the only command."""
        return {"reply": encode(self._sent(decode(SendBucket, arguments, command)))}

    def _sent(self, asked: SendBucket) -> Broadcast:
        import torch

        bucket = torch.zeros(asked.size, dtype=torch.uint8, device=self.device)
        for _ in range(WARM_UP):
            self.joint.broadcast(bucket).wait()
        self._together()
        before, seconds = sent_by_tcp(), []
        for _ in range(asked.rounds):
            begin = time.perf_counter()
            self.joint.broadcast(bucket).wait()
            self._together()
            seconds.append(time.perf_counter() - begin)
        return Broadcast(statistics.median(seconds), (sent_by_tcp() - before) / asked.rounds)

    def _together(self) -> None:
        """Wait for all ranks; some bytes."""
        import torch

        self.joint.total(torch.zeros(1, device=self.device)).cpu()

    def after_reply(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """The group ends with the process."""


def sent_by_tcp() -> int:
    """Return the bytes that the TCP connections of this process have sent so far, each once, by the kernel's count."""
    total = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            descriptor = os.dup(int(entry.name))
        except OSError:  # closed since it was listed
            continue
        with socket.socket(fileno=descriptor) as one:
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                sent, again = struct.unpack_from("=QQ", told, BYTES_SENT)
                total += sent - again
    return total


def measure(command: str, *, receivers: Sequence[int], size_mib: int, rounds: int) -> BenchResult:
    """Broadcast to each number of receivers.

    Raises:
        UserError: there are not that many GPUs.
    """
    gpus = len(visible_gpus())
    if gpus and max(receivers) >= gpus:
        raise UserError(
            f"{max(receivers)} receivers and a sender need {max(receivers) + 1} GPUs, {gpus} are visible",
            "lower --receivers",
        )
    rows = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch, TrainingProgress() as progress:
        progress.start(len(receivers))
        for count in receivers:
            rows.append(_row(Path(scratch), count, bool(gpus), size_mib * MIB, rounds))
            progress.advance(len(rows), {})
    figures: dict[str, float] = {}
    for row in rows:
        figures |= {f"{name}_{row['receivers']}": row[name] for name in ("broadcast_s", "sender_copies") if name in row}
    settings = {"rounds": rounds, "bytes": size_mib * MIB, "backend": "nccl" if gpus else "gloo"}
    return new_result("broadcast", command, figures, settings=settings, details=rows)


def _row(scratch: Path, receivers: int, on_gpus: bool, size: int, rounds: int) -> dict[str, Any]:
    """Start a sender and its receivers, and return what they saw; copies: bytes sent, in buckets."""
    spec = GroupSpec(
        name=f"broadcast-{receivers}",
        roles=(),
        devices=tuple(RankDevice(rank if on_gpus else None) for rank in range(receivers + 1)),
        log_dir=scratch,
        start_timeout_s=START_TIMEOUT_S,
        command_timeout_s=COMMAND_TIMEOUT_S,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        worker="penstock.benchmarks.broadcast:Sharing",
    )
    with EngineGroup(spec) as group:
        group.wait_ready()
        answers = group.call(name_of(SendBucket), key="send", **encode(SendBucket(size, rounds)))
    replies = [decode_reply(SendBucket, answer["reply"]) for answer in answers]
    row: dict[str, Any] = {"receivers": receivers, "broadcast_s": max(reply.seconds for reply in replies)}
    if not on_gpus:
        copies = [round(reply.sent_bytes / size, 3) for reply in replies]
        row |= {"sender_copies": copies[0], "most_copies": max(copies), "all_copies": round(sum(copies), 3)}
    return row
