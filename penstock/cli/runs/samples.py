"""`penstock samples`: responses of a run on the terminal; the run is only read, also while it trains.

Left out: what is read and shown (penstock/reports/samples/), and the page that the report has beside it.
"""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.cli.terminal import console
from penstock.reports.samples import terminal
from penstock.reports.samples.fallen import compared
from penstock.reports.samples.reading import rows_of, rows_of_prompt, samples_of
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
    if reverse and sort is None:
        raise UserError("--reverse has no effect without --sort", "name a figure, e.g. --sort reward")
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
