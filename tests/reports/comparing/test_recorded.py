"""Invariants of a comparison, on real runs: the right last and best values, and only what differs."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from penstock.base.errors import UserError
from penstock.reports.comparing.pages import write_comparison
from penstock.reports.comparing.recorded import keep, recorded_runs
from penstock.reports.comparing.tables import Comparison, comparison_of
from penstock.reports.comparing.terminal import render
from penstock.trackers.mlflow import MlflowTracker, connect
from penstock.trackers.tracker import PARENT, Artifact, NewRun
from tests.delivering import begun, log_iteration


def compare_runs(uri: str, experiment: str, wanted: list[str] | None = None) -> Comparison:
    """Read runs and compare them."""
    return comparison_of(recorded_runs(uri, experiment, wanted))


SAME = {"rollout.prompts": "64", "name": "ignored"}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two runs of `exp` (one metric of the second is missing) and the empty experiment `empty-one`."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"
    one, two = begun(uri, "one"), begun(uri, "two")
    one.configure(SAME | {"name": "one", "actor.lr": "1e-06", "critic.clip": "0.2"})
    two.configure(SAME | {"name": "two", "actor.lr": "3e-06"})
    for iteration, accuracy in enumerate((0.2, 0.9, 0.7)):
        log_iteration(
            one,
            iteration,
            {"heldout/accuracy": accuracy, "reward/mean": iteration / 10, "time/iteration_s": float(1 + 9 * iteration)},
        )
        log_iteration(two, iteration, {"reward/mean": iteration / 5})
    one.close("completed", time.time())
    connect(uri).create_experiment("empty-one")
    return uri


def test_results_are_the_last_the_best_and_the_median(uri: str) -> None:
    """Held-out accuracy fell at the end: last and best differ. What a run did not log is NaN, not 0."""
    results = compare_runs(uri, "exp").results
    assert list(results.index) == ["one", "two"]
    one, two = results.loc["one"], results.loc["two"]
    assert one["status"] == "FINISHED"
    assert two["status"] == "RUNNING"
    assert one["iterations"] == 2
    assert one["heldout/accuracy"] == pytest.approx(0.7)
    assert one["heldout/accuracy best"] == pytest.approx(0.9)
    assert one["reward/mean"] == pytest.approx(0.2)
    assert one["s/iteration"] == pytest.approx(10.0)
    assert two["reward/mean"] == pytest.approx(0.4)
    assert pd.isna(two["heldout/accuracy"])
    assert pd.isna(two["heldout/accuracy best"])


def test_tokens_per_second_are_the_summarys(uri: str) -> None:
    """Over whole iterations; one that found its experience generated nothing and counts for neither."""
    tracker = begun(uri, "run", "speeds")
    for iteration, more in enumerate(({}, {"rollout/tokens_per_s": 150.0}, {"rollout/tokens_per_s": 400.0}, {})):
        log_iteration(tracker, iteration, {"time/iteration_s": iteration, "rollout/tokens": 100.0} | more)
    assert compare_runs(uri, "speeds").results.loc["run", "tokens/s"] == pytest.approx(200 / 3)


def test_only_parameters_that_differ_are_listed(uri: str) -> None:
    """Different and missing values are there; the equal one (negative control) and the run's name are not."""
    differences = compare_runs(uri, "exp").differences
    assert list(differences.index) == ["actor.lr", "critic.clip"]
    assert list(differences.loc["actor.lr"]) == ["1e-06", "3e-06"]
    assert list(differences.loc["critic.clip"]) == ["0.2", "–"]


def test_a_run_alone_differs_in_nothing(uri: str) -> None:
    """A selection is by name or id, and one run has no differences."""
    by_name = compare_runs(uri, "exp", ["two"])
    assert list(by_name.results.index) == ["two"]
    assert by_name.differences.empty
    run_id = connect(uri).search_runs(["1"], "attributes.run_name = 'two'")[0].info.run_id
    assert list(compare_runs(uri, "exp", [run_id]).results.index) == ["two"]


def test_runs_of_one_name_stay_apart(uri: str) -> None:
    """Two runs called alike are two rows, told apart by their ids."""
    for _ in range(2):
        begun(uri, "twin", "twins")
    names = list(compare_runs(uri, "twins").results.index)
    assert len(set(names)) == 2
    assert all(name.startswith("twin (") for name in names)


