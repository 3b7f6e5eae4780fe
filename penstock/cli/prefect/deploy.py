"""Puts Penstock on a Prefect server: work pool, the end of zombie runs, and the deployments of prefect.yaml.

Every step states what shall be there, so a second deployment changes nothing. Left out: what a deployment's form shows
(penstock/cli/prefect/form.py); starting a server or workers, which live longer than a command; deleting deployments
that prefect.yaml no longer names.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from penstock.base.addresses import public_address
from penstock.base.errors import UserError
from penstock.base.home import HOME, working_folder
from penstock.cli.prefect.form import put_form
from penstock.cli.prefect.server import check_server
from penstock.engines.groups.machine import visible_gpus
from penstock.session.flow_runs.kept_alive import KEEP_ALIVE, STARTED_AGAIN

if TYPE_CHECKING:
    from prefect.automations import AutomationCore
    from prefect.client.orchestration import SyncPrefectClient

LOCAL_SERVER = "http://127.0.0.1:4200/api"
ZOMBIES = "penstock: silent runs are crashed"
KEPT_ALIVE = "penstock: crashed runs that are kept alive go on"
# A flow run gives a sign of life every three minutes unless set otherwise; three missing ones are no coincidence.
SILENCE = timedelta(minutes=10)
# A crash is reported twice, by the process that waited for the run and by its worker, and a server whose database is
# busy looks at an event again. Started at once, a run would be crashed once more, or begun by two processes.
SETTLED = timedelta(seconds=10)
GOES_ON = ("AwaitingRetry", "Scheduled", "Retrying", "Pending", "Running")


def deploy(pool: str, runs: int | None) -> list[tuple[str, str, str]]:
    """Create or update everything on the server; return what is there now as rows of kind, name and detail.

    Args:
        runs: of a deployment at a time; None: one per GPU of this machine, or one where they would share processors.

    Raises:
        UserError: no server answers, the pool exists and is of another type, or prefect.yaml is refused.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    check_server(LOCAL_SERVER)
    url = PREFECT_API_URL.value() or LOCAL_SERVER
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        ensure_pool(client, pool)
        for automation in (zombie_automation(), keep_alive_automation()):
            ensure_automation(client, automation)
        deploy_flows(client, url, pool, runs or max(1, len(visible_gpus())))
        return [
            ("server", public_address(url).removesuffix("/api"), ""),
            ("work pool", pool, "process"),
            ("automation", ZOMBIES, f"after {SILENCE.seconds // 60} min without a heartbeat"),
            ("automation", KEPT_ALIVE, f"runs with the tag '{KEEP_ALIVE}'"),
            *deployments(client, pool),
        ]


def ensure_pool(
    client: SyncPrefectClient, name: str, kind: str = "process", template: dict[str, Any] | None = None
) -> None:
    """Create the work pool `name` unless it is there.

    Args:
        kind: type of its workers.
        template: of the jobs that they start; None: that of a process.

    Raises:
        UserError: it is there and of another type.
    """
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        there = client.read_work_pool(name)
    except ObjectNotFound:
        template = template or ProcessWorker.get_default_base_job_template()
        try:
            client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=template))
            return
        except ObjectAlreadyExists:  # a worker that starts meanwhile makes its pool, too
            there = client.read_work_pool(name)
    if there.type != kind:
        raise UserError(f"the work pool '{name}' is of type '{there.type}'", "choose another with --pool NAME")


def zombie_automation(silence: timedelta = SILENCE) -> AutomationCore:
    """A run that gave signs of life and fell silent is Crashed: its machine died, and nobody else says so.

    A pool's slots do not wait for this: they come back when leases end (penstock/session/machines/admission.py).
    """
    from prefect.automations import AutomationCore, EventTrigger, Posture
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.events import ResourceSpecification

    heartbeat, ends = "prefect.flow-run.heartbeat", ("Completed", "Failed", "Cancelled", "Crashed")
    return AutomationCore(
        name=ZOMBIES,
        description="Without it the runs of a machine that lost its power stay Running for ever.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            after={heartbeat},
            expect={heartbeat, *(f"prefect.flow-run.{end}" for end in ends)},
            posture=Posture.Proactive,
            threshold=1,
            within=silence,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="No heartbeat: the flow's process is gone.")],
    )


