"""The tables of docs/algorithms.md: what the registry holds, in Markdown.

A row comes from the function and its docstring: the formula is the first paragraph, deviations are the section `Note:`,
settings and defaults are the keyword-only parameters. So a new file brings its rows along. `penstock bench page`
writes the tables into the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.algorithms import preference
from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.declarations.algorithm import Algorithm
from penstock.algorithms.declarations.settings import Setting, note, settings, summary
from penstock.algorithms.policy_losses import CHOICES, POLICY_LOSSES
from penstock.algorithms.preference import PREFERENCE_LOSSES
from penstock.algorithms.registry import ALGORITHMS, is_labelled, needs_reference, shared_settings


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; a `|` in a cell is text, and code may be in docstrings' double quotes."""
    cells = [[cell.replace("|", r"\|").replace("``", "`") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in ([*head], ["---"] * len(head), *cells)]


def by_name() -> list[str]:
    """Return the table of algorithms."""
    head = ("name", "what it does", "advantage", "loss", "aggregation", "paper")
    return table(head, (_algorithm(ALGORITHMS[name]) for name in sorted(ALGORITHMS)))


def estimators() -> list[str]:
    """Return the table of advantage estimators."""
    return table(("estimator", "formula", "settings", "notes"), _functions(ADVANTAGES, {}))


def policy_losses() -> list[str]:
    """Return the table of policy losses."""
    return table(("loss", "per token", "settings", "notes"), _functions(POLICY_LOSSES, CHOICES))


def preference_losses() -> list[str]:
    """Return the table of preference losses."""
    rows = (
        (
            f"`{name}`",
            summary(function),
            "rows with a label" if is_labelled(name) else "pairs",
            "yes" if needs_reference(name) else "no",
            _defaults(settings(function)),
            getattr(preference.MODULES[name], "PAPER", ""),
            note(function),
        )
        for name, function in PREFERENCE_LOSSES.items()
    )
    return table(("loss", "per pair or row", "data", "reference", "settings", "paper", "notes"), rows)


def notes(algorithm: Algorithm) -> str:
    """Return the notes on an algorithm's estimator and loss."""
    both = (note(ADVANTAGES[algorithm.advantage]), note(POLICY_LOSSES[algorithm.policy_loss]))
    return " ".join(filter(None, both))


def written(value: Any) -> str:
    """Return a default as a recipe has it, without the `.0` of a whole number."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _algorithm(algorithm: Algorithm) -> tuple[str, ...]:
    estimators_own = settings(ADVANTAGES[algorithm.advantage])
    estimator, loss = [f"`{algorithm.advantage}`"], [f"`{algorithm.policy_loss}`"]
    for key, value in algorithm.defaults.items():
        (estimator if key in estimators_own else loss).append(f"`{key}: {written(value)}`")
    name, pair = f"`{algorithm.name}`", (", ".join(estimator), ", ".join(loss))
    return (name, algorithm.description, *pair, algorithm.aggregation, algorithm.paper)


def _functions(
    functions: Mapping[str, Callable[..., Any]], choices: Mapping[str, Callable[..., Any]]
) -> Iterable[tuple[str, ...]]:
    for name, function in functions.items():
        together = {f"the choice of '{name}'": choices[name]} if name in choices else {}
        taken = shared_settings({**together, f"'{name}'": function})
        yield (f"`{name}`", summary(function), _defaults(taken), note(function))


def _defaults(taken: Mapping[str, Setting]) -> str:
    return ", ".join(f"`{setting.name}` {written(setting.default)}" for setting in taken.values())
