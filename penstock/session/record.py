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
from functools import partial
from typing import Any

from prefect import get_run_logger
from pydantic import BaseModel

from penstock.base.files import write_text
from penstock.base.interrupts import interrupts_deferred
from penstock.session.events import take_up
from penstock.session.session import Training
from penstock.state.manifest import Manifest, Progress, Tracked, read_manifest, write_manifest
from penstock.state.run_folder import append_metrics, drop_partial, read_metrics
from penstock.trackers.delivery import Delivery
from penstock.trackers.outbox import Outbox
from penstock.trackers.table import make_tracker
from penstock.trackers.tracker import Artifact, NewRun, Status, Tracker, flatten

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """What is recorded of a training of any kind, and where.

    Attributes:
        kind: the command that made the run, as `penstock.state.manifest.check_kind` wants it.
        config: the tree that a user gave, which becomes the settings of the tracker's run.
        tracker: as a recipe names it.
        experiment: the tracker's name for the runs that this one is compared with.
        algorithm: the run's tag of that name.
        through: the iteration or step from which this attempt goes on.
        summary: returns the content of `summary.json` of a run that ended with a status.
        report: makes pages of it, also for the tracker.
    """

    kind: str
    config: BaseModel
    tracker: str
    experiment: str
    algorithm: str
    through: int
    summary: Callable[[Training, Status], dict[str, Any]]
    report: Callable[[Training, dict[str, Any]], None] | None = None


@contextmanager
def open_record(training: Training, recording: Recording) -> Iterator[None]:
    """Keep the tracker's run of any training open, that of an earlier attempt if there is one; end it on every path."""
    session, run = training.session(), training.run
    session.kind = recording.kind
    session.seconds_before = read_manifest(run).progress.seconds if run.manifest.is_file() else 0.0
    drop_partial(run)
    with interrupts_deferred():
        session.tracker = make_tracker(recording.tracker, run.path.parent)  # which imports what it needs
    with ending(lambda status: close(training, recording.summary(training, status), recording.report)):
        if not reopened(training):
            begin_run(training, recording)
        _configure(training, recording.config)
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


def begin_run(training: Training, recording: Recording) -> None:
    """Begin a tracker's run; from here on the training can be resumed, and the next attempt goes on in this one."""
    session, run = training.session(), training.run
    tags = {"penstock.run": str(run.path), "algorithm": recording.algorithm}
    if session.prefect_flow_run_id:
        tags |= {"prefect.flow_run_id": session.prefect_flow_run_id, "prefect.flow_run_url": str(session.prefect_url)}
        if deployment := os.environ.get("PREFECT__DEPLOYMENT_ID"):
            tags["prefect.deployment"] = deployment
    begun = _tracker(training).open(NewRun(run.name, recording.experiment, tags))
    session.tracked = Tracked(recording.tracker, begun)
    saved = read_manifest(run) if run.manifest.is_file() else Manifest(Progress())
    write_manifest(run, dataclasses.replace(saved, tracked=session.tracked, kind=session.kind))


def _configure(training: Training, config: BaseModel) -> None:
    """Give the tracker's run the configuration, also where a resume goes on with another."""
    tracker, file = _tracker(training), training.run.config
    if tracker.configure(flatten(config.model_dump(mode="json"))):
        tracker.artifact(Artifact(file.name, file))


def reopened(training: Training) -> bool:
    """Go on in the tracker's run of an earlier attempt, if there is one; return whether."""
    session, run = training.session(), training.run
    earlier = read_manifest(run).tracked if run.manifest.is_file() else None
    if earlier is None:
        return False
    found = _tracker(training)
    if not found.find(earlier.run):
        lost = "%s (%s) does not hold the run %s that this folder was recorded in: a new one gets its figures"
        get_run_logger().warning(lost, found.label, found.address, earlier.run)
        return False
    session.tracked = earlier
    found.resume()
    return True


def begin_delivery(training: Training, through: int) -> None:
    """Begin to give the tracker what is recorded, first what it lacks of earlier attempts: all, if its run is new.

    Args:
        through: the iteration or step from which this attempt goes on.
    """
    training.session().outbox = outbox = Outbox(Delivery(_tracker(training)))
    if read_metrics(training.run) or read_metrics(training.run.warm_up) or training.run.events.exists():
        outbox.put("earlier attempts", partial(outbox.delivery.everything, training.run, through))


def append_record(training: Training, number: int, metrics: dict[str, float]) -> None:
    """Record an iteration or step, or more figures of it; the tracker gets each once, also if a resume repeats it."""
    append_metrics(training.run, number, finite(metrics))
    if (outbox := training.session().outbox) is not None:
        outbox.put(f"iteration {number}", partial(outbox.delivery.figures, number, metrics))


def close(
    training: Training, summary: dict[str, Any], report: Callable[[Training, dict[str, Any]], None] | None = None
) -> None:
    """Make the report, end the tracker's run, and write the summary: last if it says that all is done.

    So a run that was killed before has no summary that calls it complete. The call waits for the tracker for a while;
    what the tracker lacks after that is logged, and lies in the folder. Where the training is done and the disk takes
    no more (`at_the_end`), there is no summary either.
    """
    session, path, done = training.session(), training.run.summary, summary["status"] == "completed"
    text = json.dumps(summary, indent=2) + "\n"
    if not done:
        write_text(path, text)
    if session.tracked is None:
        return  # it ended before the tracker had a run
    if report is not None and done:
        with at_the_end(training, "the report"):
            report(training, summary)
    elif report is not None:
        report(training, summary)
    outbox = session.outbox or Outbox(Delivery(_tracker(training)))
    outbox.put("its end", partial(outbox.delivery.end, text, summary["status"], time.time()))
    if lacking := outbox.finish():
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
    tracker, url = _tracker(training), training.session().prefect_url
    found = {"Run folder": str(training.run.path), f"{tracker.label} run": tracker.page, "Prefect flow run": url}
    return {label: address for label, address in found.items() if address}


def tracked(training: Training) -> dict[str, str] | None:
    """Return in which run of which tracker a training is recorded, for its summary; None: none was begun."""
    session = training.session()
    if session.tracked is None:
        return None
    tracker = _tracker(training)
    return dataclasses.asdict(session.tracked) | {"label": tracker.label, "address": tracker.address}


def _tracker(training: Training) -> Tracker:
    tracker = training.session().tracker
    assert tracker is not None
    return tracker


def elapsed(training: Training) -> float:
    """Seconds of this attempt and, by the manifest, of the earlier ones."""
    return training.session().seconds_before + time.monotonic() - training.session().started


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Drop figures that do not exist (a variance of nothing): JSON has no NaN."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def advanced(training: Training, progress: Progress, **changes: Any) -> Progress:
    """Return `progress` with `changes` and the seconds spent so far."""
    return progress.advanced(seconds=elapsed(training), **changes)
