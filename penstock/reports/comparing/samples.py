"""Responses of two runs to the same prompts, side by side, from their folders: figures say which is better, these why.

Held-out responses of the newest evaluation that both have come first; else the newest tables of samples that share
prompts. Left out: looking at one run's samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.reports.comparing.runs import ComparedRun
from penstock.state.experience import read_columns
from penstock.state.run_folder import RunFolder

_NAMES = ("prompt", "response", "reward")


@dataclass(frozen=True)
class Answer:
    """A response and what it earned."""

    response: str
    reward: float


@dataclass(frozen=True)
class SamplePair:
    """What two runs answered.

    Attributes:
        names: of the two runs.
        source: where the responses are from, for people.
        rows: prompt and both first responses to it; those whose rewards differ most come first.
    """

    names: tuple[str, str]
    source: str
    rows: tuple[tuple[str, Answer, Answer], ...]


def paired_samples(one: ComparedRun, two: ComparedRun) -> SamplePair | None:
    """Return the responses of two runs to prompts that both answered; None where nothing of that is on this machine."""
    if one.folder is None or two.folder is None:
        return None
    for source, mine, theirs in _sources(RunFolder(one.folder), RunFolder(two.folder)):
        if common := [prompt for prompt in mine if prompt in theirs]:
            rows = [(prompt, mine[prompt], theirs[prompt]) for prompt in common]
            rows.sort(key=lambda row: -abs(row[1].reward - row[2].reward))  # stable: else the order of the prompts
            return SamplePair((one.name, two.name), source, tuple(rows))
    return None


def _sources(one: RunFolder, two: RunFolder) -> Iterator[tuple[str, Mapping[str, Answer], Mapping[str, Answer]]]:
    """Yield responses of both runs, the more telling ones first."""
    for number in reversed(_common(one.evaluation(0), two.evaluation(0), ".parquet")):
        yield (
            f"held-out prompts, iteration {number}",
            _evaluated(one.evaluation(number)),
            _evaluated(two.evaluation(number)),
        )
    for number in reversed(_common(one.samples(0), two.samples(0), ".json")):
        yield f"training prompts, iteration {number}", _sampled(one.samples(number)), _sampled(two.samples(number))


def _common(one: Path, two: Path, suffix: str) -> list[int]:
    """Return the iterations of which both folders have a file."""
    here, there = (
        {int(path.stem) for path in file.parent.glob(f"[0-9]*{suffix}") if path.stem.isdigit()} for file in (one, two)
    )
    return sorted(here & there)


def _evaluated(path: Path) -> dict[str, Answer]:
    columns = read_columns(path, _NAMES)
    return _first(columns["prompt"], columns["response"], columns["reward"])


def _sampled(path: Path) -> dict[str, Answer]:
    table = json.loads(path.read_text(encoding="utf-8"))
    columns = dict(zip(table["columns"], zip(*table["data"], strict=True), strict=False))
    return _first(*(columns.get(name, ()) for name in _NAMES))


def _first(prompts: Any, responses: Any, rewards: Any) -> dict[str, Answer]:
    """Return each prompt's first response."""
    found: dict[str, Answer] = {}
    for prompt, response, reward in zip(prompts, responses, rewards, strict=True):
        found.setdefault(str(prompt), Answer(str(response), float(reward)))
    return found
