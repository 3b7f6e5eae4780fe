"""Models that were evaluated on the same prompts, side by side: figures with intervals, and paired differences.

A difference is that of two models' answers to each prompt, so that what makes a prompt hard for both cancels; its
interval is the bootstrap's over prompts, as that of a figure (penstock/evaluators/bootstrap.py). One that excludes 0
says that other prompts of the same kind would have shown the same sign. Left out: corrections for looking at many
figures at once; the spread between trainings of different seeds, which no evaluation of one model each holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from penstock.evaluators.bootstrap import with_intervals
from penstock.reports.evaluation import how_sampled, shown, with_interval

if TYPE_CHECKING:
    from rich.table import Table

ENDS = ("/low", "/high")


@dataclass(frozen=True)
class Evaluated:
    """What came out for a model.

    Attributes:
        figures: by name, as in the record of a training; the ends of an interval as `NAME/low` and `NAME/high`.
        prompts: columns `figure`, `prompt`, `value`: what figures that are means over prompts are the means of.
    """

    label: str
    figures: Mapping[str, float]
    prompts: pd.DataFrame


def difference(model: Evaluated, other: Evaluated) -> dict[str, float]:
    """Return how much more `model` has than `other`, with intervals, over the prompts that both have answered."""
    ours, theirs = (item.prompts.set_index(["figure", "prompt"])["value"] for item in (model, other))
    both = pd.concat([ours.rename("ours"), theirs.rename("theirs")], axis=1, join="inner")
    figures: dict[str, float] = {}
    for name, values in both.groupby(level="figure", sort=False):
        # Prompts in their order, so that the same ones have the same resamples, whichever model comes first.
        pairs = values.droplevel("figure").sort_index()
        figures |= with_intervals({str(name): (pairs["ours"] - pairs["theirs"]).to_numpy()})
    return figures


def differences(models: Sequence[Evaluated]) -> dict[str, dict[str, float]]:
    """Return `difference` of every model to the first, by its label."""
    first, *others = models
    return {model.label: difference(model, first) for model in others}


def table_of(models: Sequence[Evaluated]) -> pd.DataFrame:
    """Return a row for each figure as text: a column for each model, and one for each difference to the first."""
    names = list(dict.fromkeys(name for model in models for name in model.figures))
    own = shown(names)
    tasks = {name: name for name in names if not name.startswith("heldout/") and not name.endswith(ENDS)}
    columns = {model.label: model.figures for model in models}
    columns |= {f"{label} - {models[0].label}": figures for label, figures in differences(models).items()}
    rows = {
        label: [with_interval(figures, name) for figures in columns.values()] for name, label in (own | tasks).items()
    }
    how = [how_sampled(model.figures) for model in models]
    sampled = {"responses": [*how, *[""] * (len(columns) - len(how))]} if any(how) else {}
    return pd.DataFrame.from_dict(sampled | rows, orient="index", columns=list(columns)).rename_axis("figure")


def page_of(models: Sequence[Evaluated], facts: Mapping[str, str]) -> str:
    """Return the table as a Markdown page, below it what else is to be known."""
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    note = "In brackets: 95 % intervals over prompts; of a difference, over the prompts that both have answered."
    return f"# Evaluation\n\n{table_of(models).to_markdown(disable_numparse=True)}\n\n{note}\n\n{lines}\n"


def rendered(models: Sequence[Evaluated]) -> Table:
    """Return the table for a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    content = table_of(models)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("figure (95 % interval)", overflow="fold")
    for name in content.columns:
        table.add_column(Text(str(name)), justify="right", overflow="fold")
    for label, values in content.iterrows():
        table.add_row(Text(str(label)), *(Text(str(value)) for value in values))
    return table


def as_json(models: Sequence[Evaluated]) -> dict[str, Any]:
    """Return the figures of all models and their differences to the first, for a file."""
    return {
        "figures": {model.label: dict(model.figures) for model in models},
        "differences": {"to": models[0].label, "of": differences(models)},
    }
