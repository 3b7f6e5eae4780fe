"""Invariants of the pictures: real PNG files, exactly those whose metrics exist, whatever the numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from penstock.reports.plots import (
    metrics_frame,
    plot_run,
    policy_figure,
    reward_figure,
    task_times,
    throughput_figure,
    time_figure,
)


def _records(count: int, **extra: float) -> list[dict[str, Any]]:
    before: dict[str, Any] = {"iteration": 0, "metrics": {"heldout/accuracy": 0.2, "time/evaluate_s": 9.0}}
    return [before] + [
        {"iteration": number, "metrics": {"reward/mean": 0.5, "time/rollout_s": 2.0, "time/iteration_s": 3.0, **extra}}
        for number in range(1, count + 1)
    ]


def _is_drawn(path: Path) -> bool:
    """Whether the PNG can be read and shows something: the pixels differ."""
    pixels = imread(path)
    return bool(pixels.shape[0] > 100 and pixels[..., 3].max() > pixels[..., 3].min())


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ({}, ["reward", "time"]),
        ({"actor/entropy": 1.0}, ["reward", "policy", "time"]),
        ({"actor/kl": 0.1, "critic/loss": 1.0, "rollout/tokens_per_s": 9.0},
         ["reward", "policy", "critic", "time", "throughput"]),
    ],
)  # fmt: skip
def test_each_picture_exists_exactly_when_its_metrics_do(
    tmp_path: Path, extra: dict[str, float], names: list[str]
) -> None:
    """No empty picture, none missing; a run without a critic has no critic's picture."""
    paths = plot_run(_records(3, **extra), tmp_path)
    assert [path.stem for path in paths] == names
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert all(_is_drawn(path) for path in paths)


def test_accuracy_is_drawn_with_its_interval() -> None:
    """A line for each evaluation that has one, from end to end; an evaluation without one is a point alone."""
    ends = {"heldout/accuracy": 0.5, "heldout/accuracy/low": 0.4, "heldout/accuracy/high": 0.7}
    figure = reward_figure(metrics_frame([*_records(3), {"iteration": 4, "metrics": ends}]))
    assert figure is not None
    segments = [line.tolist() for item in figure.axes[-1].collections for line in getattr(item, "get_segments", list)()]
    assert [[4.0, 0.4], [4.0, 0.7]] in segments
    sampled = reward_figure(
        metrics_frame([*_records(3), {"iteration": 4, "metrics": ends | {"heldout/temperature": 1}}])
    )
    assert sampled is not None
    assert "held-out accuracy, sampled at temperature 1" in sampled.axes[-1].get_legend_handles_labels()[1]
    plain = reward_figure(metrics_frame(_records(3)))
    assert plain is not None
    assert not any(hasattr(item, "get_segments") for item in plain.axes[-1].collections)


def test_the_kl_of_the_update_is_drawn_only_where_there_is_any() -> None:
    """With one step per iteration it is 0 throughout, and that to the reference stands alone."""
    for value, labels in (0.0, ["to the reference"]), (0.25, ["to the reference", "of the update"]):
        figure = policy_figure(metrics_frame(_records(3, **{"actor/kl": 0.1, "actor/approx_kl": value})))
        assert figure is not None
        assert [str(line.get_label()) for line in figure.axes[0].lines] == labels


def test_parallel_efficiency_is_drawn_only_where_there_are_several_ranks() -> None:
    """A panel of its own, with the run's values. Control: a run of one rank, which has no such figure."""
    for extra, drawn in ({"ranks/parallel_efficiency": 0.875}, True), ({}, False):
        figure = throughput_figure(metrics_frame(_records(3, **{"rollout/tokens_per_s": 9.0, **extra})))
        assert figure is not None
        found = [axes for axes in figure.axes if axes.get_title().startswith("Parallel efficiency")]
        assert len(found) == drawn
        assert all(list(axes.lines[0].get_ydata()) == [0.875] * 3 for axes in found)


def test_what_waits_and_how_old_tokens_are_is_drawn_where_rollouts_do_not_wait() -> None:
    """Beside all other panels, each with the run's values. Control: a synchronous run has none of them."""
    all_others = {"actor/mfu": 0.3, "reference/mfu": 0.3, "gpu/utilisation": 0.9, "actor/communication_share": 0.1}
    all_others |= {"ranks/parallel_efficiency": 0.9, "gpu/memory_gib": 80.0, "memory/gpu_gib": 70.0}
    all_others |= {"rollout/tokens_per_s": 9.0, "rollout/response_length_max": 9.0, "rollout/response_length_mean": 4.0}
    carried = {"rollout/deferred": 16.0, "rollout/unused_share": 0.0, "rollout/off_policy_share": 0.5}
    carried |= {"rollout/staleness_max": 2.0, "rollout/staleness_mean": 0.75}
    titles = {
        "Prompts that wait": [16.0],
        "Tokens, share": [0.0, 0.5],
        "Age of tokens, updates of the policy": [2.0, 0.75],
    }
    for extra, drawn in (carried, titles), ({}, {}):
        figure = throughput_figure(metrics_frame(_records(3, **all_others, **extra)))
        assert figure is not None
        panels = {axes.get_title(): axes for axes in figure.axes}
        found = {title: [float(line.get_ydata()[0]) for line in axes.lines] for title, axes in panels.items()}
        assert {title: found[title] for title in titles if title in found} == drawn


