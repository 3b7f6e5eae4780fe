"""How many drafts the last responses of a rollout would have had accepted, by its experience file; no engine.

A draft is accepted where it is the token that is sampled next, and which that was the file says: what a response's
tokens were is the same with drafts and without. So this counts, for the responses that are left when most have ended,
the steps that they took and those that they would have taken.

Suffixes: `_B` responses. Left out: responses that do not begin at the same time, and what a step with drafts takes
(measuring.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.benchmarks.reporting.result import BenchResult, new_result
from penstock.benchmarks.speculation.drafter import NGRAM, Lookup
from penstock.state.experience import read_columns


def measure(file: Path, command: str, *, left: int, drafts: int) -> BenchResult:
    """Count the steps of the `left` longest responses of an experience file, from when the others have ended.

    Drafts are looked up in the response and its prompt, then in the other responses to the prompt that have ended.

    Raises:
        UserError: there is no such file, it has episodes or no more responses than that, or these end together.
    """
    if not file.is_file():
        raise UserError(f"there is no file {file}", "name an experience of a run: runs/NAME/experience/000001.parquet")
    columns = read_columns(file, ("prompt_tokens", "response_tokens", "group", "loss_mask"))
    responses: Ragged = columns["response_tokens"]
    if not columns["loss_mask"].values_T.all():
        raise UserError(f"{file} has episodes, whose tokens are not all the policy's", "take a run without environment")
    if len(responses) <= left:
        raise UserError(f"{file} has {len(responses)} responses, and {left} would be the last", "lower --left")
    order_B = np.argsort(responses.lengths_B, kind="stable")
    begin = int(responses.lengths_B[order_B[-left - 1]])
    last = [row for row in order_B[-left:].tolist() if responses.lengths_B[row] > begin]
    if not last:
        raise UserError(f"the last {left + 1} responses of {file} end together", "raise --left, or take another file")
    rows = [_row(columns, row, begin, drafts) for row in last]
    settings = {"file": str(file), "left": left, "drafts": drafts, "ngram": NGRAM, "begin": begin}
    return new_result("drafts", command, _figures(rows), settings=settings, details=rows)


def _row(columns: Mapping[str, Any], row: int, begin: int, drafts: int) -> dict[str, int]:
    """Return the tokens of a response from number `begin` on, and their steps with both kinds of drafts."""
    prompt, response = columns["prompt_tokens"].row(row).tolist(), columns["response_tokens"].row(row).tolist()
    others = _ended(columns["response_tokens"], columns["group"], row, begin)
    return {
        "response": row,
        "tokens": len(response) - begin,
        "steps_own": steps_of(prompt, response, begin, drafts),
        "steps_group": steps_of(prompt, response, begin, drafts, others),
    }


def _figures(rows: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Return the tail's steps, which are those of the response that takes most, and the drafts accepted per step."""
    tokens, own, group = ([row[name] for row in rows] for name in ("tokens", "steps_own", "steps_group"))
    return {
        "tail_tokens": sum(tokens),
        "tail_steps": max(tokens),
        "steps_own": max(own),
        "steps_group": max(group),
        "accepted_own": sum(tokens) / sum(own) - 1,
        "accepted_group": sum(tokens) / sum(group) - 1,
    }


def steps_of(
    prompt: Sequence[int], response: Sequence[int], begin: int, drafts: int, others: Lookup | None = None
) -> int:
    """Return the steps in which the tokens of a response come, from number `begin` on.

    A step brings the drafts that are right up to the first that is not, and the token behind them.

    Args:
        drafts: tokens in a step at most.
        others: where is looked for what neither prompt nor response says.
    """
    known, at, steps = Lookup([*prompt, *response[:begin]]), begin, 0
    while at < len(response):
        drafted = known.after(known.last, drafts)
        if not drafted and others is not None:
            drafted = others.after(known.last, drafts)
        came = response[at : at + accepted(drafted, response[at : at + drafts]) + 1]
        known.extend(came)
        at, steps = at + len(came), steps + 1
    return steps


def accepted(drafted: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many drafts are the tokens that are sampled, up to the first that is not."""
    pairs = zip(drafted, sampled, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _ended(responses: Ragged, groups_B: np.ndarray, row: int, begin: int) -> Lookup:
    """Return the other responses to a row's prompt that had ended after `begin` tokens."""
    there_B = (groups_B == groups_B[row]) & (responses.lengths_B <= begin)
    return Lookup([token for other in np.flatnonzero(there_B) for token in responses.row(int(other)).tolist()])
