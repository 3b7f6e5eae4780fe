"""MLflow as a tracker: a training is one MLflow run in a server or a database, an exported model one of its models.

Why the client and not `mlflow.start_run`: a flow's tasks run in several threads, and the fluent API keeps one active
run per thread. A tracker here names the store and the run it means, and may be used from any process.

Why not `MlflowClient.log_table`: it appends to a table that exists (a redone iteration would double its rows), and it
lists every table in one tag of at most 8000 characters, so that about the 160th call of a run fails.

Why an exported model is a logged model marked as external, whose tag says in which folder its weights lie, and a
registered version has the source `runs:/RUN/NAME` and the same tag: as the source of a version a tracking server
refuses a local folder, and a database without a server does not find a logged model (`models:/m-...`), for which MLflow
3.17 asks the store of the environment. Nothing lies at the source; the tags say where the weights are. `latest` is
reserved there for the newest version.

Left out: registering checkpoints as models (the run folder keeps them; an export of one is registered), system metrics,
starting a tracking server, stages of models, copies of weights.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from posixpath import dirname, normpath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from penstock.base.addresses import public_address
from penstock.base.errors import UserError
from penstock.state.chain import is_chain
from penstock.state.sweep import is_sweep
from penstock.trackers.registry import FOLDER, NewVersion, Version
from penstock.trackers.tracker import (
    ITERATION,
    PAGES_PORT,
    PARENT,
    Artifact,
    Figures,
    Model,
    NewRun,
    Pages,
    Status,
    Table,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, Run
    from mlflow.entities.model_registry import ModelVersion

CHANGED = "penstock.changed"
"""Tag with the configuration keys that a resume changed."""

COMPARISONS = "comparisons"
"""The experiment of comparisons: in that of the runs compared they would change what has ended."""

METRICS_PER_CALL = 1000  # that MLflow takes
AT_IMPORT = {"MLFLOW_DISABLE_TELEMETRY": "true"}  # it does not count DO_NOT_TRACK=1
WITHHELD = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")

_STATUS: dict[Status, str] = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_PARAM_CHARACTERS = 6000
_TAG_CHARACTERS = 5000
_NAME_CHARACTERS = 250
_PARAMS_PER_CALL = 100
_TABLES_LISTED = 100
_MODELS_PER_CALL = 200
_NOTE_TAG = "mlflow.note.content"
"""The description of a run, in Markdown."""
_TABLES_TAG = "mlflow.loggedArtifacts"
_PARENT = "mlflow.parentRunId"
_FOR_TRAINING = "?workflowType=machine_learning"
"""Opens MLflow's pages for training; its default are those for applications, without metrics and without runs."""


