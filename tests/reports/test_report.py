"""Invariants of the report: what the run folder holds is shown, what a model wrote is text, nothing is loaded."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from penstock.reports.headline import duration, headlines
from penstock.reports.plots import metrics_frame
from penstock.reports.report import mean_task_times, write_report
from penstock.state.digests import sealed
from penstock.state.events import FAULT, append_event
from penstock.state.run_folder import RunFolder, read_metrics

SUMMARY = {
    "status": "completed",
    "seconds": 125.0,
    "iterations": 2,
    "accuracy_before": 0.25,
    "accuracy_after": 0.75,
    "heldout_temperature": 1.0,
    "reward_first": 0.5,
    "reward_last": 0.25,
    "tokens_per_second": 12345.6,
    "time_shares": {"rollout": 0.7, "update_actor": 0.25, "other": 0.044, "reshard": 0.001},
    "actor_mfu": 0.3456,
    "parameters_shared": 1000,
    "parameters_copied": 7,
}
EVIL = "<script>alert('x')</script>"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-20260101-000000"
    folder.mkdir()
    records = [
        {"iteration": number, "metrics": {"reward/mean": 0.5, "time/rollout_s": 1.5, "time/iteration_s": 2.0}}
        for number in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(sealed(record) + "\n" for record in records))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "config.yaml").write_text("name: tiny\nreward: {function: '<b>x</b>'}\n")
    return folder


def test_the_page_holds_figures_pictures_times_links_and_config(run_folder: Path) -> None:
    """Everything that a reader looks for is on the one page, in the reader's units."""
    links = {"MLflow run": "http://127.0.0.1:5000/#/experiments/1", "Run folder": str(run_folder)}
    page = write_report(run_folder, links).read_text()
    for text in ("tiny-20260101-000000", "completed", "25.0% → 75.0%", "+50.0 points", "0.500 → 0.250", "-0.250"):
        assert text in page
    for text in (
        "2 min 05 s",
        "12,346",
        "1,000",
        "7 copied",
        "34.6%",
        "rollout 70%",
        "update actor 25%, other 4%<",
        "1.500",
        "75 %",
        str(run_folder),
    ):
        assert text in page
    assert page.count('src="data:image/png;base64,') == 2
    assert 'href="http://127.0.0.1:5000/#/experiments/1"' in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page


def test_losses_are_shown_with_what_came_of_them(run_folder: Path) -> None:
    """On both pages: one recovered from, one given up, one in which the run ended. Control: without any, no word."""
    assert "Lost, and gone on" not in write_report(run_folder, {}).read_text()
    lost = {"event": "HostLost", "after": 3, "during": "update", "group": "main", "rank": 0, "reason": "it is silent"}
    for number in (1, 2, 3):
        append_event(RunFolder(run_folder), {**lost, "number": number, "unheard_s": 5.25})
    over = {"event": "recovered", "number": 1, "recovered_s": 12.0, "place": "checkpoint 000002", "tokens_lost": 6400}
    append_event(RunFolder(run_folder), over)
    append_event(RunFolder(run_folder), {"event": "given up", "number": 2})
    page = write_report(run_folder, {}).read_text()
    for text in (page, (run_folder / "report" / "report.md").read_text()):
        for said in (
            "group main, rank 0 with its host",
            "after 3, during update",
            "it is silent",
            "within 5.2 s",
            "from checkpoint 000002 after 12 s, 6,400 tokens again",
            "given up",
            "the run ended before it had recovered",
        ):
            assert said in text


def test_faults_are_shown_with_what_followed(run_folder: Path) -> None:
    """On both pages, and not among the losses. Control: without any, no word."""
    assert "Numbers that went wrong" not in write_report(run_folder, {}).read_text()
    for number, action in ((17, "skip"), (18, "rollback"), (19, "stop")):
        fault = {"event": FAULT, "iteration": number, "name": "kl", "says": f"the KL is {number}.5", "action": action}
        append_event(RunFolder(run_folder), fault)
    page = write_report(run_folder, {}).read_text()
    assert "Lost, and gone on" not in page
    for text in (page, (run_folder / "report" / "report.md").read_text()):
        for said in ("iteration 17", "the KL is 18.5", "passed over", "undone", "the training ended"):
            assert said in text


@pytest.mark.parametrize("status", ["completed", "cancelled", "failed", None])
def test_what_can_be_done_next_follows_from_how_the_run_ended(run_folder: Path, status: str | None) -> None:
    """A complete run has a model to export and to serve and nothing to resume; any other, without a summary, too, may
    go on. Both pages, with the folder's path as a shell takes it."""
    folder = run_folder.rename(run_folder.with_name("tiny run"))
    (folder / "summary.json").unlink()
    if status:
        (folder / "summary.json").write_text(json.dumps(SUMMARY | {"status": status}))
    resume = "penstock train --resume 'tiny run'"
    page = write_report(folder, {}, resume=resume)
    for text in (html.unescape(page.read_text()), page.with_name("report.md").read_text()):
        assert (resume in text) == (status != "completed")
        assert (f"penstock export '{folder}'" in text) == (status == "completed")
        assert (f"penstock serve '{folder}'" in text) == (status == "completed")
        assert "penstock ui" not in text


def test_pages_of_this_machine_come_with_the_command_that_serves_them(run_folder: Path) -> None:
    """An address of `penstock ui` answers nobody until it runs. Control: the test above, which has no such address."""
    page = write_report(run_folder, {"MLflow run": "http://127.0.0.1:5000/#/experiments/1"})
    for text in (page.read_text(), page.with_name("report.md").read_text()):
        assert f"penstock ui {run_folder.parent}" in text
    page = write_report(run_folder, {"MLflow run": "https://mlflow.example.org/#/experiments/1"})
    assert "penstock ui" not in page.read_text()


