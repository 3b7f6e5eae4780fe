"""What travels between the source of rewards and its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One response to be scored; `columns` is the data row that its prompt came from."""

    sample_id: str
    prompt_id: str
    prompt: str
    response: str
    columns: dict[str, Any]


Row = dict[str, Any]  # the arguments of one row, by parameter name

TIMED_OUT = "timed out after"  # the reason of a call that took too long begins with it
NO_REPLY = "no complete reply within"  # likewise, of a request


@dataclass(frozen=True)
class Score:
    """What one response is worth.

    Attributes:
        reward: the reward, or `reward.failure_value` if the call failed.
        parts: the named parts that the function returned; empty if it returned a number or failed.
        failure: why the call failed; None if it did not.
        answer: what a judge wrote, empty if nothing came; None without a judge.
    """

    reward: float
    parts: dict[str, float]
    failure: str | None
    answer: str | None = None
