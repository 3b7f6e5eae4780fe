"""A run's report: one HTML page that can be sent as it is, and a short Markdown page, from the run folder alone.

The run may still be going or may have been killed: what its folder holds is shown. Everything a model or a user wrote
is escaped by the template.

Left out: comparing runs (penstock/reports/comparing/), interactive charts (MLflow has them).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from penstock.base.files import write_text
from penstock.reports.alarms import Alarm, alarms_of
from penstock.reports.evaluation import Figure, evaluation_figures
from penstock.reports.faults import Told, faults_of
from penstock.reports.headline import Headline, headlines
from penstock.reports.losses import Loss, losses_of
from penstock.reports.plots import metrics_frame, plot_run, task_times
from penstock.reports.samples.page import SAMPLES_PAGE
from penstock.reports.samples.thumbnails import Thumbnails
from penstock.state.events import read_events
from penstock.state.run_folder import RunFolder, read_metrics

if TYPE_CHECKING:
    import pandas as pd

Samples = Path | Sequence[Mapping[str, Any]]

_SAMPLES_SHOWN = 12
_CAPTIONS = {
    "loss": "What each step learns from its rows, and what the model gives away on rows that it never trains on.",
    "preferences": "How well the preferred response is told from the other, and what moves apart.",
    "optimizer": "How hard each step moves the weights, and how fast.",
    "reward": "What the policy earns on training prompts, and what it gets right on prompts it never trains on.",
    "policy": "How far and how hard each update moves the policy.",
    "critic": "How well the value model predicts returns.",
    "time": "Where the seconds of an iteration go. Tasks that run side by side are stacked, too.",
    "throughput": "How fast experience is generated, how long responses are, and how well GPUs and ranks are used.",
}


@dataclass(frozen=True)
class TaskTime:
    """Mean seconds of a task and its share of the iteration, 0 to 1 (tasks that overlap add up to more than 1)."""

    task: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Picture:
    """One plot: the PNG beside the page, and the same as a data URI."""

    path: Path
    caption: str

    @property
    def data_uri(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.path.read_bytes()).decode("ascii")


@dataclass(frozen=True)
class Report:
    """What both pages show."""

    name: str
    status: str
    headlines: list[Headline]
    alarms: list[Alarm]
    losses: list[Loss]
    faults: list[Told]
    evaluation: list[Figure]
    pictures: list[Picture]
    times: list[TaskTime]
    samples: list[dict[str, Any]]
    samples_page: str
    config: str
    links: Mapping[str, str]
    commands: Mapping[str, str]


def write_report(
    run_folder: Path,
    links: Mapping[str, str],
    samples: Samples = (),
    resume: str = "",
    summary: Mapping[str, Any] | None = None,
) -> Path:
    """Write `report/index.html` (self-contained), `report/report.md` and the plots; return the HTML's path.

    Args:
        run_folder: holds `metrics.jsonl` and `config.yaml`, and `summary.json` once the run has ended.
        links: label to address or path, e.g. the MLflow run, the Prefect flow run, the run folder.
        samples: rows (or a Parquet file of rows) with `prompt` and `response` as text and `reward` as a number;
            `images` names those of the prompt in the run folder, with spaces between.
        resume: the command that continues this run; shown unless the run is complete.
        summary: what `summary.json` will say, of a run that is just ending; default: what it says.
    """
    from jinja2 import Environment, PackageLoader

    folder = run_folder / "report"
    folder.mkdir(parents=True, exist_ok=True)
    summary = _read_summary(run_folder) if summary is None else summary
    report = _gather(run_folder, folder, summary, links, samples, resume)
    templates = Environment(
        loader=PackageLoader("penstock.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters["thumbnails"] = Thumbnails(RunFolder(run_folder))
    page = folder / "index.html"
    write_text(page, templates.get_template("report.html.j2").render(vars(report)))
    write_text(folder / "report.md", _markdown(report))
    return page


def _gather(
    run_folder: Path,
    folder: Path,
    summary: Mapping[str, Any],
    links: Mapping[str, str],
    samples: Samples,
    resume: str,
) -> Report:
    records, config = read_metrics(RunFolder(run_folder)), run_folder / "config.yaml"
    events = read_events(RunFolder(run_folder))
    status = str(summary.get("status", "unfinished")).lower()
    return Report(
        name=run_folder.name,
        status=status,
        headlines=headlines(summary),
        alarms=alarms_of(records),
        losses=losses_of(events),
        faults=faults_of(events),
        evaluation=evaluation_figures(records),
        pictures=[Picture(path, _CAPTIONS[path.stem]) for path in plot_run(records, folder)],
        times=mean_task_times(metrics_frame(records)),
        samples=_rows(samples)[-_SAMPLES_SHOWN:],
        samples_page=SAMPLES_PAGE if (folder / SAMPLES_PAGE).is_file() else "",
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        links=links,
        commands=_commands(run_folder, summary, status, links, resume),
    )


def _commands(
    run_folder: Path, summary: Mapping[str, Any], status: str, links: Mapping[str, str], resume: str
) -> dict[str, str]:
    """Return what can be done with this run, by label: an unfinished one is resumed, a complete one has its model."""
    found = {}
    if any(address.startswith("http://127.0.0.1:") for address in links.values()):
        found["Serve these pages"] = f"penstock ui {quote(str(run_folder.parent))}"
    if status != "completed":
        return found | ({"Resume this run": resume} if resume else {})
    place, command = quote(str(run_folder)), summary.get("command", "train")
    if command == "train":  # the others leave a model folder already
        found["Export the model"] = f"penstock export {place}"
    if command == "reward-model":
        found["Train with it"] = f"reward.model={run_folder / 'models' / 'final'}"
    return found | {"Serve the model": f"penstock serve {place}"}


def mean_task_times(frame: pd.DataFrame) -> list[TaskTime]:
    """Return each task's mean over the iterations in which it ran, the task with the largest share first."""
    times = task_times(frame)
    whole = frame["time/iteration_s"].sum() if "time/iteration_s" in frame else times.to_numpy(na_value=0.0).sum()
    return [TaskTime(str(task), float(seconds.mean()), float(seconds.sum() / whole)) for task, seconds in times.items()]


