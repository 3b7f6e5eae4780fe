"""Which flow run of Prefect a training is: its tags, where else it is shown, and its report.

A run of any command has these. Left out: what `train` alone shows there meanwhile (penstock/session/flow_runs/page.py).
"""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from penstock.configs.preference import PairConfig
from penstock.configs.schema import TrainConfig
from penstock.session.flow_runs.page import without_files
from penstock.session.session import Training

RUN_TAG, RECIPE_TAG, ALGORITHM_TAG, MODEL_TAG = "run:", "recipe:", "algorithm:", "model:"  # before a flow run's tags


def know_flow_run(training: Training, config: TrainConfig | PairConfig, algorithm: str) -> None:
    """Keep which flow run of Prefect the training is, if it is one, and tag that with what people look for it by.

    It alone is tagged: a tag on a task makes Prefect ask the server for its limit every time.
    """
    if not flow_run.id:
        return
    session, run = training.session(), training.run
    session.prefect_flow_run_id = str(flow_run.id)
    session.prefect_url = _flow_run_url(session.prefect_flow_run_id, flow_run.ui_url)
    model = Path(config.model.path).name if config.model.path else "tiny"
    ours = {RECIPE_TAG: config.name, ALGORITHM_TAG: algorithm, MODEL_TAG: model, RUN_TAG: run.name}
    theirs = [tag for tag in flow_run.tags or () if not tag.startswith(tuple(ours))]
    with get_client(sync_client=True) as client:
        client.update_flow_run(UUID(flow_run.id), tags=[*theirs, *(kind + name for kind, name in ours.items())])


def _flow_run_url(flow_run_id: str, ui_url: str | None) -> str:
    """Return the address of the run's page, on its server or where `penstock ui` shows a temporary server's runs."""
    if ui_url and ui_url.startswith("http"):
        return ui_url
    return f"http://127.0.0.1:4200/runs/flow-run/{flow_run_id}"


def link_tracker(training: Training) -> None:
    """Put a link to the first tracker that has a page on the page of the flow run."""
    session = training.session()
    shown = next((tracker for tracker in session.trackers if tracker.page), None)
    if session.prefect_flow_run_id and shown is not None:
        about = f"Curves, parameters and files of this training in {shown.label}"
        create_link_artifact(shown.page, f"{shown.label} run", key="tracker-run", description=about)


def show_report(training: Training) -> None:
    """Put the report of a training that has ended on the page."""
    session, run = training.session(), training.run
    if session.prefect_flow_run_id and not session.lacks:
        page = (run.path / "report" / "report.md").read_text(encoding="utf-8")
        create_markdown_artifact(without_files(page), key="training-report", description=run.name)
