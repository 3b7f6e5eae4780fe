"""Select responses: the best of what a stage has said become a file, which a later stage learns from."""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.configs.chain import SelectConfig
from penstock.data.selection import response_column, selected, write_selection
from penstock.session.session import read_config
from penstock.state.run_folder import open_run_folder


@task(cache_policy=NO_CACHE)
def select_responses(run: Path, config: SelectConfig, to: Path) -> None:
    """Write the best responses to each prompt of a run, or the best and the worst, whole or not at all.

    Raises:
        UserError: the run has nothing to take.
    """
    folder = open_run_folder(run)
    column = response_column(read_config(folder).data)
    found = selected(folder, config.best, config.least, config.pairs, config.margin, column)
    write_selection(found.rows, to)
    (low, high), of = found.rewards, f"{found.responses:,} responses to {found.prompts:,} prompts"
    get_run_logger().info("%s rows of %s, rewards %g to %g: %s", f"{len(found.rows):,}", of, low, high, to)
