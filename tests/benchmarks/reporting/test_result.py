"""A result file is what the commands that read results can use: what is written is read back, all else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import (
    BenchResult,
    medians,
    new_result,
    read_peers,
    read_result,
    steady,
    write_result,
)

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
PLAIN: dict[str, Any] = {
    "bench": "step",
    "command": "penstock bench step r.yaml",
    "commit": None,
    "machine": "CPU",
    "versions": {"python": "3.11"},
    "figures": {"step_s": 2.5},
    "peers": {"trl": {"step_s": 5.0}},
}


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    result = new_result("step", "a command", {"step_s": 1.5}, settings={"skipped": 2}, details=[{"iteration": 1}])
    write_result(tmp_path / "result.json", result)
    assert read_result(tmp_path / "result.json") == result
    assert result.versions["python"].startswith("3.")
    assert result.machine


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.name)
def test_every_file_of_results_is_a_result_in_the_folder_of_its_benchmark(path: Path) -> None:
    assert path.relative_to(RESULTS).parent == Path(read_result(path).bench)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"figures": {}}, "figures"),
        ({"figures": {"step_s": "fast"}}, "figures.step_s"),
        ({"figures": {"step_s": float("nan")}}, "figures.step_s"),
        ({"peers": {"trl": 5.0}}, "peers.trl"),
        ({"surprise": 1}, "surprise"),
        ({"machine": None}, "machine"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], place: str) -> None:
    """The plain file is the control: it reads."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps(PLAIN), encoding="utf-8")
    assert read_result(path).figures == {"step_s": 2.5}
    path.write_text(json.dumps(PLAIN | change), encoding="utf-8")
    with pytest.raises(UserError, match=f"is not a result file: {place}: "):
        read_result(path)


def test_files_that_are_not_there_or_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        read_result(tmp_path / "absent.json")
    (tmp_path / "cut.json").write_text('{"bench": "st', encoding="utf-8")
    with pytest.raises(UserError, match="the file: Invalid JSON"):
        read_result(tmp_path / "cut.json")


def test_figures_that_are_no_numbers_are_refused_before_anything_is_written() -> None:
    with pytest.raises(ValidationError):
        BenchResult(**PLAIN | {"figures": {"step_s": float("inf")}})


def test_peers_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    path.write_text('{"trl": {"step_s": 48}}', encoding="utf-8")
    assert read_peers(path) == {"trl": {"step_s": 48.0}}
    path.write_text('{"step_s": 48}', encoding="utf-8")
    with pytest.raises(UserError, match="is not a file of peers' figures: step_s: "):
        read_peers(path)


def test_the_commit_is_known_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the image: a measurement that is done must not be lost for it. Control: git's word comes first."""
    monkeypatch.setenv("PENSTOCK_COMMIT", "abc")
    assert new_result("step", "a command", {"step_s": 1.5}).commit != "abc"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert new_result("step", "a command", {"step_s": 1.5}).commit == "abc"
    monkeypatch.setenv("PENSTOCK_COMMIT", "")  # an image that was built without the argument
    assert new_result("step", "a command", {"step_s": 1.5}).commit is None


def test_medians_leave_out_cold_rows_and_absent_metrics() -> None:
    """The slow first row would move the median, and a metric that only some rows have counts where it is."""
    rows = [{"a": 90.0}, {"a": 1.0}, {"a": 2.0, "b": 7.0}, {"a": 4.0}]
    assert medians(steady(rows, 1), {"x": "a", "y": "b", "z": "c"}) == {"x": 2.0, "y": 7.0}
    assert medians(rows, {"x": "a"}) == {"x": 3.0}
    with pytest.raises(UserError, match="1 measured, and the first 1 are not counted"):
        steady(rows[:1], 1)
