"""Peers' figures from their own logs: TRL's step lines and verl's console metrics, medians from the second step on.

The first step of every system is cold (compilation, CUDA graphs, allocator). What TRL says of held-out prompts after
its training is taken as it stands. Left out: running the peers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import HELDOUT, medians

TRL_LINE = re.compile(r"TRL step (\{[^}]*\})")
TRL_HELDOUT = re.compile(r"TRL heldout (\{[^}]*\})")
TRL_FIGURES = {
    "step_s": "wall_s",
    "rollout_s": "generation_s",
    "reward_mean": "reward",
    "peak_gib": "peak_gib",
}
# `step:2` opens the metrics of a step, on one line or one per line; `timing_s/step:61.2` and `global_step:2` do not.
VERL_TOKEN = re.compile(
    r"(?<![\w/])step:(?P<step>\d+)\b|(?P<name>(?:timing_s|perf)/[\w/]+):(?:np\.\w+\()?(?P<value>[\d.eE+-]+)"
)
VERL_FIGURES = {
    "step_s": "timing_s/step",
    "rollout_s": "timing_s/gen",
    "reward_s": "timing_s/reward",
    "old_logprobs_s": "timing_s/old_log_prob",
    "reference_s": "timing_s/ref",
    "advantage_s": "timing_s/adv",
    "update_s": "timing_s/update_actor",
    "reshard_s": "timing_s/update_weights",
    "mfu": "perf/mfu/actor",
    "peak_gib": "perf/max_memory_allocated_gb",
}


def trl_figures(log: Path) -> dict[str, float]:
    """Return TRL's figures from lines `TRL step {'wall_s': 48.1, 'peak_gib': 79.0}` and `TRL heldout {...}`.

    Raises:
        UserError: the log has no second step, or a line that is no such line to its end.
    """
    lines = [line for line, _ in groupby(TRL_LINE.findall(_read(log)))]  # the end of a training repeats its last
    steps = dict(enumerate((_literal(line, log) for line in lines), start=1))
    heldout = [_literal(line, log) for line in TRL_HELDOUT.findall(_read(log))]
    figures = _from_second(steps, TRL_FIGURES, log, "TRL step")
    if peaks := [step["host_peak_gib"] for step in steps.values() if "host_peak_gib" in step]:
        figures["host_peak_gib"] = max(peaks)
    return figures | {name: found[its] for found in heldout for name, its in HELDOUT.items() if its in found}


def verl_figures(log: Path) -> dict[str, float]:
    """Return verl's figures from its console metrics `step:2 - timing_s/gen:30.1 - ...`.

    Raises:
        UserError: the log has no second step, or a figure that is no number.
    """
    steps: dict[int, dict[str, float]] = {}
    for step, name, value in _verl_tokens(log):
        steps.setdefault(step, {})[name] = value
    return _from_second(steps, VERL_FIGURES, log, "step:2")


def _verl_tokens(log: Path) -> Iterator[tuple[int, str, float]]:
    step = 0
    for token in VERL_TOKEN.finditer(_read(log)):
        if token["step"]:
            step = int(token["step"])
        elif step:
            yield step, token["name"], _number(token["value"], log)


def _from_second(
    steps: Mapping[int, Mapping[str, float]], names: Mapping[str, str], log: Path, sign: str
) -> dict[str, float]:
    figures = medians([metrics for step, metrics in steps.items() if step > 1], names)
    if "step_s" not in figures:
        raise UserError(
            f"{log} has no second step ('{sign}')", "run the peer for at least two steps and keep its output"
        )
    return figures


def _number(text: str, log: Path) -> float:
    try:
        return float(text)
    except ValueError:
        raise _garbled(log, text) from None


def _literal(text: str, log: Path) -> dict[str, Any]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise _garbled(log, text) from None
    if not isinstance(value, dict):  # `{'wall_s'}` is a set
        raise _garbled(log, text)
    return value


def _garbled(log: Path, text: str) -> UserError:
    return UserError(f"{log} is garbled at '{text}'", "keep the peer's output apart from that of other processes")


def _read(log: Path) -> str:
    if not log.is_file():
        raise UserError(f"there is no file {log}", "name the peer's log")
    return log.read_text(encoding="utf-8", errors="replace")