def test_alarms_and_held_out_figures_are_on_both_pages(run_folder: Path) -> None:
    """What was raised with what to change, and the evaluation with its interval; nothing where there is neither."""
    quiet = write_report(run_folder, {})
    for page in (quiet, quiet.with_name("report.md")):
        assert "Alarms" not in page.read_text()
        assert "eld-out prompts" not in page.read_text()
    accuracy = {"heldout/accuracy": 0.5, "heldout/accuracy/low": 0.25, "heldout/accuracy/high": 0.75}
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(sealed({"iteration": 3, "metrics": {**accuracy, "alarm/truncation": 1.0}}) + "\n")
    loud = write_report(run_folder, {})
    for page in (loud, loud.with_name("report.md")):
        text = page.read_text()
        for part in ("Alarms", "responses are cut", "iteration 3", "max_response_tokens", "0.500 (0.250 to 0.750)"):
            assert part in text
        assert "swings up and down" not in text


def test_what_the_model_wrote_is_text(run_folder: Path) -> None:
    """Markup in a prompt, a response, a link or its address stays visible text; nothing is executable."""
    samples = [{"prompt": EVIL, "response": EVIL, "reward": 1.0}]
    page = write_report(run_folder, {EVIL: "javascript:alert(1)"}, samples).read_text()
    assert page.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") == 3
    assert "<script" not in page
    assert 'href="javascript' not in page


def test_the_page_loads_nothing_from_outside(run_folder: Path) -> None:
    """Self-contained: every source is a data URI, there is no stylesheet, font or script to fetch."""
    page = write_report(run_folder, {}).read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)|@import', page)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source, _ in sources)


def test_samples_may_come_from_a_parquet_file_and_the_last_are_shown(run_folder: Path) -> None:
    """A file and a list show the same; of many samples the newest remain."""
    rows = [{"prompt": f"prompt-{number}.", "response": "r", "reward": 0.5} for number in range(40)]
    path = run_folder / "samples.parquet"
    pd.DataFrame(rows).to_parquet(path)
    from_file = write_report(run_folder, {}, path).read_text()
    assert from_file == write_report(run_folder, {}, rows).read_text()
    assert "prompt-39." in from_file
    assert "prompt-0." not in from_file


def test_a_killed_run_has_a_report(run_folder: Path) -> None:
    """No summary and a last line cut short: the status says so, the whole lines are shown."""
    (run_folder / "summary.json").unlink()
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "met')
    assert [record["iteration"] for record in read_metrics(RunFolder(run_folder))] == [1, 2]
    assert "unfinished" in write_report(run_folder, {}).read_text()


def test_a_run_that_recorded_nothing_has_a_report(tmp_path: Path) -> None:
    """Negative control: an empty folder gives a page without pictures, not an error."""
    page = write_report(tmp_path, {}).read_text()
    assert "Nothing has been recorded yet." in page
    assert "<img" not in page


def test_the_markdown_page_points_at_the_pictures_beside_it(run_folder: Path) -> None:
    """Each picture that it names exists."""
    folder = write_report(run_folder, {"Run folder": "here"}).parent
    text = (folder / "report.md").read_text()
    pictures = re.findall(r"!\[\w+\]\(([^)]+)\)", text)
    assert pictures == ["reward.png", "time.png"]
    assert all((folder / picture).exists() for picture in pictures)
    assert "| Held-out accuracy | 25.0% → 75.0% | +50.0 points, sampled at temperature 1 |" in text


def test_a_tasks_share_counts_the_iterations_in_which_it_did_not_run() -> None:
    """Evaluation took 4 s once in two iterations of 10 s: a mean of 4 s, and a fifth of the time."""
    records = [
        {"iteration": 1, "metrics": {"time/evaluate_s": 4.0, "time/rollout_s": 5.0, "time/iteration_s": 10.0}},
        {"iteration": 2, "metrics": {"time/rollout_s": 5.0, "time/iteration_s": 10.0}},
    ]
    times = mean_task_times(metrics_frame(records))
    assert [(time.task, time.seconds, time.share) for time in times] == [("rollout", 5.0, 0.5), ("evaluate", 4.0, 0.2)]


def test_a_summary_shows_only_what_it_holds() -> None:
    """An absent figure is left out, a zero is not; good and bad news are told apart."""
    assert headlines({}) == []
    assert [line.label for line in headlines({"iterations": 0})] == ["Iterations"]
    assert [line.trend for line in headlines(SUMMARY)][:2] == ["up", "down"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.7, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    """No 60 s and no 60 min at the edges."""
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("command", "shown", "hidden"),
    [
        ("sft", ["penstock serve"], ["penstock export", "reward.model="]),
        ("preference", ["penstock serve"], ["penstock export", "reward.model="]),
        ("reward-model", ["penstock serve", "reward.model="], ["penstock export"]),
    ],
)
def test_a_training_in_steps_says_what_can_be_done_with_its_model(
    run_folder: Path, command: str, shown: list[str], hidden: list[str]
) -> None:
    """Its loss is better where it is lower. Control: of iterations the model is exported."""
    summary = {"status": "completed", "command": command, "steps": 9, "loss_first": 0.75, "loss_last": 0.5}
    page = write_report(run_folder, {}, summary=summary).read_text()
    for text in (*shown, "0.750 → 0.500", "-0.250"):
        assert text in page
    for text in hidden:
        assert text not in page
    assert [(line.label, line.trend) for line in headlines(summary)] == [("Loss", "up"), ("Steps", "")]
    assert "penstock export" in write_report(run_folder, {}).read_text()
