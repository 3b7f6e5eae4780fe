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
from dataclasses import dataclass
from typing import Any

from prefect import get_run_logger

from penstock.base.files import write_text
from penstock.base.interrupts import interrupts_deferred
from penstock.configs.preference import PairConfig
from penstock.configs.schema import TrainConfig
from penstock.session.events import take_up
from penstock.session.flow_run import know_flow_run
from penstock.session.flow_runs.taken_over import succeed
from penstock.session.session import Training
from penstock.state.chain import is_chain
from penstock.state.manifest import Progress, Tracked, read_manifest, read_progress, write_manifest
from penstock.state.run_folder import RunFolder, append_metrics, drop_partial, read_metrics
from penstock.state.sweep import sweep_of
from penstock.trackers.delivery import Delivery
from penstock.trackers.outbox import Outbox, finish_all
from penstock.trackers.table import make_tracker
from penstock.trackers.tracker import PARENT, Artifact, NewRun, Status, Tracker, flatten

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """What is recorded of a training of any kind, and where.

    Attributes:
        kind: the command that made the run, as `penstock.state.manifest.check_kind` wants it.
        config: the tree that a user gave, which becomes the settings of the trackers' runs.
        trackers: as a recipe names them, the main one first.
        experiment: the trackers' name for the runs that this one is compared with.
        algorithm: the run's tag of that name.
        through: the iteration or step from which this attempt goes on.
        summary: returns the content of `summary.json` of a run that ended with a status.
        report: makes pages of it, also for the trackers.
    """

    kind: str
    config: TrainConfig | PairConfig
    trackers: list[str]
    experiment: str
    algorithm: str
    through: int
    summary: Callable[[Training, Status], dict[str, Any]]
    report: Callable[[Training, dict[str, Any]], None] | None = None


@contextmanager
def open_record(training: Training, recording: Recording) -> Iterator[None]:
    """Keep the trackers' runs of any training open, those of an earlier attempt if they are there; end them always."""
    session, run = training.session(), training.run
    session.kind = recording.kind
    saved = read_progress(run)
    know_flow_run(training, recording.config, recording.algorithm)
    if session.prefect_flow_run_id:
        succeed(saved.prefect_flow_run_id, session.prefect_flow_run_id, run)
    session.seconds_before = saved.progress.seconds
    drop_partial(run)
    with interrupts_deferred():
        made = [make_tracker(name, run.path.parent) for name in recording.trackers]  # which import what they need
    with ending(lambda status: close(training, recording.summary(training, status), recording.report)):
        for name, tracker in zip(recording.trackers, made, strict=True):
            open_run(training, recording, name, tracker)
        begin_delivery(training, recording.through)
        take_up(training)
        yield


@contextmanager
def ending(finish: Callable[[Status], None]) -> Iterator[None]:
    """On the way out, on every path, call `finish` with how the run ended.

    The caller gets the exception that ended the run, also where `finish` fails after it, often for the same reason.
    """
    try:
        yield
    except BaseException as error:
        status: Status = "failed" if isinstance(error, Exception) else "cancelled"
        try:
            finish(status)
        except Exception:
            get_run_logger().exception("the end of a run that %s is not recorded everywhere", status)
        raise
    finish("completed")


def open_run(training: Training, recording: Recording, name: str, tracker: Tracker) -> None:
    """Go on in a tracker's run of an earlier attempt, or begin one; from here on the training can be resumed."""
    session, run = training.session(), training.run
    earlier = reopened(training, name, tracker)
    tracked = earlier or _begun(training, recording, name, tracker)
    session.trackers.append(tracker)
    session.tracked += (tracked,)
    if earlier is not None:
        tracker.resume()
    saved = read_progress(run)
    opened = {item.tracker for item in session.tracked}
    later = tuple(item for item in saved.tracked if item.tracker in {*recording.trackers} - opened)
    here = dataclasses.replace(saved, kind=session.kind, prefect_flow_run_id=session.prefect_flow_run_id)
    write_manifest(run, dataclasses.replace(here, tracked=session.tracked + later))
    _configure(training, recording.config, tracker)


def _begun(training: Training, recording: Recording, name: str, tracker: Tracker) -> Tracked:
    session, run = training.session(), training.run
    tags = {"penstock.run": str(run.path), "algorithm": recording.algorithm}
    if session.prefect_flow_run_id:
        tags |= {"prefect.flow_run_id": session.prefect_flow_run_id, "prefect.flow_run_url": str(session.prefect_url)}
        if deployment := os.environ.get("PREFECT__DEPLOYMENT_ID"):
            tags["prefect.deployment"] = deployment
    sweep = sweep_of(run)
    if sweep is not None and sweep.tracked is not None and sweep.tracked.tracker == name:
        tags[PARENT] = sweep.tracked.run
    return Tracked(name, tracker.open(NewRun(_name(run), recording.experiment, tags)))


