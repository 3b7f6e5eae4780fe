"""The page of samples: what a model wrote is text, nothing is loaded or run, and it stays small."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from penstock.reports.report import write_report
from penstock.reports.samples.page import LAST, TOKENS, binned, by_turn, chosen_iterations, quartered, write_page
from penstock.reports.samples.tokens import Piece
from penstock.state.experience import column_names, read_columns, write_columns
from penstock.state.run_folder import RunFolder
from tests.reports.samples.played import EVIL, GREEK, played_run, write


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return played_run(tmp_path / "sums")


def page_of(run: RunFolder) -> str:
    page = write_page(run, 2)
    assert page is not None
    return page.read_text(encoding="utf-8")


def test_what_a_model_wrote_is_text(run: RunFolder) -> None:
    """A script in a response, a prompt or the name of a part is shown as it is written, and could not run: the page
    allows none."""
    assert EVIL.startswith("<script>")
    write(run, run.experience(14), 14, {20: [("</div><img src=x onerror=alert(1)>", 1.0)]})
    text = page_of(run)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in re.sub(r"</?span[^>]*>", "", text)
    assert "<script" not in text
    assert "<img" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=\"(?!index\.html)", text)
    assert not re.search(r"\son\w+=", text.replace("onerror=alert(1)&gt;", ""))


def test_it_shows_iterations_prompts_rewards_and_shades(run: RunFolder) -> None:
    """The last iteration first; a masked token and a cut response are marked, tokens coloured by their advantage."""
    text = page_of(run)
    assert re.findall(r"Iteration (\d+)</h2>", text) == ["12", "10"]
    for said in ("train-000017", "17+25=", "mean reward 0.250", "format 0.000", "refused: nothing is learnt", *GREEK):
        assert said in text
    assert '<span class="masked" title="masked: nothing is learnt from it">8</span>' in text
    assert '<span class="n2" title="-0.250">4</span><span class="gap"> ✂ cut here</span>' in text
    assert "heldout-000003" in text
    assert "best after 0" in text


def test_buttons_are_about_what_there_is(run: RunFolder) -> None:
    """Every response is of one reward's button, and each button has one."""
    text = page_of(run)
    buttons = set(re.findall(r'name="reward" id="(r\d)"', text))
    assert buttons == set(re.findall(r'class="response (r\d)', text))
    assert len(re.findall(r'class="response r\d l\d cut"', text)) == 1
    assert set(re.findall(r'name="length" id="(l\d)"', text)) == set(re.findall(r'class="response r\d (l\d)', text))
    assert 'id="cut"' in text and 'id="failed"' not in text, "none has failed"


def test_few_rewards_have_a_button_each_and_many_share_some() -> None:
    """The highest reward is in the last."""
    assert [item.label for item in binned(np.array([0.0, 1.0, 1.0]))[1]] == ["0", "1"]
    edges, bins = binned(np.linspace(-1, 1, 50))
    assert [item.label for item in bins] == ["-1 to -0.5", "-0.5 to 0", "0 to 0.5", "0.5 to 1"]
    assert edges[-1] == 1.0


def test_lengths_have_a_button_for_each_quarter() -> None:
    """However far the longest is away: no button is about nothing. Control: few have one each."""
    edges, bins = quartered(np.array([3, 4, 5, 6, 7, 8, 9, 5000]))
    assert [item.label for item in bins] == ["3 to 4", "5 to 6", "7 to 8", "9 to 5,000"]
    assert edges.tolist() == [4, 6, 8, 5000]
    assert [item.label for item in quartered(np.array([7, 7, 1200]))[1]] == ["7", "1,200"]


def test_an_episode_is_told_turn_by_turn() -> None:
    """What the policy was told stands between its turns; behind a gap turns are counted from the end."""
    said, told, gap = Piece("a", 0.5, 0.5), Piece("b", None, None), Piece("", None, None, left_out=9)
    assert [turn.number for turn in by_turn([said, said, told, said], 2)] == [1, None, 2]
    assert [turn.number for turn in by_turn([told, said, told, gap, told, said], 7)] == [None, 1, None, None, None, 7]
    assert [turn.pieces for turn in by_turn([said, said, told], 1)] == [[said, said], [told]]


def test_an_episode_that_failed_is_found_by_its_button(run: RunFolder) -> None:
    """Together with others that are down; what it was told is apart. Control: of other responses there is neither."""
    assert 'class="told"' not in page_of(run) and 'id="failed"' not in page_of(run)
    path = run.experience(12)
    columns = read_columns(path, column_names(path))
    count = len(columns["reward"])
    columns |= {"turns": np.full(count, 2), "reward_failure": ["environment: it broke", *[None] * (count - 1)]}
    write_columns(path, columns)
    text = page_of(run)
    assert 'id="failed"' in text and len(re.findall(r'class="response r\d l\d(?: cut)? failed"', text)) == 1
    assert (
        "main:has(#r0:checked):has(#cut:checked):has(#failed:checked) .card.asked:not(:has(.response.r0.cut.failed))"
        in text
    )
    assert '<div class="told"><small>told</small>' in text and "<span>2 turns</span>" in text
    assert "no reward: environment: it broke" in text


@pytest.mark.parametrize(
    ("there", "every", "chosen"),
    [
        ([], 10, []),
        ([3], 10, [3]),
        (list(range(1, 26)), 10, [1, 10, 20, 25]),
        (list(range(1, 101)), 10, [1, 30, 60, 90, 100]),
        (list(range(1, 8)), 0, [1, 3, 4, 6, 7]),
    ],
)
def test_the_last_iteration_and_a_few_before_it_are_chosen(there: list[int], every: int, chosen: list[int]) -> None:
    """Those of which tables of samples were kept, and the first."""
    assert chosen_iterations(there, every) == chosen


def test_its_size_is_bounded(run: RunFolder) -> None:
    """Responses a hundred times as many, prompts and responses a hundred times as long: the page is no larger than its
    bounds allow, and says what it leaves out."""
    long = "".join(np.random.default_rng(0).choice(list("0123456789abc"), 100 * TOKENS))
    write(run, run.experience(14), 14, {prompt: [(long, prompt / 50), (long, 0.0)] for prompt in range(50)})
    text = page_of(run)
    assert len(re.findall(r'<article class="card asked">', text)) <= LAST[0] + 2 * 6
    assert f"[... {99 * TOKENS + 1:,} tokens ...]" in text
    assert len(text) < 24 * TOKENS * 60 + 100_000


def test_a_run_without_responses_has_no_page_and_its_report_no_link(tmp_path: Path, run: RunFolder) -> None:
    """Control: with the page, both pages of the report lead to it."""
    empty = RunFolder(tmp_path / "empty")
    empty.path.mkdir()
    assert write_page(empty, 10) is None
    assert "samples.html" not in write_report(empty.path, {}).read_text()
    write_page(run, 10)
    report = write_report(run.path, {})
    assert 'href="samples.html"' in report.read_text()
    assert "(samples.html)" in report.with_name("report.md").read_text()


def test_without_a_tokenizer_texts_are_there_and_no_shades(run: RunFolder, tmp_path: Path) -> None:
    """A model that was moved takes nothing else from the page."""
    run.model("initial").rename(tmp_path / "elsewhere")
    text = page_of(run)
    assert "&lt;script&gt;alert(1)" in text
    assert 'class="masked"' not in text
