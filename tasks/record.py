"""Record: an iteration's figures go to the run folder, to MLflow and to the terminal; a run's result to its summary.

The run folder comes first and is the truth. A resumed run repeats iterations after its checkpoint: MLflow gets each
iteration once, on a thread of its own (reports/mlflow_outbox.py). Left out: pictures and pages (reports/).
"""

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
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from pydantic import BaseModel

from reports import mlflow_run
from reports.evaluation import TEMPERATURE
from reports.mlflow_outbox import Delivery, Outbox
from reports.report import write_report
from state.experience import read_columns
from state.files import write_text
from state.manifest import Manifest, Progress, read_manifest, write_manifest
from state.run_folder import append_metrics, drop_partial, read_metrics
from tasks.consolidation import begin_consolidation, finish_consolidation
from tasks.draw import keep_memory
from tasks.interrupts import interrupts_deferred
from tasks.session import Training
from tasks.settings import page_of_overrides, variable_name

_logger = logging.getLogger(__name__)

ENGINE_FIGURES = ("parameters", "parameters_shared", "parameters_copied", "reshard_strategy", "attention")


@contextmanager
def recording(training: Training) -> Iterator[None]:
    """Keep the record of a training open; on the way out, on every path, write report and summary."""
    session, config, run = training.session(), training.config, training.run
    session.prefect_flow_run_id = str(flow_run.id) if flow_run.id else None
    session.prefect_url = _prefect_url(session.prefect_flow_run_id, flow_run.ui_url)
    done = read_manifest(run).progress.iteration if run.manifest.is_file() else 0
    with open_record(
        training, "train", config, config.record.experiment, config.algorithm.name, done, summarize, _report
    ):
        if session.prefect_flow_run_id:
            _tag_flow_run(session.prefect_flow_run_id, [f"algorithm:{config.algorithm.name}", f"run:{run.name}"])
            create_link_artifact(_mlflow_url(training), link_text="MLflow run", key="mlflow-run")
            create_markdown_artifact(page_of_overrides(run), key="live-values", description=variable_name(run))
        yield
        finish_consolidation(session)
    if config.record.experiment and session.prefect_flow_run_id:
        page = (run.path / "report" / "report.md").read_text(encoding="utf-8")
        create_markdown_artifact(page, key="training-report", description=run.name)


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
        kind: the command that made the run, as `state.manifest.check_kind` wants it.
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


def _tag_flow_run(flow_run_id: str, labels: list[str]) -> None:
    """Tag the training's flow run alone: a tag on a task makes Prefect ask the server for its limit every time."""
    with get_client(sync_client=True) as client:
        client.update_flow_run(UUID(flow_run_id), tags=labels)


def _prefect_url(flow_run_id: str | None, ui_url: str | None) -> str | None:
    """Return the run's page: on its server, or where `penstock ui` serves that of a temporary server afterwards."""
    if flow_run_id is None or (ui_url and ui_url.startswith("http")):
        return ui_url
    return f"http://127.0.0.1:4200/runs/flow-run/{flow_run_id}"


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


@task(task_run_name="record-{iteration:06d}", cache_policy=NO_CACHE)
def record(training: Training, iteration: int, metrics: dict[str, float]) -> None:
    """Write down the figures of an iteration; iteration 0 is the evaluation before training."""
    session, every = training.session(), training.config.record.samples_every
    if iteration:
        keep_memory(training, iteration)
    append_record(training, iteration, metrics)
    if iteration and every and iteration % every == 0:  # a repeated one, too: a kill may have come before them
        _record_samples(training, iteration)
    if session.progress is not None and iteration:
        session.progress.advance(iteration, metrics)
    if iteration:
        begin_consolidation(session, iteration)


def append_record(training: Training, number: int, metrics: dict[str, float]) -> None:
    """Record an iteration or step; MLflow gets it once, also where a resume repeats it."""
    append_metrics(training.run, number, finite(metrics))
    if (outbox := training.session().outbox) is not None:
        outbox.put(f"iteration {number}", partial(outbox.delivery.figures, number, metrics))


def add_to_record(training: Training, iteration: int, metrics: dict[str, float]) -> None:
    """Add figures to an iteration that is recorded; MLflow gets them once, also if the iteration is a repeated one."""
    append_record(training, iteration, metrics)


def _record_samples(training: Training, iteration: int) -> None:
    rows = sample_rows(training.run.experience(iteration), training.config.record.samples)
    training.run.samples(iteration).parent.mkdir(exist_ok=True)
    write_text(training.run.samples(iteration), mlflow_run.table_of(rows))
    if (outbox := training.session().outbox) is not None:
        outbox.put(f"the samples of iteration {iteration}", partial(outbox.delivery.samples, training.run, iteration))


