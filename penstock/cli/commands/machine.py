"""Commands that prepare a machine: judge it, and tell a Prefect server of Penstock.

Heavy imports stay inside the commands: `penstock --help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.base.errors import UserError
from penstock.cli.commands.training import Overrides
from penstock.cli.terminal import console


def doctor(
    target: Annotated[Path, typer.Argument(help="directory of the run folders, or a recipe to check as well")] = Path(
        "runs"
    ),
    overrides: Overrides = None,
) -> None:
    """Check the machine: driver, libraries, GPUs, links, memory, disk; exit code 1 if something would stop a run."""
    from configs.loading.load import load_config
    from penstock.doctor.doctor import diagnose, examine_recipe, table
    from penstock.doctor.machine_facts import collect

    if target.suffix in (".yaml", ".yml"):
        config = load_config(target, overrides or ())
        about_recipe, disk_needed = examine_recipe(config)
        lines = [*diagnose(collect(Path(config.folder)), disk_needed), *about_recipe]
    elif overrides:
        raise UserError(
            f"{target} is no recipe, so there is nothing to override", "name a YAML file, or a folder alone"
        )
    else:
        lines = diagnose(collect(target))
    console.print(table(lines))
    if any(line.level == "problem" for line in lines):
        raise SystemExit(1)


def deploy(pool: Annotated[str, typer.Option(help="process work pool that runs the flows")] = "penstock") -> None:
    """Put Penstock on a Prefect server: pool, GPU slots, automation and the deployments of prefect.yaml."""
    from rich.table import Table

    from penstock.cli.prefect.deploy import deploy as deploy_all
    from penstock.cli.prefect.deploy import next_commands

    table = Table("what", "name", "detail")
    for row in deploy_all(pool):
        table.add_row(*row)
    console.print(table)
    commands = "\n  ".join(next_commands(pool))
    console.print(f"Next, a worker and a first run:\n  {commands}", highlight=False, soft_wrap=True)
