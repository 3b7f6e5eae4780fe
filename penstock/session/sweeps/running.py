"""A sweep that runs in this process: its folder, its trainings' processes, and the tracker's run above theirs.

Tasks get a `Swept`, which is the path of the sweep's folder, and ask it for the living things, as tasks of a training
do. Left out: the report (penstock/reports/sweep.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prefect import Flow
from prefect.exceptions import TerminationSignal

from penstock.base.errors import FailedInWords
from penstock.configs.sections.run import names_of_trackers
from penstock.session.flow_runs.taken_over import take_over
from penstock.session.sweeps.plan import SWEEP_TAG, Plan, taken_up
from penstock.session.sweeps.trainings import LOOK_S, Ended, Processes, processes
from penstock.state.manifest import Tracked
from penstock.state.run_folder import RunFolder, locked
from penstock.state.sweep import Planned, Sweep, SweepFolder, read_sweep, write_sweep
from penstock.trackers.delivery import Delivery
from penstock.trackers.outbox import Outbox
from penstock.trackers.table import keeps, make_tracker
from penstock.trackers.tracker import Artifact, NewRun, Status, Tracker

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Swept:
    """Handle of a running sweep: the path of its folder."""

    path: str

    @property
    def folder(self) -> SweepFolder:
        """The folder."""
        return SweepFolder(Path(self.path))

    def living(self) -> Living:
        """The living parts of this sweep in this process."""
        return _LIVING[self.path]


@dataclass
class Living:
    """The plan, the flow that trains, the processes, and what has ended so far."""

    plan: Plan
    flow: Flow[..., str]
    processes: Processes
    ended: list[Ended] = field(default_factory=list)

    @property
    def failed(self) -> list[Ended]:
        """The trainings that did not come to their end."""
        return [item for item in self.ended if item.code]


class TrainingsFailed(FailedInWords):
    """Some trainings of a sweep did not come to their end; the others did."""

    def __init__(self, folder: SweepFolder, failed: Sequence[Ended]) -> None:
        of = len(read_sweep(folder).trainings)
        names = "".join(
            f"\n    {item.name} (exit code {item.code}): {folder.path}/logs/{item.name}.log" for item in failed
        )
        super().__init__(f"{len(failed)} of {of} trainings failed:{names}")


_LIVING: dict[str, Living] = {}


@contextmanager
def running_sweep(folder: SweepFolder, flow: Flow[..., str], at_once: int | None = None) -> Iterator[Swept]:
    """Go on with a sweep until the block ends; then none of its trainings runs.

    Args:
        flow: trains, with the parameters `config` and `run_folder`, or `resume`.
        at_once: trainings at a time from now on; None: as it was asked for.

    Raises:
        UserError: there is no sweep, another process is at it, or a training cannot work any more.
    """
    plan, swept = taken_up(folder, at_once), Swept(str(folder.path))
    with locked(RunFolder(folder.path)):
        take_over(folder.path, f"{SWEEP_TAG}{folder.path.name}")
        tracker = _tracked(folder, plan)
        with processes(plan.lanes) as started, _ending(folder, tracker):
            _LIVING[swept.path] = Living(plan, flow, started)
            try:
                yield swept
            finally:
                del _LIVING[swept.path]


def left(swept: Swept) -> list[Planned]:
    """Return the trainings that have not come to their end, the next one first."""
    return swept.folder.left(swept.living().plan.sweep)


def look(swept: Swept) -> list[Ended]:
    """Wait for a moment, and return the trainings that have ended meanwhile."""
    time.sleep(LOOK_S)
    living = swept.living()
    ended = living.processes.ended()
    living.ended += ended
    return ended


def _tracked(folder: SweepFolder, plan: Plan) -> Tracker | None:
    """Go on in the tracker's run of a sweep, or begin it before its trainings; None: no tracker keeps runs."""
    sweep, record = read_sweep(folder), plan.first.record
    if (name := next(filter(keeps, names_of_trackers(record.tracker)), None)) is None:
        return None
    tracker = make_tracker(name, folder.path)
    if sweep.tracked is not None and tracker.find(sweep.tracked.run):
        tracker.resume()
        return tracker
    run = tracker.open(NewRun(folder.path.name, record.experiment, {"penstock.sweep": str(folder.path)}))
    write_sweep(folder, sweep.model_copy(update={"tracked": Tracked(name, run)}))
    tracker.configure(_settings(sweep))
    return tracker


def _settings(sweep: Sweep) -> dict[str, str]:
    given = dict(setting.partition("=")[::2] for setting in sweep.settings)
    return {"recipe": sweep.recipe, **given, "by": sweep.by, "trainings": str(len(sweep.trainings))}


@contextmanager
def _ending(folder: SweepFolder, tracker: Tracker | None) -> Iterator[None]:
    """Give the tracker the report and the end of a sweep, on every path; where it is away, that is said."""
    status: Status = "failed"
    try:
        yield
        status = "completed"
    except (KeyboardInterrupt, SystemExit, TerminationSignal):
        status = "cancelled"
        raise
    finally:
        if tracker is not None:
            _deliver(folder, tracker, status)


def _deliver(folder: SweepFolder, tracker: Tracker, status: Status) -> None:
    outbox = Outbox(Delivery(tracker))
    if folder.report.is_dir():
        outbox.put("the report", partial(tracker.artifact, Artifact("report", folder.report)))
    outbox.put("its end", partial(tracker.close, status, time.time()))
    if lacking := outbox.finish():
        _logger.warning("%s. The sweep's folder has it: %s", lacking, folder.path)
