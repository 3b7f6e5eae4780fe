"""The files of a comparison: what they hold, and that what models and users wrote is text in them."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from penstock.base.errors import UserError
from penstock.reports.comparing.pages import write_comparison
from penstock.reports.comparing.tables import check_samples, comparison_of, group_table
from penstock.reports.comparing.terminal import _beside, render, render_samples
from penstock.state.experience import write_columns
from penstock.state.run_folder import RunFolder
from tests.reports.comparing.examples import RATE, run, two_groups

NAMES = [
    "compare.md",
    "compare.html",
    "compare.png",
    "results.csv",
    "differences.csv",
    "groups.csv",
    "significance.csv",
]


def shown(what: object, width: int = 140) -> str:
    """Return what the terminal shows."""
    out = Console(file=io.StringIO(), width=width)
    out.print(what)
    return str(out.file.getvalue())  # type: ignore[attr-defined]


def test_groups_and_their_difference_are_in_all_files(tmp_path: Path) -> None:
    """Markdown, HTML and the terminal have the same texts, the CSV files numbers. Control: single runs have none."""
    comparison = comparison_of(two_groups())
    paths = write_comparison(comparison, tmp_path / "groups")
    assert [path.name for path in paths] == NAMES
    texts = [paths[0].read_text(encoding="utf-8"), paths[1].read_text(encoding="utf-8"), shown(render(comparison))]
    for text in texts:
        for word in ("B – A", "+0.030", "0.035", "paired t-test", "0.670 (0.408 to 0.932)", f"{RATE}=3e-06"):
            assert word in text
    significance = pd.read_csv(tmp_path / "groups" / "significance.csv").set_index("measure")
    assert significance.loc["heldout/accuracy", "p"] == pytest.approx(0.0351, abs=1e-4)
    assert pd.read_csv(tmp_path / "groups" / "groups.csv")["tokens trained"].tolist() == [1200.0, 1200.0]
    single = comparison_of([two_groups()[0], two_groups()[3]])
    assert [path.name for path in write_comparison(single, tmp_path / "single")] == NAMES[:5]
    assert "Mean over seeds" not in (tmp_path / "single" / "compare.md").read_text(encoding="utf-8")


def test_many_groups_stand_below_each_other() -> None:
    """On a terminal no interval is broken into lines, and no group left out. Control: all ten in a row break them."""
    many = [
        run(f"r{rate}-{seed}", f"{rate}e-06", seed, (0.3, 0.5 + seed / 10)) for rate in range(1, 11) for seed in (0, 1)
    ]
    comparison = comparison_of(many)
    interval = re.compile(r"0\.550 \(-?0\.\d+ to 1\.\d+\)")
    text = shown(render(comparison), 120)
    assert len(interval.findall(text)) == 2 * 10, "last and best held-out accuracy of each group"
    assert not interval.findall(shown(_beside(group_table(comparison.groups), "mean"), 120))


def test_curves_have_a_band_over_seeds(tmp_path: Path) -> None:
    """Of groups with several. Control: of single runs there are lines alone."""
    from penstock.reports.comparing.pictures import comparison_figure

    several, single = (comparison_figure(comparison_of(runs)) for runs in (two_groups(), two_groups()[::3]))
    assert several is not None and single is not None
    assert [len(panel.collections) for panel in several.axes] == [2, 2]
    assert [len(panel.lines) for panel in several.axes] == [2, 2]
    assert [len(panel.collections) for panel in single.axes] == [0, 0]
    low, high = several.axes[1].collections[0].get_datalim(several.axes[1].transData).get_points()[:, 1]
    assert low < 0.41 < 0.93 < high, "of the last accuracies of the first group"


def evaluated(folder: Path, iteration: int, rewards: list[float], texts: list[str]) -> None:
    """Write held-out responses as an evaluation does."""
    prompts = [f"<b>{number}+{number}=" for number in range(len(rewards))]
    path = RunFolder(folder).evaluation(iteration)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_columns(path, {"prompt": prompts, "response": texts, "reward": rewards})


def test_two_runs_answer_the_same_prompts_side_by_side(tmp_path: Path) -> None:
    """Of the newest evaluation that both have; rewards that differ come first, and no text becomes markup."""
    one, two = tmp_path / "one", tmp_path / "two"
    evaluated(one, 1, [0.0, 0.0], ["old", "old"])
    evaluated(two, 1, [0.0, 0.0], ["old", "old"])
    evaluated(one, 2, [1.0, 0.0], ["0.", "<script>"])
    evaluated(two, 2, [1.0, 1.0], ["0!", "[bold]2"])
    evaluated(two, 3, [1.0, 1.0], ["newer", "newer"])
    runs = [
        run(name, rate, 0, (0.1, 0.2), folder=tmp_path / name) for name, rate in (("one", "1e-06"), ("two", "3e-06"))
    ]
    comparison = comparison_of(runs)
    samples = check_samples(comparison)
    assert samples.source == "held-out prompts, iteration 2"
    assert [(prompt, a.response, b.response) for prompt, a, b in samples.rows] == [
        ("<b>1+1=", "<script>", "[bold]2"),
        ("<b>0+0=", "0.", "0!"),
    ]
    page = write_comparison(comparison, tmp_path / "out")[-1]
    assert page.name == "samples.html"
    assert "&lt;script&gt;" in (text := page.read_text(encoding="utf-8")) and "<script>" not in text
    assert "[bold]2" in (terminal := shown(render_samples(samples, 1))) and "0!" not in terminal


def test_tables_of_samples_stand_in_for_held_out_responses(tmp_path: Path) -> None:
    """Where prompts are the same. Control: with other prompts, or without folders, there is nothing, which is said."""
    for name, prompt in (("one", "1+1="), ("two", "1+1="), ("other", "2+2=")):
        table = {"columns": ["sample_id", "prompt", "response", "reward"], "data": [["a", prompt, name, 0.5]]}
        RunFolder(tmp_path / name).samples(4).parent.mkdir(parents=True)
        RunFolder(tmp_path / name).samples(4).write_text(json.dumps(table), encoding="utf-8")
    runs = [
        run(name, f"{n}e-06", 0, (0.1, 0.2), folder=tmp_path / name) for n, name in enumerate(("one", "two", "other"))
    ]
    samples = check_samples(comparison_of(runs[:2]))
    assert samples.source == "training prompts, iteration 4"
    assert [answer.response for answer in samples.rows[0][1:]] == ["one", "two"]
    for none in ([runs[0], runs[2]], [replace(item, folder=None) for item in runs], runs[:1]):
        with pytest.raises(UserError, match="no responses of two of these runs"):
            check_samples(comparison_of(none))
