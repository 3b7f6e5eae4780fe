"""The command that trains a recipe with several settings.

Heavy imports stay inside the command: `penstock --help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.base.errors import UserError
from penstock.cli.terminal import console, errors, short_path

if TYPE_CHECKING:
    from penstock.state.sweep import SweepFolder


def sweep(
    recipe: Annotated[Path | None, typer.Argument(help="YAML recipe of 'train'; none with --resume")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="what varies: key=value,value or, with --random, key=low..high; key=value holds for all"),
    ] = None,
    random: Annotated[
        int | None, typer.Option(min=1, help="train so many combinations that chance takes, each with every seed")
    ] = None,
    draw_seed: Annotated[int, typer.Option("--seed", min=0, help="seed of the chance of --random")] = 0,
    by: Annotated[
        str, typer.Option(help="figure by which the best is told; 'lowest heldout/kl' where less is better")
    ] = "heldout/accuracy",
    at_once: Annotated[
        int | None, typer.Option(min=1, help="trainings at a time; default: as many as GPUs allow, one on a CPU")
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="folder of a sweep: do what is left of it")] = None,
) -> None:
    """Train a recipe with every combination of some settings, and report which did best."""
    from penstock.cli.prefect.server import check_server
    from penstock.cli.running import ending_in_words
    from penstock.flows.sweep import sweep as sweep_flow
    from penstock.reports.progress import waiting
    from penstock.session.sweeps.plan import Asked, begin, planned, taken_up
    from penstock.session.sweeps.running import TrainingsFailed
    from penstock.state.sweep import SweepFolder

    if resume is not None:
        if recipe is not None or settings or random is not None:
            raise UserError("--resume goes on with a sweep as it was asked for", "remove the recipe and settings")
        folder = SweepFolder(resume.resolve())
        with waiting(console, "checking what is left"):
            taken_up(folder, at_once)
        check_server()
    else:
        if recipe is None:
            raise UserError("no recipe given", "for example: penstock sweep configs/quickstart.yaml seed=0,1,2")
        asked = Asked(tuple(settings or ()), random, draw_seed, by, at_once)
        with waiting(console, "checking every combination"):
            plan = planned(str(recipe), asked, anywhere=True)
        check_server()  # before there is a folder that nothing will be in
        folder = begin(plan)
    console.print(f"sweep: {short_path(folder.path)}", highlight=False, soft_wrap=True)
    try:
        with ending_in_words("sweep", folder.path, _how_to_go_on):
            sweep_flow(resume=str(folder.path), at_once=at_once)
    except TrainingsFailed as failed:
        _print_result(folder)
        errors.print(f"[bold red]error:[/] {failed}", highlight=False, soft_wrap=True)
        errors.print(_how_to_go_on("sweep", folder.path), highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    _print_result(folder)


def _how_to_go_on(command: str, folder: Path) -> str:
    return f"Continue with: penstock {command} --resume {quote(short_path(folder))}"


def _print_result(folder: SweepFolder) -> None:
    """Print the comparison and what was best."""
    from penstock.reports.comparing.terminal import render
    from penstock.reports.sweep import best_text, compared
    from penstock.state.sweep import read_sweep

    sweep = read_sweep(folder)
    if (found := compared(folder, sweep)) is None:
        return
    comparison, best = found
    console.print(render(comparison))
    console.print(best_text(sweep.by, best), highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {short_path(folder.report)}/compare.html", highlight=False, soft_wrap=True)
