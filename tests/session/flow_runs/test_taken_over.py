"""The flow run of a killed attempt is Crashed once another goes on in its folder, and nobody starts it again."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
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
from penstock.session.flow_runs.taken_over import succeed
from penstock.session.sweeps.plan import SWEEP_TAG, Asked, begin_sweep
from penstock.session.sweeps.running import running_sweep
from penstock.state.chain import ChainFolder
from penstock.state.run_folder import RunFolder, locked
from penstock.state.sweep import SweepFolder
from tests.configs.test_chain import BASE, CHAIN

TAG = "run:sums"  # of flow runs of a run folder, and of every copy that keeps its name
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


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run folder that this process has locked."""
    run = RunFolder(tmp_path / "sums")
    run.path.mkdir()
    with locked(run):
        yield run


def new() -> str:
    """Return the id of a flow run that goes on where another was killed."""
    return left_behind(Completed())[0]


@pytest.mark.parametrize("state", [Cancelling(), Running()], ids=["cancelling", "running"])
def test_a_killed_attempt_is_crashed_with_its_child_and_not_started_again(state: State, run: RunFolder) -> None:
    """Both say which flow run goes on. The tag by which an automation would start it again is gone, others stay."""
    (parent, child), now = left_behind(state), new()
    succeed(None, parent, run)
    succeed(parent, now, run)
    for found in map(read, (parent, child)):
        assert found.state is not None and found.state.is_crashed()
        assert now in str(found.state.message)
    assert read(parent).tags == [TAG]


@pytest.mark.parametrize("copied", [["cp", "-r"], ["cp", "-a"]], ids=" ".join)
def test_a_copy_of_its_name_leaves_a_living_attempt_as_it_is(copied: list[str], run: RunFolder, tmp_path: Path) -> None:
    """Also one that keeps times and owners. Control: the folder itself, under another name, is that of the attempt."""
    (parent, child), now = left_behind(Running()), new()
    succeed(None, parent, run)
    copy = RunFolder(tmp_path / "elsewhere" / run.name)
    copy.path.parent.mkdir()
    subprocess.run([*copied, run.path, copy.path], check=True)
    with locked(copy):
        succeed(parent, now, copy)
    assert [read(number).state_name for number in (parent, child)] == ["Running"] * 2 and KEEP_ALIVE in read(
        parent
    ).tags
    succeed(parent, now, RunFolder(run.path.rename(tmp_path / "renamed")))
    assert [read(number).state_name for number in (parent, child)] == ["Crashed"] * 2


def test_others_stay_as_they_are(run: RunFolder) -> None:
    """One that has ended; the flow run itself, which Prefect has started again; another server's."""
    ended, _ = left_behind(Completed())
    succeed(None, ended, run)
    succeed(ended, new(), run)
    assert read(ended).state_name == "Completed" and KEEP_ALIVE in read(ended).tags
    again, child = left_behind(Running())
    succeed(again, again, run)
    succeed(str(uuid4()), again, run)
    assert [read(number).state_name for number in (again, child)] == ["Running"] * 2


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
    copy = folder.parent / "elsewhere" / folder.name
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
