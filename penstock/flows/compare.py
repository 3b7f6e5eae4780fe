"""Compare: the runs of an MLflow experiment side by side, as files and as artifacts of this flow run."""

from __future__ import annotations

from prefect import flow

from penstock.session.flow_runs.failures import ends_in_words
from penstock.tasks.compare import compare_experiment


@flow(name="compare", flow_run_name="compare-{experiment}")
@ends_in_words
def compare(
    experiment: str = "penstock",
    run_ids: list[str] | None = None,
    folder: str = "runs",
    against: str | None = None,
) -> str:
    """Compare runs; return the folder with `compare.md`, `compare.html`, `compare.png` and the tables.

    Args:
        experiment: name of the MLflow experiment (`record.experiment` of a recipe).
        run_ids: names or ids of runs; default: all of the experiment.
        folder: directory of the run folders; the files go into its subfolder `comparisons`. The MLflow store is that
            of the environment (`MLFLOW_TRACKING_URI`: Prefect would keep a password), else the database in `folder`.
        against: a run; others are compared with its group, the runs that differ from it in their seed alone. Default:
            the oldest run.
    """
    return compare_experiment(experiment, run_ids, folder, against)
