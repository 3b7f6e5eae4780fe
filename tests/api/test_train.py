"""`penstock.train` says a mistake before anything starts, as the command does."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.base.errors import UserError
from tests.processes import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, with the variables of this process as they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.api.training.quiet_libraries", lambda: None)


@pytest.mark.parametrize(
    ("arguments", "named", "said"),
    [
        ((), {}, "no recipe given"),
        ((QUICKSTART, "iteration=3"), {}, "did you mean 'iterations'"),
        (({"iterations": 0},), {}, "the recipe: one setting is wrong\n.*iterations: must be"),
        (
            (
                QUICKSTART,
                "data={train: absent.jsonl, heldout: absent.jsonl, arithmetic: null, response: null}",
                "sft=null",
            ),
            {},
            "absent.jsonl",
        ),
        ((QUICKSTART,), {"resume": "there"}, "remove recipe and run_folder"),
        ((), {"resume": "there"}, "there"),
        ((QUICKSTART,), {"dataflow": lambda: None}, "called with the iteration alone"),
    ],
)
def test_a_mistake_is_said_and_nothing_is_left(
    arguments: tuple[Any, ...], named: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"(?s){said}"):
        penstock.train(*arguments, **named)
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_trains_when_it_is_imported_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker imports the script that has started it; Python marks its process meanwhile."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UserError, match="if __name__ == '__main__'"):
        penstock.train(QUICKSTART)


def test_a_run_that_is_not_there_yet_says_so(tmp_path: Path) -> None:
    run = penstock.Run(tmp_path)
    assert run.metrics.empty
    with pytest.raises(UserError, match="no summary yet"):
        _ = run.summary
    with pytest.raises(UserError, match="no experience of iteration 3"):
        run.experience(3)


def test_importing_penstock_brings_nothing_else() -> None:
    """What it offers is loaded when it is named. Control: naming it loads it."""
    code = (
        "import sys, penstock; print('penstock.flows.train' in sys.modules, 'pydantic' in sys.modules, *dir(penstock))"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.startswith("False False ")
    assert {"Iteration", "Run", "UserError", "log", "train"} <= set(said.split())
    assert penstock.Run.__module__ == "penstock.api.run"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = penstock.trian  # type: ignore[attr-defined]
