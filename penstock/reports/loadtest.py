"""What vLLM's load test found: its figures in seconds, as a table, as JSON and as a picture.

Rates and percentiles are vLLM's, of the requests that succeeded. Left out: making the load
(penstock/cli/serving/loadtest.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.errors import UserError
from penstock.base.files import write_text
from penstock.reports.plots import COLOURS, canvas, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

REASON_CHARACTERS = 200
HEADROOM_KEPT = 0.2  # share of a GPU's memory that should stay free under load


@dataclass(frozen=True)
class GpuUse:
    """Most memory in use on a GPU during the test, GiB, of how much it has."""

    gpu: int
    used_gib: float
    total_gib: float

    @property
    def headroom(self) -> float:
        """Share of the memory that stayed free."""
        return 1.0 - self.used_gib / self.total_gib


@dataclass(frozen=True)
class LoadFigures:
    """Seconds unless the name says otherwise. Percentiles are of requests that succeeded."""

    users: int
    seconds: float
    requests: int
    failures: int
    failure_reasons: dict[str, int]
    requests_per_s: float
    tokens_per_s: float
    tokens_mean: float
    latency_p50: float
    latency_p95: float
    latency_p99: float
    first_token_p50: float
    first_token_p95: float
    first_token_p99: float
    seconds_per_token_p50: float
    gpus: tuple[GpuUse, ...]


def figures(measured: Mapping[str, Any], users: int, gpus: Sequence[GpuUse]) -> LoadFigures:
    """Return the figures of a test from what vLLM measured.

    Raises:
        UserError: no request succeeded.
    """
    outcomes = zip(measured["output_lens"], measured["errors"], strict=True)
    reasons = Counter(_reason(error) for tokens, error in outcomes if not tokens)
    if not measured["completed"]:
        said = reasons.most_common(1)[0][0] if reasons else "none was answered"
        raise UserError(f"no request succeeded: {said}", "look at the server's messages")

    def seconds(figure: str) -> float:
        return float(measured[f"{figure}_ms"]) / 1000

    return LoadFigures(
        users=users,
        seconds=measured["duration"],
        requests=measured["completed"] + measured["failed"],
        failures=measured["failed"],
        failure_reasons=dict(reasons),
        requests_per_s=measured["request_throughput"],
        tokens_per_s=measured["output_throughput"],
        tokens_mean=measured["total_output_tokens"] / measured["completed"],
        latency_p50=seconds("p50_e2el"),
        latency_p95=seconds("p95_e2el"),
        latency_p99=seconds("p99_e2el"),
        first_token_p50=seconds("p50_ttft"),
        first_token_p95=seconds("p95_ttft"),
        first_token_p99=seconds("p99_ttft"),
        seconds_per_token_p50=seconds("p50_tpot"),
        gpus=tuple(gpus),
    )


def _reason(error: str) -> str:
    """Return the last line of what may be a traceback."""
    return (error.strip().splitlines() or ["without a reason"])[-1][:REASON_CHARACTERS]


def write_results(found: LoadFigures, measured: Mapping[str, Any], facts: Mapping[str, Any], to: Path) -> None:
    """Write `loadtest.json` (figures, and `facts` about the test) and `loadtest.png` into a folder."""
    write_text(to / "loadtest.json", json.dumps({**facts, **asdict(found)}, indent=2) + "\n")
    save(_figure, measured, to / "loadtest.png")


def table(found: LoadFigures) -> Table:
    """Return the figures for a terminal."""
    from rich.table import Table

    grid = Table("figure", "value", title=f"{found.users} users, {found.seconds:.1f} s")
    grid.add_row("requests", f"{found.requests:,}, of which {found.failures:,} failed")
    grid.add_row("requests per second", f"{found.requests_per_s:.2f}")
    grid.add_row("response tokens per second", f"{found.tokens_per_s:,.1f} (mean {found.tokens_mean:.1f} a request)")
    grid.add_row("latency p50, p95, p99", _ms(found.latency_p50, found.latency_p95, found.latency_p99))
    grid.add_row("first token p50, p95, p99", _ms(found.first_token_p50, found.first_token_p95, found.first_token_p99))
    grid.add_row("time per further token, p50", _ms(found.seconds_per_token_p50))
    for use in found.gpus:
        verdict = "kept" if use.headroom >= HEADROOM_KEPT else "not kept: lower --gpu-memory of penstock serve"
        memory = f"{use.used_gib:.1f} of {use.total_gib:.1f} GiB, {use.headroom:.0%} free"
        grid.add_row(f"GPU {use.gpu} memory", f"{memory} ({HEADROOM_KEPT:.0%} {verdict})")
    for reason, count in found.failure_reasons.items():
        grid.add_row("failure", f"{count} x {reason}")
    return grid


def _ms(*seconds: float) -> str:
    return ", ".join(f"{1000 * value:,.1f} ms" for value in seconds)


def _figure(measured: Mapping[str, Any]) -> Figure | None:
    """How long requests and first tokens took, and tokens per second over the test."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    good = np.flatnonzero(measured["output_lens"])
    first, begin, tokens = (np.array(measured[key])[good] for key in ("ttfts", "start_times", "output_lens"))
    whole_response = first + [sum(measured["itls"][number]) for number in good]
    latency, pace = canvas(2, height=3.0)
    kinds = {"first token": first, "whole response": whole_response}
    for colour, (label, times) in zip(COLOURS, kinds.items(), strict=False):
        seconds = np.sort(times)
        latency.step(seconds, np.arange(1, len(seconds) + 1) / len(seconds), where="post", color=colour, label=label)
    latency.set_xlabel("seconds")
    latency.xaxis.set_major_locator(MaxNLocator(nbins=8))
    latency.set_title("Share of requests answered within")
    latency.legend(loc="best")
    ends = begin + whole_response - begin.min()
    whole = np.arange(max(np.floor(ends.max()), 1) + 1)  # a second cut at the end would look like a drop
    sums, _ = np.histogram(ends, bins=whole, weights=tokens)
    pace.stairs(sums, whole, color=COLOURS[2], linewidth=1.7, baseline=None)
    pace.set_ylim(bottom=0)
    pace.set_xlabel("seconds of the test")
    pace.set_title("Tokens of responses that ended, per second")
    figure: Figure = latency.get_figure()  # type: ignore[assignment]
    return figure
