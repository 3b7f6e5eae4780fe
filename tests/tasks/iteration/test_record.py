"""What a run says about itself at its end, from its folder alone."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.entities import Run

from penstock.configs.schema import TrainConfig
from penstock.engines.groups.spec import GroupSpec, RankDevice
from penstock.engines.sizing.memory import Recomputed
from penstock.session import record as session_record
from penstock.session.consolidation import Consolidator
from penstock.session.record import Recording, begin_delivery, finite, reopened
from penstock.session.session import Training, write_config
from penstock.state.experience import write_columns
from penstock.state.manifest import Manifest, Progress, Tracked, ended, read_manifest, write_manifest
from penstock.state.run_folder import RunFolder, append_metrics
from penstock.tasks.finetuning.checkpoints import steps_done
from penstock.tasks.iteration import record
from penstock.tasks.iteration.checkpoint import manifest
from penstock.tasks.iteration.record import gpus_held, sample_rows, summarize
from penstock.trackers import mlflow as module
from penstock.trackers.mlflow import MlflowTracker, connect, default_tracking_uri
from penstock.trackers.outbox import Outbox
from penstock.trackers.tracker import Figures, Status
from tests.delivering import await_delivery, in_mlflow, log_iteration, tracked_run, with_outbox

MakeTraining = Callable[[TrainConfig], Training]


def recorded(training: Training, *accuracies: float | None) -> Training:
    """Record iterations 0, 1, ... with these held-out accuracies; iteration n earns n / 10 in n seconds."""
    for number, accuracy in enumerate(accuracies):
        metrics = {} if accuracy is None else {"heldout/accuracy": accuracy, "heldout/temperature": 0.7}
        if number:
            metrics |= {"reward/mean": number / 10, "time/iteration_s": float(number), "rollout/tokens": 100.0}
            metrics |= {"rollout/tokens_per_s": 150.0}
            metrics |= {"share/rollout": 0.6, "share/other": 0.1 * number}
        if number > 1:
            metrics["actor/mfu"] = 0.1 * number
        append_metrics(training.run, number, metrics)
    return training


def test_tokens_that_an_earlier_attempt_generated_took_no_time_here(training_with: MakeTraining) -> None:
    """An iteration that found its experience says no speed, and counts for none."""
    training = recorded(training_with(TrainConfig()), 0.5, None)
    found = {"reward/mean": 0.5, "time/iteration_s": 0.25, "rollout/tokens": 1e6}
    append_metrics(training.run, 2, found)
    assert summarize(training, "completed")["tokens_per_second"] == 100.0


def test_a_run_that_mlflow_lost_is_recorded_anew_up_to_where_it_goes_on(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Deleted in the interface, or the folder is on another machine. Control: a run that is there goes on."""
    training = recorded(training_with(TrainConfig()), 0.5, None, None, None)
    run = training.run
    monkeypatch.setattr(session_record, "get_run_logger", lambda: logging.getLogger("record"))
    uri = default_tracking_uri(run.path.parent)
    tracker = in_mlflow(training, uri)
    first = tracker.run
    log_iteration(tracker, 1, {"reward/mean": 0.1})
    write_manifest(run, manifest(training, Progress(iteration=2), None))
    assert reopened(training, "mlflow", tracker)
    connect(uri).delete_run(first)
    assert not reopened(training, "mlflow", tracker)
    assert first in caplog.text
    write_config(run, training.config)
    session = training.session()
    session.trackers, session.tracked = [], ()
    session_record.open_run(training, recording(training, 2), "mlflow", tracker)
    assert tracker.run != first
    begin_delivery(training, 2)
    await_delivery(training)
    history = connect(uri).get_metric_history(tracker.run, "reward/mean")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.1), (2, 0.2)]
    assert not MlflowTracker(uri).find("0" * 32)
    assert reopened(training, "mlflow", tracker), "the next resume goes on in the new one"
    assert read_manifest(run).progress.iteration == 2


def test_nothing_counts_as_logged_that_was_never_recorded(training_with: MakeTraining) -> None:
    """A run killed in its warm-up has a manifest and no evaluation yet: a new MLflow run is to get that one."""
    training = training_with(TrainConfig())
    tracker = in_mlflow(training, default_tracking_uri(training.run.path.parent))
    write_manifest(training.run, Manifest(Progress()))
    begin_delivery(training, 0)
    await_delivery(training)
    assert tracker.logged_through() == -1


