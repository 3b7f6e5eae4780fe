"""A snapshot counts when all ranks have finished it, outlives them, and is what they go on from, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock.base.errors import UserError
from penstock.base.files import sha256
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.hosts import TellSlots, WriteSlots
from penstock.engines.groups.group import EngineGroup, RankLost
from penstock.engines.groups.hosts import REPLY_S, Hosts
from penstock.engines.groups.spec import LOCAL
from penstock.engines.training.state_images import saved_actor
from penstock.session.saving.snapshots import RankSlots, newest_whole, slots_of
from penstock.session.session import Session
from penstock.state.run_folder import RunFolder
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import Ranks, Shape
from tests.processes import words_of
from tests.waiting import until

SHAPE = Shape("qwen3", tied=True, intermediate=1024)
FolderOf = Callable[[Shape], Path]


def _session(ranks: Ranks, folder: Path) -> Session:
    return Session(TrainConfig(), RunFolder(folder), groups={"actor": ranks.group, "rollout": ranks.group})


def _update(ranks: Ranks, path: str) -> None:
    split = {**SPLIT, "micro_batch_tokens": 64}
    ranks.ask("update_actor", path=path, version=-1, split=split, loss=LOSS, learning_rate=1e-2)


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


def _whole(session: Session, number: int) -> None:
    until(
        lambda: session.newest_snapshot("iteration", number) == number,
        60,
        "every rank has finished the snapshot",
        0.02,
    )


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "float32")])
def test_ranks_go_on_from_a_snapshot_bit_for_bit(
    stage: int, dtype: str, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """It is of the moment at which it was asked for, though a step follows at once; a file of it is the same.

    Controls: the next snapshot is another; of three the newest two are there.
    """
    session, path = _session(two_ranks, tmp_path), write_rows(tmp_path / "rows.parquet", random_rows(8))
    two_ranks.build(folder_of(SHAPE), actor={"zero_stage": stage}, model={"dtype": dtype})
    first = 100 * (stage + 1)  # no number comes twice to the shared ranks
    at: dict[int, Any] = {}
    for number in range(first, first + 3):
        _update(two_ranks, path)
        session.take_snapshot("iteration", number)
        if number < first + 2:
            _update(two_ranks, path)
            after = two_ranks.parameters()
        at[number] = two_ranks.parameters()
    _whole(session, first + 2)
    assert session.newest_snapshot("iteration", first + 1) == first + 1
    assert session.newest_snapshot("iteration", first) is None
    assert session.newest_snapshot("step", first + 2) is None

    session.load_snapshot("iteration", first + 1, version=0)
    assert not _same(two_ranks.parameters(), at[first + 2])
    _update(two_ranks, path)
    assert _same(two_ranks.parameters(), after)

    written = session.groups["actor"].hosts.begin(LOCAL, WriteSlots("iteration", first + 2, str(tmp_path / "files")))
    files = written.result(60)
    assert [file.sha256 for file in files] == [sha256(tmp_path / "files" / file.name) for file in files]
    assert len(files) == 2
    saved = {name: value.float() for name, value in saved_actor(tmp_path / "files").weights().items()}
    assert _same(at[first + 2], saved)


def test_a_snapshot_that_is_kept_is_not_written_over(two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """Neither the newest that counts, nor one that is copied to files. Control: without a reason the older one goes."""
    session = _session(two_ranks, tmp_path)
    two_ranks.build(folder_of(SHAPE), actor={"zero_stage": 1})
    for number in (501, 502):
        session.take_snapshot("iteration", number)
        _whole(session, number)
    session.checkpoints.writing = ("iteration", 501)
    session.take_snapshot("iteration", 503)
    _whole(session, 503)
    assert _numbers(session) == {501, 503}
    session.checkpoints.writing = None
    session.take_snapshot("iteration", 504)
    _whole(session, 504)
    assert _numbers(session) == {503, 504}


def test_hosts_are_asked_for_slots_only_where_the_flow_cannot_know(
    two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows them once every rank has answered what waits for the copy, and what it knows is what hosts tell.

    Controls: before the first snapshot it knows nothing, nor where nothing waited for one, nor after a loss.
    """
    session, asked = _session(two_ranks, tmp_path), list[type]()
    two_ranks.build(folder_of(SHAPE), actor={"zero_stage": 1})
    begin = Hosts.begin

    def counted(hosts: Hosts, host: str, command: Any) -> Any:
        asked.append(type(command))
        return begin(hosts, host, command)

    def take(number: int) -> int:
        """Return how often hosts were asked."""
        asked.clear()
        session.take_snapshot("iteration", number)
        return asked.count(TellSlots)

    monkeypatch.setattr(Hosts, "begin", counted)
    assert take(801) == 1
    for number in (802, 803):
        _whole(session, number - 1)
        session.load_snapshot("iteration", number - 1, version=0)
        assert take(number) == 0
    _whole(session, 803)
    assert [one.slots for one in session.slots.ranks] == [one.slots for one in _slots(session)]
    session.checkpoints.writing = ("iteration", 802)
    session.load_snapshot("iteration", 803, version=0)
    assert take(804) == 0
    _whole(session, 804)
    assert _numbers(session) == {802, 804}
    assert take(805) == 1
    _whole(session, 805)
    session.load_snapshot("iteration", 805, version=0)
    session.slots.forget()
    assert take(806) == 1


