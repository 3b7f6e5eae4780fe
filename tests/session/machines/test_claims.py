"""Trainings on one machine share its GPUs: each has others, all of its own or none, and no longer than it is there.

Real processes and real locks; the four GPUs are pretended (claiming.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest
from prefect.logging import disable_run_logger

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.spec import GroupSpec
from penstock.session.machines.claims import FOLDER, Claims, Wanted, claimed, holders, wanted_by, would_get
from penstock.session.opening import TRAIN, started
from penstock.session.session import Session, read_config
from penstock.state.run_folder import RunFolder
from tests.processes import ROOT
from tests.session.machines.claiming import GPUS, PRETENDED
from tests.waiting import until

UUIDS = {gpu: f"GPU-{gpu}" for gpu in range(GPUS)}
ROLES = ["actor", "rollout"]
Holding = Callable[..., "Holder"]


def on(**devices: Any) -> dict[str, Any]:
    """Return the groups of a training of one group, on GPUs that it names, on so many, or on all."""
    return {"main": {**devices, "roles": ROLES}}


def wanted(**devices: Any) -> Wanted:
    """Return what a training asks for."""
    return wanted_by(TrainConfig(groups=on(**devices)))


class Holder:
    """Another process."""

    def __init__(self, name: str, groups: dict[str, Any], *doing: str) -> None:
        words = ["-m", "tests.session.machines.claiming", name, json.dumps(groups), *doing]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, *words], cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload]

    def told(self, key: str) -> Any:
        """Return what it says next of a kind."""
        for line in self.process.stdout:
            if key in (said := json.loads(line)):
                return said[key]
        raise AssertionError("it has ended")

    @property
    def has(self) -> list[int]:
        """The GPUs that it has, once it has them."""
        return list(self.told("has"))

    def end(self) -> int:
        """Let it give back what it has; return its exit code."""
        self.process.stdin.close()
        return int(self.process.wait(60))


@pytest.fixture
def holding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Holding]:
    """Start other processes on a machine of four GPUs, which this process sees as well."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "claims"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for question, answer in PRETENDED.items():
        monkeypatch.setattr(pynvml, question, answer)
    begun: list[Holder] = []

    def start(name: str, groups: dict[str, Any], *doing: str) -> Holder:
        begun.append(Holder(name, groups, *doing))
        return begun[-1]

    yield start
    for holder in begun:
        with holder.process as process:
            process.kill()


def test_trainings_that_name_no_gpus_get_different_ones(holding: Holding) -> None:
    """So many as they say, or all that are left. Control: GPUs that one names are those, whatever is free."""
    assert holding("named", on(gpus=[1])).has == [1]
    first, second = holding("first", on(ranks=1)), holding("second", on(ranks=1))
    both = first.has + second.has
    assert len(set(both)) == 2
    assert 1 not in both
    rest = holding("rest", {}).has
    assert sorted([1, *both, *rest]) == [0, 1, 2, 3]
    assert sorted(holders(UUIDS)) == [0, 1, 2, 3]


def test_what_a_killed_training_had_is_free_at_once(holding: Holding) -> None:
    """By SIGKILL, which lets it clean up nothing. Control: before, it had them, and its name is told."""
    holder = holding("sums-20260115", on(gpus=[0, 2]))
    assert holder.has == [0, 2]
    assert holders(UUIDS) == dict.fromkeys((0, 2), f"sums-20260115 (process {holder.process.pid})")
    holder.process.kill()
    holder.process.wait(60)
    assert holders(UUIDS) == {}
    with claimed(wanted(), "next") as claims:
        assert claims.mine == (0, 1, 2, 3)


def test_gpus_are_not_free_before_the_last_rank_has_ended(holding: Holding, tmp_path: Path) -> None:
    """The flow is killed, and what ends its host stands still: GPUs are in use. Control: it goes on, they are free."""
    holder = holding("sums", on(gpus=[0]), "hosted", str(tmp_path))
    assert holder.has == [0]
    (keeper,) = psutil.Process(holder.process.pid).children()
    keeper.suspend()
    holder.process.kill()
    holder.process.wait(60)
    assert list(holders(UUIDS)) == [0]
    keeper.resume()
    until(lambda: not holders(UUIDS), 30, "the host has ended")


