"""What a mode of working learns beside synchronous training: held-out accuracy after as many samples, several seeds.

A mode is one or more settings over a recipe, such as `rollout.tail={extra: 0.25}`. Both trainings of a seed start from
the weights of one supervised warm-up, take as many iterations of as many samples, and are asked the same held-out
prompts; so their difference is the mode's, and what chance makes of another order of the prompts.

Left out: how fast they are (penstock/benchmarks/waiting.py).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.benchmarks.accuracy.algorithms import (
    UNRECORDED,
    Plan,
    refuse_failures,
    settings_of,
    variables_of,
    warmed_up,
)
from penstock.benchmarks.accuracy.side_by_side import side_by_side
from penstock.benchmarks.reporting.result import BenchResult, new_result
from penstock.checks.training import check_training
from penstock.configs.loading.load import load_config
from penstock.reports.comparing.statistics import interval
from penstock.state.run_folder import RunFolder, read_metrics

SYNCHRONOUS, MODE = "synchronous", "mode"
GAP = "rollout/logprob_gap"


@dataclass(frozen=True)
class Comparison:
    """What is compared: `overrides` are both trainings', `mode` the settings of one of them.

    Attributes:
        lanes: trainings at a time.
    """

    recipe: Path
    mode: tuple[str, ...]
    seeds: tuple[int, ...]
    lanes: int
    overrides: tuple[str, ...] = ()

    def of(self, name: str, seed: int) -> list[str]:
        """Return the overrides of one training."""
        own = self.mode if name == MODE else ()
        return [*UNRECORDED, *self.overrides, *own, f"seed={seed}"]


def measure(comparison: Comparison, command: str, say: Callable[[str], None]) -> BenchResult:
    """Train both ways with every seed; return mean accuracies and what their difference may be.

    Args:
        say: told of each training that ended.

    Raises:
        UserError: a setting is wrong, fewer than two seeds are given, or a training failed.
    """
    if len(comparison.seeds) < 2:
        raise UserError("one seed says nothing of what chance does", "give several, for example --seeds 0,1,2,3,4")
    if not comparison.mode:
        raise UserError("no mode is given", "for example --mode 'rollout.tail={extra: 0.25}'")
    configs = [load_config(comparison.recipe, comparison.of(name, comparison.seeds[0])) for name in (SYNCHRONOUS, MODE)]
    for config in configs:
        check_training(config)
    environment = variables_of(configs[0])
    plan = Plan(comparison.recipe, (), comparison.seeds, comparison.lanes, comparison.overrides)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        folder = Path(scratch)
        starts = warmed_up(plan, comparison.seeds, folder, environment, say)
        rows = _train(comparison, starts, folder, environment, say)
    settings = settings_of(plan) | {"mode": list(comparison.mode), "seeds": list(comparison.seeds)}
    return new_result("learning", command, figures_of(rows), settings=settings, details=rows)


def _train(
    comparison: Comparison,
    starts: Mapping[int, Sequence[str]],
    folder: Path,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Train seed by seed; return a row of each training."""
    runs = {f"{name}-{seed}": (name, seed) for seed in comparison.seeds for name in (SYNCHRONOUS, MODE)}
    recipe = str(comparison.recipe)
    commands = {
        run: ["train", recipe, *comparison.of(name, seed), *starts[seed], "--run", str(folder / run)]
        for run, (name, seed) in runs.items()
    }
    rows = []
    for ended in side_by_side(commands, comparison.lanes, folder, environment):
        refuse_failures([ended] if ended.code else [], len(runs))
        name, seed = runs[ended.name]
        rows.append(row_of(name, seed, read_metrics(RunFolder(folder / ended.name))))
        say(f"{name}, seed {seed}: {rows[-1]['accuracy_after']:.1%}, {ended.seconds:.0f} s")
    return sorted(rows, key=lambda row: (row["seed"], row["name"] == MODE))


def row_of(name: str, seed: int, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a training's row: accuracy before and after, after how many iterations.

    And the largest mean difference of log-probs of vLLM and actor of those that were compared.
    """
    before, after = records[0]["metrics"], records[-1]["metrics"]
    gaps = [record["metrics"][GAP] for record in records if GAP in record["metrics"]]
    return {
        "name": name,
        "seed": seed,
        "accuracy_before": before["heldout/accuracy"],
        "accuracy_after": after["heldout/accuracy"],
        "iterations": records[-1]["iteration"],
        **({"logprob_gap": max(gaps)} if gaps else {}),
    }


def figures_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return mean accuracies, the synchronous trainings' 95 % interval, and that of the difference seed by seed.

    Both intervals are Student's of a mean, over seeds.
    """
    after: dict[str, dict[int, float]] = {SYNCHRONOUS: {}, MODE: {}}
    for row in rows:
        after[row["name"]][row["seed"]] = row["accuracy_after"]
    synchronous, seeds = after[SYNCHRONOUS], sorted(after[SYNCHRONOUS])
    low, high = interval([synchronous[seed] for seed in seeds])
    gains = [after[MODE][seed] - synchronous[seed] for seed in seeds]
    least, most = interval(gains)
    accuracy = statistics.mean(after[MODE].values())
    return {
        "accuracy_synchronous": statistics.mean(synchronous.values()),
        "accuracy_synchronous_low": low,
        "accuracy_synchronous_high": high,
        "accuracy_mode": accuracy,
        "difference": statistics.mean(gains),
        "difference_low": least,
        "difference_high": most,
        "within_synchronous": float(low <= accuracy <= high),
    }
