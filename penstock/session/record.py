"""The record of a training: opened, added to, closed, and taken up again by a resume."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from prefect import get_run_logger
from pydantic import BaseModel

from penstock.base.files import write_text
from penstock.base.interrupts import interrupts_deferred
from penstock.session.session import Training
from penstock.state.manifest import Manifest, Progress, read_manifest, write_manifest
from penstock.state.run_folder import append_metrics, drop_partial, read_metrics
from penstock.trackers import mlflow as mlflow_run
from penstock.trackers.mlflow_outbox import Delivery, Outbox

_logger = logging.getLogger(__name__)


@contextmanager
def open_record(
    training: Training,
    kind: str,
    config: BaseModel,
    experiment: str,
    algorithm: str,
    through: int,
    summary: Callable[[Training, str], dict[str, Any]],
    report: Callable[[Training, dict[str, Any]], None] | None = None,
) -> Iterator[None]:
    """Keep the MLflow run of any training open, that of an earlier attempt if there is one; end it on every path.

    Args:
        kind: the command that made the run, as `penstock.state.manifest.check_kind` wants it.
        config: the tree that a user gave, which becomes the run's parameters.
        algorithm: the run's tag of that name.
        through: the iteration or step from which this attempt goes on.
        summary: returns the content of `summary.json` of a run that ended with a status.
        report: makes pages of it, also for MLflow.
    """
    session = training.session()
    session.kind = kind
    session.tracking_uri = mlflow_run.default_tracking_uri(training.run.path.parent)
    session.seconds_before = read_manifest(training.run).progress.seconds if training.run.manifest.is_file() else 0.0
    drop_partial(training.run)
    with interrupts_deferred():
        mlflow_run.connect(session.tracking_uri)  # which imports MLflow, and asks no server
    with ending(lambda status, mlflow_status: close(training, summary(training, status), mlflow_status, report)):
        mlflow_run.check_store(session.tracking_uri)
        if not reopened(training):
            _open_mlflow(training, config, experiment, algorithm)
        else:
            _note_changes(training, config)
        begin_delivery(training, through)
        yield


@contextmanager
def ending(finish: Callable[[str, mlflow_run.RunStatus], None]) -> Iterator[None]:
    """On the way out, on every path, call `finish` with how the run ended: in our words and in MLflow's.

    What ended the run is what its caller gets, also where `finish` fails after it: often for the same reason.
    """
    try:
        yield
    except BaseException as error:
        ends: tuple[str, mlflow_run.RunStatus] = ("failed", "FAILED")
        if not isinstance(error, Exception):
            ends = ("cancelled", "KILLED")
        try:
            finish(*ends)
        except Exception:
            get_run_logger().exception("the end of a run that %s is not recorded everywhere", ends[0])
        raise
    finish("completed", "FINISHED")


def _open_mlflow(training: Training, config: BaseModel, experiment: str, algorithm: str) -> None:
    """Open a new MLflow run; from here on the run can be resumed, and the next attempt goes on in this one."""
    session, run = training.session(), training.run
    tags = {"penstock.run": str(run.path), "algorithm": algorithm}
    if session.prefect_flow_run_id:
        tags |= {"prefect.flow_run_id": session.prefect_flow_run_id, "prefect.flow_run_url": str(session.prefect_url)}
        if deployment := os.environ.get("PREFECT__DEPLOYMENT_ID"):
            tags["prefect.deployment"] = deployment
    session.mlflow_run_id = mlflow_run.open_run(session.tracking_uri, experiment, run.name, tags)
    saved = read_manifest(run) if run.manifest.is_file() else Manifest(Progress())
    write_manifest(run, dataclasses.replace(saved, mlflow_run_id=session.mlflow_run_id, kind=session.kind))
    params = mlflow_run.flatten(config.model_dump(mode="json"))
    mlflow_run.log_params(session.tracking_uri, session.mlflow_run_id, params)
    mlflow_run.log_artifacts(session.tracking_uri, session.mlflow_run_id, run.config)


def _note_changes(training: Training, config: BaseModel) -> None:
    """Give the MLflow run the configuration with which a resume goes on: its parameters cannot change."""
    session = training.session()
    params = mlflow_run.flatten(config.model_dump(mode="json"))
    if mlflow_run.tag_changes(session.tracking_uri, session.mlflow_run_id, params):
        mlflow_run.log_artifacts(session.tracking_uri, session.mlflow_run_id, training.run.config)


def reopened(training: Training) -> bool:
    """Go on in the MLflow run of an earlier attempt, if there is one; return whether."""
    session, run = training.session(), training.run
    if not run.manifest.is_file() or not (earlier := read_manifest(run).mlflow_run_id):
        return False
    if not mlflow_run.holds_run(session.tracking_uri, earlier):
        lost = "MLflow (%s) does not hold the run %s that this folder was recorded in: a new one gets its figures"
        get_run_logger().warning(lost, mlflow_run.public_uri(session.tracking_uri), earlier)
        return False
    session.mlflow_run_id = earlier
    mlflow_run.resume_run(session.tracking_uri, earlier)
    return True


def begin_delivery(training: Training, through: int) -> None:
    """Begin to give MLflow what is recorded, first what it lacks of earlier attempts: all of it, if its run is new.

    Args:
        through: the iteration or step from which this attempt goes on.
    """
    session = training.session()
    mlflow_run.run_url(session.tracking_uri, session.mlflow_run_id)  # asked while the store answers
    session.outbox = Outbox(delivery := Delivery(session.tracking_uri, session.mlflow_run_id))
    if read_metrics(training.run) or read_metrics(training.run.warm_up):
        session.outbox.put("earlier attempts", partial(delivery.everything, training.run, through))


def append_record(training: Training, number: int, metrics: dict[str, float]) -> None:
    """Record an iteration or step, or more figures of it; MLflow gets each once, also where a resume repeats it."""
    append_metrics(training.run, number, finite(metrics))
    if (outbox := training.session().outbox) is not None:
        outbox.put(f"iteration {number}", partial(outbox.delivery.figures, number, metrics))


def close(
    training: Training,
    summary: dict[str, Any],
    mlflow_status: mlflow_run.RunStatus,
    report: Callable[[Training, dict[str, Any]], None] | None = None,
) -> None:
    """Make the report, end the MLflow run, and write the summary: last if it says that all is done.

    So a kill before is noticed. MLflow is waited for, for a while: what it lacks then is said, and in the run folder.
    """
    session, path, done = training.session(), training.run.summary, summary["status"] == "completed"
    text = json.dumps(summary, indent=2) + "\n"
    if not done:
        write_text(path, text)
    if not session.mlflow_run_id:
        return  # it ended before there was one
    if report is not None:
        report(training, summary)
    outbox = session.outbox or Outbox(Delivery(session.tracking_uri, session.mlflow_run_id))
    outbox.put("its end", partial(outbox.delivery.end, text, mlflow_status, time.time()))
    if lacking := outbox.finish():
        _logger.warning("%s. Deliver it with: penstock mlflow-sync %s", lacking, training.run.path)
    if done:
        write_text(path, text)


def links(training: Training) -> dict[str, str]:
    """Return where a run can be looked at."""
    found = {"Run folder": str(training.run.path), "MLflow run": mlflow_url(training)}
    url = training.session().prefect_url
    return found | ({"Prefect flow run": url} if url else {})


def mlflow_url(training: Training) -> str:
    session = training.session()
    return mlflow_run.run_url(session.tracking_uri, session.mlflow_run_id)


def elapsed(training: Training) -> float:
    """Seconds of this attempt and, by the manifest, of the earlier ones."""
    return training.session().seconds_before + time.monotonic() - training.session().started


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Drop figures that do not exist (a variance of nothing): JSON has no NaN."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def advanced(training: Training, progress: Progress, **changes: Any) -> Progress:
    """Return `progress` with `changes` and the seconds spent so far."""
    return progress.advanced(seconds=elapsed(training), **changes)
