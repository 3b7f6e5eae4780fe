"""Seconds from the end of a rank in an update until the training has taken up its work again.

A training as a user starts it. In the midst of its third update of the actor a rank is killed: a snapshot of the second
iteration is there, and whatever the first ones compile. An update may be over before the blow falls: the rank is halted
first and killed only if the training then waits for it, otherwise it is struck in the next iteration's update. Figures,
all from the kill on:

    noticed_s       the training says that a rank is lost
    recovered_s     new ranks hold the state that was snapshotted, and the responses of the iteration
    update_s        the iteration that was struck is recorded: its update was done again
    next_s          the iteration after it is recorded, with a rollout of the new engines

`undisturbed_s` is the last iteration, that nothing happened to. `in_ranks` of the settings is what the new ranks say in
their logs of how they started. Left out: whether runs end equal, and other processes (`penstock chaos`).
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import BenchResult, new_result
from penstock.benchmarks.session import describe
from penstock.benchmarks.step import PROGRAM
from penstock.benchmarks.workload.prompts import with_prompts
from penstock.checks.training import check_training
from penstock.configs.loading.load import load_config
from penstock.state.events import RECOVERED, losses, read_events
from penstock.state.experience import column_names
from penstock.state.run_folder import RunFolder, read_metrics

LOOK_S = 0.02
EPOCH = ", epoch "  # in the line with which a rank begins its log
SETTLED_S = 1.0  # in which a training records an iteration whose update is over, without its rank
FIRST = 3  # iteration in whose update the rank is killed, if that update lasts until the blow falls
AFTER = 2  # iterations that follow: one with a rollout of the new engines, and one that nothing happened to
NEEDED = FIRST + AFTER
TIMED = re.compile(r" INFO [\w.]+: (?P<what>[^:]+): (?P<seconds>\d+\.\d) s")


def measure(recipe: Path, overrides: list[str], command: str, keep: Path | None) -> BenchResult:
    """Train, kill, and return what the training recorded.

    Args:
        keep: run folder to leave behind; None: a temporary one.

    Raises:
        UserError: the recipe is wrong, has too few iterations, or the training did not go on.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        overrides = [*overrides, *with_prompts(load_config(recipe, overrides), Path(scratch))]
        config = load_config(recipe, overrides)
        if config.iterations < NEEDED:
            raise UserError(f"{recipe} has {config.iterations} iterations", f"give iterations={NEEDED} or more")
        check_training(config)
        run = RunFolder((keep or Path(scratch) / "run").absolute())
        words = ["train", str(recipe), *overrides, "--run", str(run.path)]
        training = psutil.Popen([sys.executable, "-m", PROGRAM, *words])
        try:
            struck, at, seconds = _struck(training, run, config.iterations - AFTER)
        finally:
            training.terminate()
            training.wait()
        ended = [event for event in read_events(run) if event["event"] == RECOVERED]
        if len(losses(run)) != 1 or len(ended) != 1:
            raise UserError("the training did not recover", "its messages are above")
        figures = {"noticed_s": _since(at, losses(run)[0]), "recovered_s": _since(at, ended[0]), **seconds}
        figures["undisturbed_s"] = _recorded(run)[struck + AFTER]["time/iteration_s"]
        settings = {"struck": struck, "goes_on_from": ended[0]["place"], "in_ranks": _in_ranks(run)} | describe(config)
    return new_result("recovery", command, figures, settings=settings)


def _struck(training: psutil.Popen, run: RunFolder, last: int) -> tuple[int, datetime, dict[str, float]]:
    """Kill a rank in an update.

    Returns:
        the iteration that was struck, when, and the seconds until it and the next one were recorded.
    """
    rank, struck = _halted(training, run, last)
    at, began = datetime.now(UTC), time.monotonic()
    rank.kill()
    seconds = {}
    for name, number in (("update_s", struck), ("next_s", struck + 1)):
        _until(training, partial(_is_recorded, run, number))
        seconds[name] = time.monotonic() - began
    _until(training, partial(_is_recorded, run, struck + AFTER))
    return struck, at, seconds


def _halted(training: psutil.Popen, run: RunFolder, last: int) -> tuple[psutil.Process, int]:
    """Halt a rank in the midst of an update; return it and the iteration.

    Raises:
        UserError: each update was over before the rank was halted.
    """
    for number in range(FIRST, last + 1):
        _until(training, partial(_is_recorded, run, number - 1))
        rank = _rank(training)
        half = _recorded(run)[number - 1]["time/update_actor_s"] / 2
        _until(training, partial(_updates, run, number))
        time.sleep(half)
        rank.suspend()
        time.sleep(SETTLED_S)
        if not _is_recorded(run, number):
            return rank, number
        rank.resume()
    raise UserError("every update was over before its rank could be killed", "give more iterations")


def _rank(training: psutil.Popen) -> psutil.Process:
    return next(child for child in training.children(recursive=True) if _is_rank(child))


def _is_rank(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[-1:] == ["penstock.engines.groups.rank"]
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return False


def _is_recorded(run: RunFolder, number: int) -> bool:
    return number in _recorded(run)


def _recorded(run: RunFolder) -> dict[int, Mapping[str, float]]:
    """Return the figures of every iteration."""
    return {record["iteration"]: record["metrics"] for record in read_metrics(run)}


def _updates(run: RunFolder, number: int) -> bool:
    """Whether the iteration is at its update: all that it is made from is there."""
    path = run.experience(number)
    return path.exists() and "advantages" in column_names(path)


def _in_ranks(run: RunFolder) -> dict[str, float]:
    """Return what the rank that took the place of the killed one says of how it started, in seconds."""
    logs = sorted(run.logs.glob("*-rank*.log"))
    newest = max(
        (log.read_text(encoding="utf-8", errors="replace") for log in logs), key=lambda text: text.count(EPOCH)
    )
    found = TIMED.finditer(newest.rpartition(EPOCH)[2])
    return {match["what"]: float(match["seconds"]) for match in found}


def _until(training: psutil.Popen, condition: Callable[[], bool]) -> None:
    """Wait until it holds.

    Raises:
        UserError: the training ends before.
    """
    while not condition():
        if training.poll() is not None:
            raise UserError(f"the training ended with exit code {training.poll()}", "its messages are above")
        time.sleep(LOOK_S)


def _since(at: datetime, event: Mapping[str, Any]) -> float:
    return (datetime.fromisoformat(event["at"]) - at).total_seconds()
