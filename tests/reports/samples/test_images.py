"""Images of prompts among samples: small pictures inside of the page, names on the terminal and in tables."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from penstock.base.ragged import Ragged
from penstock.data.images import names_in_run
from penstock.reports.report import write_report
from penstock.reports.samples import terminal
from penstock.reports.samples.page import write_page
from penstock.reports.samples.reading import samples_of
from penstock.reports.samples.thumbnails import SIDE, Thumbnails
from penstock.state.experience import add_columns
from penstock.state.run_folder import RunFolder
from penstock.tasks.iteration.record import sample_rows
from penstock.trackers.tracker import table_text
from tests.reports.samples.played import played_run

RED, GREEN, GONE = 0xABC, 0x7F00000000000001, 5
NAMES = names_in_run(np.asarray([(digest, 1, 2, 2) for digest in (RED, GREEN, GONE)]))
WIDE, HIGH = 640, 320


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Its last iteration has prompt 17 with a red image, 18 with none, 19 with two, one of which is gone."""
    run = played_run(tmp_path / "seen")
    for digest, colour in ((RED, (255, 0, 0)), (GREEN, (0, 255, 0))):
        (path := run.path / names_in_run(np.asarray((digest, 0, 0, 0)))[0]).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (WIDE, HIGH), colour).save(path, "PNG")
    one, both = [(RED, 1, 2, 2)], [(GREEN, 1, 2, 2), (GONE, 5, 2, 2)]
    rows = [np.asarray(images, np.int64).reshape(-1) for images in (one, one, [], [], both, both)]
    add_columns(run.experience(12), {"images": Ragged.of(rows, np.int64)})
    return run


def pictures(page: str) -> list[tuple[Image.Image, str]]:
    found = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)" alt="([^"]+)"', page)
    return [(Image.open(io.BytesIO(base64.b64decode(content))), name) for content, name in found]


def test_the_page_has_the_images_of_its_prompts(run: RunFolder) -> None:
    """Small, with their colours, once per prompt; one that is gone is named. Control: an iteration without has none."""
    path = write_page(run, 2)
    assert path is not None
    last, before = path.read_text(encoding="utf-8").split("Iteration 10</h2>")
    shown = {name: picture for picture, name in pictures(last)}
    assert [name for _, name in pictures(last)].count(NAMES[0]) == 1 and set(shown) == {*NAMES[:2]}
    assert {picture.size for picture in shown.values()} == {(SIDE, SIDE * HIGH // WIDE)}
    for name, channel in zip(NAMES[:2], (0, 1), strict=True):
        pixel = shown[name].getpixel((5, 5))
        assert isinstance(pixel, tuple) and np.argmax(pixel) == channel and max(pixel) > 240
    assert f"<code>{NAMES[2]}</code>" in last
    assert "<img" not in before and not re.search(r'(src|href)="(?!index\.html|data:)', last)


def test_pictures_are_bounded(run: RunFolder) -> None:
    """What does not fit is named instead; the control fits."""
    (made,) = Thumbnails(run)(NAMES[:1])
    small = Thumbnails(run, most=len(made.uri))
    assert [item.uri for item in small(NAMES[:2])] == [made.uri, ""]
    assert all(item.uri for item in Thumbnails(run)(NAMES[:2]))


def test_tables_and_terminal_name_them(run: RunFolder) -> None:
    """A table that outlives its experience still does, and the report shows what it names."""
    rows = sample_rows(run.experience(12), 100)
    assert [row["images"].split() for row in rows[::2]] == [NAMES[:1], [], NAMES[1:]]
    said = Console(width=200, record=True)
    run.samples(12).parent.mkdir(exist_ok=True)
    run.samples(12).write_text(table_text(rows))
    assert "images" not in sample_rows(run.experience(10), 100)[0]
    for _ in range(2):
        samples = samples_of(run, 12)
        for part in terminal.listed(samples.at([0, 2, 4])):
            said.print(part)
        text = said.export_text()
        assert [name in text for name in NAMES] == [True] * 3 and text.count("images") == 3 + 2
        run.experience(12).unlink(missing_ok=True)
    assert samples.is_table
    page = write_report(run.path, {}, rows[:1])
    assert [name for _, name in pictures(page.read_text(encoding="utf-8"))] == NAMES[:1]
