"""`penstock select`: the best responses of a run become a data file for the next training."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from penstock.base.errors import UserError
from penstock.cli.terminal import console, short_path
from penstock.data.selection import check_asked, response_column, selected, write_selection
from penstock.session.session import read_config
from penstock.state.manifest import check_kind
from penstock.state.run_folder import open_run_folder


def select(run: Path, to: Path, best: int | None, least: float | None, pairs: bool, margin: float | None) -> None:
    """Write the best responses to each prompt of a run, or its best and its worst, and say how to train on them.

    Raises:
        UserError: options exclude each other, the file is there, or the run has nothing to take.
    """
    check_asked(best, least, pairs, margin)
    folder = open_run_folder(run)
    check_kind(folder, "train")
    if to.exists():
        raise UserError(f"{to} is there already", "name another file, or remove it")
    column = response_column(read_config(folder).data)
    found = selected(folder, best, least, pairs, margin, column)
    write_selection(found.rows, to)
    place, (low, high) = quote(short_path(to)), found.rewards
    what = "pairs" if pairs else "responses"
    use = f"penstock preference RECIPE data.train={place}" if pairs else f"penstock sft RECIPE data.sft={place}"
    more = "" if pairs else f" data.response={column}"
    console.print(
        f"{len(found.rows):,} {what} of {found.responses:,} responses to {found.prompts:,} prompts, rewards {low:g} to "
        f"{high:g}: {short_path(to)}\ntrain on them: {use}{more}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