@pytest.mark.parametrize(("checkpoint", "exported", "step"), [(None, False, 0), (5, False, 5), (None, True, 12)])
def test_a_training_without_rollout_is_replayed_up_to_its_own_steps(
    training_with: MakeTraining, checkpoint: int | None, exported: bool, step: int
) -> None:
    """Its own manifest counts them while there are checkpoints; with the model written all are done."""
    run = training_with(TrainConfig()).run
    write_manifest(run, Manifest(Progress()))
    if checkpoint is not None:
        write_manifest(run.finetuning, Manifest(Progress(iteration=checkpoint), checkpoint="000005"))
    if exported:
        run.model("final").mkdir(parents=True)
    assert steps_done(run, "final", 12) == step


def test_a_summary_counts_the_gpus_that_were_held(training_with: MakeTraining) -> None:
    """Each once, on all machines. Control: CPU ranks are none."""
    training = training_with(TrainConfig())
    first, second = RankDevice(0), RankDevice(1)
    placed = {"actor": (first, second), "critic": (RankDevice(0, "pool/0"),), "reward": (RankDevice(None),)}
    for role, devices in placed.items():
        spec = GroupSpec(role, (role,), devices, Path(), 1.0, 1.0, 1.0)  # type: ignore[arg-type]
        training.session().groups[role] = type("Placed", (), {"spec": spec})()  # type: ignore[index,assignment]
    training.session().groups["rollout"] = training.session().groups["actor"]
    assert gpus_held(training) == 3


