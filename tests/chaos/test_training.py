"""How far a training is: each look at its figures reads what is new, also where a resume has replaced them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.chaos import training
from penstock.chaos.training import LastIteration
from penstock.state.digests import unsealed
from penstock.state.run_folder import RunFolder, append_metrics, truncate_metrics


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every line that was read."""
    lines: list[str] = []

    def reading(text: str) -> Mapping[str, Any]:
        lines.append(text)
        return unsealed(text)

    monkeypatch.setattr(training, "unsealed", reading)
    return lines


def test_the_last_iteration_is_known_and_no_line_is_read_twice(tmp_path: Path, read: list[str]) -> None:
    """Control: there is no file yet, and after each line the answer is another."""
    run, last = RunFolder(tmp_path), LastIteration(tmp_path / "metrics.jsonl")
    assert last.look() == -1
    for number in range(3):
        append_metrics(run, number, {"actor/loss": 0.5})
        assert [last.look(), last.look()] == [number, number]
    assert len(read) == 3


def test_a_line_counts_once_it_is_whole(tmp_path: Path, read: list[str]) -> None:
    """Half of a line says nothing, and is read again with its other half; a damaged one says nothing at all."""
    run, last = RunFolder(tmp_path), LastIteration(tmp_path / "metrics.jsonl")
    append_metrics(run, 1, {"actor/loss": 0.5})
    append_metrics(run, 2, {"actor/loss": 0.5})
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(whole[:-10])
    assert last.look() == 1
    with run.metrics.open("ab") as stream:
        stream.write(whole[-10:] + b'{"iteration": 9}\n')
    assert last.look() == 2


def test_what_a_resume_has_dropped_is_forgotten(tmp_path: Path) -> None:
    """Likewise lines that a full disk did not take, and a file that was set aside."""
    run, last = RunFolder(tmp_path), LastIteration(tmp_path / "metrics.jsonl")
    for number in range(4):
        append_metrics(run, number, {"actor/loss": 0.5})
    assert last.look() == 3
    truncate_metrics(run, 1)
    assert last.look() == 1
    with run.metrics.open("r+b") as stream:
        stream.truncate(run.metrics.stat().st_size // 2)
    assert last.look() == 0
    run.metrics.unlink()
    assert last.look() == -1
