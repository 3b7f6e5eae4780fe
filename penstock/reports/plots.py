"""The pictures of a run: one function per figure, one PNG per figure whose metrics exist.

Backgrounds are transparent and text is mid-grey, so that the same file reads well on a light and on a dark page.
Figures are built without pyplot: it keeps global state, and a report may be written from any thread.

Left out: interactive charts (MLflow has them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.reports.evaluation import how_sampled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#7d8590"
COLOURS = ("#2f81d6", "#e5812b", "#3aa675", "#d6506b", "#8d6cc9", "#24a3ad", "#b58a2a", "#c765ad", "#7a8aa0", "#6a9a2d")
RASTER_DPI = 160
STYLE: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.linewidth": 0.7,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.xmargin": 0.02,
    "grid.color": GREY,
    "grid.alpha": 0.22,
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.7,
    "lines.markersize": 4,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.4,
}

_SMOOTH_ABOVE = 120
_BARS = 150


def metrics_frame(records: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return records `{"iteration": 12, "metrics": {...}}` as one row per iteration and one column per metric.

    Values that are not finite are NaN. Of two records of an iteration (it was redone after a crash) the later counts.
    """
    import numpy as np
    import pandas as pd

    rows = {record["iteration"]: record["metrics"] for record in records}
    frame = pd.DataFrame.from_dict(rows, orient="index", dtype="float64").sort_index()
    return frame.replace([np.inf, -np.inf], np.nan).dropna(axis=1, how="all")


def task_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns `time/<task>_s` as `<task>`, seconds, the longest task first, from iteration 1 on."""
    names = [name for name in frame.columns if name.startswith("time/") and name != "time/iteration_s"]
    times = frame.loc[frame.index > 0, names].dropna(axis=1, how="all")
    times = times.rename(columns=lambda name: name.removeprefix("time/").removesuffix("_s"))
    return times[times.sum().sort_values(ascending=False).index]


def plot_run(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write the figures whose metrics `records` hold into `folder`; return their paths, in reading order."""
    frame = metrics_frame(records)
    figures: dict[str, Callable[[pd.DataFrame], Figure | None]] = {
        "loss": loss_figure,
        "preferences": preferences_figure,
        "optimizer": optimizer_figure,
        "reward": reward_figure,
        "policy": policy_figure,
        "critic": critic_figure,
        "time": time_figure,
        "throughput": throughput_figure,
    }
    paths = []
    for name, plot in figures.items():
        if path := save(plot, frame, folder / f"{name}.png"):
            paths.append(path)
    return paths


def save(plot: Callable[[Any], Figure | None], data: Any, path: Path) -> Path | None:
    """Plot in this module's style and write the PNG; nothing is written when there is nothing to plot."""
    from matplotlib import rc_context

    with rc_context(STYLE):  # type: ignore[arg-type]
        figure = plot(data)
        if figure is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=RASTER_DPI)
    return path


def reward_figure(frame: pd.DataFrame) -> Figure | None:
    """Mean reward with a band of one standard deviation (min to max without it); held-out accuracy and its interval."""
    has_reward = "reward/mean" in frame
    has_accuracy = "heldout/accuracy" in frame and "accuracy" not in frame  # of preferences, which have a figure
    if not has_reward and not has_accuracy:
        return None
    rewards = [name for name in ("reward/mean", "reward/min", "reward/max") if name in frame]
    within = frame[rewards].min().min() >= 0 and frame[rewards].max().max() <= 1
    together = has_reward and has_accuracy and within
    panels = canvas(1 if together or not (has_reward and has_accuracy) else 2, height=3.3)
    if has_reward:
        _reward_band(panels[0], frame)
        line(panels[0], frame["reward/mean"], COLOURS[0], "mean reward")
    if has_accuracy:
        accuracy = frame["heldout/accuracy"].dropna()
        how = how_sampled(frame.loc[accuracy.index[-1]].dropna())
        label = f"held-out accuracy, {how}" if how else "held-out accuracy"
        panels[-1].plot(accuracy.index, accuracy, "o-", color=COLOURS[1], linewidth=1.1, label=label)
        if {"heldout/accuracy/low", "heldout/accuracy/high"} <= set(frame):
            low, high = (frame.loc[accuracy.index, f"heldout/accuracy/{end}"] for end in ("low", "high"))
            panels[-1].vlines(accuracy.index, low, high, colors=COLOURS[1], linewidth=1.1)
        panels[-1].set_ylim(-0.03, 1.03)
    for panel in panels:
        panel.legend(loc="best")
    panels[0].set_title("Reward and held-out accuracy" if together else "Reward" if has_reward else "Held-out accuracy")
    if len(panels) == 2:
        panels[1].set_title("Held-out accuracy")
    return _figure(panels)


