"""`penstock sync`: give trackers what a run folder holds and they do not, because a server was away.

A run that goes on delivers by itself, also what earlier attempts left; this is for one that has ended. Twice is once:
each tracker is asked what it holds. Left out: what is delivered, and how (penstock/trackers/delivery.py).
"""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.session.opening import TRAIN
from penstock.session.registry.registering import deliver_version, final_version, with_registry
from penstock.session.session import read_config
from penstock.state.manifest import Tracked, read_manifest
from penstock.state.run_folder import RunFolder, locked, open_run_folder
from penstock.trackers.delivery import Delivery
from penstock.trackers.table import keeps, make_tracker


def sync(folder: Path) -> str:
    """Deliver what each tracker lacks of the run in `folder`; return what was done, for people, a line for each.

    Raises:
        UserError: there is no run, it is being trained, no tracker has it, or one does not answer or hold it. The
            others have got what they lacked.
    """
    run = open_run_folder(folder)
    done, failed = [], []
    with locked(run):
        manifest = read_manifest(run)
        if not (tracked := [item for item in manifest.tracked if keeps(item.tracker)]):
            raise UserError(f"{folder} was never recorded in a tracker that keeps it", "resume it with one")
        for item in tracked:
            try:
                done.append(_delivered(run, item))
            except UserError as error:
                failed.append(error)
        if not failed and manifest.kind in (None, TRAIN.name) and run.model("final").is_dir():
            _register(run, with_registry(manifest.tracked))
    if failed:
        raise UserError("; ".join([*(error.problem for error in failed), *done]), failed[0].remedy)
    return "\n".join(done)


def _delivered(run: RunFolder, tracked: Tracked) -> str:
    tracker = make_tracker(tracked.tracker, run.path.parent)
    where = f"{tracker.label} ({tracker.address})"
    if not tracker.find(tracked.run):
        raise UserError(
            f"{where} does not hold the run {tracked.run} that {run.path} was recorded in",
            "name its store as it was in the training: docs/trackers.md says how",
        )
    delivery = Delivery(tracker)
    delivery.everything(run)
    return f"{where} {'now holds all of it' if delivery.sent else 'held all of it already'}"


def _register(run: RunFolder, tracked: Tracked | None) -> None:
    config = read_config(run)
    if config.record.registered_model is not None and tracked is not None:
        deliver_version(final_version(run, config, tracked), run.path.parent)
