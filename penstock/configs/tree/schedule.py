"""Values that may change during a run: a plain number, or steps `{0: 1.0, 100: 0.5}` keyed by iteration.

A step schedule holds each value from its iteration on. A live override (a Prefect Variable, read by
penstock/session/settings.py) replaces the scheduled value while it is set.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator

Number = TypeVar("Number", int, float)


def _numbers(value: object) -> list[int | float]:
    numbers = value.values() if isinstance(value, dict) else [value]
    return [number for number in numbers if isinstance(number, int | float)]


def _check_schedule(value: object) -> object:
    if not all(map(math.isfinite, _numbers(value))):
        raise ValueError("must be finite")
    if any(number < 0 for number in _numbers(value)):
        raise ValueError("must not be negative")
    return _check_steps(value)


def _check_steps(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if 0 not in value:
        raise ValueError("a schedule needs a value for iteration 0, e.g. {0: 1.0, 100: 0.5}")
    if min(value) < 0:
        raise ValueError("a schedule's keys are iterations: they cannot be negative")
    return dict(sorted(value.items()))


def steps_of(annotation: Any) -> Any:
    """Return the type of a value of `annotation`, or of steps of such values; bounds are those of the annotation."""
    return Annotated[annotation | dict[int, annotation], AfterValidator(_check_steps)]


Scheduled = Annotated[Number | dict[int, Number], AfterValidator(_check_schedule)]


def _check_above_zero(value: object) -> object:
    if 0 in _numbers(value):
        raise ValueError("must be greater than 0")
    return value


ScheduledAboveZero = Annotated[Scheduled[Number], AfterValidator(_check_above_zero)]


def largest(schedule: Number | dict[int, Number]) -> Number:
    """Return the largest value that is ever in force."""
    return max(schedule.values()) if isinstance(schedule, dict) else schedule


def value_at(schedule: Number | dict[int, Number], iteration: int) -> Number:
    """Return the value in force at `iteration` (the first iteration of a run is 1)."""
    if not isinstance(schedule, dict):
        return schedule
    return schedule[max(key for key in schedule if key <= iteration)]
