"""Compare: runs of an experiment, read from MLflow, become files in a folder and artifacts on the Prefect page.

Left out: what is compared and how it is drawn (penstock/reports/comparing/).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from penstock.session.flow_runs.page import without_files
from penstock.state.run_folder import new_run_folder

if TYPE_CHECKING:
    from penstock.reports.comparing.tables import Comparison


def compare_into_folder(
    experiment: str, runs: list[str] | None, folder: Path, against: str | None = None
) -> tuple[Comparison, Path]:
    """Read the runs, write their comparison into a new folder under `folder`/comparisons, and return both.

    MLflow keeps the files, too, as a run of its experiment `comparisons`.

    Args:
        experiment: name of the MLflow experiment.
        runs: names or ids; None: all runs of the experiment.
        folder: directory of the run folders; it holds their MLflow database unless `MLFLOW_TRACKING_URI` names another
            store.
        against: name of a run whose group the others are compared with; None: the oldest one's.

    Raises:
        UserError: there is no such store, experiment or run.
    """
    from penstock.reports.comparing.pages import write_comparison
    from penstock.reports.comparing.recorded import keep, recorded_runs, store_of
    from penstock.reports.comparing.tables import comparison_of

    store = store_of(folder)
    comparison = comparison_of(recorded_runs(store, experiment, runs), against)
    target = new_run_folder(folder / "comparisons", re.sub(r"[^\w.-]+", "-", experiment)).path
    write_comparison(comparison, target)
    keep(store, target, comparison.runs)
    return comparison, target


@task(task_run_name="compare-{experiment}", cache_policy=NO_CACHE)
def compare_experiment(experiment: str, runs: list[str] | None, folder: str, against: str | None) -> str:
    """Compare the runs; return the folder with the files. The page shows the results as a table, and the whole page."""
    comparison, target = compare_into_folder(experiment, runs, Path(folder), against)
    rows = comparison.results.reset_index().to_dict("records")
    table = [{str(name): value for name, value in row.items()} for row in rows]
    create_table_artifact(table, key="comparison", description=f"{experiment}: {target}")
    page = (target / "compare.md").read_text(encoding="utf-8")
    create_markdown_artifact(without_files(page), key="comparison-report")
    return str(target)