def test_a_summary_of_a_whole_run(training_with: MakeTraining) -> None:
    """First and last of each figure; tokens per second over the iterations; seconds of all attempts."""
    training = recorded(training_with(TrainConfig()), 0.5, None, 0.6, None)
    session = training.session()
    engine = {"parameters": 7, "parameters_shared": 5, "parameters_copied": 2, "reshard_strategy": "shared"}
    engine |= {"attention": "FlashAttention 4"}
    session.engine_figures = dict(engine)
    session.trackers, session.tracked = [MlflowTracker("https://me:sesame@mlflow.corp")], (Tracked("mlflow", "run"),)
    session.prefect_flow_run_id = "flow"
    session.recomputed = {"actor": Recomputed(False, True)}
    session.seconds_before, session.started = 100.0, time.monotonic() - 10
    summary = summarize(training, "completed")
    assert 110 <= summary.pop("seconds") < 170
    assert summary == {
        "status": "completed",
        "iterations": 3,
        "accuracy_before": 0.5,
        "accuracy_after": 0.6,
        "heldout_temperature": 0.7,
        "greedy_before": None,
        "greedy_after": None,
        "reward_first": 0.1,
        "reward_last": 0.3,
        "tokens_per_second": 50.0,
        "gpus": 0,
        "actor_mfu": pytest.approx(0.25),
        "time_shares": pytest.approx({"rollout": 0.6, "other": (0.1 * 1 + 0.2 * 2 + 0.3 * 3) / 6}),
        **engine,
        "recomputed": {"actor": "logits"},
        "kv_cache_stays": None,
        "tracked": [{"tracker": "mlflow", "run": "run", "label": "MLflow", "address": "https://mlflow.corp"}],
        "prefect_flow_run_id": "flow",
    }


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((), {"iterations": 0, "accuracy_before": None, "accuracy_after": None, "reward_first": None}),
        (
            (0.5,),
            {"iterations": 0, "accuracy_before": 0.5, "accuracy_after": None, "time_shares": {}, "actor_mfu": None},
        ),
        ((0.5, None), {"iterations": 1, "accuracy_before": 0.5, "accuracy_after": None, "reward_last": 0.1}),
    ],
)
def test_a_run_that_failed_early_has_gaps_and_no_invented_figures(
    training_with: MakeTraining, accuracies: tuple[float | None, ...], expected: dict[str, Any]
) -> None:
    """An accuracy before training is not also one after it."""
    summary = summarize(recorded(training_with(TrainConfig()), *accuracies), "failed")
    assert summary.items() >= expected.items()
    assert summary["status"] == "failed"


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_a_run_says_how_it_ended_also_where_mlflow_is_gone(
    training_with: MakeTraining,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: Status,
) -> None:
    """In its summary; what MLflow lacks, and the command that delivers it, in one line."""
    training = training_with(TrainConfig())
    session = training.session()
    session.trackers = [MlflowTracker("http://alice:sesame@127.0.0.1:9")]
    session.tracked = (Tracked("mlflow", "of this run"),)

    def gone(*_: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(module, "connect", gone)
    session_record.close(training, {"status": status})
    assert json.loads(training.run.summary.read_text(encoding="utf-8")) == {"status": status}
    said = caplog.records[-1].getMessage()
    assert said == (
        "MLflow (http://127.0.0.1:9) lacks this run from its end on: ConnectionError:. "
        f"Deliver it with: penstock sync {training.run.path}"
    )
    assert "sesame" not in caplog.text


def test_what_ended_a_run_is_told_and_its_summary_and_page_are_there_also_where_mlflow_is_gone(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost rank stays one, with its words on how to go on. Control: what MLflow said is logged."""
    training = recorded(training_with(TrainConfig()), 0.5, None)
    run = training.run
    monkeypatch.setattr(session_record, "get_run_logger", lambda: logging.getLogger("record"))
    in_mlflow(training, default_tracking_uri(run.path.parent))

    def gone(*_: object) -> None:
        raise ConnectionError("away")

    def finish(status: Status) -> None:
        session_record.close(training, summarize(training, status), record._report)

    monkeypatch.setattr(module, "connect", gone)
    for error, status in ((RuntimeError("rank lost"), "failed"), (KeyboardInterrupt(), "cancelled")):
        with pytest.raises(type(error)) as ended_with, session_record.ending(finish):
            raise error
        assert ended_with.value is error
        assert json.loads(run.summary.read_text(encoding="utf-8"))["status"] == status
        assert f"Status: **{status}**" in (run.path / "report" / "report.md").read_text(encoding="utf-8")
        assert "away" in caplog.text
        caplog.clear()


def recording(training: Training, through: int) -> Recording:
    """Return how a training is recorded; its experiment is its own."""
    return Recording("train", training.config, ["mlflow"], training.run.name, "grpo", through, summarize)


def opened(training: Training, through: int) -> AbstractContextManager[None]:
    """Open the record of a training as any flow does."""
    return session_record.open_record(training, recording(training, through))


def runs_of(training: Training) -> list[Run]:
    """Return all MLflow runs of a training, whose experiment is its own."""
    client = connect(default_tracking_uri(training.run.path.parent))
    return list(client.search_runs([client.get_experiment_by_name(training.run.name).experiment_id]))


def test_a_resume_tells_prefect_of_the_attempt_before(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which flow run it was, which one goes on, and of which folder; from then on the manifest names the new one.

    Controls: a first attempt has none before it; outside of a flow run nobody is told.
    """
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    told: list[tuple[str | None, str, RunFolder]] = []
    monkeypatch.setattr(session_record, "succeed", lambda *said: told.append(said))
    for number in ("first", "second", None):
        training = training_with(TrainConfig())
        write_config(training.run, training.config)
        known = partial(setattr, training.session(), "prefect_flow_run_id", number)
        monkeypatch.setattr(session_record, "know_flow_run", lambda *_, known=known: known())
        with opened(training, 0):
            assert read_manifest(training.run).prefect_flow_run_id == number
    assert told == [(None, "first", training.run), ("first", "second", training.run)]


@pytest.mark.parametrize("attempt", ["the first", "a resume"])
def test_no_run_stays_running_in_mlflow_that_was_stopped_while_it_opened(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, attempt: str
) -> None:
    """Ctrl-C among the requests, which is not held back; a folder that has an MLflow run can be resumed.

    Control: undisturbed, the next attempt goes on in the same MLflow run.
    """
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    training = training_with(TrainConfig())
    run = training.run
    write_config(run, training.config)
    if attempt == "a resume":
        with opened(training, 0):
            pass
        training = training_with(TrainConfig())

    def stopped(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the signal came, and the request went on")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MlflowTracker, "configure" if attempt == "the first" else "resume", stopped)
        with opened(training, 0):
            pytest.fail("it opened")
    assert json.loads(run.summary.read_text(encoding="utf-8"))["status"] == "cancelled"
    first = tracked_run(run)
    client = connect(default_tracking_uri(run.path.parent))
    assert client.get_run(first).info.status == "KILLED"

    training = training_with(TrainConfig())
    with opened(training, 0):
        assert training.session().tracked == (Tracked("mlflow", first),)
        assert client.get_run(first).info.status == "RUNNING"
    assert client.get_run(first).info.status == "FINISHED"
    assert len(runs_of(training)) == 1


def test_a_run_whose_store_is_away_from_the_start_says_that_it_failed(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing asked of the store once more. Control: the error that came is the one that is told."""
    training = training_with(TrainConfig())

    def gone(*_: object, **__: object) -> None:
        raise ConnectionError("away")

    monkeypatch.setattr(MlflowTracker, "open", gone)
    with pytest.raises(ConnectionError, match="away"), opened(training, 0):
        pass
    assert json.loads(training.run.summary.read_text(encoding="utf-8"))["status"] == "failed"
    assert not training.run.manifest.exists()


def test_a_replay_that_is_cut_goes_on_in_the_same_mlflow_run(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest names the new MLflow run before its figures are there. Control: none of them is there twice."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    training = recorded(training_with(TrainConfig()), 0.5, None, None, None)
    write_config(training.run, training.config)
    write_manifest(training.run, Manifest(Progress(iteration=2)))
    log = MlflowTracker.log

    def gone(tracker: MlflowTracker, figures: list[Figures]) -> None:
        if figures[0].step == 2:
            raise ConnectionError
        log(tracker, figures)

    with monkeypatch.context() as patch, opened(training, 2):
        patch.setattr(MlflowTracker, "log", gone)
    training = training_with(TrainConfig())
    with opened(training, 2):
        await_delivery(training)
    (found,) = runs_of(training)
    client = connect(default_tracking_uri(training.run.path.parent))
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.1), (2, 0.2)]


def test_samples_of_an_iteration_that_is_repeated_reach_mlflow(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill came between its figures and its samples. Control: the figures are there once."""
    monkeypatch.setattr(record, "keep_memory", lambda *_: None)
    monkeypatch.setattr(Consolidator, "begin", lambda *_: None)
    training = training_with(TrainConfig.model_validate({"record": {"samples_every": 1}}))
    run, uri = training.run, default_tracking_uri(training.run.path.parent)
    tracker = in_mlflow(training, uri)
    texts = {name: ["a"] for name in ("sample_id", "prompt", "response")}
    write_columns(run.experience(1), {**texts, "reward": np.ones(1), "policy_version": np.zeros(1)})
    log_iteration(tracker, 1, {"reward/mean": 0.1})
    record.record.fn(with_outbox(training), 1, {"reward/mean": 0.1})
    await_delivery(training)
    client = connect(uri)
    assert [file.path for file in client.list_artifacts(tracker.run, "samples")] == ["samples/000001.json"]
    assert len(client.get_metric_history(tracker.run, "reward/mean")) == 1


def test_an_attempt_begins_where_the_one_before_left_off(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind: with its seconds, and without what a kill left half-written. Control: whole files stay."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    training = recorded(training_with(TrainConfig()), 0.5)
    run = training.run
    write_config(run, training.config)
    write_manifest(run, Manifest(Progress(seconds=1000.0)))
    cut = run.path / ".metrics.jsonl.77.partial"
    cut.touch()
    before = run.metrics.read_bytes()
    with opened(training, 0):
        assert not cut.exists()
        assert run.metrics.read_bytes() == before
    assert json.loads(run.summary.read_text(encoding="utf-8"))["seconds"] > 1000.0


def test_samples_are_plain_values_spread_over_the_experience(tmp_path: Path) -> None:
    """All of a small file, every third of six rows for two; numbers that JSON can hold."""
    path = tmp_path / "000001.parquet"
    texts = [f"text {row}" for row in range(6)]
    numbers = {"reward": np.arange(6.0), "policy_version": np.arange(6)}
    write_columns(path, {"sample_id": texts, "prompt": texts, "response": texts, **numbers})
    assert [row["reward"] for row in sample_rows(path, 2)] == [0.0, 3.0]
    rows = sample_rows(path, 10)
    assert [row["reward"] for row in rows] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert rows[1] == {
        "sample_id": "text 1",
        "prompt": "text 1",
        "response": "text 1",
        "reward": 1.0,
        "policy_version": 1,
    }
    assert [type(value) for value in rows[1].values()] == [str, str, str, float, int]


def test_figures_that_do_not_exist_are_left_out() -> None:
    """JSON has neither NaN nor infinity."""
    assert finite({"a": 1.0, "b": float("nan"), "c": float("inf")}) == {"a": 1.0}


@pytest.mark.parametrize("killed_in", ["write_report", "finish", None])
def test_a_run_calls_itself_complete_only_when_its_end_is_recorded(
    training_with: MakeTraining, monkeypatch: pytest.MonkeyPatch, killed_in: str | None
) -> None:
    """A kill in any step of the end leaves a run to resume. Control: undisturbed, report and MLflow say the same."""
    training = recorded(training_with(TrainConfig()), 0.5, 0.6)
    run, uri = training.run, default_tracking_uri(training.run.path.parent)
    tracker = in_mlflow(training, uri)
    run.model("final").mkdir(parents=True)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    if killed_in is not None:
        monkeypatch.setattr(record if killed_in == "write_report" else Outbox, killed_in, killed)
        with pytest.raises(KeyboardInterrupt):
            session_record.close(training, summarize(training, "completed"), record._report)
        assert not ended(run)
        return
    session_record.close(training, summarize(training, "completed"), record._report)
    assert ended(run)
    assert "Status: **completed**" in (run.path / "report" / "report.md").read_text(encoding="utf-8")
    client = connect(uri)
    assert client.get_run(tracker.run).info.status == "FINISHED"
    logged = client.download_artifacts(tracker.run, "summary.json")
    assert Path(logged).read_text(encoding="utf-8") == run.summary.read_text(encoding="utf-8")
