"""Figures of a load test follow from its requests: rates over the whole test, percentiles of what succeeded."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.base.errors import UserError
from penstock.reports.loadtest import GpuUse, figures, read_lines, table, write_results


def request(begin: float, first: float, end: float, tokens: int = 5, failure: str | None = None) -> dict[str, Any]:
    """A line as a user writes it; `first` and `end` are seconds after `begin`."""
    return {"begin": begin, "first": begin + first, "end": begin + end, "tokens": tokens, "failure": failure}


LINES = [request(100 + number, 0.1, 0.1 * (number + 2)) for number in range(9)]


def test_rates_and_percentiles_are_of_requests_that_succeeded() -> None:
    """Nine requests of 0.2 to 1.0 s within 10 s; a failed one ends the test and counts as nothing else."""
    failed = request(109, 0.5, 1.0, tokens=100, failure="status 500")
    found = figures([*LINES, failed], users=2, gpus=[])
    assert (found.requests, found.failures, found.failure_reasons) == (10, 1, {"status 500": 1})
    assert found.seconds == pytest.approx(10)
    assert found.requests_per_s == pytest.approx(0.9)
    assert found.tokens_per_s == pytest.approx(4.5)
    assert found.latency_p50 == pytest.approx(0.6)
    assert found.latency_p99 == pytest.approx(0.992)
    assert found.first_token_p95 == pytest.approx(0.1)
    assert found.seconds_per_token_p50 == pytest.approx(0.5 / 4)


def test_a_test_without_a_success_says_why() -> None:
    """With the commonest failure; also when nothing came back at all."""
    with pytest.raises(UserError, match="status 404"):
        figures([request(0, 0, 1, 0, "status 404")], 1, [])
    with pytest.raises(UserError, match="none was answered in time"):
        figures([], 1, [])


@pytest.mark.parametrize(("used", "verdict"), [(70.0, "(20% kept)"), (90.0, "not kept: lower --gpu-memory")])
def test_results_are_written_and_headroom_is_judged(tmp_path: Path, used: float, verdict: str) -> None:
    """JSON with all figures, a picture, and a table that says whether a fifth of the GPU's memory stayed free."""
    found = figures(LINES, 2, [GpuUse(0, used, 100.0)])
    write_results(found, LINES, {"url": "u"}, tmp_path)
    written = json.loads((tmp_path / "loadtest.json").read_text())
    assert written["latency_p50"] == found.latency_p50
    assert written["gpus"] == [{"gpu": 0, "used_gib": used, "total_gib": 100.0}]
    assert (tmp_path / "loadtest.png").stat().st_size > 1000
    said = StringIO()
    Console(width=160, file=said).print(table(found))
    assert verdict in said.getvalue()


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    """Users are stopped in the middle of what they do."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES[:2]) + '{"begin": 1')
    assert read_lines(path) == LINES[:2]
