"""What a stranger sees of `make quickstart`: it learns what README.md says, and its report and samples are readable.

Left out: Prefect's and MLflow's pages of it (test_pages.py).
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from penstock.state.run_folder import RunFolder
from tests.browser.conftest import on_wide
from tests.browser.test_form import Picture
from tests.browser.test_pages import fits
from tests.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900), pytest.mark.xdist_group("flows")]

COLUMNS = 108  # of the terminal
END = "\x1b[?25h"  # the cursor is shown again: the line with the progress is gone
WENT = re.compile(r"went from (\S+) % to (\S+) %, of responses sampled at temperature 1 from (\S+) % to (\S+) %")
LIKE_HERE = 0.03  # a share by which accuracies differ between processors, at most


@dataclass(frozen=True)
class Quickstart:
    """A whole quickstart.

    Attributes:
        shown: what the terminal showed in the end, with its colours.
    """

    run: RunFolder
    shown: str


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """Train as `make quickstart` does."""
    home = tmp_path_factory.mktemp("quickstart")
    (home / "configs").symlink_to(ROOT / "configs")
    colours = {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "penstock.cli.main", "train", "configs/quickstart.yaml"]
    done = subprocess.run(words, cwd=home, env=os.environ | colours, capture_output=True, text=True, check=True)
    (folder,) = (home / "runs").glob("quickstart-*")
    return Quickstart(RunFolder(folder), done.stdout.rpartition(END)[2].replace(str(home), "/penstock"))


def test_the_quickstart_learns_as_much_as_the_readme_says(quickstart: Quickstart) -> None:
    """Greedy responses by 25 points at least, to above 80 %. Control: before it they are right half of the time."""
    summary = json.loads(quickstart.run.summary.read_text(encoding="utf-8"))
    found = [summary[name] for name in ("greedy_before", "greedy_after", "accuracy_before", "accuracy_after")]
    said = WENT.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert said is not None
    assert found == pytest.approx([float(share) / 100 for share in said.groups()], abs=LIKE_HERE)
    assert found[0] < 0.6 and found[1] > 0.8 and found[1] - found[0] >= 0.25


@on_wide
def test_the_report_fits_any_page(page: Any, quickstart: Quickstart, picture: Picture, tmp_path: Path) -> None:
    """As wide as a laptop's and as narrow as a telephone's, and so do the samples. What the terminal said is kept."""
    report = quickstart.run.report
    for file, words in ((report, "Held-out accuracy"), (report.with_name("samples.html"), "the report")):
        page.goto(file.as_uri())
        page.get_by_text(words).first.wait_for()
        fits(page)
    picture(page, "samples")

    both = tmp_path / "quickstart.html"
    both.write_text(_beside(quickstart.shown, report), encoding="utf-8")
    page.goto(both.as_uri())
    page.frame_locator("iframe").get_by_text("Held-out accuracy").first.wait_for()
    assert "training completed" in page.locator("pre").inner_text()
    picture(page, "quickstart")


def _beside(shown: str, report: Path) -> str:
    """Return a page with what a terminal showed above a report."""
    console = Console(file=io.StringIO(), record=True, width=COLUMNS)
    console.print(Text.from_ansi(f"$ make quickstart\n{shown.strip()}"))
    terminal = console.export_html(theme=MONOKAI, inline_styles=True, code_format="<pre>{code}</pre>")
    return f"""<!doctype html><meta charset="utf-8">
<style>body {{ margin: 0; background: #f6f7f9 }}
pre {{ margin: 24px; padding: 20px; border-radius: 8px; background: #15181d; color: #e6e6e6 }}
pre {{ font: 14px/1.25 monospace }}
iframe {{ width: 100%; height: 1000px; border: 0 }}</style>
{terminal}<iframe src="{report.as_uri()}"></iframe>"""
