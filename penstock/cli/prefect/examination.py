"""`penstock doctor --pool`: runs the examination of a work pool in this process, and shows what it found.

Left out: what is looked at (penstock/flows/machines/examine_pool.py), and the judgements (penstock/doctor/pool.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.cli.prefect.quiet import quiet_terminal
from penstock.cli.prefect.server import check_server
from penstock.cli.terminal import console
from penstock.configs.loading.load import load_config
from penstock.configs.sections.run import HostsConfig
from penstock.doctor.diagnosis import Diagnosis
from penstock.doctor.doctor import table
from penstock.doctor.pool import diagnose_pool, machine_table
from penstock.engines.groups.host import versions
from penstock.engines.groups.interface import towards
from penstock.flows.machines.examine_pool import examine_pool
from penstock.session.machines.pools import read_pool

JOIN_S = 60.0  # nobody waits for a training here: workers look for work every ten seconds


def examine(name: str, target: Path, overrides: Sequence[str]) -> list[Diagnosis]:
    """Examine a pool and print what was found; return the judgements.

    Args:
        target: directory of the run folders, or a recipe that names it and how machines reach each other.

    Raises:
        UserError: no server answers, it has no such pool or worker, or this machine cannot listen for hosts.
    """
    check_server()
    pool = read_pool(name)
    if target.suffix in (".yaml", ".yml"):
        config = load_config(target, overrides)
        folder, network = Path(config.folder), config.hosts
    else:
        folder, network = target, None
    if network is None:
        network = HostsConfig(address=towards(pool.server).address, join_timeout_s=JOIN_S)
    with quiet_terminal():
        found = examine_pool(name, str(folder), network)
    if found.machines:
        console.print(machine_table(found.machines))
    lines = diagnose_pool(found, versions())
    console.print(table(lines))
    return lines
