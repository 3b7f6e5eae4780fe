"""`penstock evaluate`: models on held-out prompts or tasks, and a table of what came out.

Left out: the evaluation itself (penstock/flows/evaluate.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.base.errors import UserError
from penstock.cli.terminal import console, short_path

RECIPES = (".yaml", ".yml")


@dataclass(frozen=True)
class Named:
    """The words of a command line, by what they are."""

    models: list[str]
    recipe: str | None
    overrides: list[str]


def named(words: Sequence[str]) -> Named:
    """Sort words: a YAML file is the recipe, `key=value` that names no folder an override, all others are models.

    Raises:
        UserError: there are two recipes.
    """
    recipes = [word for word in words if word.endswith(RECIPES)]
    if len(recipes) > 1:
        raise UserError(f"two recipes are given, {recipes[0]} and {recipes[1]}", "all models are asked by one")
    rest = [word for word in words if word not in recipes]
    overrides = [word for word in rest if "=" in word and not Path(word).exists()]
    return Named([word for word in rest if word not in overrides], recipes[0] if recipes else None, overrides)


def evaluated(words: Sequence[str], tasks: str | None, include_path: Path | None, to: Path | None) -> None:
    """Evaluate, and show the table and where the files are.

    Raises:
        UserError: a model, the recipe or a task is not there or cannot work; said before a server starts.
    """
    from penstock.cli.prefect.quiet import quiet_terminal
    from penstock.cli.prefect.server import check_server, start_server
    from penstock.reports.evaluations import rendered
    from penstock.reports.progress import waiting
    from penstock.session.opening import foreseen
    from penstock.tasks.evaluation.inputs import planned
    from penstock.tasks.evaluation.results import read_results
    from penstock.tasks.evaluation.serve import EVALUATION

    given, wanted = named(words), [name for name in (tasks or "").split(",") if name]
    own, target = (None if path is None else str(path) for path in (include_path, to))
    with waiting(console, "checking models, recipe and tasks"):
        plan = planned(given.models, given.recipe, given.overrides, wanted, own, target)
        for subject in plan.subjects if plan.config is not None else ():
            foreseen(EVALUATION, plan.engines(subject))
    if plan.origin:
        console.print(f"recipe: {plan.origin}", highlight=False, markup=False, soft_wrap=True)
    check_server()
    start_server()
    from penstock.flows.evaluate import evaluate

    with quiet_terminal():
        folder = Path(evaluate(given.models, given.recipe, given.overrides, wanted, own, target))
    console.print(rendered(read_results(folder, [subject.label for subject in plan.subjects])))
    console.print(f"files: {short_path(folder)}", highlight=False, soft_wrap=True)
