"""Which settings of a sweep did best, and its report: from the run folders alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.reports.comparing.groups import grouped
from penstock.reports.sweep import best_of, best_text, compared, figure_of, last_value, write_sweep_report
from penstock.session.session import write_config
from penstock.state.run_folder import RunFolder, append_metrics
from penstock.state.sweep import Planned, Sweep, SweepFolder
from tests.reports.comparing.examples import RATE, two_groups


def test_the_best_is_told_by_the_mean_over_seeds() -> None:
    """Of what the last iteration said. Control: where less is better the other one is best."""
    groups = grouped(two_groups())
    best = best_of(groups, "heldout/accuracy")
    assert best is not None and (best.group.label, best.value, best.runs) == ("B", pytest.approx(0.7), 3)
    assert best_text("heldout/accuracy", best) == (
        f"Best by heldout/accuracy: B: {RATE}=3e-06, with 0.700 on the mean of 3 runs."
    )
    lowest = best_of(groups, "lowest heldout/accuracy")
    assert lowest is not None and lowest.group.label == "A"
    assert best_of(groups, "heldout/kl") is None
    assert "None of them recorded heldout/kl" in best_text("heldout/kl", None)


def test_a_training_that_failed_is_no_candidate() -> None:
    """However well it had begun. Control: completed, it would be the best."""
    runs = two_groups()
    failed = [replace(run, completed=False) if run.name.startswith("fast") else run for run in runs]
    best = best_of(grouped(failed), "heldout/accuracy")
    assert best is not None and best.group.label == "A"


@pytest.mark.parametrize("by", ["", "lowest", "highest x", "a b c"])
def test_what_is_no_figure_is_refused(by: str) -> None:
    """Control: a figure, and the lowest of one."""
    with pytest.raises(UserError, match="is no figure"):
        figure_of(by)
    assert [figure_of("a/b"), figure_of("lowest a/b")] == [("a/b", 1.0), ("a/b", -1.0)]


def test_the_report_has_what_is_there(tmp_path: Path) -> None:
    """Two trainings are done, one broke, one has not begun. Control: without any there is no report."""
    rates = ("1e-3", "3e-3")
    planned = [
        Planned(name=f"{n}-x", overrides=(f"{RATE}={rate}", f"seed={seed}"))
        for n, (rate, seed) in enumerate((rate, seed) for rate in rates for seed in (0, 1))
    ]
    sweep = Sweep(
        recipe="sums.yaml",
        settings=(f"{RATE}=1e-3,3e-3", "seed=0,1"),
        random=None,
        draw_seed=0,
        by="heldout/accuracy",
        at_once=None,
        trainings=tuple(planned),
    )
    folder = SweepFolder(tmp_path / "sums-sweep")
    assert compared(folder, sweep) is None and not write_sweep_report(folder, sweep)
    for number, (training, accuracy) in enumerate(zip(planned[:3], (0.4, 0.5, 0.9), strict=True)):
        run = folder.run(training)
        run.path.mkdir(parents=True)
        actor = {"optimizer": {"learning_rate": float(rates[number // 2])}}
        write_config(run, TrainConfig.model_validate({"seed": number % 2, "name": training.name, "actor": actor}))
        append_metrics(run, 1, {"heldout/accuracy": accuracy, "reward/mean": accuracy})
        status = "failed" if number == 2 else "completed"
        run.summary.write_text(json.dumps({"status": status, "seconds": 3600.0, "gpus": 2}), encoding="utf-8")
    assert write_sweep_report(folder, sweep)
    page = (folder.report / "compare.md").read_text(encoding="utf-8")
    assert "# sums-sweep\n\n2 of 4 trainings of sums.yaml came to their end. Best by heldout/accuracy: A:" in page
    assert "with 0.450 on the mean of 2 runs" in page
    assert f"{RATE}=0.003" in page and "0 of 1" in page and "4.000" in page
    assert {path.name for path in folder.report.iterdir()} >= {"compare.html", "compare.png", "groups.csv"}
    assert last_value(RunFolder(folder.run(planned[0]).path).path, "reward/mean") == "reward/mean 0.400"
