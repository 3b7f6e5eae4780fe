"""Curves of runs side by side: each run's, or of each group its mean with the interval over its seeds.

Left out: charts of any other metric (MLflow's own comparison has them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.reports.comparing.runs import CURVES
from penstock.reports.comparing.statistics import interval
from penstock.reports.comparing.tables import Comparison
from penstock.reports.plots import COLOURS, canvas, line

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def comparison_figure(comparison: Comparison) -> Figure | None:
    """Overlay curves, one panel per metric that any run recorded."""
    curves = comparison.curves
    metrics = [metric for metric in CURVES if (curves["metric"] == metric).any()]
    if not metrics:
        return None
    axes = canvas(len(metrics), height=3.4)
    titles = {group.label: group.title for group in comparison.groups}
    by = "group" if comparison.over_seeds else "run"
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(curves[by].unique())}
    for panel, metric in zip(axes, metrics, strict=True):
        panel.set_title(CURVES[metric] + (" (mean over seeds)" if comparison.over_seeds else ""))
        for name, rows in curves[curves["metric"] == metric].groupby(by, sort=False):
            if comparison.over_seeds:
                _band(panel, rows, colours[name])
            mean = rows.groupby("iteration")["value"].mean()
            line(panel, mean, colours[name], titles.get(str(name), str(name)) if by == "group" else str(name))
    figure: Figure = axes[0].get_figure()  # type: ignore[assignment]
    pairs = [pair for panel in axes for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    longest = max(map(len, handles))
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(len(handles), max(1, 110 // longest), 3),
    )
    return figure


def _band(panel: Axes, rows: pd.DataFrame, colour: str) -> None:
    """Draw the interval of the mean where several runs have a value."""
    values = {step: rows.loc[rows["iteration"] == step, "value"].tolist() for step in sorted(set(rows["iteration"]))}
    ends = {step: interval(several) for step, several in values.items() if len(several) > 1}
    if ends:
        low, high = zip(*ends.values(), strict=True)
        panel.fill_between(list(ends), low, high, color=colour, alpha=0.16, linewidth=0)