def test_who_wants_more_than_is_free_waits_and_has_nothing_meanwhile(holding: Holding) -> None:
    """It names who has what it waits for, each anew. Controls: others take what is left, and then it gets all."""
    first = holding("first", on(gpus=[0, 1]))
    assert first.has == [0, 1]
    waiting = [holding("counted", on(ranks=3)), holding("named", on(gpus=[1, 2]))]
    has = f"first (process {first.process.pid}) has"
    assert waiting[0].told("said") == f"waiting for 3 GPUs of this machine: {has} GPUs 0, 1"
    assert waiting[1].told("said") == f"waiting for GPUs 1, 2 of this machine: {has} GPU 1"
    with claimed(wanted(ranks=2), "this") as claims:
        assert claims.mine == (2, 3)
        assert waiting[0].told("said").endswith(f"{has} GPUs 0, 1, this (process {os.getpid()}) has GPUs 2, 3")
    assert sorted(holders(UUIDS)) == [0, 1]
    assert first.end() == 0
    sets = {0: [0, 1, 2], 1: [1, 2]}
    while waiting:  # either may be next, and then the other
        got = [holder for holder in waiting if _has_come(holder)]
        for holder in got:
            assert holder.has == sets[["counted", "named"].index(holder.process.args[3])]
            assert holder.end() == 0
            waiting.remove(holder)


def _has_come(holder: Holder) -> bool:
    told = f"(process {holder.process.pid})"
    try:
        until(lambda: any(told in name for name in holders(UUIDS).values()), 2, "it is its turn")
    except AssertionError:
        return False
    return True


