"""A comparison as files: Markdown, tables as CSV, a picture, and one HTML page that can be sent as it is.

Everything a model or a user wrote is escaped by the template.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.files import write_text
from penstock.reports.comparing.pictures import comparison_figure
from penstock.reports.comparing.samples import SamplePair
from penstock.reports.comparing.tables import (
    Comparison,
    contrast_numbers,
    contrast_table,
    group_numbers,
    group_table,
    results_text,
)
from penstock.reports.plots import save
from penstock.reports.report import Picture

if TYPE_CHECKING:
    import pandas as pd

SAMPLES_SHOWN = 30
RUNS, SEEDS = "Curves of the runs.", "Means over the seeds of a group, in bands of their 95 % intervals."


def write_comparison(comparison: Comparison, folder: Path, title: str = "Comparison", head: str = "") -> list[Path]:
    """Write the files, and return them: pages first, then tables.

    `compare.md`, `compare.html`, `compare.png` where a curve exists, `results.csv`, `differences.csv`; where there are
    several seeds `groups.csv`, and where groups can be told apart `significance.csv`; `samples.html` where two runs
    answered the same prompts.

    Args:
        head: a paragraph below the title.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = save(comparison_figure, comparison, folder / "compare.png")
    picture = None if drawn is None else Picture(drawn, SEEDS if comparison.over_seeds else RUNS)
    tables = _tables(comparison)
    page = folder / "compare.md"
    write_text(page, _markdown(title, head, tables, picture))
    html = _html(folder / "compare.html", title, head, tables, picture)
    numbers = _numbers(comparison)
    for name, table in numbers.items():
        table.to_csv(folder / name)
    paths = [page, html, *([picture.path] if picture else []), *(folder / name for name in numbers)]
    if comparison.samples is not None:
        paths.append(_html(folder / "samples.html", f"{title}: samples", "", {}, None, comparison.samples))
    return paths


def _numbers(comparison: Comparison) -> dict[str, pd.DataFrame]:
    """Return the tables for other programs by their files' names."""
    found = {"results.csv": comparison.results, "differences.csv": comparison.differences}
    if comparison.over_seeds:
        found["groups.csv"] = group_numbers(comparison.groups)
    if comparison.contrasts:
        found["significance.csv"] = contrast_numbers(comparison.contrasts).set_index("group")
    return found


def _tables(comparison: Comparison) -> dict[str, pd.DataFrame | None]:
    """Return the tables by their headings, the first under the title; None: there is nothing to say."""
    found: dict[str, pd.DataFrame | None] = {"Runs": results_text(comparison.results).reset_index()}
    if comparison.over_seeds:
        found["Mean over seeds (95 % interval)"] = group_table(comparison.groups).reset_index()
    if comparison.contrasts:
        found["Differences between groups"] = contrast_table(comparison.contrasts)
    if len(comparison.evaluation):
        found["Last held-out evaluation"] = comparison.evaluation.reset_index()
    found["Parameters that differ"] = comparison.differences.reset_index() if len(comparison.differences) else None
    return found


def _markdown(title: str, head: str, tables: dict[str, pd.DataFrame | None], picture: Picture | None) -> str:
    parts = [f"# {title}", *([head] if head else [])]
    for heading, table in tables.items():
        text = "None." if table is None else table.to_markdown(index=False, disable_numparse=True)
        parts += [f"## {heading}", text]
    if picture:
        parts.append(f"![{picture.caption}]({picture.path.name})")
    return "\n\n".join(parts) + "\n"


def _html(
    path: Path,
    title: str,
    head: str,
    tables: dict[str, pd.DataFrame | None],
    picture: Picture | None,
    samples: SamplePair | None = None,
) -> Path:
    from jinja2 import Environment, PackageLoader

    templates = Environment(
        loader=PackageLoader("penstock.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    content: dict[str, Any] = {
        "title": title,
        "head": head,
        "tables": {
            heading: None if table is None else (list(table.columns), table.to_numpy().tolist())
            for heading, table in tables.items()
        },
        "picture": picture,
        "samples": samples,
        "rows": () if samples is None else samples.rows[:SAMPLES_SHOWN],
    }
    write_text(path, templates.get_template("comparison.html.j2").render(content))
    return path