def _read_summary(run_folder: Path) -> dict[str, Any]:
    path = run_folder / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return summary


def _rows(samples: Samples) -> list[dict[str, Any]]:
    if isinstance(samples, Path):
        import pandas as pd

        return [{str(key): value for key, value in row.items()} for row in pd.read_parquet(samples).to_dict("records")]
    return [dict(row) for row in samples]


def _markdown(report: Report) -> str:
    parts = [f"# {report.name}", f"Status: **{report.status}**"]
    if report.headlines:
        rows = [f"| {line.label} | {line.value} | {line.note} |" for line in report.headlines]
        parts.append("\n".join(["| figure | value | |", "| --- | --- | --- |", *rows]))
    if report.alarms:
        lines = [f"- **{alarm.happens}** ({alarm.when}). {alarm.change}." for alarm in report.alarms]
        parts.append("\n".join(["## Alarms", "", *lines]))
    if report.losses:
        rows = [f"| {loss.what} | {loss.when} | {loss.why} | {loss.noticed} | {loss.then} |" for loss in report.losses]
        parts.append("\n".join(["| lost | when | why | noticed | gone on |", "| --- | --- | --- | --- | --- |", *rows]))
    if report.faults:
        rows = [f"| {fault.what} | {fault.when} | {fault.why} | {fault.then} |" for fault in report.faults]
        parts.append("\n".join(["| fault | when | why | then |", "| --- | --- | --- | --- |", *rows]))
    if report.evaluation:
        rows = [f"| {line.label} | {line.first} | {line.last} |" for line in report.evaluation]
        parts.append("\n".join(["| held-out prompts | first | last |", "| --- | --- | --- |", *rows]))
    parts += [f"![{picture.path.stem}]({picture.path.name})" for picture in report.pictures]
    if report.times:
        rows = [f"| {time.task} | {time.seconds:.3f} | {time.share:.0%} |" for time in report.times]
        parts.append("\n".join(["| task | mean seconds when it ran | share |", "| --- | ---: | ---: |", *rows]))
    if report.samples_page:
        parts.append(f"[Samples]({report.samples_page}): prompts, responses, rewards, and advantages token by token")
    if report.links:
        parts.append("\n".join(f"- {label}: `{address}`" for label, address in report.links.items()))
    if report.commands:
        parts.append("\n".join(f"- {label}: `{command}`" for label, command in report.commands.items()))
    return "\n\n".join(parts) + "\n"
