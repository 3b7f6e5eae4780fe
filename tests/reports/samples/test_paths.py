"""An episode of several paths is shown path by path, on the page and on the terminal."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from penstock.base.ragged import Ragged
from penstock.reports.samples.page import write_page
from penstock.reports.samples.reading import samples_of
from penstock.reports.samples.terminal import turn_by_turn
from penstock.state.experience import column_names, read_columns, write_columns
from penstock.state.run_folder import RunFolder
from tests.reports.samples.played import play_episodes


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Of the first episode, which has two turns, the second one is a path of its own, after a prompt of its own."""
    play_episodes(tmp_path / "played")
    run = RunFolder(tmp_path / "played")
    tokenizer = Tokenizer.from_file(str(run.model("initial") / "tokenizer.json"))
    first = len(tokenizer.encode("[4+4]=8 ").ids)
    columns = read_columns(run.experience(1), column_names(run.experience(1)))
    whole = columns["response_tokens"].lengths_B.tolist()
    columns["path_ends"] = Ragged.of([[first, whole[0]], [whole[1]], [whole[2]]], np.int32)
    prompt = tokenizer.encode("once more= ").ids
    columns["path_prompt_tokens"] = Ragged.of([prompt, [], []], np.int32)
    columns["path_prompt_ends"] = Ragged.of([[len(prompt)], [], []], np.int32)
    columns["advantages"] = Ragged(np.ones(sum(whole), np.float32), columns["response_tokens"].offsets_B1)
    columns["policy_version"] = np.zeros(3, np.int64)
    write_columns(run.experience(1), columns)
    return run


def terminal_of(run: RunFolder) -> str:
    console = Console(width=100, record=True, file=StringIO())
    for part in turn_by_turn(run, samples_of(run, 1).at([0, 1], tokens=True)):
        console.print(part)
    return console.export_text()


def test_the_terminal_tells_what_a_path_begins_after(run: RunFolder) -> None:
    """Turns are counted through. Control: the other episode has one path, and nothing says so."""
    text = terminal_of(run)
    first, second = text.split("train-000017/1")
    assert "2 paths" in first and "paths" not in second
    rows = re.findall(r"^\s*(turn \d|told|path \d after)\s+[\d,]+\s+(\S.*?)\s*$", first, re.MULTILINE)
    expected = [("turn 1", "[4+4]"), ("told", "=8"), ("path 2 after", "once more="), ("turn 2", "8.<eos>")]
    assert [(label, said) for label, said in rows] == expected


def test_the_page_does_as_well(run: RunFolder) -> None:
    """Control: without the columns of paths it has no such line."""
    page = write_page(run, 2)
    assert page is not None
    text = re.sub(r"</?span[^>]*>", "", page.read_text(encoding="utf-8"))
    assert re.search(
        r"<small>path 2 after</small><div>once more= </div>.*?<small>turn 2</small><div>8.&lt;eos&gt;", text
    )
    assert text.count("path 2 after") == 1 and "2 paths" in text


def test_each_path_has_its_own_tokens(run: RunFolder) -> None:
    """All of them together are the episode's. Control: an episode of one path is that."""
    several, one = samples_of(run, 1).at([0, 1], tokens=True)
    assert several.tokens is not None
    parts = [path.tokens.tolist() for path in several.paths if path.tokens is not None]
    assert len(parts) == 2 and parts[0] + parts[1] == several.tokens.tolist() and all(parts)
    assert one.paths == [one]
