"""`penstock samples` and `penstock episodes`: responses of a run on the terminal; it is only read, while it trains too.

Left out: what is read and shown (penstock/reports/samples/), and the page that the report has beside it.
"""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.cli.terminal import console
from penstock.reports.samples import terminal
from penstock.reports.samples.fallen import compared
from penstock.reports.samples.reading import TURNS, rows_of, rows_of_prompt, samples_of
from penstock.state.run_folder import open_run_folder

LISTED, FALLEN = 8, 5


def show(
    run: Path,
    iteration: int | None,
    heldout: bool,
    sort: str | None,
    reverse: bool,
    limit: int | None,
    prompt: int | None,
    against: int | None,
) -> None:
    """Show responses of an iteration, of one prompt of it, or what lost against another iteration.

    Raises:
        UserError: the run has no such responses, or options exclude each other; the message names what there is.
    """
    _check_order(sort, reverse, "reward")
    if against is not None and (sort is not None or prompt is not None):
        raise UserError("--against shows the prompts that lost most: --sort and --prompt have no effect", "remove them")
    folder = open_run_folder(run)
    samples = samples_of(folder, iteration, heldout)
    if against is not None:
        if against == samples.iteration:
            raise UserError(f"--against {against} names the iteration itself", "name another with --iteration")
        found = compared(folder, samples_of(folder, against, heldout), samples, limit or FALLEN)
        parts = list(terminal.of_comparison(found, samples))
    elif prompt is not None:
        rows = rows_of_prompt(samples, prompt)
        if sort is not None:
            of_prompt = set(rows)
            rows = [row for row in rows_of(samples, sort, reverse, len(samples)) if row in of_prompt]
        responses = samples.at(rows[:limit], tokens=True)
        parts = [*terminal.about(samples), *terminal.of_prompt(folder, samples, responses, console)]
    else:
        responses = samples.at(rows_of(samples, sort, reverse, limit or LISTED), tokens=True)
        parts = [*terminal.about(samples), *terminal.listed(responses)]
    for part in parts:
        console.print(part, highlight=False)


def show_episodes(
    run: Path,
    iteration: int | None,
    heldout: bool,
    sort: str | None,
    reverse: bool,
    limit: int | None,
    prompt: int | None,
    failed: bool,
) -> None:
    """Show episodes turn by turn.

    Args:
        failed: those alone that have no reward.

    Raises:
        UserError: the run has no episodes, or none of that kind; the message names what there is.
    """
    _check_order(sort, reverse, "turns")
    folder = open_run_folder(run)
    samples = samples_of(folder, iteration, heldout)
    if samples.is_table:
        raise UserError(
            f"the experience of iteration {samples.iteration} is not in the run folder, so its turns are not known",
            f"`penstock samples {run}` shows the responses that were kept",
        )
    if TURNS not in samples.names:
        raise UserError(
            f"the responses of iteration {samples.iteration} are no episodes: they were made without an environment",
            f"`penstock samples {run}` shows them",
        )
    wanted = {*range(len(samples))} if prompt is None else {*rows_of_prompt(samples, prompt)}
    if failed:
        wanted -= {row for row, reason in enumerate(samples.failures()) if reason is None}
    rows, count = [row for row in rows_of(samples, sort, reverse, len(samples)) if row in wanted], limit or LISTED
    if sort is None and count < len(rows):
        rows = [rows[number * len(rows) // count] for number in range(count)]
    parts = [*terminal.about(samples), *terminal.turn_by_turn(folder, samples.at(rows[:count], tokens=True))]
    for part in parts if rows else [*terminal.about(samples), "none of these"]:
        console.print(part, highlight=False)


def _check_order(sort: str | None, reverse: bool, example: str) -> None:
    if reverse and sort is None:
        raise UserError("--reverse has no effect without --sort", f"name a figure, e.g. --sort {example}")
