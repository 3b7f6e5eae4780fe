"""The table of docs/algorithms.md that has all of an algorithm in one row: accuracy, formula, paper, deviations.

Accuracies come from a result of `penstock bench algorithms`; the rest is put together from the other tables of the same
page, so that it cannot say something else than they do. A second result, with more optimizer steps per iteration, is
put beside the first loss by loss: at an iteration's first step all losses have the same gradient. A test renders the
page and compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.algorithms import TUNED, figures_of
from benchmarks.result import BenchResult
from penstock.base.errors import UserError
from penstock.reports.evaluation import drawn_at

BEGIN, END = "<!-- accuracies: written by 'penstock bench page' -->\n", "<!-- end of accuracies -->"
HEAD = (
    "| name | accuracy | by seed | advantage | loss | paper | deviations and notes |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


def read_page(path: Path) -> str:
    """Return the text of the page that has the table.

    Raises:
        UserError: there is none, or it has no place for the table.
    """
    if not path.is_file():
        raise UserError(f"there is no page {path}", "run this in the root of the repository, or name the page")
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise UserError(f"{path} has no place for the table ('{BEGIN.strip()}')", "name docs/algorithms.md or a copy")
    return text


def rendered(page: str, result: BenchResult | None, more_steps: BenchResult | None = None) -> str:
    """Return the page with the table written anew; without a result its accuracies are dashes.

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
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    introduction, details = ([], []) if result is None else (_introduction(result), result.details)
    lines = [*introduction, *HEAD, *_rows(page, details), "", *_settings()]
    if result is not None and more_steps is not None:
        lines += ["", *_losses(page, result, more_steps)]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def table(page: str, heading: str) -> dict[str, list[str]]:
    """Return the cells of the first table below a heading, by the name in code style in its first cell."""
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()] if lines else []
    return {re.findall(r"`([^`]+)`", row[0])[0]: row for row in rows if row[0].startswith("`")}


def _introduction(result: BenchResult) -> list[str]:
    fixed, start = result.settings, result.figures["accuracy_before"]
    seeds = ", ".join(map(str, sorted({row["seed"] for row in result.details})))
    return [
        f"Accuracy on {fixed['heldout_prompts']} held-out problems, {drawn_at(fixed['heldout_temperature'])}, after "
        f"{fixed['iterations']} iterations of `configs/{fixed['recipe']}`, the mean of seeds {seeds}; {start:.1%} "
        "before.",
        f"An iteration takes {fixed['mini_batches']} optimizer steps, the first of them at a ratio of exactly 1.",
        f"All trainings of a seed start from the same warm-up. Measured on {result.machine}.",
        "± is the standard deviation over seeds; * marks a seed whose 95 % interval overlaps that of its start.",
        "",
    ]


def _rows(page: str, details: Sequence[Mapping[str, Any]]) -> list[str]:
    estimators, losses = table(page, "Advantage estimators"), table(page, "Policy losses")
    lines = []
    for name, (_, _, advantage, loss, _, paper, *_) in table(page, "By name").items():
        estimator, policy_loss = estimators[_first(advantage)], losses[_first(loss)]
        found = [row for row in details if row["name"] == name]
        deviations = "; ".join(row[3] for row in (estimator, policy_loss) if row[3]) or "none"
        cells = (f"`{name}`", *accuracy_cells(found), estimator[1], policy_loss[1], paper, deviations)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def accuracy_cells(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return an algorithm's accuracy over its seeds, and that of each."""
    if not rows:
        return "–", "–"
    figures, (name,) = figures_of(rows), {row["name"] for row in rows}
    deviation = figures.get(f"deviation_{name}")
    each = " ".join(f"{row['accuracy_after']:.1%}{'' if row['improved'] else '*'}" for row in rows)
    return f"{figures[f'accuracy_{name}']:.1%}" + ("" if deviation is None else f" ± {deviation:.1%}"), each


def _losses(page: str, result: BenchResult, more_steps: BenchResult) -> list[str]:
    """The policy losses beside each other, with few and with more steps per iteration, over the same seeds."""
    seeds = sorted({row["seed"] for row in more_steps.details})
    few, many = (item.settings["mini_batches"] for item in (result, more_steps))
    lines = [
        f"Losses differ in steps that are off the policy, so each once more with `algorithm.mini_batches: {many}`: "
        f"{many} instead of {few} steps of the same learning rate, and a ratio of 1 in the first alone. Both columns "
        f"are over {f'seeds {seeds[0]} to {seeds[-1]}' if len(seeds) > 1 else f'seed {seeds[0]} alone'}.",
        "",
        f"| loss | algorithm | advantage | {few} steps | {many} steps | by seed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    by_name = table(page, "By name")
    for name in dict.fromkeys(row["name"] for row in more_steps.details):
        found = [row for row in more_steps.details if row["name"] == name]
        before = [row for row in result.details if row["name"] == name and row["seed"] in seeds]
        _, _, advantage, loss, *_ = by_name[name]
        names = (f"`{_first(loss)}`", f"`{name}`", f"`{_first(advantage)}`")
        cells = (*names, accuracy_cells(before)[0], *accuracy_cells(found))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _settings() -> list[str]:
    """What differs from the recipe besides the name."""
    lines = ["What an algorithm has there besides its name:", "", "| name | settings | why |", "| --- | --- | --- |"]
    for name, tuned in TUNED.items():
        given = ", ".join(f"`{override}`" for override in tuned.overrides)
        lines.append(f"| `{name}` | {given} | {tuned.reason} |")
    return lines


def _first(cell: str) -> str:
    return re.findall(r"`([^`]+)`", cell)[0]