def _name(run: RunFolder) -> str:
    """Return what trackers call a run; beside a stage of one chain there may be that of another."""
    return f"{run.path.parent.name}/{run.name}" if is_chain(run.path.parent) else run.name


def _configure(training: Training, config: TrainConfig | PairConfig, tracker: Tracker) -> None:
    """Give a tracker's run the configuration, also where a resume goes on with another."""
    file = training.run.config
    if tracker.configure(flatten(config.model_dump(mode="json"))):
        tracker.artifact(Artifact(file.name, file))


def reopened(training: Training, name: str, tracker: Tracker) -> Tracked | None:
    """Return a tracker's run of an earlier attempt, if there is one that it holds."""
    run = training.run
    tracked = read_manifest(run).tracked if run.manifest.is_file() else ()
    earlier = next((item for item in tracked if item.tracker == name), None)
    if earlier is None:
        return None
    if not tracker.find(earlier.run):
        lost = "%s (%s) does not hold the run %s that this folder was recorded in: a new one gets its figures"
        get_run_logger().warning(lost, tracker.label, tracker.address, earlier.run)
        return None
    return earlier


def begin_delivery(training: Training, through: int) -> None:
    """Begin to give trackers what is recorded, first what each lacks of earlier attempts: all, if its run is new.

    Args:
        through: the iteration or step from which this attempt goes on.
    """
    session, run = training.session(), training.run
    session.outboxes = [Outbox(Delivery(tracker)) for tracker in session.trackers]
    if read_metrics(run) or read_metrics(run.warm_up) or run.events.exists():
        session.deliver("earlier attempts", Delivery.everything, run, through)


def append_record(training: Training, number: int, metrics: dict[str, float]) -> None:
    """Record an iteration or step, or more figures of it; a tracker gets each once, also if a resume repeats it."""
    append_metrics(training.run, number, finite(metrics))
    training.session().deliver(f"iteration {number}", Delivery.figures, number, metrics)


def close(
    training: Training, summary: dict[str, Any], report: Callable[[Training, dict[str, Any]], None] | None = None
) -> None:
    """Make the report, end the trackers' runs, and write the summary: last if it says that all is done.

    So a run that was killed before has no summary that calls it complete. The call waits for trackers for a while;
    what they lack after that is logged, and lies in the folder. Where the training is done and the disk takes
    no more (`at_the_end`), there is no summary either.
    """
    session, path, done = training.session(), training.run.summary, summary["status"] == "completed"
    text = json.dumps(summary, indent=2) + "\n"
    if not done:
        write_text(path, text)
    if not session.tracked:
        return  # it ended before a tracker had a run
    if report is not None and done:
        with at_the_end(training, "the report"):
            report(training, summary)
    elif report is not None:
        report(training, summary)
    session.outboxes = session.outboxes or [Outbox(Delivery(tracker)) for tracker in session.trackers]
    session.deliver("its end", Delivery.end, text, summary["status"], time.time())
    for lacking in finish_all(session.outboxes):
        _logger.warning("%s. Deliver it with: penstock sync %s", lacking, training.run.path)
    if done and not session.lacks:
        with at_the_end(training, path.name):
            write_text(path, text)


@contextmanager
def at_the_end(training: Training, what: str) -> Iterator[None]:
    """Write what a training is done without, its model being written: a disk that takes no more costs that alone.

    A resume writes it, since a run without a summary is not complete.

    Args:
        what: is written in the block, for people.
    """
    try:
        yield
    except OSError as error:
        training.session().lacks.append(what)
        said = "the training is done, but %s could not be written: %s. Once there is room: penstock %s --resume %s"
        _logger.warning(said, what, error.strerror or error, training.session().kind, training.run.path)


def links(training: Training) -> dict[str, str]:
    """Return where a run can be looked at."""
    session = training.session()
    pages = {f"{tracker.label} run": tracker.page for tracker in session.trackers}
    found = {"Run folder": str(training.run.path), **pages, "Prefect flow run": session.prefect_url}
    return {label: address for label, address in found.items() if address}


def tracked(training: Training) -> list[dict[str, str]]:
    """Return in which runs of which trackers a training is recorded, for its summary; empty: none was begun."""
    session = training.session()
    return [
        dataclasses.asdict(run) | {"label": tracker.label, "address": tracker.address}
        for run, tracker in zip(session.tracked, session.trackers, strict=True)
    ]


def elapsed(training: Training) -> float:
    """Seconds of this attempt and, by the manifest, of the earlier ones."""
    return training.session().seconds_before + time.monotonic() - training.session().started


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Drop figures that do not exist (a variance of nothing): JSON has no NaN."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def advanced(training: Training, progress: Progress, **changes: Any) -> Progress:
    """Return `progress` with `changes` and the seconds spent so far."""
    return progress.advanced(seconds=elapsed(training), **changes)
