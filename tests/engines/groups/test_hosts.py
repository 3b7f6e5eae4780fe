"""Hosts start, watch and end the ranks of a group, on one machine or on several; whatever is killed, no rank is left.

Several hosts here are processes of this machine, which dial as those of others do. Machines of their own, in network
namespaces, are in tests/hosts.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from penstock.base.errors import UserError
from penstock.engines.commands.hosts import ProveFolder, TellFacts, TellLog, WriteFile
from penstock.engines.groups import channel, interface
from penstock.engines.groups import host as module
from penstock.engines.groups import hosts as flows_side
from penstock.engines.groups.group import EngineGroup, HostLost, RankDevice
from penstock.engines.groups.host import Host, HostStart
from penstock.engines.groups.hosts import HostFailed, Hosts, start_host
from penstock.engines.groups.spec import LOCAL
from tests.engines.groups.small_ranks import pids_of, spec
from tests.processes import alive
from tests.waiting import came_true, until

REPLY_S = 20.0
NAMES = ("pool/0", "pool/1")


@pytest.fixture(autouse=True)
def quick_hearts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection counts as gone after some beats."""
    monkeypatch.setattr(flows_side, "HEARTBEAT_S", 0.25)


@contextmanager
def two_hosts(folder: Path, **changes: Any) -> Iterator[tuple[Hosts, list[subprocess.Popen[bytes]]]]:
    """Two hosts that were started by others than the flow; their keepers' processes beside them."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(folder, expected=NAMES, **changes))
        log = stack.enter_context((folder / "hosts.log").open("ab"))
        keepers = [start_host(HostStart(name, hosts.address, silence_s=5.0), log) for name in NAMES]
        for keeper in keepers:
            stack.callback(keeper.wait)
            stack.callback(keeper.terminate)
        assert hosts.wait_joined(REPLY_S)
        yield hosts, keepers


def _apart(folder: Path, **changes: Any) -> Any:
    """A group of two ranks on each of two hosts."""
    devices = tuple(RankDevice(None, name) for name in NAMES for _ in range(2))
    return spec(folder, devices=devices, **changes)


def test_a_host_tells_what_its_machine_has(tmp_path: Path) -> None:
    """What it tells is what this process sees of the same machine."""
    with Hosts(tmp_path) as hosts:
        hosts.start_local()
        facts = hosts.begin(LOCAL, TellFacts()).result(REPLY_S)
    assert facts.cores == len(os.sched_getaffinity(0))
    assert (facts.interface, facts.address) == ("lo", "127.0.0.1")
    assert facts.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert abs(facts.free_bytes - psutil.virtual_memory().available) < 4 << 30


def test_a_host_that_has_not_joined_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could tell it that it is over. Who waited for it would wait here for longer than a test may take."""
    monkeypatch.setattr(flows_side, "LEAVE_S", 600.0)
    with Hosts(tmp_path) as hosts:
        hosts.start_local()
        child = hosts._child
    assert child is not None and child.returncode is not None