def test_a_training_starts_its_ranks_on_what_it_has_and_its_host_keeps_that(
    holding: Holding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory and ranks are of those GPUs, until it has ended. Control: a file of the flow that nobody gave it.

    What it leaves to the memory is in its configuration, for a resume.
    """
    first, run, shared = holding("first", on(gpus=[0])), RunFolder(tmp_path / "sums"), _hosts()
    assert first.has == [0]
    checked: list[Any] = []
    started_on: list[GroupSpec] = []
    kind = replace(TRAIN, memory=lambda _, elsewhere: checked.append(elsewhere.mine) or [])
    monkeypatch.setattr(Session, "start_groups", lambda _, specs: started_on.extend(specs))
    own = (tmp_path / "own").open("w")  # noqa: SIM115
    config = TrainConfig.model_validate({"groups": on(ranks=2), "actor": {"micro_batch_tokens": None}})
    with own, disable_run_logger(), started(kind, config, run):
        assert {*checked} == {(1, 2)}
        assert read_config(run).actor.micro_batch_tokens == 16384
        assert [device.gpu for spec in started_on for device in spec.devices] == [1, 2]
        assert holders(UUIDS)[1] == f"sums (process {os.getpid()})"
        (keeper,) = [child for child in _hosts() if child not in shared]
        kept = {path.readlink().name for path in Path(f"/proc/{keeper.pid}/fd").iterdir()}
        assert {"claims", "GPU-1", "GPU-2"} <= kept
        assert not kept & {"own", "GPU-0", "GPU-3", "turn"}
    assert list(holders(UUIDS)) == [0]


def _hosts() -> list[psutil.Process]:
    """Return the hosts of this process: tests of engines keep theirs until the last test has ended."""
    return [
        child for child in psutil.Process().children() if "penstock.engines.groups.host" in " ".join(child.cmdline())
    ]


@pytest.mark.parametrize("locked", [True, False])
def test_no_gpu_has_two_and_nobody_waits_for_ever(holding: Holding, tmp_path: Path, locked: bool) -> None:
    """Three processes take GPUs again and again, in sets that overlap. Control: without the locks two have the same."""
    (tmp_path / "notes").mkdir()
    doing = ["turns", "60", str(tmp_path / "notes"), *([] if locked else ["unlocked"])]
    sets = [on(gpus=[0, 1, 2]), on(ranks=2), on(gpus=[3, 2])]
    busy = [holding(f"process-{number}", groups, *doing) for number, groups in enumerate(sets)]
    assert all(holder.has == [] for holder in busy)
    for holder in busy:
        holder.process.stdin.close()
    codes = {holder.process.wait(120) for holder in busy}
    assert codes == {0} if locked else 3 in codes


@pytest.mark.parametrize(
    ("asked", "free", "got"),
    [
        (Wanted((1,)), [0, 1], ()),
        (Wanted((1, 2)), [0, 1], None),
        (Wanted(more=2), [0, 3], (0, 3)),
        (Wanted(more=3), [0, 3], None),
        (Wanted((0,), 1), [0, 3], (3,)),
        (Wanted((0,), 1), [0], None),
        (Wanted(more=None), [1, 2, 3], (1, 2, 3)),
        (Wanted(more=None), [], None),
        (Wanted(more=None, multiple=2), [1, 2, 3], (1, 2)),
        (Wanted(more=None, multiple=2), [3], None),
    ],
)
def test_all_or_none(asked: Wanted, free: list[int], got: tuple[int, ...] | None) -> None:
    """What is got of what is free: those that are named, so many besides, or all that rollout engines divide."""
    assert asked.of(free) == got


def test_what_a_recipe_asks_for(holding: Holding) -> None:
    """All that are free where it does not say, in whole rollout engines. Control: groups elsewhere ask for none."""
    assert wanted_by(TrainConfig(rollout={"tensor_parallel": 2})) == Wanted(more=None, multiple=2)
    apart = {"train": {"ranks": 1, "roles": ["actor"]}, "generate": {"gpus": [2, 3], "roles": ["rollout"]}}
    assert wanted_by(TrainConfig(groups=apart)) == Wanted((2, 3), 1)
    assert wanted(pool="h200") == Wanted()


def test_a_machine_without_gpus_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, nobody waits. Control: the same training where GPUs are seen."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "claims"))
    monkeypatch.setattr("penstock.session.machines.claims.visible_gpus", list)
    with claimed(wanted(ranks=2), "this") as claims:
        assert claims == Claims()
    assert would_get(wanted()).text == ""
    assert not (tmp_path / "claims").exists()
    monkeypatch.setattr("penstock.session.machines.claims.visible_gpus", lambda: [0])
    monkeypatch.setattr("penstock.session.machines.claims.gpu_uuid", lambda index: f"GPU-{index}")
    with claimed(wanted(ranks=1), "this") as claims:
        assert claims.mine == (0,)
    assert (tmp_path / "claims" / "GPU-0").is_file()


def test_what_one_would_get_is_told_and_not_taken(holding: Holding) -> None:
    """Free ones, or who has what it would wait for. Control: nobody has more than before."""
    assert would_get(wanted(gpus=[3, 0])).text == "GPUs: 3, 0 of this machine, free now"
    first = holding("first", on(gpus=[0, 1]))
    assert first.has == [0, 1]
    held = f"(first (process {first.process.pid}) has GPUs 0, 1)"
    free, waits = would_get(wanted(ranks=1)), would_get(wanted(ranks=3))
    assert (free.mine, free.others) == ((2,), frozenset())
    assert free.text == f"GPUs: 2 of this machine, free now {held}"
    assert (waits.mine, waits.others) == (None, frozenset({0, 1}))
    assert waits.text == f"GPUs: it would wait for 3 GPUs {held}"
    assert sorted(holders(UUIDS)) == [0, 1]


def test_files_are_every_users_and_a_folder_that_is_not_is_said(
    holding: Holding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the mask of who makes them. Control: a file in the folder's place is a mistake with a remedy."""
    before = os.umask(0o077)
    try:
        with claimed(wanted(gpus=[0]), "this"):
            pass
    finally:
        os.umask(before)
    modes = {
        path.name: path.stat().st_mode & 0o7777 for path in [tmp_path / "claims", *(tmp_path / "claims").iterdir()]
    }
    assert modes == {"claims": 0o1777, "turn": 0o666, "GPU-0": 0o666}
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    with (
        pytest.raises(UserError, match="cannot be looked up in .*file: Not a directory") as caught,
        claimed(wanted(), ""),
    ):
        pass
    assert FOLDER in caught.value.remedy


def test_a_file_that_is_removed_before_it_is_locked_is_made_anew(
    holding: Holding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a file without a name is nobody else's. Control: how often it was asked for."""
    asked, flock = [], fcntl.flock

    def tidied_up(descriptor: int, how: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name == "GPU-0" and name not in asked:
            (tmp_path / "claims" / name).unlink()
        asked.append(name)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", tidied_up)
    with claimed(wanted(gpus=[0]), "this"):
        assert asked[:3] == ["turn", "GPU-0", "GPU-0"]
        assert list(holders(UUIDS)) == [0]
