"""A regression ends with exit code 1, files that cannot be compared with 2; the name tells which way is worse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.compare import compare, direction, remarks
from penstock.benchmarks.reporting.result import BenchResult, write_result
from penstock.cli import main as cli


def result(bench: str = "step", machine: str = "1 x GPU", **figures: float) -> BenchResult:
    return BenchResult(bench=bench, command="c", commit=None, machine=machine, versions={}, figures=figures)


@pytest.fixture
def exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int | str | None, str]]:
    """Compare two results on the command line; return its exit code and what it printed."""

    def run(old: BenchResult, new: BenchResult, *options: str) -> tuple[int | str | None, str]:
        for name, item in (("old", old), ("new", new)):
            write_result(tmp_path / f"{name}.json", item)
        paths = [str(tmp_path / f"{name}.json") for name in ("old", "new")]
        monkeypatch.setattr(sys, "argv", ["penstock", "bench", "compare", *paths, *options])
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr("penstock.cli.libraries.quiet_libraries", lambda: None)
        code: int | str | None = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("step_s", -1),
        ("overhead_s", -1),
        ("gather_reshard_bytes", -1),
        ("peak_gib", -1),
        ("rollout_tokens_per_s", 1),
        ("tokens_per_s_per_gpu", 1),
        ("all_gather_gb_per_s", 1),
        ("mfu", 1),
        ("rollout_mfu", 1),
        ("scaling_efficiency_4", 1),
        ("parameters_shared", 0),
        ("truncated_share", 0),
    ],
)
def test_the_name_tells_the_direction(name: str, expected: int) -> None:
    assert direction(name) == expected


@pytest.mark.parametrize(
    ("name", "new", "verdict"),
    [
        ("step_s", 104.0, "same"),
        ("step_s", 106.0, "worse"),
        ("step_s", 94.0, "better"),
        ("mfu", 94.0, "worse"),
        ("mfu", 106.0, "better"),
        ("parameters", 900.0, "not judged"),
    ],
)
def test_verdicts_follow_direction_and_tolerance(name: str, new: float, verdict: str) -> None:
    (change,) = compare(result(**{name: 100.0}), result(**{name: new}), 0.05)
    assert change.verdict == verdict


def test_bytes_that_were_none_may_not_become_some() -> None:
    """There is no share of zero: any byte is worse, and zero stays the same."""
    old = result(reshard_bytes=0.0)
    assert compare(old, result(reshard_bytes=1.0), 0.05)[0].verdict == "worse"
    assert compare(old, old, 0.05)[0].verdict == "same"


def test_a_judged_figure_that_is_gone_is_worse() -> None:
    """Control: one whose name says no direction may go, and a new one may come."""
    old, new = result(step_s=1.0, mfu=0.4, parameters=3.0), result(step_s=1.0, wake_s=0.1)
    found = [(change.name, change.new, change.verdict) for change in compare(old, new, 0.05)]
    assert found == [("step_s", 1.0, "same"), ("mfu", None, "worse")]


def test_exit_codes(exit_code: Callable[..., tuple[int | str | None, str]]) -> None:
    old, slower = result(step_s=10.0, mfu=0.4), result(step_s=11.0, mfu=0.4)
    assert exit_code(old, old)[0] == 0
    code, text = exit_code(old, slower)
    assert code == 1
    assert "worse" in text
    assert "+10.0%" in text
    assert exit_code(old, slower, "--tolerance", "0.2")[0] == 0
    assert exit_code(slower, old)[0] == 0
    code, text = exit_code(old, result(step_s=10.0))
    assert code == 1
    assert "gone" in text
    assert exit_code(result(step_s=10.0), old)[0] == 0
    assert exit_code(old, result("update", step_s=10.0))[0] == 2
    assert exit_code(old, result(update_s=10.0))[0] == 2
    assert "different machines" in exit_code(old, result(machine="8 x GPU", step_s=10.0))[1]


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UserError, match="different benchmarks: step and update"):
        compare(result(step_s=1.0), result("update", step_s=1.0), 0.05)
    with pytest.raises(UserError, match="no figure in common"):
        compare(result(step_s=1.0), result(update_s=1.0), 0.05)


def test_what_else_is_different_is_said() -> None:
    """Another recipe, and figures that one side lacks. Control: nothing is said of two that differ in figures alone."""
    old, new = result(step_s=1.0, mfu=0.4), result(step_s=2.0, wake_s=0.1)
    old.settings.update(actor={"micro_batch_tokens": 16384}, iterations=5)
    new.settings.update(actor={"micro_batch_tokens": 32768, "lora": None}, iterations=5)
    assert remarks(old, new) == [
        "settings differ: actor.micro_batch_tokens 16384 -> 32768",
        "only in the old result: mfu",
        "only in the new result: wake_s",
    ]
    assert remarks(result(step_s=1.0), result(step_s=9.0)) == []


@pytest.mark.parametrize("machine", ["1 x other GPU", "CPU, 2 cores, x86_64"])
def test_other_kinds_of_machine_are_not_compared(
    exit_code: Callable[..., tuple[int | str | None, str]], machine: str
) -> None:
    """Their figures differ by what they are. Control: another number of the same GPU, which a remark names."""
    assert exit_code(result(step_s=1.0), result(machine=machine, step_s=9.0))[0] == 2
    assert exit_code(result(step_s=1.0), result(machine="2 x GPU", step_s=1.0))[0] == 0
