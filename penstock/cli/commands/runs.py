"""Commands that follow, change and compare runs.

Heavy imports stay inside the commands: `penstock --help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.base.errors import UserError
from penstock.cli.places import free_file
from penstock.cli.terminal import console
from penstock.trackers.tracker import PAGES_PORT


def compare(
    experiment: Annotated[str, typer.Argument(help="experiment (record.experiment of a recipe) in MLflow")],
    runs: Annotated[list[str] | None, typer.Argument(help="names or ids of runs; default: all of them")] = None,
    folder: Annotated[Path, typer.Option(help="directory of the run folders")] = Path("runs"),
    against: Annotated[
        str | None, typer.Option(help="run whose group the others are compared with; default: the oldest")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="show so many responses of two runs to the same prompts side by side")
    ] = 0,
) -> None:
    """Show runs side by side, with means over seeds and what chance explains; files go to FOLDER/comparisons."""
    from penstock.reports.comparing.tables import check_samples
    from penstock.reports.comparing.terminal import render, render_samples
    from penstock.tasks.compare import compare_into_folder

    comparison, target = compare_into_folder(experiment, runs, folder, against)
    console.print(render(comparison))
    if samples:
        console.print(render_samples(check_samples(comparison), samples))
    console.print(f"files: {target}", highlight=False, soft_wrap=True)


def sync(run: Annotated[Path, typer.Argument(help="folder of a run that has ended")]) -> None:
    """Give a run's trackers what they lack because a server was away."""
    from penstock.cli.runs.sync import sync as deliver

    console.print(deliver(run), highlight=False, markup=False, soft_wrap=True)


def replay(
    run: Annotated[Path, typer.Argument(help="folder of a run of 'train'; it is only read")],
    iteration: Annotated[int, typer.Argument(min=1, help="number of the iteration")],
    tasks: Annotated[
        list[str] | None, typer.Argument(help="tasks, e.g. reward or update_actor; default: all that can be compared")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="share of a value that counts as no difference; on GPUs e.g. 1e-3")
    ] = 0.0,
    to: Annotated[
        Path | None,
        typer.Option(help="folder for what is made again; default: one beside the run, kept on differences"),
    ] = None,
) -> None:
    """Run tasks of an iteration again from what they were given, and compare: exit code 0 equal, 1 different."""
    from penstock.cli.runs.replaying import replayed

    if not replayed(run, iteration, tasks or [], tolerance, to):
        raise typer.Exit(1)


def samples(
    run: Annotated[Path, typer.Argument(help="folder of a run of 'train'; it is only read, also while it trains")],
    iteration: Annotated[int | None, typer.Option(min=0, help="number of the iteration; default: the newest")] = None,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="held-out responses of the evaluation after it instead")
    ] = False,
    sort: Annotated[
        str | None,
        typer.Option(help="reward, length, advantage or reward/PART: the highest first; default: spread over all"),
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="the lowest first")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="how many to show; default: 8, all of a --prompt, 5 prompts of --against")
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(min=0, help="row of the data file, e.g. 17 of train-000017: its responses, token by token"),
    ] = None,
    against: Annotated[
        int | None, typer.Option(min=0, help="an earlier iteration: what fell since then, prompts that lost most first")
    ] = None,
) -> None:
    """Show prompts, responses, rewards and advantages of an iteration, and what lost against an earlier one."""
    from penstock.cli.runs.samples import show

    show(run, iteration, evaluation, sort, reverse, limit, prompt, against)


def episodes(
    run: Annotated[Path, typer.Argument(help="folder of a run with an environment; it is only read")],
    iteration: Annotated[int | None, typer.Option(min=0, help="number of the iteration; default: the newest")] = None,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="held-out episodes of the evaluation after it instead")
    ] = False,
    sort: Annotated[
        str | None,
        typer.Option(help="reward, turns, length, advantage or reward/PART: highest first; default: spread over all"),
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="the lowest first")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="how many to show; default: 8")] = None,
    prompt: Annotated[
        int | None, typer.Option(min=0, help="row of the data file, e.g. 17 of train-000017: its episodes alone")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="those alone that failed, with the reason")] = False,
) -> None:
    """Show episodes turn by turn: what the policy said, what it was told, what that earned."""
    from penstock.cli.runs.samples import show_episodes

    show_episodes(run, iteration, evaluation, sort, reverse, limit, prompt, failed)


def select(
    run: Annotated[Path, typer.Argument(help="folder of a run of 'train'; it is only read")],
    to: Annotated[Path, typer.Option(help="file to write, .jsonl or .parquet", callback=free_file)],
    best: Annotated[int | None, typer.Option(min=1, help="most responses to a prompt; default: 1")] = None,
    least: Annotated[float | None, typer.Option(help="lowest reward that is taken; default: any")] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="the best and the worst response to each prompt, for 'preference'")
    ] = False,
    margin: Annotated[
        float | None, typer.Option(min=0, help="with --pairs: by which their rewards have to differ; default: at all")
    ] = None,
) -> None:
    """Write the best responses of a run's experience as data: for 'sft' (rejection sampling) or 'preference'."""
    from penstock.cli.runs.selecting import select as select_from

    select_from(run, to, best, least, pairs, margin)


def set_live(
    run: Annotated[Path, typer.Argument(help="folder of a running training")],
    values: Annotated[
        list[str] | None,
        typer.Argument(help="key=value, e.g. rollout.temperature=0.9; a key that cannot change is refused"),
    ] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="take all of them back: the recipe's values hold again")
    ] = False,
) -> None:
    """Change values of a running training from its next iteration on."""
    from penstock.cli.prefect.live import clear_overrides, set_overrides
    from penstock.configs.tree.recipes import dump

    if clear == bool(values):
        raise UserError("give values or --clear, one of them", "for example penstock set RUN rollout.temperature=0.9")
    name, overrides = (clear_overrides(run), {}) if clear else set_overrides(run, values or [])
    what = f":\n{dump(overrides).rstrip()}" if overrides else " the recipe's values are in force again"
    said = f"from the next iteration on{what}\nPrefect Variable: {name}"
    console.print(said, highlight=False, markup=False, soft_wrap=True)


def ui(
    folder: Annotated[Path, typer.Argument(help="directory of the run folders")] = Path("runs"),
    tracker_port: Annotated[
        int, typer.Option(min=1, max=65535, help="port of the first tracker's pages; a further one's is the next")
    ] = PAGES_PORT,
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="port of Prefect's pages")] = 4200,
) -> None:
    """Serve the trackers' and Prefect's pages of past runs until Ctrl-C (loopback only)."""
    from penstock.cli.runs.pages import serve_pages

    serve_pages(folder, tracker_port, prefect_port, console)
