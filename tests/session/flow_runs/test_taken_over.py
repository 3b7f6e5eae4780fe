"""The flow run of a killed attempt is Crashed once another goes on, and nobody starts it again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.runtime import flow_run
from prefect.states import Cancelling, Completed, Running

from penstock.flows.train import train
from penstock.session.chains.plan import CHAIN_TAG, begin_chain
from penstock.session.chains.running import running_chain
from penstock.session.flow_runs.kept_alive import KEEP_ALIVE
from penstock.session.flow_runs.taken_over import crash_earlier
from penstock.session.sweeps.plan import SWEEP_TAG, Asked, begin_sweep
from penstock.session.sweeps.running import running_sweep
from penstock.state.chain import ChainFolder
from penstock.state.sweep import SweepFolder
from tests.configs.test_chain import BASE, CHAIN

TAG = "run:sums"  # of flow runs of a run folder
pytestmark = pytest.mark.usefixtures("prefect_harness")


def left_behind(state: State) -> tuple[str, str]:
    """Return the ids of a flow run, with tags, and of its child, both in a state in which a process has left them."""
    ids = list[str]()

    @flow(name="iteration-left")
    def child() -> None:
        ids.append(flow_run.id)

    @flow(name="left")
    def parent() -> None:
        ids.append(flow_run.id)
        child()

    parent()
    with get_client(sync_client=True) as client:
        for number in ids:
            client.set_flow_run_state(UUID(number), state, force=True)
        client.update_flow_run(UUID(ids[0]), tags=[TAG, KEEP_ALIVE])
    return ids[0], ids[1]


def read(number: str) -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(number))


@pytest.mark.parametrize("state", [Cancelling(), Running()], ids=["cancelling", "running"])
def test_a_killed_attempt_is_crashed_with_its_child_and_not_started_again(state: State) -> None:
    """Both say which flow run goes on. The tag by which an automation would start it again is gone, others stay."""
    parent, child = left_behind(state)
    now = str(uuid4())
    crash_earlier(parent, now, TAG)
    for found in map(read, (parent, child)):
        assert found.state is not None and found.state.is_crashed()
        assert now in str(found.state.message)
    assert read(parent).tags == [TAG]


def test_others_stay_as_they_are() -> None:
    """One that has ended; the flow run itself, which Prefect has started again; another folder's; another server's."""
    ended, _ = left_behind(Completed())
    crash_earlier(ended, str(uuid4()), TAG)
    assert read(ended).state_name == "Completed" and KEEP_ALIVE in read(ended).tags
    again, _ = left_behind(Running())
    crash_earlier(again, again, TAG)
    copied, child = left_behind(Running())
    crash_earlier(copied, again, "run:a-copy")
    assert [read(number).state_name for number in (again, copied, child)] == ["Running"] * 3
    crash_earlier(str(uuid4()), again, TAG)
    crash_earlier(None, again, TAG)


def chain_begun() -> ChainFolder:
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    Path("chain.yaml").write_text(CHAIN, encoding="utf-8")
    return begin_chain("chain.yaml", None, None)


def sweep_begun() -> SweepFolder:
    Path("sweep.yaml").write_text(BASE, encoding="utf-8")
    return begin_sweep("sweep.yaml", Asked(("seed=0,1", "record.tracker=tensorboard")), None)


def in_chain(folder: Path) -> AbstractContextManager[object]:
    return running_chain(ChainFolder(folder))


def in_sweep(folder: Path) -> AbstractContextManager[object]:
    return running_sweep(SweepFolder(folder), train)


@pytest.mark.parametrize(
    ("begun", "inside", "tag"), [(chain_begun, in_chain, CHAIN_TAG), (sweep_begun, in_sweep, SWEEP_TAG)]
)
def test_so_is_that_of_a_killed_chain_or_sweep(
    begun: Callable[[], ChainFolder | SweepFolder],
    inside: Callable[[Path], AbstractContextManager[object]],
    tag: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a third time. Controls: one that has ended stays so; a copy of the folder leaves all as they are."""
    monkeypatch.chdir(tmp_path)
    folder = begun().path

    @flow(name="several")
    def at(place: Path) -> str:
        with inside(place):
            return str(flow_run.id)

    def states() -> list[str | None]:
        return [read(number).state_name for number in attempts]

    def killed(number: str) -> str:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(number), Running(), force=True)
        return number

    attempts = [killed(at(folder))]
    copy = folder.with_name("a-copy")
    shutil.copytree(folder, copy)
    at(copy)
    assert states() == ["Running"]
    attempts.append(killed(at(folder)))
    assert states() == ["Crashed", "Running"]
    attempts.append(at(folder))
    assert states() == ["Crashed", "Crashed", "Completed"]
    assert f"{tag}{folder.name}" in read(attempts[2]).tags
    at(folder)
    assert states() == ["Crashed", "Crashed", "Completed"]
