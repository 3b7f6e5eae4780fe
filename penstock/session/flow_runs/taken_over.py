"""The flow run of an attempt that was killed, once another attempt goes on with its training.

Nobody tells Prefect of a process that a kernel ends: a worker does of its own, an automation of `penstock deploy` of
those without a heartbeat, and a command's temporary server calls the run "Running" for ever. The attempt that goes on
holds the run folder's lock, so the one before it in this folder is over, and that is what it tells Prefect. A copy of a
run folder names a flow run that may be alive: a label of the flow run says which folder's lock it has held. A
training's manifest has the id of its flow run; the folder of a chain or a sweep, which has no manifest, has a file
with it.

Left out: task runs, which Prefect itself leaves as they were in a crashed flow run; a folder that was moved to another
disk, which is a copy to this.
"""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Crashed

from penstock.base.files import write_text
from penstock.session.flow_runs.kept_alive import KEEP_ALIVE
from penstock.state.run_folder import RunFolder

LOCK_LABEL = "penstock.lock"  # of a flow run: which folder's lock it has held
UNDER_WAY = (StateType.RUNNING, StateType.CANCELLING)
FLOW_RUN = "flow_run.txt"  # in the folder of a chain or a sweep: the id of the flow run that is at it


def take_over(folder: Path, tag: str) -> None:
    """Let this flow run, if it is one, be at the folder of a chain or a sweep; one before it that was killed is over.

    Args:
        folder: which this process has locked.
        tag: that flow runs of this folder get.
    """
    if not this_flow_run.id:
        return
    with get_client(sync_client=True) as client:
        tags = list(dict.fromkeys([*(this_flow_run.tags or ()), tag]))  # once, also where it is started again
        client.update_flow_run(UUID(this_flow_run.id), tags=tags)
    kept = folder / FLOW_RUN
    succeed(kept.read_text(encoding="utf-8") if kept.is_file() else None, this_flow_run.id, RunFolder(folder))
    write_text(kept, this_flow_run.id)


def succeed(earlier: str | None, now: str, run: RunFolder) -> None:
    """Say of a flow run that it is at a folder; set that of an earlier attempt there to Crashed.

    So are its child flow runs, where Prefect believes they run. It loses the tag that has crashed flow runs started
    again: what it did goes on here.

    Args:
        earlier: its id; None: nobody knows of any. One that this server does not have is another server's.
        now: the id of the flow run that goes on, which may be the same one, started again.
        run: the folder, which this process has locked. A flow run that was at another one is left alone.
    """
    lock = _identity(run)
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(UUID(now), {LOCK_LABEL: lock})
        if earlier in (None, now):
            return
        try:
            found = client.read_flow_run(UUID(earlier))
        except ObjectNotFound:
            return
        if found.state_type not in UNDER_WAY or found.labels.get(LOCK_LABEL) != lock:
            return
        client.update_flow_run(found.id, tags=[tag for tag in found.tags if tag != KEEP_ALIVE])
        _crash(client, found.id, f"Its process was gone when flow run {now} went on in its place.")


def _identity(run: RunFolder) -> str:
    """Return what tells the lock of a folder from that of every copy, on any machine that sees the folder.

    Nothing is written to a lock, and no copying command sets the time of its last change, as `cp -a` does others. A
    folder that is renamed keeps both.
    """
    status = run.lock.stat()
    return f"{status.st_ino}-{status.st_ctime_ns}"


def _crash(client: SyncPrefectClient, flow_run: UUID, why: str) -> None:
    """Set a flow run to Crashed, after those of its child flows that run."""
    under_way = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[*UNDER_WAY])),
    )
    for child in client.read_flow_runs(flow_run_filter=under_way):
        _crash(client, child.id, why)
    client.set_flow_run_state(flow_run, Crashed(message=why), force=True)
