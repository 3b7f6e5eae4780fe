"""The flow run of an attempt that was killed, once another attempt goes on with its training.

Nobody tells Prefect of a process that a kernel ends: a worker does of its own, an automation of `penstock deploy` of
those without a heartbeat, and a command's temporary server calls the run "Running" for ever. The attempt that goes on
holds the run folder's lock, so the one before it is over, and that is what it tells Prefect. A copy of a run folder
names a flow run that may be alive: its tag has the name of the folder that it is of. A training's manifest has the id
of its flow run; the folder of a chain or a sweep, which has no manifest, has a file with it.

Left out: task runs, which Prefect itself leaves as they were in a crashed flow run; a copy that has the same name in
another place, which is not told apart.
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
    crash_earlier(kept.read_text(encoding="utf-8") if kept.is_file() else None, this_flow_run.id, tag)
    write_text(kept, this_flow_run.id)


def crash_earlier(earlier: str | None, now: str, tag: str) -> None:
    """Set the flow run of an earlier attempt to Crashed, with its child flow runs, where Prefect believes it runs.

    It loses the tag that has crashed flow runs started again: what it did goes on here.

    Args:
        earlier: its id; None: nobody knows of any. One that this server does not have is another server's.
        now: the id of the flow run that goes on, which may be the same one, started again.
        tag: of flow runs of this run folder; one without it is left alone.
    """
    if earlier in (None, now):
        return
    with get_client(sync_client=True) as client:
        try:
            found = client.read_flow_run(UUID(earlier))
        except ObjectNotFound:
            return
        if found.state_type not in UNDER_WAY or tag not in found.tags:
            return
        client.update_flow_run(found.id, tags=[tag for tag in found.tags if tag != KEEP_ALIVE])
        _crash(client, found.id, f"Its process was gone when flow run {now} went on in its place.")


def _crash(client: SyncPrefectClient, flow_run: UUID, why: str) -> None:
    """Set a flow run to Crashed, after those of its child flows that run."""
    under_way = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[*UNDER_WAY])),
    )
    for child in client.read_flow_runs(flow_run_filter=under_way):
        _crash(client, child.id, why)
    client.set_flow_run_state(flow_run, Crashed(message=why), force=True)
