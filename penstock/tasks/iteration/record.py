"""Record: an iteration's figures go to run folder, trackers and terminal; a run's result to its summary.

The run folder comes first and is the truth. A resumed run repeats iterations after its checkpoint: a tracker gets
each iteration once, on a thread of its own (penstock/trackers/outbox.py). Left out: pictures and pages
(penstock/reports/).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from penstock.base.files import write_text
from penstock.configs.sections.run import names_of_trackers
from penstock.data.images import names_in_run
from penstock.reports.evaluation import TEMPERATURE, greedy_accuracy
from penstock.reports.report import write_report
from penstock.reports.samples.page import write_page
from penstock.session.events import flow_asked_for
from penstock.session.flow_run import link_tracker, show_report
from penstock.session.flow_runs.page import page_of
from penstock.session.record import Recording, append_record, at_the_end, elapsed, links, open_record, tracked
from penstock.session.rollout.draw import keep_memory
from penstock.session.session import Training
from penstock.session.settings import page_of_overrides, variable_name
from penstock.state.experience import IMAGES, column_names, read_columns
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import read_metrics
from penstock.trackers.delivery import Delivery
from penstock.trackers.tracker import Status, table_text

_logger = logging.getLogger(__name__)

ENGINE_FIGURES = ("parameters", "parameters_shared", "parameters_copied", "reshard_strategy", "attention")


@contextmanager
def recording(training: Training) -> Iterator[None]:
    """Keep the record of a training open; on the way out, on every path, write report and summary."""
    session, config, run = training.session(), training.config, training.run
    session.asked_for = flow_asked_for()
    done = read_manifest(run).progress.iteration if run.manifest.is_file() else 0
    to, names, algorithm = config.record, names_of_trackers(config.record.tracker), config.algorithm.name
    recording = Recording("train", config, names, to.experiment, algorithm, done, summarize, _report)
    with open_record(training, recording), page_of(session.prefect_flow_run_id) as session.page:
        link_tracker(training)
        if session.prefect_flow_run_id:
            create_markdown_artifact(page_of_overrides(run, config), key="live-values", description=variable_name(run))
        yield
        with at_the_end(training, "the experience of the last iterations as one file each"):
            session.consolidator.finish()
    show_report(training)


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
    if session.page is not None:
        session.page.advance(iteration, metrics)
    if iteration:
        session.consolidator.begin(training.run.experience(iteration))


def _record_samples(training: Training, iteration: int) -> None:
    rows = sample_rows(training.run.experience(iteration), training.config.record.samples)
    training.run.samples(iteration).parent.mkdir(exist_ok=True)
    write_text(training.run.samples(iteration), table_text(rows))
    session = training.session()
    if session.page is not None:
        session.page.samples(iteration, rows, f"penstock samples {training.run.path}")
    session.deliver(f"the samples of iteration {iteration}", Delivery.samples, training.run, iteration)


def sample_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return `count` samples of an experience file as plain rows, spread evenly over its prompts.

    Images of prompts are there by their names in the run folder, with spaces between.
    """
    seen = [IMAGES] if IMAGES in column_names(path) else []
    names = ("sample_id", "prompt", *seen, "response", "reward", "policy_version")
    columns = read_columns(path, names)
    if seen:
        images = columns[IMAGES]
        columns[IMAGES] = [" ".join(names_in_run(images.row(row))) for row in range(len(images))]
    total = len(columns["reward"])
    rows = [number * total // count for number in range(count)] if count < total else range(total)
    return [{name: _plain(columns[name][row]) for name in names} for row in rows]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _report(training: Training, summary: dict[str, Any]) -> None:
    """Write the report that is made from a summary into the run folder and to the trackers."""
    session, run = training.session(), training.run
    session.say("writing the report")
    last = max(run.experiences(), default=None)
    rows = sample_rows(last, training.config.record.samples) if last and summary["status"] == "completed" else []
    if summary["status"] != "cancelled":  # who cancels waits, and Prefect kills after half a minute
        _samples_page(training)
    write_report(run.path, links(training), rows, f"penstock train --resume {run.path}", summary)
    session.deliver("the report", Delivery.report, run)


def _samples_page(training: Training) -> None:
    """Write the page of samples; what is odd in a file of long ago is no failure of a training that has ended."""
    try:
        write_page(training.run, training.config.record.samples_every)
    except OSError:
        raise  # a full disk: `at_the_end` says what it means
    except Exception:
        _logger.exception("the page of samples is not written")


def summarize(training: Training, status: Status) -> dict[str, Any]:
    """Return the content of `summary.json` from what has been recorded."""
    session, records = training.session(), read_metrics(training.run)
    iterations = [item for item in records if item["iteration"] > 0]
    accuracies = [item["metrics"]["heldout/accuracy"] for item in records if "heldout/accuracy" in item["metrics"]]
    greedy = [accuracy for item in records if (accuracy := greedy_accuracy(item["metrics"])) is not None]
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
        "greedy_before": greedy[0] if greedy and records[0]["iteration"] == 0 else None,
        "greedy_after": greedy[-1] if len(greedy) > 1 else None,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "gpus": gpus_held(training),
        "actor_mfu": _mean(iterations, "actor/mfu"),
        "time_shares": _time_shares(iterations),
        **{name: session.engine_figures.get(name) for name in ENGINE_FIGURES},
        "recomputed": {name: str(value) for name, value in session.recomputed.items()},
        "kv_cache_stays": session.kv_cache_stays,
        "tracked": tracked(training),
        "prefect_flow_run_id": session.prefect_flow_run_id,
    }


def gpus_held(training: Training) -> int:
    """Return how many GPUs the engine groups that stay have, on all machines."""
    devices = {device for group in training.session().distinct_groups for device in group.spec.devices}
    return sum(device.gpu is not None for device in devices)


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