def test_no_records_give_no_pictures(tmp_path: Path) -> None:
    """Negative control: a run that has recorded nothing draws nothing."""
    assert plot_run([], tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_one_iteration_and_a_thousand_are_drawn(tmp_path: Path) -> None:
    """A single point is visible, a long run is averaged into bars, and both are pictures."""
    for count in (1, 1000):
        folder = tmp_path / str(count)
        assert all(_is_drawn(path) for path in plot_run(_records(count, **{"actor/kl": 0.1}), folder))


def test_numbers_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    """NaN and infinity do not stop the picture, and a metric that never was finite is no metric."""
    records = _records(3, **{"actor/kl": math.inf, "actor/entropy": math.nan, "reward/std": 0.1})
    records[2]["metrics"]["reward/mean"] = math.nan
    assert "actor/kl" not in metrics_frame(records)
    assert [path.stem for path in plot_run(records, tmp_path)] == ["reward", "time"]


def test_accuracy_shares_the_rewards_axes_only_if_both_are_shares() -> None:
    """Rewards within 0 to 1 share the panel with held-out accuracy; a negative reward gets its own."""
    together, apart = (
        reward_figure(metrics_frame(_records(3))),
        reward_figure(metrics_frame(_records(3, **{"reward/min": -1.0}))),
    )
    assert together is not None
    assert apart is not None
    assert (len(together.axes), len(apart.axes)) == (1, 2)


def test_the_last_record_of_an_iteration_counts() -> None:
    """An iteration that was redone after a crash is one row, with the newer numbers."""
    records = [*_records(2), {"iteration": 1, "metrics": {"reward/mean": 0.9}}]
    frame = metrics_frame(records)
    assert list(frame.index) == [0, 1, 2]
    assert frame.loc[1, "reward/mean"] == 0.9


def test_times_are_tasks_of_iterations() -> None:
    """The whole iteration is no task, and the evaluation before training belongs to no iteration."""
    times = task_times(metrics_frame(_records(2, **{"time/reward_s": 5.0})))
    assert list(times.columns) == ["reward", "rollout"]
    assert list(times.index) == [1, 2]


def test_bars_of_a_long_run_keep_the_height_of_the_mean() -> None:
    """Averaging over iterations changes no height: 2 s per iteration stay 2 s, in 1000 iterations as in 2."""
    for count in (2, 1000):
        figure = time_figure(metrics_frame(_records(count)))
        assert figure is not None
        bars = np.asarray(figure.axes[0].collections[0].get_paths()[0].vertices)
        assert bars[:, 1].max() == pytest.approx(2.0)
        assert bars[:, 0].min() == 0.5
        assert bars[:, 0].max() >= count + 0.5


def test_no_two_tasks_have_one_colour() -> None:
    """Of more tasks than there are colours the shortest are one bar, and no second is lost.

    Control: as many tasks as colours keep their names.
    """
    for count, last in (10, "t0"), (13, "shorter tasks"):
        tasks = {f"time/t{number}_s": 1.0 + number for number in range(count)}
        records = [{"iteration": number, "metrics": tasks} for number in (1, 2)]
        figure = time_figure(metrics_frame(records))
        assert figure is not None
        bars = figure.axes[0].collections
        assert len({tuple(bar.get_facecolor()[0]) for bar in bars}) == len(bars) == 10
        assert bars[-1].get_label() == last
        top = max(np.asarray(bars[-1].get_paths()[0].vertices)[:, 1])
        assert top == pytest.approx(sum(tasks.values()))


@pytest.mark.parametrize("count", [3, 200])
def test_no_curve_runs_through_a_legend(count: int) -> None:
    """The legend of a small panel lies above its axes. Control: the titles, which lie above the legend."""
    lengths = {"rollout/response_length_max": 6.0, "rollout/response_length_mean": 5.0}
    figure = throughput_figure(metrics_frame(_records(count, **lengths)))
    assert figure is not None
    figure.draw_without_rendering()
    (panel,) = figure.axes
    legend = panel.get_legend()
    assert legend is not None
    assert panel.get_window_extent().y1 <= legend.get_window_extent().y0 + 1
    assert legend.get_window_extent().y1 <= panel.title.get_window_extent().y0 + 1


STEPS = [
    {"iteration": 0, "metrics": {"heldout/loss": 0.7, "heldout/accuracy": 0.0}},
    *(
        {"iteration": step, "metrics": {"loss": 0.7 - step / 100, "grad_norm": 1.0, "learning_rate": 1e-5}}
        for step in range(1, 9)
    ),
]


def test_steps_have_pictures_of_their_own(tmp_path: Path) -> None:
    """Of preferences with a margin, too. Control: iterations have none of them."""
    assert [path.stem for path in plot_run(STEPS[1:], tmp_path)] == ["loss", "optimizer"]
    last = {"margin": 0.5, "accuracy": 1.0, "heldout/loss": 0.6, "heldout/accuracy": 0.9}
    preferring = [*STEPS, {"iteration": 9, "metrics": STEPS[-1]["metrics"] | last}]
    assert [path.stem for path in plot_run(preferring, tmp_path)] == ["loss", "preferences", "optimizer"]
    iterations = [{"iteration": 1, "metrics": {"reward/mean": 0.5, "heldout/accuracy": 0.5}}]
    assert [path.stem for path in plot_run(iterations, tmp_path)] == ["reward"]
