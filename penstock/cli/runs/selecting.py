"""`penstock select`: the best responses of a run become a data file for the next training."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from penstock.base.errors import UserError
from penstock.cli.terminal import console, short_path
from penstock.data.selection import best_and_worst, best_responses, write_selection
from penstock.session.session import read_config
from penstock.state.manifest import check_kind
from penstock.state.run_folder import open_run_folder


def select(run: Path, to: Path, best: int | None, least: float | None, pairs: bool, margin: float | None) -> None:
    """Write the best responses to each prompt of a run, or its best and its worst, and say how to train on them.

    Raises:
        UserError: options exclude each other, the file is there, or the run has nothing to take.
    """
    folder = open_run_folder(run)
    check_kind(folder, "train")
    if to.exists():
        raise UserError(f"{to} is there already", "name another file, or remove it")
    if pairs and (best is not None or least is not None):
        raise UserError("--best and --least have no effect with --pairs", "remove them; --margin says what a pair is")
    if not pairs and margin is not None:
        raise UserError(
            "--margin has no effect without --pairs", "remove it; --least is the lowest reward that is taken"
        )
    column = read_config(folder).data.response or "response"
    found = best_and_worst(folder, margin or 1e-9) if pairs else best_responses(folder, best or 1, least, column)
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
