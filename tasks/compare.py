"""Compare: runs of an experiment, read from MLflow, become files in a folder and artifacts on the Prefect page.

Left out: what is compared and how it is drawn (penstock/reports/compare.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from penstock.state.run_folder import new_run_folder

if TYPE_CHECKING:
    from penstock.reports.compare import Comparison


def compare_into_folder(experiment: str, runs: list[str] | None, folder: Path) -> tuple[Comparison, Path]:
    """Read the runs, write them into a new folder under `folder`/comparisons, and return both.

    Args:
        experiment: name of the MLflow experiment.
        runs: names or ids; None: all runs of the experiment.
        folder: directory of the run folders; it holds their MLflow database unless `MLFLOW_TRACKING_URI` names another
            store.

    Raises:
        UserError: there is no such store, experiment or run.
    """
    from penstock.reports.compare import compare_runs, store_of, write_comparison

    comparison = compare_runs(store_of(folder), experiment, runs)
    target = new_run_folder(folder / "comparisons", re.sub(r"[^\w.-]+", "-", experiment)).path
    write_comparison(comparison, target)
    return comparison, target


@task(task_run_name="compare-{experiment}", cache_policy=NO_CACHE)
def compare_experiment(experiment: str, runs: list[str] | None, folder: str) -> str:
    """Compare the runs; return the folder with the files. The page shows the results as a table, and the whole page."""
    comparison, target = compare_into_folder(experiment, runs, Path(folder))
    rows = comparison.results.reset_index().to_dict("records")
    table = [{str(name): value for name, value in row.items()} for row in rows]
    create_table_artifact(table, key="comparison", description=f"{experiment}: {target}")
    create_markdown_artifact((target / "compare.md").read_text(encoding="utf-8"), key="comparison-report")
    return str(target)
