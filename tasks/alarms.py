"""Alarms: what goes wrong in a training is said once, with what to change, and recorded as `alarm/<name>`, 0 or 1.

Not a task: it looks at figures that are there already. The rules are in reports/alarms.py.
"""

from __future__ import annotations

from prefect import get_run_logger

from reports.alarms import RULES, looked_at, raised
from state.run_folder import read_metrics
from tasks.session import Training


def alarms(training: Training, metrics: dict[str, float]) -> dict[str, float]:
    """Return the alarms of an iteration with the figures `metrics`; one that was never raised in this run is logged."""
    session = training.session()
    if not session.history:  # the first iteration of this process; a resumed run has some behind it
        session.history = [dict(item["metrics"]) for item in read_metrics(training.run) if item["iteration"] > 0]
        session.alarms_said = {rule.metric for rule in RULES if any(item.get(rule.metric) for item in session.history)}
    figures = raised([*session.history, metrics])
    if training.config.rollout.ignore_eos:
        figures.pop("alarm/truncation", None)  # every response has the full length, as asked for
    for rule in RULES:
        metric = rule.metric
        if figures.get(metric) and metric not in session.alarms_said:
            session.alarms_said.add(metric)
            get_run_logger().warning("alarm: %s. %s", rule.happens, rule.change)
    session.history = looked_at([*session.history, metrics | figures])
    return figures
