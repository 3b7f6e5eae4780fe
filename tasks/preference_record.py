"""The MLflow run of a training on preferences, and its summary at the end.

Figures are recorded step by step as those of iterations are (tasks/record.py). Left out: reports with pictures
(reports/report.py is about iterations).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from configs.preference import PairConfig
from state.manifest import read_manifest, write_manifest
from state.run_folder import read_metrics
from tasks.finetuning import steps_done
from tasks.preference import kind_of, loss_arguments
from tasks.record import elapsed, open_record
from tasks.session import Training


@contextmanager
def recording_preferences(training: Training, config: PairConfig) -> Iterator[None]:
    """Keep the record open, of an earlier attempt if there is one; on the way out write the summary, always."""
    done = steps_done(training.run, "final", config.trainer.steps)
    with open_record(
        training, kind_of(config), config, config.experiment, loss_arguments(config)["name"], done, summary
    ):
        training.session().engine_figures |= read_manifest(training.run).trained_with or {}
        yield


def record_engines(training: Training) -> None:
    """Keep in the manifest what the engines train with: an attempt that does only the end starts no model to ask."""
    session, run = training.session(), training.run
    session.engine_figures["recomputed"] = str(session.recomputed["sft"])
    write_manifest(run, dataclasses.replace(read_manifest(run), trained_with=session.engine_figures))


def summary(training: Training, status: str) -> dict[str, Any]:
    """Return the content of `summary.json` from what has been recorded."""
    session, records = training.session(), read_metrics(training.run)
    steps = [item["metrics"] for item in records if item["iteration"] > 0]
    losses = [metrics["loss"] for metrics in steps if "loss" in metrics]  # one that is NaN is not there
    accuracies = [metrics["accuracy"] for metrics in steps if "accuracy" in metrics]
    heldout = [item["metrics"] for item in records if "heldout/accuracy" in item["metrics"]]
    first = records and records[0]["iteration"] == 0
    return {
        "status": status,
        "seconds": round(elapsed(training), 3),
        "steps": len(steps),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "accuracy_last": accuracies[-1] if accuracies else None,
        "heldout_accuracy_before": heldout[0]["heldout/accuracy"] if heldout and first else None,
        "heldout_accuracy": heldout[-1]["heldout/accuracy"] if len(heldout) > 1 else None,
        "attention": session.engine_figures.get("attention"),
        "recomputed": session.engine_figures.get("recomputed"),
        "mlflow_run_id": session.mlflow_run_id,
    }
