"""A real training that Debian's Prometheus watches, and its resume in other trackers, as docs/trackers.md says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.engines.groups.interface import free_port
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.trackers.prometheus import PORT, PORT_VARIABLE, metric_name
from tests.trackers import test_tensorboard, test_wandb
from tests.trackers.test_several import in_mlflow
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "penstock.json").read_text(encoding="utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
PAGE = (ROOT / "docs" / "trackers.md").read_text(encoding="utf-8")
OWN = {"penstock_iteration", "penstock_status", "penstock_seconds_since_iteration"}
OF_GPUS_AND_WAYS_OF_WAITING = {
    *("rollout/tokens_per_s_per_gpu", "actor/tokens_per_s_per_gpu", "actor/mfu", "reference/mfu", "rollout/mfu"),
    *("gpu/memory_gib", "memory/gpu_gib", "memory/reserved_gib", "gpu/utilisation"),
    *("rollout/portion_wait_s", "rollout/batch_wait_s", "rollout/engine_pause_s"),
    *("rollout/staleness_mean", "rollout/staleness_max"),
}
RECIPE = (
    "iterations=3",
    "data.arithmetic={digits: 2, sft: 256, train: 40, heldout: 16}",
    "sft.steps=4",
    "sft.batch=32",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 6, max_sequences: 32}",
    "evaluate={every: 1, temperature: 1.0}",
    "checkpoint.every=1",
    "record.samples_every=2",
    "algorithm={name: grpo, kl: {place: loss, coefficient: 0.05}}",
)
WAIT_S = 400.0


@dataclass(frozen=True)
class Watched:
    """A training that Prometheus has watched.

    Attributes:
        prometheus: address of Prometheus' API.
        refused: what another training said that was to have the same port, and its exit code.
    """

    run: RunFolder
    prometheus: str
    refused: tuple[str, int]

    def asked(self, expression: str) -> list[dict[str, Any]]:
        """Return what an expression has given since an hour ago, by series."""
        now = float(answer(self.prometheus, "query", query="time()")["result"][0])
        span = {"start": f"{now - 3600:.0f}", "end": f"{now:.0f}", "step": "1"}
        result: list[dict[str, Any]] = answer(self.prometheus, "query_range", query=expression, **span)["result"]
        return result


def answer(prometheus: str, what: str, **fields: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{prometheus}/{what}?{urllib.parse.urlencode(fields)}", timeout=30) as reply:
        said = json.load(reply)
    assert said["status"] == "success"
    data: dict[str, Any] = said["data"]
    return data


@contextmanager
def prometheus(folder: Path, training_port: int) -> Iterator[str]:
    """Run Debian's Prometheus with the configuration of deploy/, which looks at a training once a second."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus here: apt-get install prometheus")
    settings = (ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8")
    assert settings.count(f"127.0.0.1:{PORT}") == settings.count("scrape_interval: 5s") == 1
    settings = settings.replace(f":{PORT}", f":{training_port}").replace("scrape_interval: 5s", "scrape_interval: 1s")
    (folder / "prometheus.yml").write_text(settings, encoding="utf-8")
    port = free_port("127.0.0.1")
    (line,) = [line for line in PAGE.splitlines() if line.startswith("prometheus ")]
    for before, after in (("deploy/prometheus.yml", "prometheus.yml"), (":9090", f":{port}")):
        assert before in line
        line = line.replace(before, after)
    with (folder / "prometheus.txt").open("wb") as output:
        server = subprocess.Popen(line.split(), cwd=folder, stdout=output, stderr=output)
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        server.terminate()
        server.wait(60)


def penstock(folder: Path, port: int, *arguments: str) -> subprocess.Popen[bytes]:
    settings = os.environ | {PORT_VARIABLE: str(port), "WANDB_MODE": "offline"}
    settings.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    with (folder / "training.txt").open("ab") as output:
        return subprocess.Popen(command, cwd=ROOT, env=settings, stdout=output, stderr=output)


def finish(folder: Path, process: subprocess.Popen[bytes]) -> None:
    assert process.wait(WAIT_S) == 0, (folder / "training.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A training in three trackers, and Prometheus, which has its figures of before the training ended."""
    folder, port = tmp_path_factory.mktemp("watched"), free_port("127.0.0.1")
    (named,) = set(re.findall(r"record\.tracker='(\[mlflow, tensorboard, prometheus\])'", PAGE))
    run = RunFolder(folder / "run")
    arguments = ["train", str(ROOT / "configs" / "quickstart.yaml"), *RECIPE, f"record.tracker={named}"]
    with prometheus(folder, port) as api:
        process = penstock(folder, port, *arguments, "--run", str(run.path))
        until(lambda: run.manifest.is_file() or process.poll() is not None, WAIT_S, "the record is open")
        settings = os.environ | {PORT_VARIABLE: str(port)}
        again = [sys.executable, "-m", "penstock.cli.main", *arguments, "--dry-run"]
        second = subprocess.run(again, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
        finish(folder, process)
        yield Watched(run, api, (second.stderr + second.stdout, second.returncode))


def test_prometheus_holds_what_the_run_recorded(watched: Watched) -> None:
    """Figures of one iteration belong together, whichever was scraped. Control: the series are of this run alone."""
    series = {
        metric: watched.asked(metric)
        for metric in ("penstock_iteration", "penstock_time_iteration_s", "penstock_reward_mean")
    }
    by_time = {name: {at: float(value) for at, value in found[0]["values"]} for name, found in series.items()}
    assert [found[0]["metric"]["run"] for found in series.values()] == ["run"] * 3
    seen = {by_time["penstock_iteration"][at]: at for at in by_time["penstock_time_iteration_s"]}
    assert seen.keys() & {1.0, 2.0, 3.0}
    for iteration, at in seen.items():
        recorded = next(item["metrics"] for item in read_metrics(watched.run) if item["iteration"] == iteration)
        assert by_time["penstock_time_iteration_s"][at] == recorded["time/iteration_s"]
        assert by_time["penstock_reward_mean"][at] == recorded["reward/mean"]


def test_every_expression_of_the_dashboard_finds_its_metrics(watched: Watched) -> None:
    """On a CPU all but those of GPUs and of ways of waiting, which pages and report name. Control: a wrong name."""
    exported = {metric_name(name) for item in read_metrics(watched.run) for name in item["metrics"]} | OWN
    elsewhere = {metric_name(name): name for name in OF_GPUS_AND_WAYS_OF_WAITING}
    places = [*(ROOT / "docs").glob("*.md"), ROOT / "penstock" / "reports" / "plots.py"]
    known = "".join(path.read_text(encoding="utf-8") for path in places)
    for name in OF_GPUS_AND_WAYS_OF_WAITING:
        assert any(said in known for said in (f"`{name}`", f'"{name}"', f"`<role>/{name.partition('/')[2]}`")), name
    assert not exported & elsewhere.keys()
    for expression in EXPRESSIONS:
        names = set(re.findall(r"penstock_\w+", expression.replace("penstock_time_.+_s", "")))
        assert names <= exported | elsewhere.keys(), expression
        found = watched.asked(expression.replace("$run", ".*"))
        assert bool(found) != bool(names & elsewhere.keys()), expression
    assert watched.asked("penstock_reward_meen") == []


def test_a_second_training_on_the_port_is_refused_before_engines_start(watched: Watched) -> None:
    """One message, exit code 2, no traceback. Control: the training that has the port went on to its end."""
    said, code = watched.refused
    assert code == 2
    assert "the tracker 'prometheus' cannot listen on port" in said
    assert "Traceback" not in said
    assert json.loads(watched.run.summary.read_text(encoding="utf-8"))["status"] == "completed"


def test_its_resume_goes_on_in_other_trackers(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page says: MLflow goes on, Weights & Biases gets all of it, TensorBoard keeps what it has."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # the training had none either
    run, folder = watched.run, watched.run.path.parent
    (named,) = set(re.findall(r"record\.tracker='(\[mlflow, wandb\])'", PAGE))
    finish(folder, penstock(folder, 9, "train", "--resume", str(run.path), "iterations=4", f"record.tracker={named}"))
    assert [item.tracker for item in read_manifest(run).tracked] == ["mlflow", "wandb"]
    assert in_mlflow(run) == [1, 2, 3, 4]
    assert test_tensorboard.steps(run, "reward/mean") == [1, 2, 3]
    (name,) = [item.run.rpartition("/")[2] for item in read_manifest(run).tracked if item.tracker == "wandb"]
    (file,) = (folder / "wandb").glob(f"offline-run-*/run-{name}.wandb")
    rows = [row for row in test_wandb.rows_of([file]) if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    (line,) = [line.partition("#")[0].split() for line in PAGE.splitlines() if line.startswith("wandb sync --dry-run")]
    command = [str(Path(sys.executable).with_name("wandb")), *line[1:-1], str(folder / "wandb")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "Would sync 1 run(s)" in done.stdout + done.stderr
    assert not [process for process in psutil.process_iter(["cwd"]) if _is_wandbs(process, folder)]


def _is_wandbs(process: psutil.Process, folder: Path) -> bool:
    return process.name() == "wandb-core" and any(file.path.startswith(str(folder)) for file in process.open_files())
