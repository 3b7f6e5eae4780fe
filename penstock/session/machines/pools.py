"""Work pools of Prefect, from which a training gets its hosts: what is known of them, and runs of `engine-host`.

The keys that let a host in lie in a Secret block of this training, which its runs are told the name of; it is deleted
when the training ends. A run that has not ended then is cancelled, so that Prefect's worker ends what it started.

Left out: the flow that such a run is (penstock/flows/machines/engine_host.py), and making pools
(penstock/cli/prefect/pools.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling
from prefect.variables import Variable

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import HostsConfig
from penstock.engines.groups.channel import Address
from penstock.engines.groups.host import HostStart

AT_ONCE = 200
DEPLOYMENT = "engine-host"  # of each pool, which it is named after


@dataclass(frozen=True)
class HostRun:
    """A run of `engine-host` that was asked for, and the block with its keys."""

    name: str
    pool: str
    flow_run_id: UUID
    secret: str


@dataclass(frozen=True)
class Missing:
    """What Prefect says of a host that has not joined; `ended`: it never will."""

    text: str
    ended: bool


def machines_variable(pool: str) -> str:
    """Return the name of the Variable that says what the machines of a pool have."""
    return f"penstock_pool_{pool.lower().replace('-', '_').replace('.', '_')}"


def gpus_of_pools(config: TrainConfig) -> dict[str, int]:
    """Return how many GPUs each machine of the configuration's pools has, as far as `penstock deploy` was told.

    Raises:
        UserError: there is no Prefect server to ask.
    """
    pools = sorted({group.pool for group in config.groups.values() if group.pool is not None})
    if pools:
        _server_of(pools[0])
    found = {pool: Variable.get(machines_variable(pool)) for pool in pools}
    return {pool: int(value["gpus"]) for pool, value in found.items() if isinstance(value, dict)}


def _server_of(pool: str) -> str:
    if (url := PREFECT_API_URL.value()) is None:
        raise UserError(
            f"work pool '{pool}' is on a Prefect server, and none is named",
            "set PREFECT_API_URL to the server that the pool's workers use",
        )
    return url


@dataclass(frozen=True)
class Pool:
    """A pool that can start hosts: how many machines it has, and the GPUs of each, as `penstock deploy` was told.

    Attributes:
        server: name or address of its Prefect server.
    """

    name: str
    hosts: int
    gpus: int
    server: str

    @property
    def slots(self) -> int:
        """Of its concurrency limit, all of them: one per GPU, one per machine where there is none."""
        return self.hosts * max(1, self.gpus)


def read_pool(name: str) -> Pool:
    """Return what is known of a pool.

    Raises:
        UserError: no server is named, the pool cannot start a host, or nobody said what its machines have.
    """
    server = urlsplit(_server_of(name)).hostname or ""
    check_pool(name)
    told = Variable.get(machines_variable(name))
    if not isinstance(told, dict):
        raise UserError(
            f"nothing is known of the machines of pool '{name}'",
            f"say it: penstock deploy --pool {name} --hosts N --gpus M",
        )
    return Pool(name, int(told["hosts"]), int(told["gpus"]), server)


def check_pool(pool: str, has_worker: bool = True) -> None:
    """Check that a pool can start a host.

    Args:
        has_worker: whether a worker must be online by now.

    Raises:
        UserError: it does not exist, has no deployment of hosts, or no worker that is online.
    """
    remedy = f"create it: penstock deploy --pool {pool} --hosts N --gpus M"
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(pool)
        except ObjectNotFound:
            there = ", ".join(sorted(item.name for item in client.read_work_pools())) or "none"
            raise UserError(f"Prefect has no work pool '{pool}' (it has: {there})", remedy) from None
        try:
            client.read_deployment_by_name(f"{DEPLOYMENT}/{pool}")
        except ObjectNotFound:
            raise UserError(f"work pool '{pool}' has no deployment '{DEPLOYMENT}/{pool}'", remedy) from None
        workers = client.read_workers_for_work_pool(pool)
    if has_worker and not any(worker.status == "ONLINE" for worker in workers):
        raise UserError(
            f"work pool '{pool}' has no worker that is online",
            f"on each of its machines: prefect worker start --pool {pool} --limit 1",
        )


def ask_for_hosts(
    pool: str, names: Sequence[str], address: Address, network: HostsConfig, training: str
) -> Iterator[HostRun]:
    """Have a pool start hosts, as child runs of this flow run; yield each that was asked for.

    So those before one that Prefect's server does not take, because it is busy or away, can be let go. That one's keys
    are deleted here.
    """
    for name in names:
        start = HostStart(name, address, network.interface, network.silence_s)
        secret = f"penstock-host-{secrets.token_hex(8)}"
        with ExitStack() as undone:
            Secret(value=asdict(start)).save(secret)
            undone.callback(Secret.delete, secret)
            flow_run: Any = run_deployment(
                f"{DEPLOYMENT}/{pool}",
                parameters={"host": name, "secret": secret},
                flow_run_name=f"{name} of {training}",
                timeout=0,
                as_subflow=True,
            )
            undone.pop_all()
        yield HostRun(name, pool, flow_run.id, secret)


def start_of(secret: str) -> HostStart:
    """Return what a host has to know, out of the block of that name."""
    block: Any = Secret.load(secret)
    return HostStart.of(block.get())


def why_missing(asked: Sequence[HostRun], names: Sequence[str]) -> dict[str, Missing]:
    """Return what Prefect says of hosts, by name, as far as it was asked for them."""
    wanted = [run for run in asked if run.name in names]
    found = {flow_run.id: flow_run for flow_run in _flow_runs(wanted)}
    return {run.name: _missing(run, found[run.flow_run_id]) for run in wanted}


def _flow_runs(runs: Sequence[HostRun]) -> list[FlowRun]:
    """Read the flow runs of hosts, as many as a server gives at once."""
    ids = [run.flow_run_id for run in runs]
    if not ids:
        return []
    with get_client(sync_client=True) as client:
        return [
            flow_run
            for begin in range(0, len(ids), AT_ONCE)
            for flow_run in client.read_flow_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids[begin : begin + AT_ONCE]))
            )
        ]


def _missing(run: HostRun, flow_run: FlowRun) -> Missing:
    state = flow_run.state
    if state is None or state.is_scheduled() or state.is_pending():
        name = "none" if state is None else state.name
        return Missing(f"its run '{flow_run.name}' is {name}: no worker of pool '{run.pool}' is free", False)
    said = f": {state.message}" if state.message else ""
    if state.is_final():
        return Missing(f"its run '{flow_run.name}' is {state.name}{said}", True)
    return Missing(f"its run '{flow_run.name}' is {state.name}, and has not reached this machine", False)


def cancelled(asked: Sequence[HostRun]) -> list[str]:
    """Return the hosts whose runs somebody has cancelled, before the training lets them go."""
    states = {flow_run.id: flow_run.state for flow_run in _flow_runs(asked)}
    found = [(run.name, states.get(run.flow_run_id)) for run in asked]
    return [name for name, state in found if state is not None and (state.is_cancelled() or state.is_cancelling())]


def let_go(asked: Sequence[HostRun], within_s: float) -> None:
    """Wait until the runs of hosts have ended, cancel those that have not, and delete their keys, whatever happens."""
    if not asked:
        return
    with ExitStack() as keys:
        for run in asked:
            keys.callback(Secret.delete, run.secret)
        deadline = time.monotonic() + within_s
        while (left := _running(asked)) and time.monotonic() < deadline:
            time.sleep(0.25)
        with get_client(sync_client=True) as client:
            for flow_run_id in left:
                client.set_flow_run_state(flow_run_id, Cancelling(message="The training has ended."))


def _running(asked: Sequence[HostRun]) -> list[UUID]:
    return [item.id for item in _flow_runs(asked) if item.state is None or not item.state.is_final()]
