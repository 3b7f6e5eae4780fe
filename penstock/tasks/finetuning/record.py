"""The record of offline trainings: supervised, on preferences, and the warm-up inside `train`.

Figures are recorded step by step as those of iterations are (penstock/tasks/iteration/record.py). The steps of a
warm-up are counted from 1 as iterations are, so they have a folder of their own in the run and, in the same run of the
tracker, a figure of their own. Report and terminal are those of `train`, with other figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.configs.preference import PairConfig
from penstock.configs.sections.run import names_of_trackers
from penstock.reports.report import write_report
from penstock.session.figures import step_alarms
from penstock.session.flow_run import link_tracker, show_report
from penstock.session.record import Recording, append_record, elapsed, links, open_record, tracked
from penstock.session.session import Training
from penstock.state.manifest import read_manifest, write_manifest
from penstock.state.run_folder import append_steps, read_metrics
from penstock.tasks.finetuning.checkpoints import steps_done
from penstock.tasks.finetuning.preferences import loss_of
from penstock.trackers.delivery import Delivery
from penstock.trackers.tracker import Status


@contextmanager
def recording_supervised(training: Training) -> Iterator[None]:
    """Keep the record open, of an earlier attempt if there is one; on the way out write the summary, always."""
    config = training.config
    assert config.sft is not None
    done = steps_done(training.run, "sft", config.sft.steps)
    record, names = config.record, names_of_trackers(config.record.tracker)
    recording = Recording("sft", config, names, record.experiment, "sft", done, summary, write_pages)
    with _on_page(training, recording):
        yield


@contextmanager
def _on_page(training: Training, recording: Recording) -> Iterator[None]:
    """Keep a record open, and show on the page of the flow run where it is."""
    with open_record(training, recording):
        link_tracker(training)
        yield
    show_report(training)


@task(task_run_name="record-{first:06d}", cache_policy=NO_CACHE)
def record_steps(training: Training, first: int, figures: list[dict[str, float]]) -> None:
    """Write down the figures of every step from step `first` on."""
    for step, metrics in enumerate(figures, start=first + 1):
        append_record(training, step, metrics | step_alarms(training, metrics))


def summary(training: Training, status: Status) -> dict[str, Any]:
    """Return the content of `summary.json` from what has been recorded."""
    session, steps = training.session(), read_metrics(training.run)
    losses = [item["metrics"]["loss"] for item in steps if "loss" in item["metrics"]]  # one that is NaN is not there
    return {
        "status": status,
        "command": session.kind,
        "seconds": round(elapsed(training), 3),
        "steps": len(steps),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "tokens_per_second": tokens_per_second(steps),
        "recomputed": str(session.recomputed["sft"]) if "sft" in session.recomputed else None,
        "tracked": tracked(training),
        "prefect_flow_run_id": session.prefect_flow_run_id,
    }


@contextmanager
def recording_preferences(training: Training, command: str, config: PairConfig) -> Iterator[None]:
    """Keep the record open, of an earlier attempt if there is one; on the way out write the summary, always."""
    done = steps_done(training.run, "final", config.trainer.steps)
    recording = Recording(
        command,
        config,
        names_of_trackers(config.tracker),
        config.experiment,
        loss_of(config).name,
        done,
        preference_summary,
        write_pages,
    )
    with _on_page(training, recording):
        training.session().engine_figures |= read_manifest(training.run).trained_with or {}
        yield


def record_engines(training: Training) -> None:
    """Keep in the manifest what the engines train with: an attempt that does only the end starts no model to ask."""
    session, run = training.session(), training.run
    session.engine_figures["recomputed"] = str(session.recomputed["sft"])
    write_manifest(run, dataclasses.replace(read_manifest(run), trained_with=session.engine_figures))


def preference_summary(training: Training, status: Status) -> dict[str, Any]:
    """Return the content of `summary.json` from what has been recorded."""
    session, records = training.session(), read_metrics(training.run)
    steps = [item["metrics"] for item in records if item["iteration"] > 0]
    losses = [metrics["loss"] for metrics in steps if "loss" in metrics]  # one that is NaN is not there
    accuracies = [metrics["accuracy"] for metrics in steps if "accuracy" in metrics]
    heldout = [item["metrics"] for item in records if "heldout/accuracy" in item["metrics"]]
    first = records and records[0]["iteration"] == 0
    return {
        "status": status,
        "command": session.kind,
        "seconds": round(elapsed(training), 3),
        "steps": len(steps),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "accuracy_last": accuracies[-1] if accuracies else None,
        "heldout_accuracy_before": heldout[0]["heldout/accuracy"] if heldout and first else None,
        "heldout_accuracy": heldout[-1]["heldout/accuracy"] if len(heldout) > 1 else None,
        "tokens_per_second": tokens_per_second(records),
        "attention": session.engine_figures.get("attention"),
        "recomputed": session.engine_figures.get("recomputed"),
        "tracked": tracked(training),
        "prefect_flow_run_id": session.prefect_flow_run_id,
    }


def tokens_per_second(records: list[dict[str, Any]]) -> float | None:
    """Return the tokens of all steps by the seconds that these took; None: there are none."""
    steps = [item["metrics"] for item in records if item["metrics"].get("tokens_per_s")]
    seconds = sum(step["tokens"] / step["tokens_per_s"] for step in steps)
    return sum(step["tokens"] for step in steps) / seconds if seconds else None


def write_pages(training: Training, summary: dict[str, Any]) -> None:
    """Write the report that is made from a summary into the run folder and to the tracker."""
    session, run = training.session(), training.run
    session.say("writing the report")
    write_report(run.path, links(training), (), f"penstock {session.kind} --resume {run.path}", summary)
    session.deliver("the report", Delivery.report, run)


@task(task_run_name="record-{first:06d}", cache_policy=NO_CACHE)
def record_warm_up(training: Training, first: int, figures: list[dict[str, float]]) -> None:
    """Write down the loss of every step from step `first` on."""
    by_step = {step: metrics["loss"] for step, metrics in enumerate(figures, start=first + 1)}
    append_steps(training.run.warm_up, {step: {"loss": loss} for step, loss in by_step.items()})
    training.session().deliver(f"step {first + 1} of the warm-up", Delivery.warm_up, by_step)
