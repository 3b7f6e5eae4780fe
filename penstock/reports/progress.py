"""A training as the terminal shows it: one live line, or plain lines where no terminal listens, and the last panel.

What counts is an iteration, or a step where nothing is generated.

Why plain lines: a log file, a CI job and the Prefect worker's output get readable text instead of control codes.

Left out: the log of the engines (their files are in the run folder's `logs/`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from penstock.reports.evaluation import how_sampled
from penstock.reports.headline import duration, headlines

if TYPE_CHECKING:
    from rich.console import RenderableType

# The estimate must span several iterations, however long one takes.
_ETA_WINDOW_S = 86_400.0

WIDE = 110  # columns


class TrainingProgress:
    """Context manager: `phase` says what is waited for, `start` begins the iterations or steps, `advance` ends one.

    Args:
        console: where to write; default: standard output.
        every_s: without a terminal, seconds between plain lines (the first and the last are always written).
        tell: gets each phase outside the iterations and each iteration as a line, for those who look on elsewhere.
    """

    def __init__(
        self, console: Console | None = None, every_s: float = 2.0, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._console = console or Console()
        self._every_s, self._tell = every_s, tell
        self._live = self._console.is_terminal
        self._bar = Progress(
            *_columns(), console=self._console, speed_estimate_period=_ETA_WINDOW_S, disable=not self._live
        )
        self._task = self._bar.add_task("starting", total=None, metrics="")
        self._total = self._first = self._done = 0
        self._unit = "iteration"
        self._began_s = time.monotonic()
        self._written_s = -float("inf")
        self._held_back = self._phase = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._held_back:
            self._write(self._held_back)

    def phase(self, text: str, detail: str = "") -> None:
        """Show what is waited for, from now on; as a plain line only outside the iterations, where it is news.

        Outside the iterations the clock shows the seconds of this phase: it starts anew where `text` changes.

        Args:
            detail: how far the phase is.
        """
        shown = f"{text}: {detail}" if detail else text
        outside = self._done == self._total
        if outside and text != self._phase:
            self._bar.columns = _columns()
            self._bar.reset(self._task, total=None, description=shown)
        self._phase = text
        self._bar.update(self._task, description=shown)
        if not outside:
            return
        self._tell(shown)
        if not self._live:
            self._write(shown)

    def start(self, total: int, completed: int = 0, unit: str = "iteration", what: str = "training") -> None:
        """Begin the iterations or steps; `completed` of them were done before this process (a resumed run)."""
        self._total, self._first, self._done, self._unit = total, completed, completed, unit
        self._began_s = time.monotonic()
        self._bar.columns = _columns_with_figures(wide=self._console.width >= WIDE)
        self._bar.reset(self._task, total=total, completed=completed, description=what)

    def advance(self, number: int, metrics: Mapping[str, float], told: bool = True) -> None:
        """Show that an iteration or step (counted from 1) has ended with `metrics`; absent ones are left out.

        Args:
            told: whether those who look on elsewhere hear of it; of many quick steps they hear of some.
        """
        first = self._done == self._first
        self._done, self._phase = number, ""
        where = f"{self._unit} {number}/{self._total}"
        if told:
            self._tell(", ".join([where, *_metric_texts(metrics), *_result_texts(metrics)]))
        text = " ".join(_metric_texts(metrics))
        # 80 columns have no room for the words; a wider terminal and the lines of a log have them.
        shown = text if self._console.width >= WIDE else text.replace("rollout ", "").replace("accuracy ", "")
        self._bar.update(self._task, completed=number, metrics=shown)
        if self._live:
            return
        plain = "  ".join(part for part in (where, text, self._pace()) if part)
        if first or number == self._total or time.monotonic() - self._written_s >= self._every_s:
            self._write(plain)
        else:
            self._held_back = plain

    def _pace(self) -> str:
        elapsed = time.monotonic() - self._began_s
        left = elapsed / max(1, self._done - self._first) * (self._total - self._done)
        return f"{duration(elapsed)} elapsed" + (f"  {duration(left)} left" if left else "")

    def _write(self, text: str) -> None:
        self._held_back = ""
        self._written_s = time.monotonic()
        self._console.print(Text(text), soft_wrap=True)


@contextmanager
def waiting(console: Console, text: str) -> Iterator[None]:
    """Show on a terminal what the block waits for, and for how long; the line goes away when the block ends."""
    with Progress(*_columns(), console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(text, total=None)
        yield


def print_summary(console: Console, summary: Mapping[str, Any], links: Mapping[str, str]) -> None:
    """Print what ends a training: a panel with what it reached, and below it where to look.

    Args:
        links: an address, a path or a command by its label; on a line each, never broken, so that they can be copied.
    """
    console.print(_panel(summary))
    width = max(map(len, links), default=0)
    for label, address in links.items():
        console.print(Text.assemble((f"{label:<{width}}", "dim"), "  ", (address, "cyan")), soft_wrap=True)


def _panel(summary: Mapping[str, Any]) -> RenderableType:
    from rich import box
    from rich.panel import Panel
    from rich.table import Table

    status = str(summary.get("status", "unfinished")).lower()
    colour = {"completed": "green", "finished": "green", "failed": "red", "crashed": "red"}.get(status, "yellow")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for line in headlines(summary):
        note = Text(f"  {line.note}" if line.note else "", {"up": "green", "down": "red", "": "dim"}[line.trend])
        grid.add_row(line.label, Text(line.value, "bold") + note)
    title = Text(f"training {status}", f"bold {colour}")
    return Panel(grid, title=title, border_style=colour, box=box.ROUNDED, expand=False)


def _columns() -> tuple[ProgressColumn, ...]:
    """Before and after the iterations there are no figures: what is waited for has the line for itself."""
    phase = Column(no_wrap=True, overflow="ellipsis")
    return (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=phase),
        TimeElapsedColumn(),
    )


def _columns_with_figures(*, wide: bool) -> tuple[ProgressColumn, ...]:
    """The line fits 80 columns; a wider terminal gets the bar itself, too."""
    phase = Column(width=20 if wide else 12, no_wrap=True, overflow="ellipsis")
    return (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=phase),
        *([BarColumn(bar_width=20)] if wide else []),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}", style="cyan", markup=False),
        TimeElapsedColumn(),
        TextColumn("ETA", style="dim"),
        TimeRemainingColumn(compact=True),
    )


def _metric_texts(metrics: Mapping[str, float]) -> list[str]:
    """Return the figures of an iteration or a step; KL is that to the reference, step KL that of the update, if any."""
    shapes = {"reward/mean": "reward {:.3f}", "actor/kl": "KL {:.2g}", "rollout/tokens_per_s": "rollout {:,.0f} tok/s"}
    if "actor/kl" not in metrics and metrics.get("actor/approx_kl"):  # one step per iteration leaves it at 0
        shapes = {"reward/mean": shapes.pop("reward/mean"), "actor/approx_kl": "step KL {:.2g}", **shapes}
    shapes |= {"loss": "loss {:.3f}", "accuracy": "accuracy {:.0%}", "tokens_per_s": "{:,.0f} tok/s"}
    return [shape.format(metrics[name]) for name, shape in shapes.items() if name in metrics]


def _result_texts(metrics: Mapping[str, float]) -> list[str]:
    """What a line that is read afterwards says besides."""
    how = f" ({how_sampled(metrics)})" if how_sampled(metrics) else ""
    shapes = {"heldout/accuracy": f"held-out accuracy {{:.1%}}{how}", "time/iteration_s": "{:.2f} s"}
    return [shape.format(metrics[name]) for name, shape in shapes.items() if name in metrics]
