"""`penstock sync`: give a tracker what a run folder holds and the tracker does not, because its server was away.

A run that goes on delivers by itself, also what earlier attempts left; this is for one that has ended. Twice is once:
the tracker is asked what it holds. Left out: what is delivered, and how (penstock/trackers/delivery.py).
"""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import locked, open_run_folder
from penstock.trackers.delivery import Delivery
from penstock.trackers.table import make_tracker


def sync(folder: Path) -> str:
    """Deliver what the tracker lacks of the run in `folder`; return what was done, for people.

    Raises:
        UserError: there is no run, it is being trained, no tracker has it, or the tracker does not answer or hold it.
    """
    run = open_run_folder(folder)
    with locked(run):
        if (tracked := read_manifest(run).tracked) is None:
            raise UserError(f"{folder} was never recorded in a tracker", "resume it, and it will be")
        tracker = make_tracker(tracked.tracker, run.path.parent)
        where = f"{tracker.label} ({tracker.address})"
        if not tracker.find(tracked.run):
            raise UserError(
                f"{where} does not hold the run {tracked.run} that {folder} was recorded in",
                "name its store as it was in the training: docs/operations.md, Trackers, says how",
            )
        delivery = Delivery(tracker)
        delivery.everything(run)
    return f"{where} {'now holds all of it' if delivery.sent else 'held all of it already'}"
