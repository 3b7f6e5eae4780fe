"""Rank processes of an engine group on this machine: what they are told, how they start, how they end.

A rank lives in its own session (Ctrl-C in the terminal reaches only the flow), reads nothing but what it is told at its
start, and writes to its own log file; it never holds the flow's stdout. Log files are appended to and rotated once, at
start: above 20 MB the old one becomes `.1`. Python's rotating handlers would miss what C libraries write.

Linux only, like the engines. Left out: machines other than this one (there torchrun starts the ranks).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.groups import interface
from engines.groups.channel import Address
from penstock.base.errors import UserError
from penstock.trackers.table import withheld
from penstock.usercode.kept import command_of, number_from

ROTATE_ABOVE_BYTES = 20 * 1024**2
TERM_GRACE_S = 2.0
REAP_TIMEOUT_S = 15.0  # longer than a keeper's patience
STACKS_WAIT_S = 1.0
START_KEY = "start"  # the key under which a rank replies how building its worker went
_TAIL_BYTES = 8192

FORCED_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the generator shares its weights with the trainer: same process
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",  # a killed rank's last lines are in its log
}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "INFO",  # what its start takes, in the rank's log
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait starve whatever else runs on the cores, up to 10x
}
# Of the flow alone: engines know neither Prefect nor a tracker.
WITHHELD_VARIABLES = frozenset(
    {
        *("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"),
        *withheld(),
    }
)
_CPU = {"DS_ACCELERATOR": "cpu", "TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankDevice:
    """Where one rank computes. `gpu` counts among the GPUs that the flow may see; None is a CPU rank."""

    gpu: int | None


@dataclass(frozen=True)
class GroupSpec:
    """What an engine group is: one rank per device, their log folder and their deadlines (seconds).

    `worker` names the class that holds the models, as "module:Class"; see `engines.groups.rank.Worker` for its shape.
    """

    name: str
    roles: tuple[str, ...]
    devices: tuple[RankDevice, ...]
    log_dir: Path
    start_timeout_s: float
    command_timeout_s: float
    heartbeat_timeout_s: float
    worker: str = "engines.ranks.worker:Worker"

    def __post_init__(self) -> None:
        if len({device.gpu is None for device in self.devices}) != 1:
            raise ValueError(f"engine group {self.name!r} needs devices, and either all GPUs or all CPU")


@dataclass(frozen=True)
class RankStart:
    """What a rank must know before it can dial. It comes through a pipe, because it holds the channel's keys.

    A process's first environment stays readable for as long as it lives, whatever the process does to its own copy.
    """

    group: str
    epoch: int
    rank: int
    world_size: int
    gpu: int | None
    worker: str
    address: Address

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def take(cls) -> RankStart:
        """Read it from the standard input, of which it is the only line."""
        values = json.loads(sys.stdin.buffer.readline())
        return cls(**values | {"address": Address(**values["address"])})


class RankProcess:
    """One spawned rank, below a keeper that ends as the rank does once nothing of it is left (usercode/keeper.py).

    The keeper's exit is observed without reaping it, so that its pid goes to nobody else.
    """

    def __init__(self, start: RankStart, environment: dict[str, str], log_file: Path) -> None:
        self.rank = start.rank
        self.log_file = log_file
        if log_file.exists() and log_file.stat().st_size > ROTATE_ABOVE_BYTES:
            log_file.replace(log_file.with_name(log_file.name + ".1"))
        with log_file.open("ab") as log:
            number, told = os.pipe()
            self._keeper = subprocess.Popen(
                command_of([sys.executable, "-P", "-m", "engines.groups.rank"], [told], session=True),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[told],
            )
        os.close(told)
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError), self._keeper.stdin as pipe:  # of a rank that has ended: `exit_reason` tells
            pipe.write(start.to_json())
        self._pid = number_from(number)

    def exit_reason(self) -> str | None:
        """How the rank ended, or None while it runs."""
        status = os.waitid(os.P_PID, self._keeper.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        if status.si_code == os.CLD_EXITED:
            return f"exited with code {status.si_status}"
        return f"exited with signal {status.si_status} ({signal.Signals(status.si_status).name})"

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the rank itself, if it still runs."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def kill_group(self) -> None:
        """Have the keeper SIGKILL the rank and every process that came of it. Does nothing once reaped."""
        if self._keeper.returncode is None:
            os.kill(self._keeper.pid, signal.SIGTERM)

    def reap(self) -> None:
        try:
            self._keeper.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.error("rank %d (pid %d) survives SIGKILL: a driver holds it", self.rank, self._pid)

    def log_size(self) -> int:
        return self.log_file.stat().st_size

    def log_tail(self, since: int = 0) -> str:
        """The end of the log file, at most 8 KB, nothing before byte `since`."""
        with self.log_file.open("rb") as log:
            log.seek(max(since, self.log_size() - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip()


def spawn(spec: GroupSpec, epoch: int, address: Address) -> list[RankProcess]:
    """Start every rank of `spec` and return at once; on an error none is left.

    Raises:
        UserError: a GPU is asked for that the flow cannot see.
    """
    shared = group_environment(spec)
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    processes: list[RankProcess] = []
    try:
        for rank, device in enumerate(spec.devices):
            start = RankStart(
                group=spec.name,
                epoch=epoch,
                rank=rank,
                world_size=len(spec.devices),
                gpu=None if device.gpu is None else rank,
                worker=spec.worker,
                address=address,
            )
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(RankProcess(start, environment, spec.log_dir / f"{spec.name}-rank{rank}.log"))
    except BaseException:
        kill(processes)
        raise
    return processes


def group_environment(spec: GroupSpec) -> dict[str, str]:
    """The environment all ranks of a group share: the flow's own, with what the engines need on top."""
    cores_per_rank = max(1, len(os.sched_getaffinity(0)) // len(spec.devices))
    settings = {
        "PENSTOCK_GROUP": spec.name,
        "WORLD_SIZE": str(len(spec.devices)),
        "MASTER_PORT": str(_free_port()),
        # What the flow can import its ranks can import, wherever it was started.
        "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
    }
    on_cpu = spec.devices[0].gpu is None
    devices = _CPU if on_cpu else {"CUDA_VISIBLE_DEVICES": _visible_gpus(spec)}
    threads = {name: str(cores_per_rank) for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")}  # the second: tokenizers
    defaults = threads | _DEFAULTS | ({} if on_cpu else _compiled_code())
    inherited = {name: value for name, value in os.environ.items() if name not in WITHHELD_VARIABLES}
    return defaults | inherited | FORCED_VARIABLES | interface.variables() | settings | devices


def _compiled_code() -> dict[str, str]:
    """Where PyTorch keeps compiled code, until vLLM names a folder of its own when it starts.

    PyTorch's default is a folder in /tmp that anyone could have made first, with code for this user to load.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {"TORCHINDUCTOR_CACHE_DIR": str(caches / "penstock" / "inductor")}


def _visible_gpus(spec: GroupSpec) -> str:
    gpus = [device.gpu for device in spec.devices if device.gpu is not None]
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    if outer is None:
        return ",".join(map(str, gpus))
    names = [name.strip() for name in outer.split(",") if name.strip()]
    if max(gpus) >= len(names):
        raise UserError(
            f"group {spec.name!r} asks for GPU {max(gpus)}, but CUDA_VISIBLE_DEVICES={outer!r} shows {len(names)}",
            "GPU indices count from 0 among the visible ones: change the group's 'gpus' or CUDA_VISIBLE_DEVICES.",
        )
    return ",".join(names[gpu] for gpu in gpus)


def _free_port() -> int:
    # Free now; rank 0 binds it seconds later. A collision shows as a failed start, never as a hang.
    with socket.socket() as probe:
        probe.bind((interface.HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def stacks(processes: Sequence[RankProcess]) -> str:
    """Every rank's Python stacks, as its faulthandler writes them to its log on SIGUSR1. Takes one second."""
    before = [process.log_size() for process in processes]
    for process in processes:
        process.send_signal(signal.SIGUSR1)
    time.sleep(STACKS_WAIT_S)
    texts = [process.log_tail(since) for process, since in zip(processes, before, strict=True)]
    return "\n".join(
        f"rank {process.rank}:\n{text or '(no stacks: the process does not react)'}"
        for process, text in zip(processes, texts, strict=True)
    )


def end(processes: Sequence[RankProcess], grace_s: float) -> None:
    """Wait `grace_s` for the ranks to leave, then SIGTERM, then SIGKILL; whatever happens, all are gone after."""
    try:
        if not _gone(processes, grace_s):
            for process in processes:
                process.send_signal(signal.SIGTERM)
            _gone(processes, TERM_GRACE_S)
    finally:
        kill(processes)


def kill(processes: Sequence[RankProcess]) -> None:
    """SIGKILL every rank with all its children, and reap it."""
    for process in processes:
        process.kill_group()
    for process in processes:
        process.reap()


def _gone(processes: Sequence[RankProcess], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(process.exit_reason() is None for process in processes):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True
