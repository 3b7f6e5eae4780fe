"""A training comes together: all its hosts or none, one run folder, the same libraries; and who is missing is told."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import HostsConfig
from penstock.engines.commands.hosts import GpuFacts, HostFacts
from penstock.engines.groups import interface
from penstock.engines.groups.channel import FLOW_KEYS, Keys
from penstock.engines.groups.host import HostStart
from penstock.engines.groups.hosts import start_host
from penstock.session.machines import hosts as session_hosts
from penstock.session.machines.claims import Claims
from penstock.session.machines.hosts import absent_after, check_alike, check_one_folder, gathering, hosted
from penstock.session.machines.pools import Missing
from penstock.state.run_folder import RunFolder
from tests.processes import alive

Keepers = list[subprocess.Popen[bytes]]
GROUPS = {"main": {"hosts": 2, "ranks": 1, "roles": ["actor", "rollout"]}}
FACTS = HostFacts("node-1", "eth0", "10.0.0.1", 8, 1 << 35, 1 << 30, [], {"torch": "2.11.0"}, 0.0)


def _config(port: int, **hosts: Any) -> TrainConfig:
    return TrainConfig(groups=GROUPS, hosts={"port": port, **hosts})  # type: ignore[arg-type]


@contextmanager
def joining(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[tuple[int, Keepers]]:
    """Start hosts that join by themselves; yield the port that they dial, and their keepers."""
    keys, port = Keys.new(), interface.free_port("127.0.0.1")
    monkeypatch.setenv(FLOW_KEYS, keys.to_text())
    address = keys.address(f"tcp://127.0.0.1:{port}")
    with ExitStack() as stack:
        log = stack.enter_context((folder / "hosts.log").open("ab"))
        keepers = [start_host(HostStart(f"hosts/{n}", address, silence_s=10.0), log) for n in range(count)]
        for keeper in keepers:
            stack.callback(keeper.wait)
            stack.callback(keeper.terminate)
        yield port, keepers


def test_a_training_has_its_hosts_and_lets_them_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What their machines have is known, nothing is left in the run folder, and they end as the training does."""
    run = RunFolder(tmp_path)
    with joining(tmp_path, monkeypatch, 2) as (port, keepers):
        with hosted(_config(port), run, Claims((1,))) as machines:
            assert machines.elsewhere.mine == (1,)
            assert sorted(machines.hosts.joined()) == sorted(machines.elsewhere.hosts) == ["hosts/0", "hosts/1"]
            assert all(alive(keeper.pid) for keeper in keepers)
            assert [path for path in tmp_path.iterdir() if path.name.startswith(".shared")] == []
        assert [keeper.wait(10) for keeper in keepers] == [0, 0]


def test_who_has_not_joined_in_time_is_told_and_the_others_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All or none: the one that is there does not stay with a training that never starts."""
    with joining(tmp_path, monkeypatch, 1) as (port, keepers):
        late = _config(port, join_timeout_s=4.0)
        with pytest.raises(UserError, match="of 2 hosts these have not joined within 4 s:") as caught:
            hosted(late, RunFolder(tmp_path), Claims()).__enter__()
        assert "hosts/1: nobody has started it" in caught.value.problem
        assert "hosts/0" not in caught.value.problem
        assert keepers[0].wait(10) == 0


def test_one_that_never_comes_ends_the_wait_of_a_training_and_not_of_an_examination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training needs all, an examination takes those that come. Control: once all have ended, both waits have."""
    ended, waiting = Missing("its run has failed", True), Missing("it has not begun", False)
    network, looks = HostsConfig(port=interface.free_port("127.0.0.1")), list[int]()

    def told(states: dict[str, Missing]) -> None:
        def why(_: object, __: object) -> dict[str, Missing]:
            looks.append(1)
            return states

        monkeypatch.setattr(session_hosts, "why_missing", why)

    monkeypatch.setenv(FLOW_KEYS, Keys.new().to_text())
    monkeypatch.setattr(session_hosts, "LOOK_S", 0.01)
    with gathering(tmp_path, network, ["pool/0", "pool/1"]) as (hosts, asked):
        told({"pool/0": ended, "pool/1": waiting})
        assert absent_after(hosts, 600.0, asked, any)["pool/0"] == ended
        assert len(looks) == 1
        assert absent_after(hosts, 0.1, asked, all)["pool/1"] == waiting
        assert len(looks) > 2
        told({"pool/0": ended, "pool/1": ended})
        assert absent_after(hosts, 600.0, asked, all) == {"pool/0": ended, "pool/1": ended}


def test_a_folder_that_is_another_one_on_a_host_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose machine has an older one of that name. (Or none: tests/engines/groups.) Control: the same folder."""
    with (
        joining(tmp_path, monkeypatch, 2) as (port, _),
        hosted(_config(port), RunFolder(tmp_path), Claims()) as machines,
    ):
        hosts = machines.hosts
        run = RunFolder(tmp_path / "shared")
        run.path.mkdir()
        check_one_folder(hosts, run, ["hosts/0"])
        begin = hosts.begin

        def elsewhere(name: str, command: Any) -> Any:
            return begin(name, replace(command, read=str(tmp_path / "older")))

        (tmp_path / "older").write_text("of an earlier training")
        monkeypatch.setattr(hosts, "begin", elsewhere)
        with pytest.raises(UserError, match="is another folder on host hosts/1, or none"):
            check_one_folder(hosts, run, ["hosts/1"])
        assert list(run.path.iterdir()) == []


def test_different_versions_are_refused() -> None:
    """With the machines that have them. Control: the same; and what only one knows is a difference, too."""
    other = replace(FACTS, machine="node-2")
    check_alike({"h/0": FACTS, "h/1": other})
    for versions in ({"torch": "2.12.0"}, {}):
        told = r"different versions of torch: 2.11.0 on h/0 \(node-1\), .* on h/1 \(node-2\)"
        with pytest.raises(UserError, match=told):
            check_alike({"h/0": FACTS, "h/1": replace(other, versions=versions)})


def test_two_hosts_with_one_gpu_are_refused() -> None:
    """As where one worker of a pool takes two runs. Control: GPUs of two machines."""
    first, second = (replace(FACTS, gpus=[GpuFacts("H200", uuid, 1 << 37, True)]) for uuid in ("GPU-1", "GPU-2"))
    check_alike({"h/0": first, "h/1": second})
    with pytest.raises(UserError, match="hosts h/0 and h/1 are on one machine, node-1"):
        check_alike({"h/0": first, "h/1": first})


def test_an_address_that_is_not_this_machine_s_is_named(tmp_path: Path) -> None:
    """Before anybody waits. Controls: 0.0.0.0, which would be every network; a name."""
    with pytest.raises(UserError, match="cannot listen on 203.0.113.7:0"):
        hosted(_config(0, address="203.0.113.7"), RunFolder(tmp_path), Claims()).__enter__()
    for address, said in (("0.0.0.0", "would listen on every network"), ("head-node", "is no IPv4 address")):
        with pytest.raises(ValueError, match=said):
            _config(0, address=address)


def test_an_end_while_hosts_are_awaited_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, say: those that have joined are let go."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.session.machines.hosts.check_one_folder", interrupted)
    with joining(tmp_path, monkeypatch, 2) as (port, keepers):
        with pytest.raises(KeyboardInterrupt):
            hosted(_config(port), RunFolder(tmp_path), Claims()).__enter__()
        assert [keeper.wait(10) for keeper in keepers] == [0, 0]
