"""Commands that prepare a machine: judge it, and tell a Prefect server of Penstock.

Heavy imports stay inside the commands: `penstock --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.base.errors import UserError
from penstock.cli.commands.training import Overrides
from penstock.cli.places import free_file
from penstock.cli.prefect.pool_type import PoolType
from penstock.cli.terminal import console

if TYPE_CHECKING:
    from penstock.doctor.diagnosis import Diagnosis


def server(
    host: Annotated[str, typer.Option(help="address to listen on; the default is this machine's own")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on")] = 4200,
) -> None:
    """Start Prefect's server, which forms, schedules and work pools need, and stay with it until Ctrl-C."""
    from penstock.cli.prefect.own_server import serve
    from penstock.cli.runs.pages import check_port

    check_port(port, "--host or --port", host)
    serve(host, port)


def doctor(
    target: Annotated[Path, typer.Argument(help="directory of the run folders, or a recipe to check as well")] = Path(
        "runs"
    ),
    overrides: Overrides = None,
    pool: Annotated[
        str | None, typer.Option(help="check the machines of this work pool together: versions, links, run folder")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="say of this model's folder, and of nothing else, how it is trained and served")
    ] = None,
) -> None:
    """Check the machine: driver, libraries, GPUs, links, memory, disk; exit code 1 if something would stop a run."""
    recipe = target.suffix in (".yaml", ".yml")
    if model is not None and (recipe or pool is not None):
        raise UserError("--model looks at a folder alone", "leave the recipe and --pool out")
    if overrides and not recipe:
        raise UserError(
            f"{target} is no recipe, so there is nothing to override", "name a YAML file, or a folder alone"
        )
    changes = overrides or ()
    if model is not None:
        lines = _examine_model(model)
    else:
        lines = _examine_machine(target, changes, recipe) if pool is None else _examine_pool(pool, target, changes)
    if any(line.level == "problem" for line in lines):
        raise SystemExit(1)


def _examine_model(folder: Path) -> list[Diagnosis]:
    from penstock.checks.hub import snapshot
    from penstock.doctor.doctor import table
    from penstock.doctor.model import examine_model

    lines = examine_model(snapshot(str(folder), "--model") or folder)
    console.print(table(lines))
    return lines


def _examine_pool(pool: str, target: Path, overrides: Sequence[str]) -> list[Diagnosis]:
    from penstock.cli.prefect.examination import examine

    return examine(pool, target, overrides)


def _examine_machine(target: Path, overrides: Sequence[str], recipe: bool) -> list[Diagnosis]:
    from penstock.configs.loading.load import load_config
    from penstock.doctor.doctor import diagnose, examine_recipe, table
    from penstock.doctor.machine_facts import collect

    if recipe:
        config = load_config(target, overrides)
        about_recipe, disk_needed = examine_recipe(config)
        lines = [*diagnose(collect(Path(config.folder)), disk_needed), *about_recipe]
    else:
        lines = diagnose(collect(target))
    console.print(table(lines))
    return lines


def host(
    flow: Annotated[
        str | None, typer.Argument(help="where the training listens, ADDRESS:PORT: its hosts.address and hosts.port")
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(help="which of the training's hosts this is, from 0; Slurm and Kubernetes say it by themselves"),
    ] = None,
    interface: Annotated[str | None, typer.Option(help="network interface for the ranks: hosts.interface")] = None,
    silence_s: Annotated[float, typer.Option(help="seconds of silence after which the training is given up")] = 30.0,
    new_keys: Annotated[bool, typer.Option("--new-keys", help="print keys for a training and its hosts")] = False,
) -> None:
    """Give this machine to a training whose groups ask for 'hosts' without a 'pool': under Slurm, on Kubernetes."""
    from penstock.cli.joining import host_start, print_new_keys
    from penstock.engines.groups.host import serve

    if new_keys:
        print_new_keys()
        return
    raise SystemExit(serve(host_start(flow, number, interface, silence_s)))


def deploy(
    pool: Annotated[str, typer.Option(help="process work pool that runs the flows; with --hosts: of machines")] = (
        "penstock"
    ),
    hosts: Annotated[
        int | None, typer.Option(min=1, help="make a pool of so many machines for engine groups (groups.NAME.pool)")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs that each of these machines has (0)")] = None,
    kind: Annotated[PoolType, typer.Option("--type", help="what starts a host on them")] = PoolType.process,
    runs: Annotated[
        int | None, typer.Option(min=1, help="of a deployment at a time, the rest queue (one per GPU of this machine)")
    ] = None,
) -> None:
    """Put Penstock on a Prefect server: pool, automations and the deployments of prefect.yaml."""
    from rich.table import Table

    from penstock.cli.prefect.deploy import deploy as deploy_all
    from penstock.cli.prefect.deploy import next_commands
    from penstock.cli.prefect.pools import check_sizes, deploy_pool

    check_sizes(hosts, gpus, kind, runs)
    table = Table("what", "name", "detail")
    for row in deploy_all(pool, runs) if hosts is None else deploy_pool(pool, hosts, gpus or 0, kind):
        table.add_row(*row)
    console.print(table)
    if hosts is not None:
        start = f"prefect worker start --pool {pool} --limit 1"
        console.print(f"Next, a worker on each of its machines:\n  {start}", highlight=False, soft_wrap=True)
        return
    commands = "\n  ".join(next_commands(pool))
    console.print(f"Next, a worker and a first run:\n  {commands}", highlight=False, soft_wrap=True)


def chaos(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe, e.g. configs/quickstart.yaml")],
    overrides: Overrides = None,
    kills: Annotated[
        int, typer.Option(min=1, help="how many processes to kill, over as many trainings as it takes")
    ] = 10,
    pause: Annotated[float, typer.Option(min=0.0, help="longest pause between recovery and the next kill, s")] = 5.0,
    seed: Annotated[int, typer.Option(help="of what is killed, and when")] = 0,
    folder: Annotated[Path, typer.Option(help="new folder for the runs")] = Path("chaos"),
    out: Annotated[Path | None, typer.Option(help="JSON file for the result", callback=free_file)] = None,
) -> None:
    """Train while processes of the run are killed at random; exit code 1 where it ends other than one left alone."""
    from penstock.chaos.kills import Chaos, unleash
    from penstock.cli.chaos import is_well, show, tell_time, write

    if folder.exists():
        raise UserError(f"{folder} exists already", "name a new one with --folder")
    outcome = unleash(Chaos(recipe, overrides or (), folder, kills, pause, seed), tell_time)
    show(outcome)
    if out is not None:
        write(out, outcome)
    if not is_well(outcome):
        raise SystemExit(1)