def keep_alive_automation() -> AutomationCore:
    """A deployment's run that crashed, and stays so, is started again if it has the tag: it goes on where it was.

    How often is for the run to say, which then fails (penstock/session/flow_runs/kept_alive.py).
    """
    from prefect.automations import AutomationCore, EventTrigger, Posture
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.events import ResourceSpecification

    ends = ("Completed", "Failed", "Cancelling", "Cancelled")
    tagged = {"prefect.resource.id": f"prefect.tag.{KEEP_ALIVE}", "prefect.resource.role": "tag"}
    deployed = {"prefect.resource.id": "prefect.deployment.*", "prefect.resource.role": "deployment"}
    return AutomationCore(
        name=KEPT_ALIVE,
        description=f"Give a run, or a deployment, the tag '{KEEP_ALIVE}': it outlives the process of its flow.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=[ResourceSpecification(tagged), ResourceSpecification(deployed)],
            for_each={"prefect.resource.id"},
            after={"prefect.flow-run.Crashed"},
            expect={f"prefect.flow-run.{name}" for name in (*GOES_ON, *ends)},
            posture=Posture.Proactive,
            threshold=1,
            within=SETTLED,
        ),
        actions=[ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message=STARTED_AGAIN)],
    )


def ensure_automation(client: SyncPrefectClient, wanted: AutomationCore) -> None:
    """Create `wanted`, or update the automation of its name where it differs."""
    content = wanted.model_dump()
    there = client.read_automations_by_name(wanted.name)
    if not there:
        client.create_automation(wanted)
    elif there[0].model_dump(include=set(content)) != content:
        client.update_automation(there[0].id, wanted)


def deploy_flows(client: SyncPrefectClient, url: str, pool: str, runs: int) -> None:
    """Have Prefect read prefect.yaml, and give its deployments their forms.

    Raises:
        UserError: a recipe cannot be read, or Prefect refuses the file; carries Prefect's last words.
    """
    content, home = read_deployments(), Path(os.environ.get("PENSTOCK_HOME") or working_folder())
    content["definitions"]["while_gpus_are_free"]["limit"] = runs  # an alias: that of all deployments that name it
    prefect_deploy(url, pool, content, home)
    for entry in read_deployments()["deployments"]:
        put_form(client, name_of(entry), home)


def prefect_deploy(url: str, pool: str, content: dict[str, Any], home: Path) -> None:
    """Have Prefect deploy what a prefect.yaml would say.

    Args:
        home: where runs begin, on the machines of the workers; `PENSTOCK_HOME` of the environment wins over it.

    Raises:
        UserError: Prefect refuses it; carries its last words.
    """
    content = {"name": "penstock", "pull": read_deployments()["pull"]} | content
    environment = {"PENSTOCK_HOME": str(home), **os.environ, "PENSTOCK_POOL": pool, "PREFECT_API_URL": url}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as whole:
        yaml.safe_dump(content, whole, sort_keys=False)
        whole.flush()
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", whole.name]
        done = subprocess.run(command, cwd=HOME, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise UserError(f"Prefect refuses {HOME / 'prefect.yaml'}:\n{last}", "correct the file")


def read_deployments() -> dict[str, Any]:
    """Return the content of prefect.yaml."""
    return dict(yaml.safe_load((HOME / "prefect.yaml").read_text(encoding="utf-8")))


def name_of(entry: dict[str, Any]) -> str:
    """Return `flow/name` of a deployment: flows are named after their functions."""
    flow = entry["entrypoint"].rpartition(".")[2].replace("_", "-")
    return f"{flow}/{entry['name']}"


def deployments(client: SyncPrefectClient, pool: str) -> list[tuple[str, str, str]]:
    """Return a row for each deployment that prefect.yaml names, as the server has it."""
    rows = []
    for entry in read_deployments()["deployments"]:
        name = name_of(entry)
        found = client.read_deployment_by_name(name)
        limit = found.global_concurrency_limit
        at_a_time = [f"{limit.limit} at a time"] if limit is not None else []
        states = [f"{item.slug} ({'active' if item.active else 'inactive'})" for item in found.schedules]
        rows.append(("deployment", name, ", ".join((*at_a_time, *states))))
    return rows


def next_commands(pool: str) -> list[str]:
    """Return the commands that come next: a worker, and a first run.

    They are for terminals of their own, which have a server's address from Prefect's profile, but not from this
    terminal's environment. One with a password is not shown.
    """
    from prefect.settings import PREFECT_API_URL

    of_terminal = os.environ.get("PREFECT_API_URL")
    url = of_terminal or (None if PREFECT_API_URL.value() else LOCAL_SERVER)
    server = f"PREFECT_API_URL={url} " if url and public_address(url) == url else ""
    return [
        f"{server}prefect worker start --pool {pool}",
        f"{server}prefect deployment run train/quickstart --watch",
    ]