def test_files_and_terminal_show_the_runs(uri: str, tmp_path: Path) -> None:
    """Markdown, CSV, a picture and the terminal's table hold both runs and the difference."""
    comparison = compare_runs(uri, "exp")
    paths = write_comparison(comparison, tmp_path / "out")
    assert [path.name for path in paths] == [
        "compare.md",
        "compare.html",
        "compare.png",
        "results.csv",
        "differences.csv",
    ]
    page = paths[0].read_text()
    assert "one" in page
    assert "3e-06" in page
    assert "rollout.prompts" not in page
    assert "evaluation" not in page, "neither run has an interval"
    assert list(pd.read_csv(paths[3])["name"]) == ["one", "two"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    out = Console(file=io.StringIO(), width=120)
    out.print(render(comparison))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "actor.lr = 3e-06" in text
    assert "0.900" in text
    assert "rollout.prompts" not in text


def test_held_out_figures_have_their_intervals(tmp_path: Path) -> None:
    """The last evaluation of each run, also what only one has; without any interval there is no second table."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for name, low in (("sure", 0.7), ("unsure", 0.5)):
        tracker = begun(uri, name)
        figures = {"heldout/accuracy": 0.75, "heldout/accuracy/low": low, "heldout/accuracy/high": 0.8}
        figures |= {"heldout/temperature": 0.0} if name == "sure" else {}
        more = {"heldout/best_at_4": 0.9, "heldout/best_at_4/low": 0.85, "heldout/best_at_4/high": 0.95}
        log_iteration(tracker, 0, dict.fromkeys(figures, 0.1))
        log_iteration(tracker, 1, figures | (more if name == "sure" else {"heldout/distinct_2": 0.3}))
    comparison = compare_runs(uri, "exp")
    assert comparison.evaluation.to_dict("index") == {
        "responses": {"sure": "greedy", "unsure": "–"},
        "accuracy": {"sure": "0.750 (0.700 to 0.800)", "unsure": "0.750 (0.500 to 0.800)"},
        "best@4": {"sure": "0.900 (0.850 to 0.950)", "unsure": "–"},
    }
    out = Console(file=io.StringIO(), width=100)
    out.print(render(comparison))
    page = write_comparison(comparison, tmp_path / "out")[0].read_text()
    for text in (out.file.getvalue(), page):  # type: ignore[attr-defined]
        assert "0.750 (0.500 to 0.800)" in text
        assert "last" in text.lower()


@pytest.mark.parametrize(("without", "tables"), [("begun", 1), ("one more", 2)])
def test_a_run_that_was_not_evaluated_has_no_table_of_its_own(tmp_path: Path, without: str, tables: int) -> None:
    """Three runs are beside each other, and a fourth has nothing to show. Control: a fourth that was evaluated."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    figures = {"heldout/accuracy": 0.75, "heldout/accuracy/low": 0.7, "heldout/accuracy/high": 0.8}
    for name in ("a", "b", "c", without):
        log_iteration(begun(uri, name), 0, {"reward/mean": 0.5} if name == "begun" else figures)
    out = Console(file=io.StringIO(), width=100)
    out.print(render(compare_runs(uri, "exp")))
    assert out.file.getvalue().count("last evaluation") == tables  # type: ignore[attr-defined]


def test_runs_without_curves_have_no_picture(uri: str, tmp_path: Path) -> None:
    """Runs that failed before their first iteration still compare."""
    begun(uri, "x", "failed-early")
    paths = write_comparison(compare_runs(uri, "failed-early"), tmp_path)
    assert "compare.png" not in {path.name for path in paths}


def test_a_misspelt_experiment_is_answered_with_the_nearest(uri: str) -> None:
    """The error names what exists and what was probably meant."""
    with pytest.raises(UserError, match=r"did you mean 'empty-one'\? .*exp"):
        compare_runs(uri, "emtpy-one")


def test_an_empty_experiment_and_an_unknown_run_are_user_errors(uri: str) -> None:
    """Neither yields an empty table."""
    with pytest.raises(UserError, match="has no runs"):
        compare_runs(uri, "empty-one")
    with pytest.raises(UserError, match=r"has no run three(.|\n)*one, two"):
        compare_runs(uri, "exp", ["one", "three"])


def test_gpu_hours_and_tokens_come_from_what_a_run_recorded(tmp_path: Path) -> None:
    """Seconds and GPUs of its summary, tokens of its iterations. Control: a run without them has dashes, not zeros."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    whole, bare = begun(uri, "whole"), begun(uri, "bare")
    for iteration in (1, 2):
        log_iteration(whole, iteration, {"rollout/tokens": 500.0, "actor/tokens": 1000.0})
    whole.artifact(Artifact("summary.json", json.dumps({"status": "completed", "seconds": 900.0, "gpus": 8})))
    log_iteration(bare, 1, {"reward/mean": 0.5})
    results = compare_runs(uri, "exp").results
    names = ["GPU hours", "tokens generated", "tokens trained"]
    assert list(results.loc["whole", names]) == [2.0, 1000.0, 2000.0]
    assert results.loc["bare", names].isna().all()


def test_the_run_of_a_sweep_means_its_trainings(uri: str) -> None:
    """It has no figures of its own. Control: the run beside the sweep."""
    parent = begun(uri, "sweep", "swept")
    for name in ("first", "second"):
        MlflowTracker(uri).open(NewRun(name, "swept", {PARENT: parent.run}))
    begun(uri, "alone", "swept")
    assert [run.name for run in recorded_runs(uri, "swept")] == ["first", "second", "alone"]
    assert [run.name for run in recorded_runs(uri, "swept", ["sweep"])] == ["first", "second"]
    assert [run.name for run in recorded_runs(uri, "swept", [parent.run, "alone"])] == ["first", "second", "alone"]


def test_a_comparison_is_kept_as_a_run_of_its_own(uri: str, tmp_path: Path) -> None:
    """With its files and the ids of the runs; those stay as they were."""
    runs = recorded_runs(uri, "exp")
    write_comparison(comparison_of(runs), tmp_path / "exp-1")
    before = [connect(uri).get_run(run.tracked).to_dictionary() for run in runs]
    kept = connect(uri).get_run(keep(uri, tmp_path / "exp-1", runs))
    assert connect(uri).get_experiment(kept.info.experiment_id).name == "comparisons"
    assert (kept.info.run_name, kept.info.status) == ("exp-1", "FINISHED")
    assert kept.data.tags["penstock.compared"] == ",".join(run.tracked for run in runs)
    assert "3e-06" in kept.data.tags["mlflow.note.content"]
    files = {item.path for item in connect(uri).list_artifacts(kept.info.run_id, "comparison")}
    assert {"comparison/compare.md", "comparison/compare.html", "comparison/results.csv"} <= files
    assert [connect(uri).get_run(run.tracked).to_dictionary() for run in runs] == before
