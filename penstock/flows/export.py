"""Export: the model of a run as a Hugging Face folder to hand on, as `penstock export` writes it; no engine starts."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from penstock.session.flow_runs.failures import ends_in_words
from penstock.tasks.export_run import export_from_page


def _name() -> str:
    return f"export-{Path(flow_run.parameters['run']).name}"


@flow(name="export", flow_run_name=_name)
@ends_in_words
def export(run: str, checkpoint: str | None = None, to: str | None = None, max_shard_size: str | None = None) -> str:
    """Write a run's model, compare it with its source, and tell the run's tracker of it; return the folder.

    Args:
        run: folder of a run of `train` that nobody trains at the moment.
        checkpoint: name of the one to export, e.g. 000010; default: the final model, or else the newest checkpoint.
        to: folder to write, a new or an empty one; default: models/export of the run.
        max_shard_size: most bytes of a weights file, e.g. 2GB; default: as they are, else 5GB.
    """
    return export_from_page(run, checkpoint, to, max_shard_size)
