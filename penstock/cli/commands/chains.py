"""The command that trains in stages.

Heavy imports stay inside the command: `penstock --help` answers at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.base.errors import UserError
from penstock.cli.terminal import console, escaped, short_path

if TYPE_CHECKING:
    from penstock.configs.chain import Chain
    from penstock.state.chain import ChainFolder
    from penstock.state.run_folder import RunFolder


def chain(
    recipe: Annotated[Path | None, typer.Argument(help="YAML recipe with 'stages'; none with --resume")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="STAGE.section.key=value in place of the recipe's")
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="folder of a chain: do what is left of it")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check every stage, print them, and leave")] = False,
) -> None:
    """Train in stages, one recipe for all: each may begin with the model or the data that an earlier one leaves."""
    from penstock.cli.prefect.server import check_server
    from penstock.cli.running import ending_in_words
    from penstock.flows.chain import chain as chain_flow
    from penstock.reports.progress import waiting
    from penstock.session.chains.plan import begin, planned, read_chain_of, stages_left
    from penstock.state.chain import ChainFolder

    if resume is not None:
        if recipe is not None or overrides:
            raise UserError("--resume goes on with a chain as it was asked for", "remove the recipe and settings")
        folder = ChainFolder(resume.resolve())
        with waiting(console, "checking what is left"):
            left = stages_left(folder)
        if dry_run:
            _print_stages(read_chain_of(folder), {stage.name for stage in left})
            return
        check_server()
    else:
        if recipe is None:
            raise UserError("no recipe given", "for example: penstock chain configs/chain.yaml")
        with waiting(console, "checking every stage"):
            plan = planned(str(recipe), overrides or [], anywhere=True)
        if dry_run:
            _print_stages(plan, {stage.name for stage in plan.stages})
            return
        check_server()  # before there is a folder that nothing will be in
        folder = begin(plan)
    console.print(f"chain: {short_path(folder.path)}", highlight=False, soft_wrap=True)
    with ending_in_words("chain", folder.path, _how_to_go_on):
        chain_flow(resume=str(folder.path))
    _print_results(folder)


def _how_to_go_on(command: str, folder: Path) -> str:
    return f"Continue with: penstock {command} --resume {quote(short_path(folder))}"


def _print_stages(chain: Chain, left: set[str]) -> None:
    """Print what each stage does, and with what of the others."""
    from rich.table import Table

    table = Table("stage", "does", "with", "")
    for stage in chain.stages:
        named = ", ".join(f"{key} of {name}" for key, name in stage.named.items())
        table.add_row(stage.name, stage.does, escaped(named), "" if stage.name in left else "done")
    console.print(table)


def _print_results(folder: ChainFolder) -> None:
    """Print what each stage has come to, and what it has left."""
    from rich.table import Table

    from penstock.session.chains.plan import read_chain_of

    table = Table("stage", "does", "result", "leaves")
    for stage in read_chain_of(folder).stages:
        table.add_row(
            stage.name, stage.does, escaped(_result(folder.run(stage))), escaped(short_path(folder.left_by(stage)))
        )
    console.print(table)


def _result(run: RunFolder) -> str:
    """Return the most important figure of a stage that trained."""
    from penstock.reports.headline import headlines

    if not run.summary.is_file():
        return ""
    first = next(iter(headlines(json.loads(run.summary.read_text(encoding="utf-8")))), None)
    return "" if first is None else f"{first.label} {first.value}"