def _reward_band(axes: Axes, frame: pd.DataFrame) -> None:
    mean = frame["reward/mean"]
    low, high = frame.get("reward/min"), frame.get("reward/max")
    if "reward/std" in frame:
        # A band beyond the rewards that occurred would mislead.
        low, high = (mean - frame["reward/std"]).clip(lower=low), (mean + frame["reward/std"]).clip(upper=high)
    if low is None or high is None:
        return
    label = "± 1 standard deviation" if "reward/std" in frame else "min to max"
    axes.fill_between(frame.index, low, high, color=COLOURS[0], alpha=0.14, linewidth=0, label=label)


def policy_figure(frame: pd.DataFrame) -> Figure | None:
    """The actor's health: KL, entropy, clip fraction, gradient norm.

    With one step per iteration the KL of the update is 0 throughout, and is left out.
    """
    if "actor/approx_kl" in frame and not frame["actor/approx_kl"].any():
        frame = frame.drop(columns="actor/approx_kl")
    return _panels(
        frame,
        {
            "KL, nats per token": {"actor/kl": "to the reference", "actor/approx_kl": "of the update"},
            "Entropy, nats per token": {"actor/entropy": "entropy"},
            "Clipped share of tokens": {"actor/clip_fraction": "clipped"},
            "Gradient norm": {"actor/grad_norm": "norm"},
            "Rollout's and trainer's probabilities": {"mismatch/probability_difference_mean": "mean difference"},
        },
    )


def critic_figure(frame: pd.DataFrame) -> Figure | None:
    """The critic's health: loss, explained variance, clip fraction, gradient norm."""
    return _panels(
        frame,
        {
            "Value loss": {"critic/loss": "loss"},
            "Explained variance": {"critic/explained_variance": "explained"},
            "Clipped share of values": {"critic/clip_fraction": "clipped"},
            "Critic's gradient norm": {"critic/grad_norm": "norm"},
        },
    )


def loss_figure(frame: pd.DataFrame) -> Figure | None:
    """The loss of every step of an offline training, and that of held-out rows before and after."""
    if "loss" not in frame:
        return None
    (axes,) = canvas(1, height=3.3, unit="step")
    line(axes, frame["loss"], COLOURS[0], "loss")
    if "heldout/loss" in frame:
        heldout = frame["heldout/loss"].dropna()
        axes.plot(heldout.index, heldout, "o--", color=COLOURS[1], linewidth=1.1, label="held-out loss")
    axes.set_title("Loss")
    axes.legend(loc="best")
    return _figure([axes])


def preferences_figure(frame: pd.DataFrame) -> Figure | None:
    """How preferences are told apart: accuracy, margin, and the log-probs or scores of both sides."""
    return _panels(
        frame,
        {
            "Accuracy, share of pairs": {"accuracy": "accuracy"},
            "Margin": {"margin": "margin"},
            "Log-probs": {"logprobs_chosen": "preferred", "logprobs_rejected": "the other"},
            "Scores": {"score_chosen": "preferred", "score_rejected": "the other"},
        },
        unit="step",
    )


def optimizer_figure(frame: pd.DataFrame) -> Figure | None:
    """The optimizer of an offline training: gradient norm, learning rate, speed."""
    return _panels(
        frame,
        {
            "Gradient norm": {"grad_norm": "norm"},
            "Learning rate": {"learning_rate": "rate"},
            "Tokens per second": {"tokens_per_s": "speed"},
        },
        unit="step",
    )


def throughput_figure(frame: pd.DataFrame) -> Figure | None:
    """Rollout speed and response length, and how well the GPUs, and of several ranks their time, are used."""
    return _panels(
        frame,
        {
            "Rollout, tokens per second": {"rollout/tokens_per_s": "speed"},
            "Response length, tokens": {
                "rollout/response_length_max": "longest",
                "rollout/response_length_mean": "mean",
            },
            "Prompts that wait": {"rollout/deferred": "prompts"},
            "Tokens, share": {"rollout/unused_share": "not used", "rollout/off_policy_share": "of older policies"},
            "Age of tokens, updates of the policy": {
                "rollout/staleness_max": "oldest",
                "rollout/staleness_mean": "mean",
            },
            "Model FLOPs, share of the GPU's peak": {
                "actor/mfu": "actor's update",
                "reference/mfu": "reference",
            },
            "GPU and collectives, share of the time": {
                "gpu/utilisation": "any kernel runs",
                "actor/communication_share": "collectives of the update",
            },
            "Parallel efficiency of the ranks, share": {"ranks/parallel_efficiency": "work of the ranks' time"},
            "GPU memory, GiB": {"gpu/memory_gib": "in use", "memory/gpu_gib": "allocated by torch"},
        },
    )


