"""Runs the evaluators on held-out responses: built-in ones here, a user's in a process that may be lost.

A user's evaluator that raises, returns no figures, runs too long or takes its process down is named with the reason;
neither the other figures nor the training suffer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from penstock.evaluators.heldout import HeldOut
from penstock.evaluators.loading import BUILT_IN, load_evaluator
from penstock.usercode.guard import begin_worker
from penstock.usercode.workers import Workers, loss, ready

DEADLINE_S = 600.0  # of one user's evaluator, the import of its module included
PREFIX = "heldout/"
_NAME = re.compile(r"[\w.-]+(/low|/high)?")  # of a figure, or of an end of its interval


def run_evaluators(
    specs: Sequence[str], heldout: HeldOut, deadline_s: float = DEADLINE_S
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the figures of all evaluators, `heldout/...`, and the reason of each that failed, by its spec."""
    figures: dict[str, float] = {}
    failures: dict[str, str] = {}
    for spec in specs:
        if spec in BUILT_IN:
            figures |= _prefixed(PREFIX, BUILT_IN[spec]().evaluate(heldout))
            continue
        try:
            figures |= _prefixed(PREFIX, _run_apart(spec, heldout, deadline_s))
        except Exception as error:  # whatever a user's code raises
            failures[spec] = loss(error, "its process", f"took longer than {deadline_s:g} s; its process was killed")
    return figures, failures


def figures_of(spec: str, heldout: HeldOut) -> dict[str, float]:
    """Return the figures of a user's evaluator, `<name>/<figure>`; runs in a process of its own.

    Raises:
        TypeError: it returned something else than numbers by name.
    """
    evaluator = load_evaluator(spec)
    returned: Any = evaluator.evaluate(heldout)
    if not isinstance(returned, Mapping):
        raise TypeError(f"it returned a {type(returned).__name__}, not a dict of figures")
    for name in returned:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in ("low", "high"):
            raise TypeError(f"{name!r} cannot be the name of a figure: letters, digits, '_', '.' and '-' can")
    return _prefixed(f"{evaluator.name}/", {name: float(value) for name, value in returned.items()})


def _run_apart(spec: str, heldout: HeldOut, deadline_s: float) -> dict[str, float]:
    with closing(Workers(1, begin_worker, (), ready)) as workers:
        called = workers.call(figures_of, spec, heldout, deadline_s=deadline_s)
        return called.future.result()


def _prefixed(prefix: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in figures.items()}
