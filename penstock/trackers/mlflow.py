"""A training as one MLflow run: opened, logged once per iteration by the flow, resumed, closed.

Why the client and not `mlflow.start_run`: a flow's tasks run in several threads, and the fluent API keeps one active
run per thread. Every function here names the store and the run it means, and may be called from any process.

Why not `MlflowClient.log_table`: it appends to a table that exists (a redone iteration would double its rows), and it
lists every table in one tag of at most 8000 characters, so that about the 160th call of a run fails.

Left out: registering checkpoints as models (the run folder keeps them), system metrics, starting a server.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

from penstock.base.errors import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

ITERATION = "iteration"
"""Metric written with every batch: its latest value says what the run already holds."""

CHANGED = "penstock.changed"
"""Tag with the configuration keys that a resume changed."""

_PARAM_CHARACTERS = 6000
_TAG_CHARACTERS = 5000
_NAME_CHARACTERS = 250
_PARAMS_PER_CALL = 100
_TABLES_LISTED = 100
_TABLES_TAG = "mlflow.loggedArtifacts"


def default_tracking_uri(folder: Path) -> str:
    """Return MLFLOW_TRACKING_URI if it is set, else a database in `folder`, the directory of the run folders."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested config as dotted keys and JSON values; a schedule `{0: 1, 100: 4}` stays one value."""
    params: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not all(str(step).isdigit() for step in value):
            params |= flatten(value, f"{name}.")
        else:
            params[name] = value if isinstance(value, str) else json.dumps(value)
    return params


def open_run(
    tracking_uri: str,
    experiment: str,
    run_name: str,
    tags: Mapping[str, str],
    params: Mapping[str, str] | None = None,
) -> str:
    """Start a run in `experiment` (created if needed) and return its id.

    Raises:
        UserError: the experiment is in MLflow's bin.
    """
    client = connect(tracking_uri)
    experiment_id = _experiment_id(client, tracking_uri, experiment)
    run_id: str = client.create_run(experiment_id, tags=dict(tags), run_name=run_name).info.run_id
    log_params(tracking_uri, run_id, params or {})
    return run_id


def log_params(tracking_uri: str, run_id: str, params: Mapping[str, str]) -> None:
    """Log params, cut to the 6000 characters that MLflow keeps."""
    from mlflow.entities import Param

    entries = iter([Param(key, value[:_PARAM_CHARACTERS]) for key, value in params.items()])
    while batch := list(islice(entries, _PARAMS_PER_CALL)):
        connect(tracking_uri).log_batch(run_id, params=batch)


def resume_run(tracking_uri: str, run_id: str) -> None:
    """Set a run that ended back to RUNNING, so that a resumed training goes on in it."""
    connect(tracking_uri).update_run(run_id, status="RUNNING")


def tag_changes(tracking_uri: str, run_id: str, params: Mapping[str, str]) -> bool:
    """Tag the run with `params` that differ from its own, which MLflow never changes; return whether that is news."""
    client = connect(tracking_uri)
    found = client.get_run(run_id).data
    changed = [name for name, value in params.items() if found.params.get(name) != value[:_PARAM_CHARACTERS]]
    text = ", ".join(f"{name}={params[name]}" for name in changed)[:_TAG_CHARACTERS]
    if text != found.tags.get(CHANGED, ""):
        client.set_tag(run_id, CHANGED, text)
        return True
    return False


def holds_run(tracking_uri: str, run_id: str) -> bool:
    """Whether the store knows the run and nobody has deleted it."""
    from mlflow.exceptions import MlflowException

    try:
        stage: str = connect(tracking_uri).get_run(run_id).info.lifecycle_stage
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return stage == "active"


def log_iteration(tracking_uri: str, run_id: str, iteration: int, metrics: Mapping[str, float]) -> None:
    """Log the metrics of one iteration in one call; `iteration` is the step."""
    log_figures(tracking_uri, run_id, iteration, {**metrics, ITERATION: float(iteration)})


def log_figures(tracking_uri: str, run_id: str, iteration: int, figures: Mapping[str, float]) -> None:
    """Log figures that belong to an iteration, without saying that the run holds it.

    A value that is not finite becomes NaN, a gap in MLflow's charts: it would store infinity as 1.8e308.
    """
    from mlflow.entities import Metric

    now_ms = time.time_ns() // 1_000_000
    finite = {name: value if math.isfinite(value) else math.nan for name, value in figures.items()}
    batch = [Metric(metric_name(name), value, now_ms, iteration) for name, value in finite.items()]
    connect(tracking_uri).log_batch(run_id, metrics=batch)


def steps_of(tracking_uri: str, run_id: str, name: str) -> set[int]:
    """Return the steps, or iterations, at which the run holds a figure."""
    return {entry.step for entry in connect(tracking_uri).get_metric_history(run_id, metric_name(name))}


def files_of(tracking_uri: str, run_id: str, folder: str | None) -> dict[str, int]:
    """Return the bytes of each file that the run holds directly in a folder of its artifacts, by path."""
    listed = connect(tracking_uri).list_artifacts(run_id, folder)
    return {item.path: item.file_size or 0 for item in listed if not item.is_dir}


def status_of(tracking_uri: str, run_id: str) -> str:
    """Return MLflow's word for how the run stands."""
    status: str = connect(tracking_uri).get_run(run_id).info.status
    return status


def metric_name(name: str) -> str:
    """Return `name` as MLflow allows it: people name the parts of their rewards as they like.

    >>> metric_name("reward/pass@1_mean"), metric_name("reward/ratio a/b: 2_mean")
    ('reward/pass_1_mean', 'reward/ratio a/b: 2_mean')
    """
    return normpath(re.sub(r"[^\w. :/-]", "_", name)).lstrip("./")[:_NAME_CHARACTERS]