def time_figure(frame: pd.DataFrame) -> Figure | None:
    """Seconds per task, stacked by iteration, under the line of the whole iteration."""
    times = task_times(frame).dropna(how="all").fillna(0.0)
    if times.empty or not len(times.columns):
        return None
    import numpy as np

    # A bar thinner than a pixel is noise: long runs are plotted as means over `width` iterations.
    width = -(-len(times) // _BARS)
    times = times.groupby((times.index - 1) // width * width + 1).mean()
    (axes,) = canvas(1, height=3.3)
    bottom = np.zeros(len(times) + 1)
    edges = [*(times.index - 0.5), times.index[-1] + width - 0.5]
    times = _longest(times, len(COLOURS))
    for number, (task, seconds) in enumerate(times.items()):
        top = bottom + np.append(seconds, seconds.iloc[-1])
        axes.fill_between(
            edges,
            bottom,
            top,
            step="post",
            linewidth=0,
            color=COLOURS[number],
            alpha=0.85,
            label=str(task).replace("_", " "),
        )
        bottom = top
    if "time/iteration_s" in frame:
        whole = frame.loc[frame.index > 0, "time/iteration_s"].dropna()
        whole = whole.groupby((whole.index - 1) // width * width + 1).mean()
        axes.step(whole.index + (width - 1) / 2, whole, where="mid", color=GREY, linewidth=1.0, label="iteration")
    axes.set_ylim(bottom=0)
    axes.set_title("Seconds per iteration by task" + (f", means of {width}" if width > 1 else ""))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.03), reverse=True)
    return _figure([axes])


def _longest(times: pd.DataFrame, count: int) -> pd.DataFrame:
    """Return at most `count` columns: the first ones, and the sum of the others, so that no two have one colour."""
    if len(times.columns) <= count:
        return times
    kept = times.iloc[:, : count - 1].copy()
    kept["shorter tasks"] = times.iloc[:, count - 1 :].sum(axis=1)
    return kept


def canvas(panels: int, height: float, unit: str = "iteration") -> list[Axes]:
    """Return the axes of an 8.8 inch wide figure: one panel across the page, or two per row of `height` inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    columns = min(panels, 2)
    rows = -(-panels // columns)
    spacing = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.1, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=(8.8, height * rows), layout=spacing)
    axes: list[Axes] = [figure.add_subplot(rows, columns, number + 1) for number in range(panels)]
    for panel in axes:
        panel.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        panel.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        panel.set_xlabel(unit)
    return axes


def line(axes: Axes, series: pd.Series[float], colour: str, label: str) -> None:
    """Draw one curve; a long one as its rolling mean over the faint raw values."""
    series = series.dropna()
    if len(series) <= _SMOOTH_ABOVE:
        axes.plot(series.index, series, "o" if len(series) == 1 else "-", color=colour, label=label)
        return
    axes.plot(series.index, series, color=colour, alpha=0.25, linewidth=0.8)
    window = max(5, len(series) // 40)
    smooth = series.rolling(window, center=True, min_periods=1).mean()
    axes.plot(series.index, smooth, color=colour, label=f"{label} (rolling mean of {window})")


def _panels(frame: pd.DataFrame, panels: Mapping[str, Mapping[str, str]], unit: str = "iteration") -> Figure | None:
    """One small panel per title with the curves of its metrics (name to label) that exist."""
    found = {title: [name for name in names if name in frame] for title, names in panels.items()}
    found = {title: names for title, names in found.items() if names}
    if not found:
        return None
    axes = canvas(len(found), height=2.5, unit=unit)
    for number, (panel, (title, names)) in enumerate(zip(axes, found.items(), strict=True)):
        for shift, name in enumerate(names):
            line(panel, frame[name], COLOURS[(number + 4 * shift) % len(COLOURS)], panels[title][name])
        if len(names) == 1 and len(frame) <= _SMOOTH_ABOVE:
            panel.set_title(title)
            continue
        # Between title and curves: a small panel has no place that its curves leave free for sure.
        columns = 1 if len(frame) > _SMOOTH_ABOVE else len(names)
        panel.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderpad=0.1, borderaxespad=0.2)
        panel.set_title(title, pad=STYLE["axes.titlepad"] + 14 * -(-len(names) // columns))
    return _figure(axes)


def _figure(axes: Sequence[Axes]) -> Figure:
    figure: Figure = axes[0].get_figure()  # type: ignore[assignment]
    return figure
