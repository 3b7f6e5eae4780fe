"""What a tracker gets of a run: each figure once, and all that the run folder holds.

Nothing here remembers across processes what was delivered: the tracker is asked, once after the start and once after
each failure, since a request whose answer was lost may have been served. Left out: when something is delivered
(penstock/trackers/outbox.py); opening and reopening the run, which a training waits for (penstock/session/record.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.state.run_folder import RunFolder, read_metrics
from penstock.trackers.tracker import ITERATION, Artifact, Figures, Status, Table, Tracker

WARM_UP_LOSS = "warm_up/loss"


class Delivery:
    """Gives a tracker what it lacks of its run; not for several threads at a time.

    Attributes:
        sent: how often something was sent.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.sent = tracker, 0
        self.forget()

    def forget(self) -> None:
        """Ask the tracker anew what it holds: something went wrong."""
        self._through: int | None = None
        self._steps: dict[str, set[int]] = {}  # where the tracker has a figure, by its name, as far as it was asked

    def figures(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log the figures of an iteration, or more of them: only those that the tracker does not have there."""
        if self._through is None:
            self._through = self.tracker.logged_through()
        if iteration > self._through:
            self._log([Figures(iteration, {**metrics, ITERATION: float(iteration)})])
            self._through, sent = iteration, metrics.keys()
        else:
            lacking = {name: value for name, value in metrics.items() if iteration not in self._steps_of(name)}
            if lacking:
                self._log([Figures(iteration, lacking)])
            sent = lacking.keys()
        for name in sent & self._steps.keys():
            self._steps[name].add(iteration)

    def _steps_of(self, name: str) -> set[int]:
        if name not in self._steps:
            self._steps[name] = self.tracker.logged(name)
        return self._steps[name]

    def _log(self, figures: list[Figures]) -> None:
        self.tracker.log(figures)
        self.sent += 1

    def warm_up(self, losses: Mapping[int, float]) -> None:
        """Log the losses of the steps of a supervised warm-up, by step."""
        held = self._steps_of(WARM_UP_LOSS)
        if new := [Figures(step, {WARM_UP_LOSS: loss}) for step, loss in losses.items() if step not in held]:
            self._log(new)
            held |= {item.step for item in new}

    def samples(self, run: RunFolder, iteration: int) -> None:
        """Log the table of an iteration's samples, which lies in the run folder."""
        self._table(samples_table(run, iteration))

    def _table(self, table: Table) -> None:
        self.tracker.table(table)
        self.sent += 1

    def report(self, run: RunFolder) -> None:
        """Log the pages of the report."""
        self.tracker.artifact(Artifact("report", run.report.parent))
        self.sent += 1

    def events(self, run: RunFolder) -> None:
        """Log what was lost while the run went on."""
        self.tracker.artifact(Artifact(run.events.name, run.events))
        self.sent += 1

    def end(self, summary: str, status: Status, at_s: float) -> None:
        """Log the summary and end the run as of a time since the epoch."""
        self.tracker.artifact(Artifact("summary.json", summary))
        self.tracker.close(status, at_s)
        self.sent += 1

    def everything(self, run: RunFolder, through: int | None = None) -> None:
        """Give the tracker what it lacks of what the run folder holds: figures, tables of samples, the end.

        Args:
            through: the iteration or step from which the run goes on; None: it does not, and all counts.
        """
        for item in read_metrics(run):
            if through is None or item["iteration"] <= through:
                self.figures(item["iteration"], item["metrics"])
        if losses := {item["iteration"]: item["metrics"]["loss"] for item in read_metrics(run.warm_up)}:
            self.warm_up(losses)
        paths = sorted(run.samples(0).parent.glob("[0-9]*.json"))
        tables = [samples_table(run, int(path.stem)) for path in paths]
        lacking = self.tracker.lacking({table.name: table.path for table in tables})
        for table in tables:
            if table.name in lacking:
                self._table(table)
        if run.events.is_file() and self.tracker.lacking({run.events.name: run.events}):
            self.events(run)
        if through is None and run.summary.is_file():
            self._deliver_end(run)

    def _deliver_end(self, run: RunFolder) -> None:
        text = run.summary.read_text(encoding="utf-8")
        status: Status = json.loads(text)["status"]
        if self.tracker.status() == status and not self.tracker.lacking({run.summary.name: run.summary}):
            return
        if run.report.is_file():
            self.report(run)
        self.end(text, status, run.summary.stat().st_mtime)


def samples_table(run: RunFolder, iteration: int) -> Table:
    """Return the table of an iteration's samples, e.g. "samples/000012.json"."""
    path = run.samples(iteration)
    return Table(f"samples/{path.name}", path)
