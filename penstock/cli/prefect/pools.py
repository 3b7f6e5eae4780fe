"""Puts a pool of machines for engine groups on a Prefect server: `penstock deploy --pool NAME --hosts N --gpus M`.

It states what shall be there, so a second time changes nothing: the work pool, a limit with one slot per GPU (per
machine where there is none), a Variable that says what each machine has, and the deployment whose runs are hosts.

Left out: workers, one per machine, which live longer than a command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.variables import Variable

from penstock.base.addresses import public_address
from penstock.base.errors import UserError
from penstock.base.home import HOME, working_folder
from penstock.cli.prefect.deploy import (
    LOCAL_SERVER,
    ensure_automation,
    ensure_pool,
    prefect_deploy,
    zombie_automation,
)
from penstock.cli.prefect.pool_type import PoolType
from penstock.cli.prefect.server import check_server
from penstock.session.machines.admission import limit_of
from penstock.session.machines.pools import DEPLOYMENT, Pool, machines_variable

ENTRYPOINT = "penstock.flows.machines.engine_host.engine_host"
IN_IMAGE = Path("/penstock")  # this repository in the image (Dockerfile)


def deploy_pool(pool: str, hosts: int, gpus: int, kind: PoolType = PoolType.process) -> list[tuple[str, str, str]]:
    """Create or update a pool of `hosts` machines with `gpus` GPUs each; return rows of kind, name and detail.

    Raises:
        UserError: no server answers, or the pool exists and is of another type.
    """
    check_server(LOCAL_SERVER)
    url = PREFECT_API_URL.value() or LOCAL_SERVER
    slots = Pool(pool, hosts, gpus, url).slots
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        ensure_pool(client, pool, kind.value, template_of(kind, gpus))
        client.upsert_global_concurrency_limit_by_name(limit_of(pool), slots)
        Variable.set(machines_variable(pool), {"hosts": hosts, "gpus": gpus}, overwrite=True)
        automation = zombie_automation()
        ensure_automation(client, automation)
        home = working_folder() if kind == PoolType.process else IN_IMAGE
        prefect_deploy(url, pool, {"deployments": [deployment_of(pool)]}, home)
    each = f"{gpus} GPUs each" if gpus else "no GPU"
    return [
        ("server", public_address(url).removesuffix("/api"), ""),
        ("work pool", pool, f"{kind.value}, {hosts} machines, {each}"),
        ("concurrency limit", limit_of(pool), f"{slots} slots"),
        ("variable", machines_variable(pool), each),
        ("automation", automation.name, ""),
        ("deployment", f"{DEPLOYMENT}/{pool}", ""),
    ]


def template_of(kind: PoolType, gpus: int) -> dict[str, Any] | None:
    """Return the base job template of a pool, with what each machine has; None: Prefect's own."""
    if kind == PoolType.process:
        return None
    template: dict[str, Any] = json.loads(
        (HOME / "deploy" / "pools" / f"{kind.value}.json").read_text(encoding="utf-8")
    )
    variables = template["variables"]["properties"]
    if kind == PoolType.kubernetes:
        variables["gpus"]["default"] = gpus
    elif not gpus:
        del variables["container_create_kwargs"]["default"]["device_requests"]
    return template


def deployment_of(pool: str) -> dict[str, object]:
    """Return the deployment of a pool's hosts, as prefect.yaml would have it."""
    return {
        "name": pool,
        "entrypoint": ENTRYPOINT,
        "description": f"A machine of pool {pool} for as long as a training needs it; trainings start it.",
        "tags": ["engine-host"],
        "work_pool": {"name": pool},
    }


def check_sizes(hosts: int | None, gpus: int | None, kind: PoolType, runs: int | None = None) -> None:
    """Refuse what is said of machines without their number, or of deployments with it.

    Raises:
        UserError: `--gpus` or `--type` without `--hosts`, or `--runs` with it.
    """
    if hosts is not None and runs is not None:
        raise UserError("--runs is about the deployments of flows, --hosts makes a pool of machines", "remove one")
    if hosts is None and (gpus is not None or kind != PoolType.process):
        raise UserError(
            "--gpus and --type are about the machines of a pool for engine groups", "say how many: --hosts N"
        )