def logged_through(tracking_uri: str, run_id: str) -> int:
    """Return the last iteration that the run holds, -1 if none: a resumed training logs only later ones."""
    return int(connect(tracking_uri).get_run(run_id).data.metrics.get(ITERATION, -1))


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as JSON, in the form that MLflow shows as a table."""
    import pandas as pd

    text: str = pd.DataFrame(list(rows)).to_json(orient="split", index=False, date_format="iso")
    return text


def log_samples(tracking_uri: str, run_id: str, iteration: int, table: str) -> None:
    """Log `table` as `samples/000012.json`; the same iteration again replaces it.

    MLflow shows the newest 100 tables of a run as tables, and older ones as JSON.
    """
    client = connect(tracking_uri)
    path = f"samples/{iteration:06d}.json"
    client.log_text(run_id, table, path)
    listed = json.loads(client.get_run(run_id).data.tags.get(_TABLES_TAG, "[]"))
    entry = {"path": path, "type": "table"}
    others = [table for table in listed if table != entry]
    client.set_tag(run_id, _TABLES_TAG, json.dumps([*others, entry][-_TABLES_LISTED:]))


def log_artifacts(
    tracking_uri: str, run_id: str, source: Path | Sequence[Path], artifact_path: str | None = None
) -> None:
    """Copy a folder's content, a file or several files into the run, under `artifact_path`."""
    client = connect(tracking_uri)
    for path in [source] if isinstance(source, Path) else source:
        if path.is_dir():
            client.log_artifacts(run_id, str(path), artifact_path)
        else:
            client.log_artifact(run_id, str(path), artifact_path)


def close_run(tracking_uri: str, run_id: str, status: RunStatus, at_ms: int | None = None) -> None:
    """End the run: FINISHED, FAILED (an error) or KILLED (a person or the scheduler stopped it); now, or as of then."""
    connect(tracking_uri).set_terminated(run_id, status, at_ms)


@functools.cache
def run_url(tracking_uri: str, run_id: str, server: str = "http://127.0.0.1:5000") -> str:
    """Return the run's page, without password: on the tracking server, or on `server` (`mlflow ui`) for a database.

    The query opens MLflow's pages for training; its default are those for applications, without metrics. The store is
    asked once per run, so that a report can be made when it is away.
    """
    experiment = connect(tracking_uri).get_run(run_id).info.experiment_id
    root = public_uri(tracking_uri) if tracking_uri.startswith("http") else server
    return f"{root.rstrip('/')}/#/experiments/{experiment}/runs/{run_id}?workflowType=machine_learning"


def public_uri(tracking_uri: str) -> str:
    """Return a store's address as it may be shown and written down: without the name and password of who uses it."""
    parts = urlsplit(tracking_uri)
    return tracking_uri.replace(f"{parts.netloc.rpartition('@')[0]}@", "", 1) if "@" in parts.netloc else tracking_uri


def without_password(tracking_uri: str) -> str:
    """Return a store's address for MLflow: of a server without name and password, which go where MLflow looks for them.

    MLflow's exceptions quote the address, on the terminal and in Prefect's states and logs.
    """
    parts = urlsplit(tracking_uri)
    if "@" not in parts.netloc or not parts.scheme.startswith("http"):
        return tracking_uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username or "")
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return public_uri(tracking_uri)


@functools.cache
def connect(tracking_uri: str) -> MlflowClient:
    """Return the client of a store; a database is made if it is missing, by one process while others wait.

    A server's name and password are kept out of what MLflow says (`without_password`). Telemetry is off, and so are
    MLflow's lines about creating tables and about where a run can be viewed.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # MLflow's own 7 of 120 s each are for nobody to wait
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    from mlflow import MlflowClient

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # who asks says that nobody answered
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with _alone(_database(tracking_uri)):
        return MlflowClient(without_password(tracking_uri))


def check_store(tracking_uri: str) -> None:
    """Ask a tracking server for a sign of life; a database needs none.

    Raises:
        UserError: it does not answer.
    """
    from mlflow.exceptions import MlflowException

    if not tracking_uri.startswith("http"):
        return
    try:
        connect(tracking_uri).search_experiments(max_results=1)
    except MlflowException as error:
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"no MLflow server answers at {public_uri(tracking_uri)} (MLFLOW_TRACKING_URI): {said}",
            "start it, or name another; without one a database beside the run folders is used",
        ) from error


@contextmanager
def _alone(database: Path | None) -> Iterator[None]:
    """Keep other processes from making or migrating the same database file meanwhile; MLflow itself does not."""
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(f"{database.name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _database(tracking_uri: str) -> Path | None:
    prefix = "sqlite:///"
    return Path(tracking_uri.removeprefix(prefix)).resolve() if tracking_uri.startswith(prefix) else None


def _experiment_id(client: MlflowClient, tracking_uri: str, name: str) -> str:
    """A new experiment of a database keeps its artifacts beside it: MLflow's own choice is the working directory."""
    from mlflow import MlflowException

    if found := client.get_experiment_by_name(name):
        if found.lifecycle_stage == "deleted":
            raise UserError(
                f"the MLflow experiment '{name}' was deleted",
                f"bring it back with `mlflow experiments restore -x {found.experiment_id}`, or set record.experiment",
            )
        return str(found.experiment_id)
    database = _database(tracking_uri)
    artifacts = (database.parent / "mlartifacts").as_uri() if database else None
    try:
        return str(client.create_experiment(name, artifact_location=artifacts))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return _experiment_id(client, tracking_uri, name)  # another process made it a moment ago
