"""Pictures of results: a step by stage beside the peers' steps, and throughput over the number of GPUs.

Drawn in the reports' style: no background, mid-grey text, so that one file suits a light and a dark page.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import BenchResult, read_result
from penstock.reports.plots import COLOURS, GREY, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGES = {
    "rollout_s": "rollout",
    "old_logprobs_s": "old log-probs",
    "reference_s": "reference log-probs",
    "values_s": "values",
    "update_s": "actor update",
    "critic_update_s": "critic update",
    "reward_s": "reward",
    "advantage_s": "advantage",
    "reshard_s": "reshard",
}
REST, WHOLE = "everything else", "not divided"


def plot(folder: Path, out: Path | None) -> list[Path]:
    """Draw every `step` and `scaling` result below a folder as SVG; return the files.

    Args:
        out: folder of the pictures; None: beside each result.

    Raises:
        UserError: a file is no result, or there is nothing to plot.
    """
    plotted = []
    for path in sorted(folder.rglob("*.json")):
        result = read_result(path)
        if figure := {"step": step_figure, "scaling": scaling_figure}.get(result.bench):
            plotted.append(save(figure, result, (out or path.parent) / f"{path.stem}.svg"))
    if not plotted:
        raise UserError(f"{folder} holds no result of 'bench step' or 'bench scaling'", "measure with --out FOLDER/...")
    return [path for path in plotted if path is not None]


def parts(figures: Mapping[str, float]) -> dict[str, float]:
    """Return a step's seconds by stage, the rest last; tasks that ran side by side leave no negative rest."""
    found = {label: figures[name] for name, label in STAGES.items() if figures.get(name)}
    if not found:
        return {WHOLE: figures["step_s"]}
    return {**found, REST: max(0.0, figures["step_s"] - sum(found.values()))}


def step_figure(result: BenchResult) -> Figure:
    """One bar per system, stacked by stage where the system reports stages."""
    systems = {"Penstock": result.figures, **{n: f for n, f in result.peers.items() if "step_s" in f}}
    named = {label for figures in systems.values() for label in parts(figures)}
    axes = _axes(height=max(0.9 + 0.55 * len(systems), 0.5 + 0.22 * len(named)))  # the bars', or the legend's
    colours = dict(zip([*STAGES.values(), WHOLE, REST], [*COLOURS, GREY], strict=True))
    bars = {}
    for row, figures in enumerate(systems.values()):
        left = 0.0
        for label, seconds in parts(figures).items():
            bars[label] = axes.barh(row, seconds, left=left, height=0.6, color=colours[label], alpha=0.85)
            left += seconds
        axes.text(left, row, f"  {figures['step_s']:.1f} s", va="center", color=GREY)
    axes.set_yticks(range(len(systems)), list(systems))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.margins(x=0.1)
    axes.set_xlabel("seconds")
    axes.set_title(f"One iteration on {result.machine}")
    plotted = [label for label in colours if label in bars]
    axes.legend([bars[label] for label in plotted], plotted, loc="upper left", bbox_to_anchor=(1.0, 1.03))
    return _figure(axes)


def scaling_figure(result: BenchResult) -> Figure:
    """Throughput of all GPUs together over their number, beside what perfect scaling would give."""
    gpus = [row["gpus"] for row in result.details]
    relative = [row["gpus"] / gpus[0] * row["scaling_efficiency"] for row in result.details]
    axes = _axes(height=3.0)
    axes.plot(gpus, [count / gpus[0] for count in gpus], "--", color=GREY, linewidth=1.0, label="perfect")
    axes.plot(gpus, relative, "o-", color=COLOURS[0], label=f"bench {result.settings['what']}")
    for count, value, row in zip(gpus, relative, result.details, strict=True):
        axes.annotate(f"{row['scaling_efficiency']:.0%}", (count, value), (6, -12), textcoords="offset points")
    axes.set_xticks(gpus)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_title(f"Throughput over {gpus[0]} GPU{'s' if gpus[0] > 1 else ''}, the same work per GPU")
    axes.legend(loc="upper left")
    return _figure(axes)


def _axes(height: float) -> Axes:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(8.8, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.1))
    axes: Axes = figure.add_subplot()
    return axes


def _figure(axes: Axes) -> Figure:
    figure: Figure = axes.get_figure()  # type: ignore[assignment]
    return figure
