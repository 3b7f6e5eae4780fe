"""What the ranks of a group find in their environment on a host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.engines.commands.hosts import Dial, MeetingPlace, RankPlace, StartRanks
from penstock.engines.groups.environment import environment_of
from penstock.engines.groups.interface import LOOPBACK_INTERFACE, Interface


def _start(gpus: Sequence[int | None], path: Sequence[str] = ()) -> StartRanks:
    return StartRanks(
        group="main",
        epoch=0,
        ranks=[RankPlace(rank, gpu) for rank, gpu in enumerate(gpus)],
        world_size=4,
        worker="module:Worker",
        dial=Dial("tcp://127.0.0.1:1", "", "", ""),
        meet=None,
        log_dir="logs",
        folder="/where/the/flow/works",
        path=list(path),
    )


def _environment(start: StartRanks, own: Interface = LOOPBACK_INTERFACE, meet: str = "127.0.0.1") -> dict[str, str]:
    return environment_of(start, own, MeetingPlace(meet, 4711))


def test_gpu_indices_count_among_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow confined to some GPUs never hands out others."""
    on_gpus = _start([1, 2])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _environment(on_gpus)["CUDA_VISIBLE_DEVICES"] == "1,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert _environment(on_gpus)["CUDA_VISIBLE_DEVICES"] == "5,6"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UserError, match="asks for GPU 2"):
        _environment(on_gpus)


def test_the_user_s_thread_count_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are shared out over the ranks only where the user has not decided."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert _environment(_start([None, None]))["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert _environment(_start([None, None]))["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_compiled_code_is_kept_where_only_this_user_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: the folder that the user has named; a CPU rank, which compiles nothing."""
    variable, on_gpu = "TORCHINDUCTOR_CACHE_DIR", _start([0])
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert _environment(on_gpu)[variable] == "/home/somebody/.cache/penstock/inductor"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert _environment(on_gpu)[variable] == "/caches/penstock/inductor"
    assert variable not in _environment(_start([None, None]))
    monkeypatch.setenv(variable, "/chosen")
    assert _environment(on_gpu)[variable] == "/chosen"


def test_a_host_s_sockets_are_on_its_own_interface_and_its_ranks_meet_at_the_first() -> None:
    """Of the three addresses that a rank is told, only the meeting place is another machine's."""
    environment = _environment(_start([None]), Interface("eth1", "10.0.0.2"), "10.0.0.1")
    told = (
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "VLLM_HOST_IP",
        "PENSTOCK_ADDRESS",
    )
    assert [environment[name] for name in told] == ["10.0.0.1", "4711", "eth1", "=eth1", "10.0.0.2", "10.0.0.2"]


def test_ranks_import_what_their_host_can_then_what_the_flow_can() -> None:
    """So a user's module beside the recipe is found, and no library of the flow's machine hides one of the host's."""
    found = _environment(_start([None], ["", "/flow/site-packages", sys.path[-1]]))["PYTHONPATH"].split(os.pathsep)
    own = [entry or str(Path.cwd()) for entry in sys.path]
    assert found == list(dict.fromkeys([*own, "/where/the/flow/works", "/flow/site-packages"]))