def test_a_host_writes_a_file_that_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Its digest says so; another one is another file."""
    with Hosts(tmp_path) as hosts:
        hosts.start_local()
        written = [hosts.begin(LOCAL, WriteFile(str(tmp_path / name), 1 << 20)).result(REPLY_S) for name in "ab"]
    digests = [hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in "ab"]
    assert [item.sha256 for item in written] == digests and len(set(digests)) == 2
    assert (tmp_path / "a").stat().st_size == 1 << 20
    assert all(item.seconds > 0 for item in written)


def test_a_host_imports_no_library_of_the_engines_and_no_configuration() -> None:
    """It is to be there in a fraction of a second. Control: what it imports is seen."""
    code = "import penstock.engines.groups.host, sys; print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'zmq'" in done.stdout
    heavy = ("torch", "vllm", "prefect", "mlflow", "pandas", "penstock.configs.schema")
    assert not {f"'{name}'" for name in heavy} & set(done.stdout.split(", "))


def test_ranks_of_two_hosts_are_one_group(tmp_path: Path) -> None:
    """Their numbers go through, each counts among its host's, and all meet in the first host's store."""
    with two_hosts(tmp_path) as (hosts, _), EngineGroup(_apart(tmp_path), hosts) as group:
        replies = group.call("echo", key="all")
        assert [reply["rank"] for reply in replies] == [0, 1, 2, 3]
        parents = [psutil.Process(reply["pid"]).parents()[1].pid for reply in replies]
        assert parents[0] == parents[1] != parents[2] == parents[3], "each host has its own"
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
        told = [list(reply.values()) for reply in group.call("environment", key="names", names=names)]
        assert [place[:4] for place in told] == [[str(rank), str(rank % 2), "4", "2"] for rank in range(4)]
        assert len({place[4] for place in told}) == 1
        pids = [reply["pid"] for reply in replies]
    assert not any(map(alive, pids))


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_lost_host_is_named_and_takes_its_ranks_along(tmp_path: Path, stopped: bool) -> None:
    """Killed, or silent as behind a cut cable; the group's ranks on the other host end, too. Control: they were there.

    A host that is stopped cannot end its ranks before it goes on: then it finds its flow silent.
    """
    with two_hosts(tmp_path, silence_s=3.0) as (hosts, keepers), EngineGroup(_apart(tmp_path), hosts) as group:
        pids = pids_of(group)
        assert all(map(alive, pids))
        (host,) = psutil.Process(keepers[1].pid).children()
        threading.Timer(0.3, host.suspend if stopped else host.kill).start()
        with pytest.raises(HostLost, match="its host pool/1 is lost") as caught:
            group.call("ponder_for_ever", key="p")
        assert caught.value.rank == 2
        assert not any(map(alive, pids[:2]))
        if stopped:
            hosts.close()
            host.resume()
        assert came_true(lambda: not any(map(alive, pids)), 20)


def test_the_host_of_a_flow_is_named_when_it_is_killed(tmp_path: Path) -> None:
    """The one on the flow's machine, which nobody has to wait for: its process is the flow's child."""
    with Hosts(tmp_path) as hosts, EngineGroup(spec(tmp_path), hosts) as group:
        pids = pids_of(group)
        assert hosts._child is not None
        (host,) = psutil.Process(hosts._child.pid).children()
        host.kill()
        with pytest.raises(HostLost, match="its host local is lost: its process exited"):
            group.call("ponder_for_ever", key="p")
        assert came_true(lambda: not any(map(alive, pids)), 10)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_lost_host_of_this_machine_is_started_anew(tmp_path: Path, stopped: bool) -> None:
    """A later epoch of its group begins on it, and the first has left no rank. Control: the old host stays lost."""
    with Hosts(tmp_path, silence_s=2.0) as hosts:
        with EngineGroup(spec(tmp_path), hosts) as group:
            pids = pids_of(group)
            assert hosts._child is not None
            (host,) = psutil.Process(hosts._child.pid).children()
            host.suspend() if stopped else host.kill()
            with pytest.raises(HostLost, match="its host local is lost") as caught:
                group.call("ponder_for_ever", key="p")
            assert not stopped or caught.value.unheard_s > 2.0
        with EngineGroup(spec(tmp_path), hosts, epoch=1) as group, pytest.raises(HostLost):
            group.wait_ready()
        hosts.await_again(LOCAL)
        with EngineGroup(spec(tmp_path), hosts, epoch=2) as group:
            assert pids_of(group) != pids
            assert not any(map(alive, pids))


def test_another_process_takes_the_place_of_a_lost_host(tmp_path: Path) -> None:
    """One that joins by itself, under the same name; ranks on it and on the other host are one group again."""
    with two_hosts(tmp_path) as (hosts, keepers):
        with EngineGroup(_apart(tmp_path), hosts) as group:
            group.wait_ready()
            keepers[1].terminate()
            with pytest.raises(HostLost, match="its host pool/1 is lost"):
                group.call("ponder_for_ever", key="p")
        hosts.await_again(NAMES[1])
        assert hosts.missing() == [NAMES[1]]
        with (tmp_path / "hosts.log").open("ab") as log:
            another = start_host(HostStart(NAMES[1], hosts.address, silence_s=5.0), log)
        assert hosts.wait_joined(REPLY_S)
        with EngineGroup(_apart(tmp_path), hosts, epoch=1) as group:
            assert [reply["rank"] for reply in group.call("echo", key="all")] == [0, 1, 2, 3]
        another.terminate()
        another.wait()


_FLOW = """
import sys, time
from pathlib import Path
from penstock.engines.groups.group import EngineGroup
from tests.engines.groups.small_ranks import pids_of
from tests.engines.groups.test_hosts import _apart, two_hosts

