"""Figures of a load test follow from its requests: rates over the whole test, percentiles of what succeeded."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.base.errors import UserError
from penstock.reports.loadtest import GpuUse, figures, table, write_results


def measured(errors: tuple[str, ...] = ("",) * 9) -> dict[str, Any]:
    """What vLLM says of requests of 0.2, 0.3, ... s with a first token after 0.1 s; failed ones have no tokens."""
    good = sum(not error for error in errors)
    percentiles = {f"p{p}_{name}_ms": 10.0 * p for p in (50, 95, 99) for name in ("ttft", "tpot", "e2el")}
    return percentiles | {
        "duration": 10.0,
        "completed": good,
        "failed": len(errors) - good,
        "request_throughput": good / 10,
        "output_throughput": 5 * good / 10,
        "total_output_tokens": 5 * good,
        "start_times": [100.0 + number for number in range(len(errors))],
        "ttfts": [0.1] * len(errors),
        "itls": [[0.1] * (number + 1) for number in range(len(errors))],
        "output_lens": [0 if error else 5 for error in errors],
        "errors": list(errors),
    }


def test_figures_are_in_seconds_and_failures_by_reason() -> None:
    """Of an exception in a request the last line is the reason; one without a word counts, too."""
    trace = "Traceback (most recent call last):\n  ...\nTimeoutError: no answer\n"
    found = figures(measured(("", trace, trace, "Bad Request", "")), users=2, gpus=[])
    assert (found.requests, found.failures) == (5, 3)
    assert found.failure_reasons == {"TimeoutError: no answer": 2, "Bad Request": 1}
    assert (found.latency_p50, found.latency_p99, found.first_token_p95) == (0.5, 0.99, 0.95)
    assert (found.seconds_per_token_p50, found.tokens_mean, found.tokens_per_s) == (0.5, 5.0, 1.0)
    silent = measured(("", "x"))
    silent["errors"][1] = ""
    assert figures(silent, 2, []).failure_reasons == {"without a reason": 1}


def test_a_test_without_a_success_says_why() -> None:
    """With the commonest failure."""
    with pytest.raises(UserError, match="no request succeeded: Not Found"):
        figures(measured(("Not Found", "Not Found", "Bad Request")), 1, [])


@pytest.mark.parametrize(("used", "verdict"), [(70.0, "(20% kept)"), (90.0, "not kept: lower --gpu-memory")])
def test_results_are_written_and_headroom_is_judged(tmp_path: Path, used: float, verdict: str) -> None:
    """JSON with all figures, a picture, and a table that says whether a fifth of the GPU's memory stayed free."""
    found = figures(measured(), 2, [GpuUse(0, used, 100.0)])
    write_results(found, measured(), {"url": "u"}, tmp_path)
    written = json.loads((tmp_path / "loadtest.json").read_text())
    assert written["latency_p50"] == found.latency_p50
    assert written["gpus"] == [{"gpu": 0, "used_gib": used, "total_gib": 100.0}]
    assert (tmp_path / "loadtest.png").stat().st_size > 1000
    said = StringIO()
    Console(width=160, file=said).print(table(found))
    assert verdict in said.getvalue()
