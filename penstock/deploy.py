"""Puts Penstock on a Prefect server: work pool, GPU slots, the end of zombie runs, and the deployments of prefect.yaml.

Every step states what shall be there, so a second deployment changes nothing. Left out: starting a server or workers,
which live longer than a command; deleting deployments that prefect.yaml no longer names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from configs.errors import UserError
from engines.machine import visible_gpus
from penstock.server import check_server
from reports.mlflow_run import public_uri
from tasks.admission import GPU_SLOTS

if TYPE_CHECKING:
    from prefect.automations import AutomationCore
    from prefect.client.orchestration import SyncPrefectClient

HOME = Path(__file__).resolve().parents[1]
LOCAL_SERVER = "http://127.0.0.1:4200/api"
ZOMBIES = "penstock: silent runs are crashed"
# A flow run gives a sign of life every three minutes unless set otherwise; three missing ones are no coincidence.
SILENCE = timedelta(minutes=10)


def deploy(pool: str) -> list[tuple[str, str, str]]:
    """Create or update everything on the server; return what is there now as rows of kind, name and detail.

    Raises:
        UserError: no server answers, the pool exists and is of another type, or prefect.yaml is refused.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    check_server(LOCAL_SERVER)
    url = PREFECT_API_URL.value() or LOCAL_SERVER
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        ensure_pool(client, pool)
        slots = max(1, len(visible_gpus()))
        client.upsert_global_concurrency_limit_by_name(GPU_SLOTS, slots)
        ensure_automation(client, zombie_automation())
        deploy_flows(url, pool)
        return [
            ("server", public_uri(url).removesuffix("/api"), ""),
            ("work pool", pool, "process"),
            ("concurrency limit", GPU_SLOTS, f"{slots} {'slot' if slots == 1 else 'slots'}"),
            ("automation", ZOMBIES, f"after {SILENCE.seconds // 60} min without a heartbeat"),
            *deployments(client, pool),
        ]


def ensure_pool(client: SyncPrefectClient, name: str) -> None:
    """Create the process work pool `name` unless it is there.

    Raises:
        UserError: it is there and of another type.
    """
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        there = client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
        return
    if there.type != "process":
        raise UserError(f"the work pool '{name}' is of type '{there.type}'", "choose another with --pool NAME")


def zombie_automation() -> AutomationCore:
    """A run that gave signs of life and fell silent is Crashed: its machine died, and its slots come back."""
    from prefect.automations import AutomationCore, EventTrigger, Posture
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.events import ResourceSpecification

    heartbeat, ends = "prefect.flow-run.heartbeat", ("Completed", "Failed", "Cancelled", "Crashed")
    return AutomationCore(
        name=ZOMBIES,
        description="Without it the runs of a machine that lost its power stay Running and hold their slots.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            after={heartbeat},
            expect={heartbeat, *(f"prefect.flow-run.{end}" for end in ends)},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="No heartbeat: the flow's process is gone.")],
    )


def ensure_automation(client: SyncPrefectClient, wanted: AutomationCore) -> None:
    """Create `wanted`, or update the automation of its name where it differs."""
    content = wanted.model_dump()
    there = client.read_automations_by_name(wanted.name)
    if not there:
        client.create_automation(wanted)
    elif there[0].model_dump(include=set(content)) != content:
        client.update_automation(there[0].id, wanted)


def deploy_flows(url: str, pool: str) -> None:
    """Have Prefect read prefect.yaml; `PENSTOCK_HOME` of the environment wins over this folder.

    Raises:
        UserError: Prefect refuses it; carries Prefect's last words.
    """
    environment = {"PENSTOCK_HOME": str(HOME), **os.environ, "PENSTOCK_POOL": pool, "PREFECT_API_URL": url}
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, cwd=HOME, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise UserError(f"Prefect refuses {HOME / 'prefect.yaml'}:\n{last}", "correct the file")


def deployments(client: SyncPrefectClient, pool: str) -> list[tuple[str, str, str]]:
    """Return a row for each deployment that prefect.yaml names, as the server has it."""
    rows = []
    for entry in yaml.safe_load((HOME / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]:
        flow = entry["entrypoint"].rpartition(":")[2].replace("_", "-")  # flows are named after their functions
        name = f"{flow}/{entry['name']}"
        found = client.read_deployment_by_name(name)
        states = [f"{item.slug} ({'active' if item.active else 'inactive'})" for item in found.schedules]
        rows.append(("deployment", name, ", ".join(states)))
    return rows


def next_commands(pool: str) -> list[str]:
    """Return the commands that come next: a worker, and a first run."""
    from prefect.settings import PREFECT_API_URL

    server = "" if PREFECT_API_URL.value() else f"PREFECT_API_URL={LOCAL_SERVER} "
    return [
        f"{server}prefect worker start --pool {pool}",
        f"{server}prefect deployment run train/quickstart --watch",
    ]
