"""What a load test found: figures from a line per request, as a table, as JSON and as a picture.

Rates are of the requests that succeeded, over the time from the first one's start to the last one's end; what was under
way when the test ended is not in them. Left out: making the load (penstock/cli/serving/loadtest.py).
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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the requests of a test; the last line may be cut where users were stopped."""
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def figures(lines: Sequence[Mapping[str, Any]], users: int, gpus: Sequence[GpuUse]) -> LoadFigures:
    """Return the figures of a test.

    Raises:
        UserError: no request succeeded.
    """
    import numpy as np

    good = [line for line in lines if not line["failure"]]
    reasons = Counter(str(line["failure"]) for line in lines if line["failure"])
    if not good:
        said = reasons.most_common(1)[0][0] if reasons else "none was answered in time"
        raise UserError(f"no request succeeded: {said}", "look at the server's messages; test longer if it is slow")
    begin, end = min(line["begin"] for line in lines), max(line["end"] for line in lines)
    latency = np.array([line["end"] - line["begin"] for line in good])
    first = np.array([line["first"] - line["begin"] for line in good])
    tokens = np.array([line["tokens"] for line in good])
    several = tokens > 1
    pace = (latency - first)[several] / (tokens[several] - 1)
    p50, p95, p99 = (float(value) for value in np.percentile(latency, [50, 95, 99]))
    first50, first95, first99 = (float(value) for value in np.percentile(first, [50, 95, 99]))
    return LoadFigures(
        users=users,
        seconds=end - begin,
        requests=len(lines),
        failures=len(lines) - len(good),
        failure_reasons=dict(reasons),
        requests_per_s=len(good) / (end - begin),
        tokens_per_s=float(tokens.sum()) / (end - begin),
        tokens_mean=float(tokens.mean()),
        latency_p50=p50,
        latency_p95=p95,
        latency_p99=p99,
        first_token_p50=first50,
        first_token_p95=first95,
        first_token_p99=first99,
        seconds_per_token_p50=float(np.median(pace)) if len(pace) else 0.0,
        gpus=tuple(gpus),
    )


def write_results(found: LoadFigures, lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], to: Path) -> None:
    """Write `loadtest.json` (figures, and `facts` about the test) and `loadtest.png` into a folder."""
    write_text(to / "loadtest.json", json.dumps({**facts, **asdict(found)}, indent=2) + "\n")
    save(_figure, [line for line in lines if not line["failure"]], to / "loadtest.png")


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


def _figure(lines: Sequence[Mapping[str, Any]]) -> Figure | None:
    """How long requests and first tokens took, and tokens per second over the test."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    latency, pace = canvas(2, height=3.0)
    kinds = {"first token": "first", "whole response": "end"}
    for colour, (label, key) in zip(COLOURS, kinds.items(), strict=False):
        seconds = np.sort([line[key] - line["begin"] for line in lines])
        latency.step(seconds, np.arange(1, len(seconds) + 1) / len(seconds), where="post", color=colour, label=label)
    latency.set_xlabel("seconds")
    latency.xaxis.set_major_locator(MaxNLocator(nbins=8))
    latency.set_title("Share of requests answered within")
    latency.legend(loc="best")
    begin = min(line["begin"] for line in lines)
    ends = np.array([line["end"] - begin for line in lines])
    whole = np.arange(max(np.floor(ends.max()), 1) + 1)  # a second cut at the end would look like a drop
    sums, _ = np.histogram(ends, bins=whole, weights=[line["tokens"] for line in lines])
    pace.stairs(sums, whole, color=COLOURS[2], linewidth=1.7, baseline=None)
    pace.set_ylim(bottom=0)
    pace.set_xlabel("seconds of the test")
    pace.set_title("Tokens of responses that ended, per second")
    figure: Figure = latency.get_figure()  # type: ignore[assignment]
    return figure
