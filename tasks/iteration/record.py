"""Record: an iteration's figures go to run folder, tracker and terminal; a run's result to its summary.

The run folder comes first and is the truth. A resumed run repeats iterations after its checkpoint: the tracker gets
each iteration once, on a thread of its own (penstock/trackers/outbox.py). Left out: pictures and pages
(penstock/reports/).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from penstock.base.files import write_text
from penstock.reports.evaluation import TEMPERATURE
from penstock.reports.report import write_report
from penstock.session.opening import RUN_TAG
from penstock.session.record import Recording, append_record, at_the_end, elapsed, links, open_record, tracked
from penstock.session.rollout.draw import keep_memory
from penstock.session.session import Training
from penstock.session.settings import page_of_overrides, variable_name
from penstock.state.experience import read_columns
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import read_metrics
from penstock.trackers.tracker import Status, table_text

_logger = logging.getLogger(__name__)

ENGINE_FIGURES = ("parameters", "parameters_shared", "parameters_copied", "reshard_strategy", "attention")


@contextmanager
def recording(training: Training) -> Iterator[None]:
    """Keep the record of a training open; on the way out, on every path, write report and summary."""
    session, config, run = training.session(), training.config, training.run
    session.prefect_flow_run_id = str(flow_run.id) if flow_run.id else None
    session.prefect_url = _prefect_url(session.prefect_flow_run_id, flow_run.ui_url)
    done = read_manifest(run).progress.iteration if run.manifest.is_file() else 0
    to, algorithm = config.record, config.algorithm.name
    recording = Recording("train", config, to.tracker, to.experiment, algorithm, done, summarize, _report)
    with open_record(training, recording):
        if session.prefect_flow_run_id:
            _tag_flow_run(session.prefect_flow_run_id, [f"algorithm:{config.algorithm.name}", f"{RUN_TAG}{run.name}"])
            if (tracker := session.tracker) is not None and tracker.page:
                create_link_artifact(tracker.page, link_text=f"{tracker.label} run", key="tracker-run")
            create_markdown_artifact(page_of_overrides(run, config), key="live-values", description=variable_name(run))
        yield
        with at_the_end(training, "the experience of the last iterations as one file each"):
            session.consolidator.finish()
    if config.record.experiment and session.prefect_flow_run_id and not session.lacks:
        page = (run.path / "report" / "report.md").read_text(encoding="utf-8")
        create_markdown_artifact(page, key="training-report", description=run.name)


def _tag_flow_run(flow_run_id: str, labels: list[str]) -> None:
    """Tag the training's flow run alone: a tag on a task makes Prefect ask the server for its limit every time."""
    with get_client(sync_client=True) as client:
        client.update_flow_run(UUID(flow_run_id), tags=labels)


def _prefect_url(flow_run_id: str | None, ui_url: str | None) -> str | None:
    """Return the address of the run's page, on its server or where `penstock ui` shows a temporary server's runs."""
    if flow_run_id is None or (ui_url and ui_url.startswith("http")):
        return ui_url
    return f"http://127.0.0.1:4200/runs/flow-run/{flow_run_id}"


@task(task_run_name="record-{iteration:06d}", cache_policy=NO_CACHE)
def record(training: Training, iteration: int, metrics: dict[str, float]) -> None:
    """Write down the figures of an iteration; iteration 0 is the evaluation before training."""
    session, every = training.session(), training.config.record.samples_every
    if iteration:
        keep_memory(training, iteration)
    append_record(training, iteration, metrics)
    if iteration and every and iteration % every == 0:  # again in a repeated one: a kill may have prevented it
        _record_samples(training, iteration)
    if session.progress is not None and iteration:
        session.progress.advance(iteration, metrics)
    if iteration:
        session.consolidator.begin(training.run.experience(iteration))


def _record_samples(training: Training, iteration: int) -> None:
    rows = sample_rows(training.run.experience(iteration), training.config.record.samples)
    training.run.samples(iteration).parent.mkdir(exist_ok=True)
    write_text(training.run.samples(iteration), table_text(rows))
    if (outbox := training.session().outbox) is not None:
        outbox.put(f"the samples of iteration {iteration}", partial(outbox.delivery.samples, training.run, iteration))


def sample_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return `count` samples of an experience file as plain rows, spread evenly over its prompts."""
    names = ("sample_id", "prompt", "response", "reward", "policy_version")
    columns = read_columns(path, names)
    total = len(columns["reward"])
    rows = [number * total // count for number in range(count)] if count < total else range(total)
    return [{name: _plain(columns[name][row]) for name in names} for row in rows]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _report(training: Training, summary: dict[str, Any]) -> None:
    """Write the report that is made from a summary into the run folder and to the tracker."""
    session, run = training.session(), training.run
    session.say("writing the report")
    last = max(run.path.glob("experience/[0-9]*[0-9].parquet"), default=None)
    rows = sample_rows(last, training.config.record.samples) if last and summary["status"] == "completed" else []
    write_report(run.path, links(training), rows, f"penstock train --resume {run.path}", summary)
    if session.outbox is not None:
        session.outbox.put("the report", partial(session.outbox.delivery.report, run))


def summarize(training: Training, status: Status) -> dict[str, Any]:
    """Return the content of `summary.json` from what has been recorded."""
    session, records = training.session(), read_metrics(training.run)
    iterations = [item for item in records if item["iteration"] > 0]
    accuracies = [item["metrics"]["heldout/accuracy"] for item in records if "heldout/accuracy" in item["metrics"]]
    temperatures = [item["metrics"][TEMPERATURE] for item in records if TEMPERATURE in item["metrics"]]
    rewards = [item["metrics"]["reward/mean"] for item in iterations if "reward/mean" in item["metrics"]]
    generated = [item["metrics"] for item in iterations if "rollout/tokens_per_s" in item["metrics"]]
    seconds = sum(metrics.get("time/iteration_s", 0.0) for metrics in generated)
    tokens = sum(metrics.get("rollout/tokens", 0.0) for metrics in generated)
    return {
        "status": status,
        "seconds": round(elapsed(training), 3),
        "iterations": iterations[-1]["iteration"] if iterations else 0,
        "accuracy_before": accuracies[0] if accuracies and records[0]["iteration"] == 0 else None,
        "accuracy_after": accuracies[-1] if len(accuracies) > 1 else None,
        "heldout_temperature": temperatures[-1] if temperatures else None,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "actor_mfu": _mean(iterations, "actor/mfu"),
        "time_shares": _time_shares(iterations),
        **{name: session.engine_figures.get(name) for name in ENGINE_FIGURES},
        "recomputed": {name: str(value) for name, value in session.recomputed.items()},
        "kv_cache_stays": session.kv_cache_stays,
        "tracked": tracked(training),
        "prefect_flow_run_id": session.prefect_flow_run_id,
    }


def _mean(records: list[dict[str, Any]], name: str) -> float | None:
    """Mean over the records that have the figure; None if none has it."""
    values = [item["metrics"][name] for item in records if name in item["metrics"]]
    return sum(values) / len(values) if values else None


def _time_shares(records: list[dict[str, Any]]) -> dict[str, float]:
    """Share of the time of all iterations by task, the largest first."""
    weights = [item["metrics"].get("time/iteration_s", 0.0) for item in records]
    names = {name for item in records for name in item["metrics"] if name.startswith("share/")}
    spent = {
        name.removeprefix("share/"): sum(
            item["metrics"].get(name, 0.0) * weight for item, weight in zip(records, weights, strict=True)
        )
        for name in names
    }
    return {name: seconds / sum(weights) for name, seconds in sorted(spent.items(), key=lambda item: -item[1])}
