"""Whether drafts would shorten a rollout's last steps, in which few sequences are left: seconds by number of sequences.

Three engines of one model: stepped as rollouts are, in turns, and with drafts, as vLLM offers them to a class of one's
own. In a step with drafts a sequence gains a token and those of its drafts that are accepted, so drafting pays from as
many accepted ones a step as the step is longer (`pays_from`). The full batch, for which nothing is drafted, shows what
an engine that can draft costs the rest of a rollout.

What verifying takes at least is told from the first two: a step has as many tokens as one of more sequences, each with
a token (`verify`, for drafts that are made on the device), and comes after the tokens of the one before where these are
looked up by the processor (`verify_in_turns`).

Left out: how many drafts a trained model's responses would have accepted (tail.py), and vLLM's drafts by a kernel
(`ngram_gpu`), which its first model runner makes for every batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import BenchResult, new_result
from penstock.benchmarks.speculation.stepping import Way, Work
from penstock.engines.groups.environment import FORCED_VARIABLES

Row = dict[str, Any]
Seconds = Mapping[tuple[Way, str, int], float]  # of a step, by way, text and number of sequences


def measure(
    folder: Path, command: str, *, rows: Sequence[int], batch: int, drafts: int, prompt: int, response: int
) -> BenchResult:
    """Measure every way of stepping.

    Args:
        rows: numbers of sequences for which is drafted.
        batch: sequences of a full batch, for which is not.
        drafts: tokens for each sequence and step.
        prompt: its tokens.
        response: its tokens.

    Raises:
        UserError: there is no model, a number of sequences with drafts is no less than a full batch, or an engine
            stopped.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"there is no model in {folder}", "make one: penstock bench model 1.5 models/random-1.5b")
    most = max(rows)
    if most * (drafts + 1) > batch:
        raise UserError(
            f"{most} sequences with {drafts} drafts each are more tokens than a full batch of {batch} has sequences",
            f"give --batch {most * (drafts + 1)} or more, or fewer --rows",
        )
    sizes = {"batch": batch, "drafts": drafts, "drafts_up_to": most, "prompt": prompt, "response": response}
    asked = Work(way=Way.in_turns, folder=folder.absolute(), rows=sorted(set(rows)), **sizes)
    more = sorted({*rows, *(count * (drafts + 1) for count in rows)})
    ahead, drafting = ({"way": Way.ahead, "rows": more}, {"way": Way.drafting})
    engines, details = _measured([asked.model_copy(update=changed) for changed in (ahead, {}, drafting)])
    greedy = [row for row in details if row["text"] == "repeats"]
    said = {(row["way"], row["rows"]): row.pop("responses") for row in greedy}
    for row in greedy:
        row["same_tokens"] = _equal(said[row["way"], row["rows"]], said[Way.ahead, row["rows"]])
    settings = {**asked.model_dump(mode="json", exclude={"way"}), "folder": str(folder), "engines": engines}
    figures = _figures(details, asked.rows, batch, drafts)
    return new_result("speculation", command, figures, settings=settings, details=details)


def pays_from(step_s: float, drafting_step_s: float) -> float:
    """Return how many drafts a sequence must have accepted in a step on the mean for drafting to be faster.

    Without drafts a sequence gains 1 token in `step_s`, with them 1 + accepted in `drafting_step_s` (seconds).
    """
    return max(0.0, drafting_step_s / step_s - 1)


def _figures(details: Sequence[Row], rows: Sequence[int], batch: int, drafts: int) -> dict[str, float]:
    seconds: Seconds = {(row["way"], row["text"], row["rows"]): row["step_s"] for row in details}
    accepted = {(row["way"], row["text"], row["rows"]): row["accepted"] for row in details}
    figures: dict[str, float] = {}
    for count in rows:
        ahead, in_turns, drafting = (seconds[way, "repeats", count] for way in Way)
        verify = seconds[Way.ahead, "repeats", count * (drafts + 1)]
        later = in_turns + max(0.0, verify - ahead)
        figures |= {f"step_s_{count}": ahead, f"accepted_{count}": accepted[Way.drafting, "repeats", count]}
        for name, longer in (("drafting", drafting), ("verify", verify), ("verify_in_turns", later)):
            figures |= {f"{name}_step_s_{count}": longer, f"{name}_pays_from_{count}": pays_from(ahead, longer)}
    full, slower = (seconds[way, "random", batch] for way in (Way.ahead, Way.drafting))
    return figures | {f"step_s_{batch}": full, f"drafting_step_s_{batch}": slower, "batch_slower": slower / full - 1}


def _equal(responses: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    """Return which share of the responses has the same tokens."""
    return sum(one == other for one, other in zip(responses, others, strict=True)) / len(responses)


def _measured(work: Sequence[Work]) -> tuple[dict[str, Row], list[Row]]:
    """Start all engines at a time, and let one measure after the other; return what they are, and their rows."""
    environment = os.environ | FORCED_VARIABLES | {"VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "penstock.benchmarks.speculation.stepping"]
    pipe = subprocess.PIPE
    with ExitStack() as running:
        processes = []
        for one in work:
            started = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
            processes.append(running.enter_context(started))
            running.callback(started.kill)
            _say(started, one.model_dump_json())
        engines = {one.way.value: _hear(process) for one, process in zip(work, processes, strict=True)}
        details: list[Row] = []
        for process in processes:
            _say(process, "")
            details += _hear(process)
    return engines, details


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> Any:
    """Return the next JSON line that a program prints; its libraries may print others.

    Raises:
        UserError: it ended.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("{", "[{")):
            return json.loads(line)
    raise UserError(f"an engine ended with exit code {process.wait()}", "its messages are above")
