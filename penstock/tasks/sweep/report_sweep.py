"""Report sweep: the comparison of its trainings, in its folder and on the page of its flow run."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from penstock.reports.sweep import write_sweep_report
from penstock.session.flow_runs.page import without_files
from penstock.session.sweeps.running import Swept


@task(task_run_name="report", cache_policy=NO_CACHE)
def report_sweep(swept: Swept) -> None:
    """Write the report of all trainings that have begun, also of those that failed."""
    folder = swept.folder
    if write_sweep_report(folder, swept.living().plan.sweep):
        page = (folder.report / "compare.md").read_text(encoding="utf-8")
        create_markdown_artifact(without_files(page), key="sweep-report", description=folder.path.name)