def _slots(session: Session) -> list[RankSlots]:
    return slots_of(session.distinct_groups)


def _numbers(session: Session) -> set[int | None]:
    return {slot.number for one in _slots(session) for slot in one.slots}


def test_what_one_rank_has_not_finished_does_not_count(two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """Its length is missing: it could be of half a state. Control: before that it counted."""
    session = _session(two_ranks, tmp_path)
    two_ranks.build(folder_of(SHAPE), actor={"zero_stage": 1})
    session.take_snapshot("iteration", 601)
    _whole(session, 601)
    slot = _slots(session)[1].holding("iteration", 601)
    assert slot is not None
    with Path(slot.path).open("r+b") as stream:
        stream.write(bytes(8))
    assert newest_whole(_slots(session), "iteration") != 601


@pytest.mark.slow
def test_a_snapshot_outlives_its_ranks(folder_of: FolderOf, tmp_path: Path) -> None:
    """The next epoch of the group goes on from it. Nothing of it has a name, and with the host it is gone."""
    path = write_rows(tmp_path / "rows.parquet", random_rows(8))
    with Hosts(tmp_path) as hosts:
        ranks = Ranks.start(2, tmp_path, hosts)
        session = _session(ranks, tmp_path)
        ranks.build(folder_of(SHAPE), actor={"zero_stage": 1})
        _update(ranks, path)
        session.take_snapshot("iteration", 1)
        _whole(session, 1)
        at = ranks.parameters()
        slots = hosts.begin(LOCAL, TellSlots()).result(REPLY_S)
        os.kill(_ranks_of(slots[0].path)[0], signal.SIGKILL)
        with pytest.raises(RankLost):
            _update(ranks, path)
        group = EngineGroup(ranks.group.spec, hosts, epoch=1)
        again = Ranks(group, 2)
        again.build(folder_of(SHAPE), actor={"zero_stage": 1})
        assert not _same(again.parameters(), at)
        _session(again, tmp_path).load_snapshot("iteration", 1, version=0)
        assert _same(again.parameters(), at)
        group.close()
    assert not any(Path(slot.path).exists() for slot in slots)


def _ranks_of(path: str) -> list[int]:
    """Return the processes of ranks below the host that owns a slot."""
    below = psutil.Process(int(Path(path).parts[2])).children(recursive=True)
    return [
        one.pid
        for one in below
        if words_of(one)[-1:] == ["penstock.engines.groups.rank"] and "keeper" not in str(words_of(one))
    ]


def test_a_host_that_writes_files_hears_all_the_same(two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """A disk that hangs, here a pipe that nobody reads, keeps it from no other command; what failed is said.

    Control: into a folder it writes.
    """
    session = _session(two_ranks, tmp_path)
    two_ranks.build(folder_of(SHAPE), actor={"zero_stage": 1})
    session.take_snapshot("iteration", 701)
    _whole(session, 701)
    pipe = tmp_path / "state-main-1.safetensors"
    os.mkfifo(pipe)
    hosts = two_ranks.group.hosts
    hanging = hosts.begin(LOCAL, WriteSlots("iteration", 701, str(tmp_path)))
    assert len(hosts.begin(LOCAL, TellSlots()).result(REPLY_S)) == 4
    assert not hanging.done()
    pipe.read_bytes()
    with pytest.raises(UserError, match="cannot be written"):
        hanging.result(60)
    assert len(hosts.begin(LOCAL, WriteSlots("iteration", 701, str(tmp_path / "folder"))).result(60)) == 2
