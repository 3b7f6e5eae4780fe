"""Seconds of a whole iteration: `penstock train` as a user starts it, in a process of its own, read from its records.

Held-out evaluation is taken out of the iterations that have one (the last always does), and checkpoints are written
after an iteration's clock has stopped. On a machine without a GPU the memory of all its processes is measured, too.
Left out: start-up, which `train` itself reports.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.host_memory import run_measured
from penstock.benchmarks.reporting.result import HELDOUT, BenchResult, medians, new_result, steady
from penstock.benchmarks.session import describe, device_count
from penstock.benchmarks.workload.prompts import with_prompts
from penstock.checks.training import check_training
from penstock.configs.loading.load import load_config
from penstock.configs.schema import TrainConfig
from penstock.engines.groups.machine import visible_gpus
from penstock.state.run_folder import RunFolder, read_metrics

FIGURES = {
    "rollout_s": "time/rollout_s",
    "rollout_tokens_per_s": "rollout/tokens_per_s",
    "wake_s": "rollout/wake_s",
    "longest_request_s": "rollout/request_s_max",
    "reward_s": "time/reward_s",
    "reward_mean": "reward/mean",
    "old_logprobs_s": "time/logprobs_old_s",
    "reference_s": "time/logprobs_reference_s",
    "values_s": "time/values_s",
    "advantage_s": "time/advantage_s",
    "update_s": "actor/update_s",
    "critic_update_s": "critic/update_s",
    "reshard_s": "time/reshard_s",
    "reshard_bytes": "reshard/bytes",
    "mfu": "actor/mfu",
    "rollout_mfu": "rollout/mfu",
    "communication_share": "actor/communication_share",
    "engine_balance": "rollout/engine_balance",
    "parallel_efficiency": "ranks/parallel_efficiency",
    "clock_mhz": "gpu/clock_mhz",
    "clock_mhz_min": "gpu/clock_mhz_min",
}

PROGRAM = "penstock.cli.main"
DECIDED = ("recomputed", "kv_cache_stays", "attention")  # by what this machine has


def measure(recipe: Path, overrides: list[str], command: str, skip: int, keep: Path | None) -> BenchResult:
    """Train, and return the medians over the iterations after the first `skip`.

    Args:
        keep: run folder to leave behind; None: a temporary one.

    Raises:
        UserError: the recipe is wrong, too few iterations are asked for, or the training failed.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        given = load_config(recipe, overrides)
        overrides = [*overrides, *with_prompts(given, Path(scratch))]
        config = load_config(recipe, overrides)
        steady(range(config.iterations), skip)
        check_training(config)
        rows, summary = trained(recipe, overrides, keep or Path(scratch) / "run")
    return new_result(
        "step",
        command,
        figures_of(rows, skip, device_count(config)) | whole_figures(summary),
        settings={**settings_of(given, skip), **{name: summary[name] for name in DECIDED}},
        details=[{"iteration": number, **row} for number, row in enumerate(rows, start=1)],
    )


def trained(
    recipe: Path, overrides: Sequence[str], folder: Path, program: str = PROGRAM
) -> tuple[list[Mapping[str, float]], dict[str, Any]]:
    """Train as a user does, in a run folder; return the figures of every iteration, and the summary.

    Args:
        program: module of the command line.

    Returns:
        The summary says `host_peak_gib` as well, where there is no GPU.

    Raises:
        UserError: the training failed.
    """
    arguments = ["train", str(recipe), *overrides, "--run", str(folder)]
    command, memory = [sys.executable, "-m", program, *arguments], {}
    if visible_gpus():  # looking at the pages of a process that fills a GPU's machine would hold it up
        code = subprocess.run(command, check=False).returncode
    else:
        code, memory["host_peak_gib"] = run_measured(command)
    if code:
        raise UserError(f"the training ended with exit code {code}", "its messages are above")
    run = RunFolder(folder)
    rows = [record["metrics"] for record in read_metrics(run) if record["iteration"] > 0]
    return rows, json.loads(run.summary.read_text(encoding="utf-8")) | memory


def figures_of(rows: Sequence[Mapping[str, float]], skip: int, devices: int) -> dict[str, float]:
    """Return the figures of iterations `rows` after the first `skip`; peak memory is that of all of them."""
    counted = steady(rows, skip)
    steps = [row["time/iteration_s"] - row.get("time/evaluate_s", 0.0) for row in counted]
    figures = {"step_s": statistics.median(steps), **medians(counted, FIGURES)}
    figures["overhead_s"] = statistics.median(row["time/other_s"] for row in counted)
    rates = [row["rollout/tokens"] / seconds / devices for row, seconds in zip(counted, steps, strict=True)]
    figures["response_tokens_per_s_per_gpu"] = statistics.median(rates)
    if peaks := [row["memory/gpu_gib"] for row in rows if "memory/gpu_gib" in row]:
        figures["peak_gib"] = max(peaks)
    return figures


def whole_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a training as a whole: its processes' memory, and what it reached on held-out prompts."""
    names = {"host_peak_gib": "host_peak_gib", **HELDOUT}
    return {figure: summary[name] for figure, name in names.items() if summary.get(name) is not None}


def settings_of(config: TrainConfig, skip: int) -> dict[str, object]:
    """Return what was fixed: the recipe, and how it was counted."""
    prompts = "the recipe's" if config.data.train or config.data.arithmetic else "random letters, the peers' own"
    return {"iterations": config.iterations, "skipped": skip, "prompts": prompts, **describe(config)}
