"""The tables of docs/algorithms.md, each between two marks: algorithms, functions, settings, and how they learn.

What algorithms and functions are comes from their files (penstock/algorithms/catalogue.py), settings from the list of
keys, and accuracies from a result of `penstock bench algorithms`, each beside the algorithm's formulas. A second
result, with more optimizer steps per iteration, is put beside the first loss by loss: at an iteration's first step all
losses have the same gradient. A test renders the page and compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from penstock.algorithms import catalogue
from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.declarations.settings import summary
from penstock.algorithms.policy_losses import POLICY_LOSSES
from penstock.algorithms.registry import ALGORITHMS
from penstock.base.errors import UserError
from penstock.benchmarks.accuracy.algorithms import TUNED, figures_of
from penstock.benchmarks.reporting.result import BenchResult
from penstock.configs.loading.keys import describe_keys
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.reports.evaluation import sampled_at

SETTINGS, PREFERENCE_SETTINGS = "algorithm.settings.", "loss.settings."
HEAD = ("name", "accuracy", "by seed", "advantage", "loss", "paper", "notes")
TABLES = (
    "algorithms",
    "estimators",
    "losses",
    "settings",
    "preference losses",
    "settings of preference losses",
    "accuracies",
)


def marks(table: str) -> tuple[str, str]:
    """Return the lines before and after a table."""
    return f"<!-- {table}: written by 'penstock bench page' -->\n", f"<!-- end of {table} -->"


def read_page(path: Path) -> str:
    """Return the text of the page that has the tables.

    Raises:
        UserError: there is none, or it has no place for one of them.
    """
    if not path.is_file():
        raise UserError(f"there is no page {path}", "run this in the root of the repository, or name the page")
    text = path.read_text(encoding="utf-8")
    for mark in (mark.strip() for name in TABLES for mark in marks(name)):
        if mark not in text:
            raise UserError(f"{path} has no place for the table ('{mark}')", "name docs/algorithms.md or a copy")
    return text


def rendered(page: str, result: BenchResult | None, more_steps: BenchResult | None = None) -> str:
    """Return the page with all tables written anew; without a result accuracies are dashes.

    Args:
        page: docs/algorithms.md or a copy.
        result: every algorithm.
        more_steps: algorithms that differ in their loss, with more mini-batches than in `result`.

    Raises:
        UserError: a result is one of another benchmark.
    """
    for given in (result, more_steps):
        if given is not None and given.bench != "algorithms":
            raise UserError(f"the result is one of 'bench {given.bench}'", "name one of 'bench algorithms'")
    tables = {
        "algorithms": catalogue.by_name(),
        "estimators": catalogue.estimators(),
        "losses": catalogue.policy_losses(),
        "settings": _settings(TrainConfig, SETTINGS),
        "accuracies": _accuracies(result, more_steps),
        "preference losses": catalogue.preference_losses(),
        "settings of preference losses": _settings(PreferenceConfig, PREFERENCE_SETTINGS),
    }
    for name, lines in tables.items():
        begin, end = marks(name)
        before, _, rest = page.partition(begin)
        page = before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    return page


def table(page: str, heading: str) -> dict[str, list[str]]:
    """Return the cells of the first table below a heading, by the name in code style in its first cell."""
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines[0].splitlines()] if lines else []
    rows = [[cell.strip() for cell in row] for row in cells]
    return {re.findall(r"`([^`]+)`", row[0])[0]: row for row in rows if row[0].startswith("`")}


def _settings(tree: type[BaseModel], place: str) -> list[str]:
    keys = [key for key in describe_keys(tree) if key.name.startswith(place)]
    rows = [(f"`{key.name.removeprefix(place)}`", key.type, key.description) for key in keys]
    return catalogue.table(("setting", "values", "meaning"), rows)


def _accuracies(result: BenchResult | None, more_steps: BenchResult | None) -> list[str]:
    introduction, details = ([], []) if result is None else (_introduction(result), result.details)
    lines = [*introduction, *catalogue.table(HEAD, _rows(details)), "", *_tuned()]
    if result is not None and more_steps is not None:
        lines += ["", *_losses(result, more_steps)]
    return lines


def _introduction(result: BenchResult) -> list[str]:
    fixed, start = result.settings, result.figures["accuracy_before"]
    seeds = ", ".join(map(str, sorted({row["seed"] for row in result.details})))
    return [
        f"Accuracy on {fixed['heldout_prompts']} held-out problems, {sampled_at(fixed['heldout_temperature'])}, after "
        f"{fixed['iterations']} iterations of `configs/{fixed['recipe']}`, the mean of seeds {seeds}; {start:.1%} "
        "before.",
        f"An iteration takes {fixed['mini_batches']} optimizer steps, the first of them at a ratio of exactly 1.",
        f"All trainings of a seed start from the same warm-up. Measured on {result.machine}.",
        "± is the standard deviation over seeds; * marks a seed whose 95 % interval overlaps that of its start.",
        "",
    ]


def _rows(details: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, algorithm in sorted(ALGORITHMS.items()):
        found = [row for row in details if row["name"] == name]
        formulas = (summary(ADVANTAGES[algorithm.advantage]), summary(POLICY_LOSSES[algorithm.policy_loss]))
        yield (f"`{name}`", *accuracy_cells(found), *formulas, algorithm.paper, catalogue.notes(algorithm))


def accuracy_cells(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return an algorithm's accuracy over its seeds, and that of each."""
    if not rows:
        return "–", "–"
    figures, (name,) = figures_of(rows), {row["name"] for row in rows}
    deviation = figures.get(f"deviation_{name}")
    each = " ".join(f"{row['accuracy_after']:.1%}{'' if row['improved'] else '*'}" for row in rows)
    return f"{figures[f'accuracy_{name}']:.1%}" + ("" if deviation is None else f" ± {deviation:.1%}"), each


def _losses(result: BenchResult, more_steps: BenchResult) -> list[str]:
    """The policy losses beside each other, with few and with more steps per iteration, over the same seeds."""
    seeds = sorted({row["seed"] for row in more_steps.details})
    few, many = (item.settings["mini_batches"] for item in (result, more_steps))
    rows = []
    for name in dict.fromkeys(row["name"] for row in more_steps.details):
        found = [row for row in more_steps.details if row["name"] == name]
        before = [row for row in result.details if row["name"] == name and row["seed"] in seeds]
        algorithm = ALGORITHMS[name]
        names = (f"`{algorithm.policy_loss}`", f"`{name}`", f"`{algorithm.advantage}`")
        rows.append((*names, accuracy_cells(before)[0], *accuracy_cells(found)))
    return [
        f"Losses differ in steps that are off the policy, so each once more with `algorithm.mini_batches: {many}`: "
        f"{many} instead of {few} steps of the same learning rate, and a ratio of 1 in the first alone. Both columns "
        f"are over {f'seeds {seeds[0]} to {seeds[-1]}' if len(seeds) > 1 else f'seed {seeds[0]} alone'}.",
        "",
        *catalogue.table(("loss", "algorithm", "advantage", f"{few} steps", f"{many} steps", "by seed"), rows),
    ]


def _tuned() -> list[str]:
    """What differs from the recipe besides the name."""
    given = {name: ", ".join(f"`{override}`" for override in tuned.overrides) for name, tuned in TUNED.items()}
    rows = [(f"`{name}`", given[name], tuned.reason) for name, tuned in TUNED.items()]
    return ["What an algorithm has there besides its name:", "", *catalogue.table(("name", "settings", "why"), rows)]
