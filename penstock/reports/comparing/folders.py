"""Runs as their folders have them: no tracker is asked, so it does not matter which ones a run is recorded in."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from penstock.configs.tree.recipes import read_mapping
from penstock.reports.comparing.runs import READ, ComparedRun
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.trackers.tracker import ITERATION, flatten


def folder_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs of some folders, in that order; each has a `config.yaml`.

    Raises:
        Damaged: a line of figures is not what was written.
    """
    return [_run(RunFolder(folder)) for folder in folders]


def _run(run: RunFolder) -> ComparedRun:
    records = [(item["iteration"], item["metrics"]) for item in read_metrics(run)]
    histories = {
        name: {number: metrics[name] for number, metrics in records if math.isfinite(metrics.get(name, math.nan))}
        for name in READ
    }
    last = {name: value for _, metrics in records for name, value in metrics.items() if math.isfinite(value)}
    summary = json.loads(run.summary.read_text(encoding="utf-8")) if run.summary.is_file() else {}
    status = str(summary.get("status", "unfinished"))
    return ComparedRun(
        name=run.name,
        status=status,
        completed=status == "completed",
        settings=flatten(read_mapping(run.config)),
        histories=histories,
        last=last | {ITERATION: float(records[-1][0] if records else 0)},
        summary=summary,
        folder=run.path,
    )
