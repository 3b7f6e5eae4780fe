"""A training's page in Prefect: the newest progress wins, tables stay, and a server that is away costs nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from markdown_it import MarkdownIt
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import Artifact
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from penstock.session.flow_runs.page import EVERY_S, HELDOUT, PROGRESS, SAMPLES, Page, page_of, verbatim, without_files

EVALUATION = {
    "heldout/accuracy": 0.5,
    "heldout/accuracy/low": 0.4,
    "heldout/accuracy/high": 0.6,
    "heldout/temperature": 1.0,
}


def shown_by(act: Callable[[Page], None], **settings: Any) -> dict[str, list[Artifact]]:
    """Let a flow run have a page; return what its server holds of it once it is closed, by key, oldest first."""
    names = []

    @flow(name="paged")
    def paged() -> None:
        names.append(UUID(flow_run.id))
        page = Page(flow_run.id, **settings)
        act(page)
        page.close()

    paged()
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=names)))
    by_key: dict[str, list[Artifact]] = {}
    for artifact in sorted(found, key=lambda item: item.created):
        by_key.setdefault(str(artifact.key), []).append(artifact)
    return by_key


@pytest.mark.usefixtures("prefect_harness")
def test_progress_is_one_artifact_with_the_newest_figures() -> None:
    """Of all iterations the last is there, with what an earlier evaluation found and how its responses were sampled."""

    def act(page: Page) -> None:
        page.advance(0, EVALUATION)
        page.start(4, 0)
        for iteration in range(1, 5):
            page.advance(iteration, {"reward/mean": iteration / 4})

    shown = shown_by(act, every_s=0.0)
    (progress,) = shown[PROGRESS]
    assert (progress.type, float(str(progress.data))) == ("progress", 100.0)
    assert str(progress.description).startswith(
        "**Iteration 4 of 4** · reward 1.000 · held-out accuracy 50.0% (sampled at temperature 1, after iteration 0) · "
    )
    assert "s per iteration" in str(progress.description)
    assert "left" not in str(progress.description)


@pytest.mark.usefixtures("prefect_harness")
def test_a_training_that_ends_early_says_so() -> None:
    """Control: one that goes on to its end, above, does not; the share is that of its iterations."""

    def act(page: Page) -> None:
        page.start(4, 2)
        page.advance(3, {"reward/mean": 0.5})

    (progress,) = shown_by(act)[PROGRESS]
    assert float(str(progress.data)) == 75.0
    assert str(progress.description).startswith("**Ended after iteration 3 of 4** · reward 0.500")


@pytest.mark.usefixtures("prefect_harness")
def test_quick_iterations_are_not_sent_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred in a moment are one or two requests: the first, and the newest when the page is closed."""
    sent = []
    original = Page._send_progress
    monkeypatch.setattr(Page, "_send_progress", lambda page, client: sent.append(1) or original(page, client))

    def act(page: Page) -> None:
        page.start(100, 0)
        for iteration in range(1, 101):
            page.advance(iteration, {})

    began = time.monotonic()
    (progress,) = shown_by(act)[PROGRESS]
    assert "Iteration 100 of 100" in str(progress.description)
    assert 1 <= len(sent) <= 2 + (time.monotonic() - began) / EVERY_S


@pytest.mark.usefixtures("prefect_harness")
def test_each_evaluation_and_table_of_samples_is_kept() -> None:
    """With intervals; an iteration without an evaluation adds none."""

    def act(page: Page) -> None:
        page.advance(0, EVALUATION)
        page.advance(1, {"reward/mean": 0.0})
        page.advance(2, EVALUATION | {"heldout/accuracy": 0.55})
        page.samples(2, [{"prompt": "1+1=", "response": "<img src=x>", "reward": 0.0}], "penstock samples runs/a")

    shown = shown_by(act)
    assert [json.loads(str(item.data))[0]["value"] for item in shown[HELDOUT]] == [
        "0.500 (0.400 to 0.600)",
        "0.550 (0.400 to 0.600)",
    ]
    assert "after iteration 2" in str(shown[HELDOUT][1].description)
    (rows,) = shown[SAMPLES]
    assert json.loads(str(rows.data)) == [{"prompt": "` 1+1= `", "response": "` <img src=x> `", "reward": 0.0}]
    assert rows.description == "Samples of iteration 2; all of them: `penstock samples runs/a`"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42.",
        "<img src=http://evil.example/x>",
        "[a](http://evil.example)",
        "a ` b `` c",
        "# one\n\n<b>two\r\nthree",
    ],
)
def test_what_a_model_wrote_is_no_markdown(text: str) -> None:
    """Prefect's pages render the cells of tables: they would load an image from anywhere. As a span of code nothing is
    rendered, and the text is there, its lines told apart. Control: without the span there are other tokens."""
    markdown = MarkdownIt()
    (paragraph,) = (token for token in markdown.parse(verbatim(text)) if token.type == "inline")
    (span,) = paragraph.children or []
    assert span.type == "code_inline"
    assert span.content.strip() == re.sub("(\r?\n)", " ↵ ", text).strip()
    if "<" in text or "](" in text:
        plain = [child.type for token in markdown.parse(text) for child in (token.children or [token])]
        assert plain != ["paragraph_open", "text", "paragraph_close"]


def test_a_long_text_is_cut() -> None:
    """A table is an entry of Prefect's database."""
    assert verbatim("x" * 5000) == f"` {'x' * 1000} [... 4,000 characters] `"


def test_a_report_leaves_out_what_lies_in_its_folder() -> None:
    """A picture and a link to a file beside it; also the last line. Control: a link to a server and a table stay."""
    report = "# Sums\n\n[Samples](samples.html)\n\n| a |\n| --- |\n\n[MLflow](http://a/b)\n\n![Curves](compare.png)\n"
    assert without_files(report) == "# Sums\n\n| a |\n| --- |\n\n[MLflow](http://a/b)\n\n"


def test_a_server_that_is_away_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """What is shown returns at once, a word is in the log, and the end is not waited for beyond its patience."""
    away = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}
    with temporary_settings(away), page_of("00000000-0000-0000-0000-000000000001") as page:
        assert page is not None
        began = time.thread_time()
        page.start(2, 0)
        page.samples(1, [{"prompt": "", "response": "", "reward": 0.0}], "")
        page.advance(1, EVALUATION)
        assert time.thread_time() - began < 0.1
    assert "page in Prefect lacks something" in caplog.text


def test_outside_a_flow_run_there_is_no_page() -> None:
    """The control: nothing is asked of any server."""
    with page_of(None) as page:
        assert page is None
