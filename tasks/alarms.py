"""Alarms: what goes wrong in a training is said once, with what to change, and recorded as `alarm/<name>`, 0 or 1.

Not a task: it looks at figures that are there already. The rules are in reports/alarms.py.
"""

from __future__ import annotations

from prefect import get_run_logger

from reports.alarms import RULES, raised
from state.run_folder import read_metrics
from tasks.session import Training


def alarms(training: Training, metrics: dict[str, float]) -> dict[str, float]:
    """Return the alarms of an iteration with the figures `metrics`; one that was never raised in this run is logged."""
    session = training.session()
    if not session.history:  # the first iteration of this process; a resumed run has some behind it
        session.history = [dict(item["metrics"]) for item in read_metrics(training.run) if item["iteration"] > 0]
    history = [*session.history, metrics]
    figures = raised(history)
    if training.config.rollout.ignore_eos:
        figures.pop("alarm/truncation", None)  # every response has the full length, as asked for
    for rule in RULES:
        metric = rule.metric
        if figures.get(metric) and not any(earlier.get(metric) for earlier in session.history):
            get_run_logger().warning("alarm: %s. %s", rule.happens, rule.change)
    session.history = [*session.history, metrics | figures]
    return figures