with two_hosts(Path(sys.argv[1])) as (hosts, keepers), EngineGroup(_apart(Path(sys.argv[1])), hosts) as group:
    print(*pids_of(group), flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_hosts_of_a_flow_that_is_gone_end_their_ranks(tmp_path: Path) -> None:
    """Those on other machines find it silent. Here their keepers are stopped, so that nothing else ends them."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command, environment = [sys.executable, "-c", _FLOW, str(tmp_path)], os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as flow:
        assert flow.stdout is not None
        pids = [int(pid) for pid in flow.stdout.readline().split()]
        assert len(pids) == 4
        keepers = psutil.Process(flow.pid).children()
        for keeper in keepers:
            keeper.suspend()
        flow.kill()
        flow.wait()
        assert all(map(alive, pids))
        assert came_true(lambda: not any(map(alive, pids)), 20)
        assert "the flow is silent" in (tmp_path / "hosts.log").read_text()
        for keeper in keepers:
            keeper.resume()


def test_what_a_host_cannot_do_is_told_and_it_lives_on(tmp_path: Path) -> None:
    """A folder of logs that is a file; a GPU that is not there is the user's mistake."""
    (tmp_path / "file").touch()
    with Hosts(tmp_path) as hosts:
        with EngineGroup(spec(tmp_path / "file"), hosts) as group, pytest.raises(HostFailed, match="FileExistsError"):
            group.wait_ready()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        assert hosts.begin(LOCAL, TellLog("main", 0, 7)).result(REPLY_S) == ""
    gpu = spec(tmp_path, devices=(RankDevice(3),))
    with EngineGroup(gpu) as group, pytest.raises(UserError, match="asks for GPU 3"):
        group.wait_ready()


def test_a_host_proves_that_a_folder_is_the_flow_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what the flow wrote, and writes what the flow reads. Control: a file that is not there."""
    (tmp_path / "theirs").write_text("from the flow")
    with Hosts(tmp_path) as hosts:
        hosts.start_local()
        ours = str(tmp_path / "ours")
        command = ProveFolder(str(tmp_path / "theirs"), ours, "from the host")
        assert hosts.begin(LOCAL, command).result(REPLY_S) == "from the flow"
        assert Path(ours).read_text() == "from the host"
    elsewhere = replace(command, read=str(tmp_path / "nothing"), write=str(tmp_path / "never"))
    monkeypatch.setattr(module, "FOLDER_WAIT_S", 0.1)  # here, where it is looked at
    assert Host.prove_folder(Mock(Host), elsewhere) == ""
    assert not (tmp_path / "never").exists()


def test_who_does_not_join_is_told(tmp_path: Path) -> None:
    """And nobody joins whom the flow does not expect, though it has the keys."""
    with Hosts(tmp_path, expected=NAMES) as hosts, (tmp_path / "log").open("ab") as log:
        keepers = [start_host(HostStart(name, hosts.address, silence_s=5.0), log) for name in (NAMES[0], "stranger")]
        assert came_true(lambda: hosts.missing() == [NAMES[1]], 20)
        assert not hosts.wait_joined(1.0)
        assert list(hosts.joined()) == [NAMES[0]]
        assert hosts.lost(NAMES[0]) is None
    for keeper in keepers:
        keeper.terminate()
        keeper.wait()


def test_a_host_takes_commands_from_its_flow_alone(tmp_path: Path) -> None:
    """Whoever listens at the flow's address without its secret key is not spoken to. Control: with it, it is."""
    keys = channel.Keys.new()
    impostors = replace(channel.Keys.new(), client_public=keys.client_public)
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("ab"))
        listeners = []
        for own in (impostors, keys):
            listener = channel.Listener(["pool/0"], ("127.0.0.1", 0), own)
            address = keys.address(listener.address.endpoint)
            keeper = start_host(HostStart("pool/0", address, silence_s=5.0), log)
            listeners.append(listener)
            for end in (listener.close, keeper.wait, keeper.terminate):
                stack.callback(end)
        impostor, flow = listeners
        said: list[str] = []
        until(lambda: said.extend(item["kind"] for _, item in flow.receive(0.2)) or "hello" in said, REPLY_S, "hello")
        heard = [message for _ in range(5) for message in impostor.receive(0.2)]
        assert heard == [], "though its host began earlier"


def test_an_interface_that_is_not_there_is_named() -> None:
    """With those that are. Control: the loopback interface, by name and by the way to an address."""
    with pytest.raises(UserError, match="no network interface 'ib7'") as caught:
        interface.named("ib7")
    assert "lo" in caught.value.remedy
    assert interface.named("lo") == interface.towards("127.0.0.1") == interface.LOOPBACK_INTERFACE
