"""Examine pool: what the machines of a work pool have, and whether a training could use them together.

    machines free -> a host on each -> facts and clocks -> the run folder -> links

Left out: how each is found out (penstock/session/examination.py), what is to be said of it (penstock/doctor/pool.py).
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from penstock.configs.sections.run import HostsConfig
from penstock.session.examination import (
    PoolFound,
    ask_machines,
    machines_of,
    measure_folder,
    measure_links,
    scratch_folder,
)
from penstock.session.machines.admission import held, limit_of
from penstock.session.machines.pools import read_pool


@flow(name="examine-pool", flow_run_name="examine-{pool}")
def examine_pool(pool: str, folder: str, network: HostsConfig) -> PoolFound:
    """Look at the machines of a pool; waits until no training uses them.

    Args:
        pool: the work pool.
        folder: directory of the run folders.
        network: how this machine and the pool's reach each other.

    Raises:
        UserError: the pool cannot start a host, or this machine cannot listen for them.
    """
    known = read_pool(pool)
    with (
        held(limit_of(pool), known.slots),
        scratch_folder(Path(folder)) as scratch,
        machines_of(known, network, scratch) as (hosts, missing),
    ):
        machines = ask_machines(hosts, missing)
        folders = measure_folder(hosts, list(machines), scratch)
        usable = {name: machine for name, machine in machines.items() if folders[name].mistake is None}
        links = measure_links(hosts, usable, scratch / "logs")
    return PoolFound(known, missing, machines, folder, folders, links, network.address)
