"""Start training: the next one of a sweep becomes a child flow run, in a process of its own."""

from __future__ import annotations

import shutil
from typing import Any
from uuid import UUID

from prefect import Flow, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Crashed, Pending

from penstock.reports.headline import duration
from penstock.reports.sweep import last_value
from penstock.session.flow_runs.saying import say
from penstock.session.sweeps.plan import SWEEP_TAG
from penstock.session.sweeps.running import Swept
from penstock.session.sweeps.trainings import Ended
from penstock.state.sweep import Planned


@task(task_run_name="start-{training.name}", cache_policy=NO_CACHE)
def start_training(swept: Swept, training: Planned) -> None:
    """Begin a training in a free lane, or go on with one that was broken off."""
    living, run = swept.living(), swept.folder.run(training)
    if run.manifest.is_file():
        parameters: dict[str, Any] = {"resume": str(run.path)}
    else:
        shutil.rmtree(run.path, ignore_errors=True)  # it ended before there was anything to go on with
        config = living.plan.configs[training.name].model_dump(mode="json", exclude={"base"})
        parameters = {"config": config, "run_folder": str(run.path)}
    flow_run, server = _child_flow_run(living.flow, training.name, parameters, swept.folder.path.name)
    living.processes.start(training.name, flow_run, swept.folder.log(training), {"PREFECT_API_URL": server})
    begun = "goes on" if "resume" in parameters else "begins"
    say(f"{training.name} {begun}: {living.plan.sweep.own(training)}")


def _child_flow_run(flow: Flow[..., str], name: str, parameters: dict[str, Any], sweep: str) -> tuple[str, str]:
    """Make a flow run below this one; return its id, and where its process finds the server."""
    with get_client(sync_client=True) as client:
        # As Prefect does for a deployment's run: the page of the sweep shows the training below a task of this name.
        below = client.create_task_run(
            task=Task(name=name, fn=lambda: None),
            flow_run_id=UUID(this_flow_run.id),
            dynamic_key=name,
            state=Pending(),
        )
        begun = client.create_flow_run(
            flow, name=name, parameters=parameters, tags=[f"{SWEEP_TAG}{sweep}"], parent_task_run_id=below.id
        )
        return str(begun.id), str(client.api_url)


@task(task_run_name="ended-{ended.name}", cache_policy=NO_CACHE)
def note_ended(swept: Swept, ended: Ended) -> None:
    """Say how a training has ended; one that was killed could not tell the server."""
    sweep = swept.living().plan.sweep
    done = f"{len(sweep.trainings) - len(swept.folder.left(sweep))} of {len(sweep.trainings)} done"
    if not ended.code:
        result = last_value(swept.folder.path / ended.name, sweep.by)
        say(f"{ended.name} is done after {duration(ended.seconds)}{', ' if result else ''}{result} ({done})")
        return
    say(f"{ended.name} failed after {duration(ended.seconds)}, exit code {ended.code} ({done}):\n{ended.tail}")
    with get_client(sync_client=True) as client:
        found = client.read_flow_run(UUID(ended.flow_run))
        if found.state is None or not found.state.is_final():
            last = ended.tail.strip() or "nothing"
            message = f"Its process ended with code {ended.code}; the last that it said:\n{last}"
            client.set_flow_run_state(found.id, Crashed(message=message), force=True)