def sample_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return `count` samples of an experience file as plain rows, spread evenly over its prompts."""
    names = ("sample_id", "prompt", "response", "reward", "policy_version")
    columns = read_columns(path, names)
    total = len(columns["reward"])
    rows = [number * total // count for number in range(count)] if count < total else range(total)
    return [{name: _plain(columns[name][row]) for name in names} for row in rows]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _report(training: Training, summary: dict[str, Any]) -> None:
    """Write the report that is made from a summary into the run folder and to MLflow."""
    session, run = training.session(), training.run
    session.say("writing the report")
    last = max(run.path.glob("experience/[0-9]*[0-9].parquet"), default=None)
    rows = sample_rows(last, training.config.record.samples) if last and summary["status"] == "completed" else []
    write_report(run.path, links(training), rows, f"penstock train --resume {run.path}", summary)
    if session.outbox is not None:
        session.outbox.put("the report", partial(session.outbox.delivery.report, run))


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
    found = {"Run folder": str(training.run.path), "MLflow run": _mlflow_url(training)}
    url = training.session().prefect_url
    return found | ({"Prefect flow run": url} if url else {})


def _mlflow_url(training: Training) -> str:
    session = training.session()
    return mlflow_run.run_url(session.tracking_uri, session.mlflow_run_id)


def summarize(training: Training, status: str) -> dict[str, Any]:
    """Return the content of `summary.json` from what has been recorded."""
    session, records = training.session(), read_metrics(training.run)
    iterations = [item for item in records if item["iteration"] > 0]
    accuracies = [item["metrics"]["heldout/accuracy"] for item in records if "heldout/accuracy" in item["metrics"]]
    temperatures = [item["metrics"][TEMPERATURE] for item in records if TEMPERATURE in item["metrics"]]
    rewards = [item["metrics"]["reward/mean"] for item in iterations if "reward/mean" in item["metrics"]]
    generated = [item["metrics"] for item in iterations if "rollout/tokens_per_s" in item["metrics"]]
    seconds = sum(metrics.get("time/iteration_s", 0.0) for metrics in generated)
    tokens = sum(metrics.get("rollout/tokens", 0.0) for metrics in generated)
    return {
        "status": status,
        "seconds": round(elapsed(training), 3),
        "iterations": iterations[-1]["iteration"] if iterations else 0,
        "accuracy_before": accuracies[0] if accuracies and records[0]["iteration"] == 0 else None,
        "accuracy_after": accuracies[-1] if len(accuracies) > 1 else None,
        "heldout_temperature": temperatures[-1] if temperatures else None,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "actor_mfu": _mean(iterations, "actor/mfu"),
        "time_shares": _time_shares(iterations),
        **{name: session.engine_figures.get(name) for name in ENGINE_FIGURES},
        "recomputed": {name: str(value) for name, value in session.recomputed.items()},
        "kv_cache_stays": session.kv_cache_stays,
        "mlflow_run_id": session.mlflow_run_id,
        "prefect_flow_run_id": session.prefect_flow_run_id,
    }


def _mean(records: list[dict[str, Any]], name: str) -> float | None:
    """Mean over the records that have the figure; None if none has it."""
    values = [item["metrics"][name] for item in records if name in item["metrics"]]
    return sum(values) / len(values) if values else None


def _time_shares(records: list[dict[str, Any]]) -> dict[str, float]:
    """Share of the time of all iterations by task, the largest first."""
    weights = [item["metrics"].get("time/iteration_s", 0.0) for item in records]
    names = {name for item in records for name in item["metrics"] if name.startswith("share/")}
    spent = {
        name.removeprefix("share/"): sum(
            item["metrics"].get(name, 0.0) * weight for item, weight in zip(records, weights, strict=True)
        )
        for name in names
    }
    return {name: seconds / sum(weights) for name, seconds in sorted(spent.items(), key=lambda item: -item[1])}


def elapsed(training: Training) -> float:
    """Seconds of this attempt and, by the manifest, of the earlier ones."""
    return training.session().seconds_before + time.monotonic() - training.session().started


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Drop figures that do not exist (a variance of nothing): JSON has no NaN."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def advanced(training: Training, progress: Progress, **changes: Any) -> Progress:
    """Return `progress` with `changes` and the seconds spent so far."""
    return progress.advanced(seconds=elapsed(training), **changes)
