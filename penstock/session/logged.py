"""Figures that a user's own code gives beside ours: of the iteration that runs, recorded with it.

Left out: figures of a reward's parts and of evaluators, which come from other processes and are recorded anyway.
"""

from __future__ import annotations

import re

from penstock.base.errors import UserError
from penstock.session.session import only_session

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./ -]*")  # as MLflow takes them


def log(name: str, value: float) -> None:
    """Record a figure with the iteration that runs; given again, it is replaced. One that is NaN is left out.

    Args:
        name: such as `mine/length`; a slash puts those of one beginning together.

    Raises:
        UserError: the name is none that trackers take, the value is no number, or no training runs in this process.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"a figure cannot be called {name!r}", "of letters, digits, and _ - . / such as 'mine/length'")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(
            f"the figure '{name}' is {type(value).__name__}, no number", "log numbers, one at a time"
        ) from None
    only_session().logged[name] = number


def with_logged(metrics: dict[str, float], logged: dict[str, float]) -> dict[str, float]:
    """Return the figures of an iteration with those that were logged, which are forgotten.

    Raises:
        UserError: one has the name of one of ours.
    """
    own, taken = dict(logged), sorted(metrics.keys() & logged.keys())
    logged.clear()
    if taken:
        raise UserError(
            f"the figure '{taken[0]}' was logged, and the training has one of that name", "log it as another"
        )
    return metrics | own