class MlflowTracker:
    """A run of a store.

    Args:
        tracking_uri: of the store, a server or a database.
    """

    label = "MLflow"

    def __init__(self, tracking_uri: str) -> None:
        self.uri, self.run, self._experiment = tracking_uri, "", ""

    @property
    def address(self) -> str:
        return public_address(self.uri)

    @property
    def page(self) -> str:
        """On the tracking server, or where `penstock ui` shows a database."""
        root = self.address if self.uri.startswith("http") else f"http://127.0.0.1:{PAGES_PORT}"
        return f"{root.rstrip('/')}/#/experiments/{self._experiment}/runs/{self.run}{_FOR_TRAINING}"

    @property
    def _client(self) -> MlflowClient:
        return connect(self.uri)

    def open(self, new: NewRun) -> str:
        """Begin a run in an experiment, which is made if needed.

        Raises:
            UserError: the experiment is in MLflow's bin, or the server does not answer.
        """
        check_store(self.uri)
        self._experiment = _experiment_id(self._client, self.uri, new.experiment)
        tags = dict(new.tags)
        if page := tags.get("prefect.flow_run_url"):
            tags[_NOTE_TAG] = f"[The flow run in Prefect]({page})"  # a tag's value is no link on MLflow's pages
        if PARENT in tags:
            tags[_PARENT] = tags[PARENT]
        begun = self._client.create_run(self._experiment, tags=tags, run_name=new.name)
        self.run = str(begun.info.run_id)
        return self.run

    def find(self, run: str) -> bool:
        """Be about a run, unless somebody has deleted it.

        Raises:
            UserError: the server does not answer.
        """
        from mlflow.exceptions import MlflowException

        check_store(self.uri)
        try:
            found = self._client.get_run(run).info
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        if found.lifecycle_stage != "active":
            return False
        self.run, self._experiment = run, str(found.experiment_id)
        return True

    def resume(self) -> None:
        self._client.update_run(self.run, status="RUNNING")

    def configure(self, settings: Mapping[str, str]) -> bool:
        """Keep settings as the run's parameters, which MLflow never changes: later ones that differ are a tag."""
        found = self._run()
        if not found.data.params:
            self._log_params(settings)
            return True
        changed = [name for name, value in settings.items() if found.data.params.get(name) != value[:_PARAM_CHARACTERS]]
        text = ", ".join(f"{name}={settings[name]}" for name in changed)[:_TAG_CHARACTERS]
        if text == found.data.tags.get(CHANGED, ""):
            return False
        self._client.set_tag(self.run, CHANGED, text)
        return True

    def _log_params(self, settings: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        entries = iter([Param(key, value[:_PARAM_CHARACTERS]) for key, value in settings.items()])
        while batch := list(islice(entries, _PARAMS_PER_CALL)):
            self._client.log_batch(self.run, params=batch)

    def log(self, figures: Sequence[Figures]) -> None:
        """Log figures in as few calls as MLflow takes them.

        A value that is not finite becomes NaN, a gap in MLflow's charts: it would store infinity as 1.8e308.
        """
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        entries = iter(
            [
                Metric(metric_name(name), value if math.isfinite(value) else math.nan, now_ms, item.step)
                for item in figures
                for name, value in item.values.items()
            ]
        )
        while batch := list(islice(entries, METRICS_PER_CALL)):
            self._client.log_batch(self.run, metrics=batch)

    def logged(self, figure: str) -> set[int]:
        return {entry.step for entry in self._client.get_metric_history(self.run, metric_name(figure))}

    def logged_through(self) -> int:
        return int(self._run().data.metrics.get(ITERATION, -1))

    def table(self, table: Table) -> None:
        """Log a table's file as one that MLflow shows as a table: the newest 100 of a run, and older ones as JSON."""
        self._client.log_text(self.run, table.path.read_text(encoding="utf-8"), table.name)
        listed = json.loads(self._run().data.tags.get(_TABLES_TAG, "[]"))
        entry = {"path": table.name, "type": "table"}
        others = [item for item in listed if item != entry]
        self._client.set_tag(self.run, _TABLES_TAG, json.dumps([*others, entry][-_TABLES_LISTED:]))

    def artifact(self, artifact: Artifact) -> None:
        """Log a text, a folder's content below the artifact's name, or a file, which keeps its own name."""
        if isinstance(artifact.content, str):
            self._client.log_text(self.run, artifact.content, artifact.name)
        elif artifact.content.is_dir():
            self._client.log_artifacts(self.run, str(artifact.content), artifact.name)
        else:
            self._client.log_artifact(self.run, str(artifact.content), dirname(artifact.name) or None)

    def lacking(self, files: Mapping[str, Path]) -> set[str]:
        """Return the names of files that are not there, or not of the same size."""
        held = [item for folder in {dirname(name) for name in files} for item in self._listed(folder)]
        sizes = dict(held)
        return {name for name, path in files.items() if sizes.get(name) != path.stat().st_size}

    def _listed(self, folder: str) -> list[tuple[str, int]]:
        listed = self._client.list_artifacts(self.run, folder or None)
        return [(item.path, item.file_size or 0) for item in listed if not item.is_dir]

    def model(self, model: Model) -> str:
        from mlflow.entities import LoggedModelStatus
        from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

        logged = self._client.create_logged_model(
            self._experiment,
            name=_model_name(model.name),
            source_run_id=self.run,
            tags={FOLDER: str(model.folder), MLFLOW_MODEL_IS_EXTERNAL: "true"},
            params=dict(model.params),
            model_type="causal-lm",
        )
        self._client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
        return str(logged.model_id)

    def status(self) -> Status | None:
        said = self._run().info.status
        return next((ours for ours, theirs in _STATUS.items() if theirs == said), None)

    def close(self, status: Status, at_s: float) -> None:
        self._client.set_terminated(self.run, _STATUS[status], int(at_s * 1000))

    def _run(self) -> Run:
        return self._client.get_run(self.run)


class MlflowRegistry:
    """The registered models of a store.

    Args:
        tracking_uri: of the store, a server or a database.
    """

    def __init__(self, tracking_uri: str) -> None:
        self.uri = tracking_uri

    @property
    def where(self) -> str:
        return f"{MlflowTracker.label} ({public_address(self.uri)})"

    @property
    def _client(self) -> MlflowClient:
        return connect(self.uri)

    def names(self) -> list[str]:
        return [model.name for model in _all_pages(self._client.search_registered_models, None)]

    def versions(self, name: str) -> list[Version]:
        if "'" in name:  # of which a filter has no way to speak
            return []
        found = _all_pages(self._client.search_model_versions, f"name='{name}'")
        return sorted(map(_version, found), key=lambda version: -version.number)

    def aliases(self, name: str) -> dict[str, int]:
        return {alias: int(number) for alias, number in self._client.get_registered_model(name).aliases.items()}

    def add(self, new: NewVersion) -> Version:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(new.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"runs:/{new.tracked}/{_model_name(new.name)}"
        tags = {name: value[:_TAG_CHARACTERS] for name, value in new.tags.items()}
        return _version(self._client.create_model_version(new.name, source, run_id=new.tracked, tags=tags))

    def point(self, alias: str, version: Version) -> None:
        self._client.set_registered_model_alias(version.name, alias, str(version.number))

    def tag(self, version: Version, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self._client.set_model_version_tag(version.name, str(version.number), name, value[:_TAG_CHARACTERS])

    def dataset(self, name: str) -> Path | None:
        if "'" in name:
            return None
        experiments = [item.experiment_id for item in _all_pages(self._client.search_experiments, None)]
        wanted, newest_first = f"dataset.name = '{name}'", ["attributes.start_time DESC"]
        for run in self._client.search_runs(experiments, wanted, order_by=newest_first, max_results=1):
            inputs: Any = run.inputs
            found = [given.dataset for given in inputs.dataset_inputs if given.dataset.name == name]
            if len(files := {_file_of(dataset) for dataset in found}) > 1:
                raise UserError(
                    f"the MLflow run {run.info.run_id} was given several datasets '{name}', in no order that is known",
                    "log each in a run of its own",
                )
            return files.pop()
        return None


def _version(found: ModelVersion) -> Version:
    return Version(found.name, int(found.version), dict(found.tags))


def _file_of(dataset: Dataset) -> Path:
    """Return the file that a dataset comes from.

    Raises:
        UserError: it comes from something else.
    """
    uri: str = json.loads(dataset.source).get("uri", "")
    path = unquote(urlsplit(uri).path) if uri.startswith("file:") else uri
    if dataset.source_type != "local" or not path:
        raise UserError(
            f"the dataset '{dataset.name}' comes from {dataset.source_type}: {dataset.source:.200}",
            "log one whose source is a file, e.g. mlflow.data.from_pandas(rows, source='data/sums.jsonl', name='sums')",
        )
    return Path(path)


def _all_pages(search: Callable[..., Any], wanted: str | None) -> list[Any]:
    page = search(filter_string=wanted, max_results=_MODELS_PER_CALL)
    found = list(page)
    while page.token:
        page = search(filter_string=wanted, max_results=_MODELS_PER_CALL, page_token=page.token)
        found += page
    return found


def _model_name(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name)  # MLflow refuses slashes, colons, dots, quotes and per cent signs


def registry(folder: Path) -> MlflowRegistry | None:
    """Return the registry of the store for the runs in a directory; None: there is no store yet, and none is made.

    Raises:
        UserError: the server does not answer.
    """
    uri = default_tracking_uri(folder)
    if (database := _database(uri)) is not None and not database.is_file():
        return None
    check_store(uri)
    return MlflowRegistry(uri)


def answers() -> None:
    """Ask the server of MLFLOW_TRACKING_URI, if it names one, for a sign of life; raises as `check_store`."""
    check_store(os.environ.get("MLFLOW_TRACKING_URI", ""))


def made_for(folder: Path) -> MlflowTracker:
    """Return the tracker of the store for the runs in a directory, and import MLflow; no server is asked."""
    tracker = MlflowTracker(default_tracking_uri(folder))
    connect(tracker.uri)
    return tracker


def default_tracking_uri(folder: Path) -> str:
    """Return MLFLOW_TRACKING_URI if it is set, else a database in `folder`, the directory of the run folders.

    Runs of a sweep or a chain are with the others: in the directory that its folder is in.
    """
    place = _directory(folder.resolve())
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place / 'mlflow.db'}"


def _directory(folder: Path) -> Path:
    """Return the directory that runs are seen in together, of that of a run folder."""
    return folder.parent if is_sweep(folder) or is_chain(folder) else folder


def pages(folder: Path, port: int) -> Pages | None:
    """Return MLflow's pages of the runs in a directory, at the experiment of the newest; None without a database."""
    place = _directory(folder)
    if not (place / "mlflow.db").is_file():
        return None
    uri = default_tracking_uri(folder)
    environment = {
        "MLFLOW_BACKEND_STORE_URI": without_password(uri),  # others can read a command line
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # for evaluations of applications: seven unused processes
        "PYTHONWARNINGS": "ignore",
    }
    module = ["penstock.trackers.mlflow_server", "ui", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    module += ["--uvicorn-opts", "--log-level warning"]
    return Pages(MlflowTracker.label, f"http://127.0.0.1:{port}{newest_experiment(uri)}", module, environment)


def newest_experiment(tracking_uri: str) -> str:
    """Return the part of MLflow's address that shows the experiment of the newest run; empty where there is none.

    A comparison is no run of its own: its experiment is passed over.
    """
    client = connect(tracking_uri)
    experiments = [item.experiment_id for item in client.search_experiments() if item.name != COMPARISONS]
    newest = client.search_runs(experiments, order_by=["attributes.start_time DESC"], max_results=1)
    return f"/#/experiments/{newest[0].info.experiment_id}/runs{_FOR_TRAINING}" if newest else ""


def metric_name(name: str) -> str:
    """Return `name` as MLflow allows it: people name the parts of their rewards as they like.

    >>> metric_name("reward/pass@1_mean"), metric_name("reward/ratio a/b: 2_mean")
    ('reward/pass_1_mean', 'reward/ratio a/b: 2_mean')
    """
    return normpath(re.sub(r"[^\w. :/-]", "_", name)).lstrip("./")[:_NAME_CHARACTERS]


def without_password(tracking_uri: str) -> str:
    """Return a store's address for MLflow: of a server without name and password, which go where MLflow looks for them.

    MLflow's exceptions quote the address, on the terminal and in Prefect's states and logs.
    """
    parts = urlsplit(tracking_uri)
    if "@" not in parts.netloc or not parts.scheme.startswith("http"):
        return tracking_uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username or "")
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return public_address(tracking_uri)


@functools.cache
def connect(tracking_uri: str) -> MlflowClient:
    """Return the client of a store; a database is made if it is missing, by one process while others wait.

    A server's name and password are kept out of what MLflow says (`without_password`). Telemetry is off, and so are
    MLflow's lines about creating tables, about where a run can be viewed and about how far a download is.
    """
    for name, value in AT_IMPORT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
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
    if not tracking_uri.startswith("http"):
        return
    from mlflow.exceptions import MlflowException

    try:
        connect(tracking_uri).search_experiments(max_results=1)
    except MlflowException as error:
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"no MLflow server answers at {public_address(tracking_uri)} (MLFLOW_TRACKING_URI): {said}",
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
