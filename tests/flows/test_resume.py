"""A killed training loses nothing: resumed, it ends as one that was left alone, bit for bit.

Real processes are killed with SIGKILL, once between two iterations and once inside one. PPO stands for what is hardest
to bring back (critic, old log-probs, the state of the adaptive KL coefficient), GRPO for the usual case.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from reports import mlflow_run
from state.manifest import read_manifest
from state.run_folder import RunFolder, read_metrics
from tests.flows.reward_functions import HOLD

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 5
SMALL = (
    f"iterations={ITERATIONS}",
    "data.arithmetic={digits: 2, sft: 256, train: 40, heldout: 16}",  # five iterations take each prompt once
    "sft.steps=10",
    "sft.batch=32",
    "reward.function=tests.flows.reward_functions:low_digit",
    "reward.timeout_s=120",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 6, max_sequences: 32, temperature: {0: 1.0, 4: 0.9}}",
    "evaluate={every: 2, temperature: 1.0}",
    "checkpoint.every=2",
    "record.samples_every=2",
)
PPO = (
    "algorithm={name: ppo, mini_batches: 2, kl: {place: reward, estimator: k1, coefficient: 0.05, target: 0.01, horizon: 100}}",
)
GRPO = ("algorithm={name: grpo, mini_batches: 1, kl: {place: loss, coefficient: 0.05}}",)
MEASURED = ("time/", "memory/", "rollout/tokens_per_s")  # of the machine, not of the training


@dataclass(frozen=True)
class Trainings:
    """Starts trainings in a folder as a person does."""

    folder: Path
    environment: dict[str, str]

    def start(self, name: str, *arguments: str, hold: str = "") -> subprocess.Popen[bytes]:
        """Start `penstock train` with its output in a file; scoring waits while the file `hold` of the run exists."""
        environment = self.environment | ({HOLD: str(self.folder / name / hold)} if hold else {})
        with (self.folder / f"{name}.txt").open("ab") as output:
            command = [sys.executable, "-m", "penstock.cli", "train", *arguments]
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)

    def new(self, name: str, *overrides: str, hold: str = "") -> subprocess.Popen[bytes]:
        """Start a new training in the run folder `name`."""
        recipe = (str(ROOT / "configs" / "quickstart.yaml"), *SMALL, *overrides)
        return self.start(name, *recipe, "--run", str(self.folder / name), hold=hold)

    def whole(self, name: str, *overrides: str) -> RunFolder:
        """Run a training that nobody disturbs."""
        return self.finished(name, self.new(name, *overrides))

    def resumed(self, name: str) -> RunFolder:
        """Resume a training and wait for its end."""
        return self.finished(name, self.start(name, "--resume", str(self.folder / name)))

    def finished(self, name: str, process: subprocess.Popen[bytes]) -> RunFolder:
        """Wait for the end of a training that must succeed."""
        assert process.wait(240) == 0, (self.folder / f"{name}.txt").read_text()
        return RunFolder(self.folder / name)

    def killed(self, name: str, process: subprocess.Popen[bytes], when: Callable[[RunFolder], bool]) -> RunFolder:
        """Kill the flow's process as soon as `when` holds; everything it started must be gone within 5 s."""
        run = RunFolder(self.folder / name)
        until(lambda: when(run) or process.poll() is not None, 240, f"the moment to kill {name}")
        started = psutil.Process(process.pid).children(recursive=True)
        assert any("engines.rank" in child.cmdline() for child in started)
        process.kill()
        assert process.wait(10) == -signal.SIGKILL, (self.folder / f"{name}.txt").read_text()
        until(lambda: not any(alive(child) for child in started), 5, f"ranks and workers of {name} are gone")
        return run


def until(condition: Callable[[], Any], within_s: float, what: str) -> None:
    """Wait for `condition`, at most `within_s`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.01)


def alive(process: psutil.Process) -> bool:
    """A zombie is dead: whoever adopted it has not collected it yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def iteration_of(run: RunFolder) -> int:
    """Return the iteration that the manifest stands at, -1 before there is one."""
    return read_manifest(run).progress.iteration if run.manifest.is_file() else -1


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    """One Prefect server and one MLflow store for all trainings."""
    folder = tmp_path_factory.mktemp("resume")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    api = f"http://127.0.0.1:{port}/api"
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    environment = inherited | {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_TRACKING_URI": uri,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.txt").open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        mlflow_run.open_run(uri, "penstock", "first", {}, {})
        until(lambda: answers(f"{api}/health"), 120, "the server answers")
        yield Trainings(folder, environment)
    finally:
        for process in [*psutil.Process(server.pid).children(recursive=True), server]:
            process.kill()
        server.wait(10)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def started(trainings: Trainings) -> Iterator[dict[str, Future[Any]]]:
    """All trainings of this module, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            "ppo": pool.submit(trainings.whole, "ppo", *PPO),
            "ppo killed": pool.submit(inside_an_iteration, trainings),
            "grpo": pool.submit(trainings.whole, "grpo", *GRPO),
            "grpo killed": pool.submit(between_iterations, trainings),
            "seed": pool.submit(trainings.whole, "seed", *GRPO, "seed=1"),
        }


def inside_an_iteration(trainings: Trainings) -> tuple[RunFolder, dict[str, Any]]:
    """Kill PPO in iteration 4, its experience written and its rewards not; there is a checkpoint of iteration 2."""
    experience = "experience/000004.parquet"
    process = trainings.new("ppo-killed", *PPO, hold=experience)
    run = trainings.killed("ppo-killed", process, lambda run: (run.path / experience).exists())
    left = state_of(run)
    (run.path / "experience" / ".000004.parquet.1.partial").write_bytes(b"cut off")
    return trainings.resumed("ppo-killed"), left


def between_iterations(trainings: Trainings) -> tuple[RunFolder, dict[str, Any]]:
    """Kill GRPO when its checkpoint of iteration 2 is complete."""
    process = trainings.new("grpo-killed", *GRPO)
    run = trainings.killed("grpo-killed", process, lambda run: iteration_of(run) == 2)
    left = state_of(run)
    return trainings.resumed("grpo-killed"), left


def state_of(run: RunFolder) -> dict[str, Any]:
    """Return what a killed training left behind."""
    return {
        "manifest": read_manifest(run),
        "recorded": [record["iteration"] for record in read_metrics(run)],
        "experience": sorted(path.name for path in (run.path / "experience").iterdir()),
    }


def numbers(run: RunFolder) -> list[tuple[int, dict[str, float]]]:
    """Return what was recorded, without what is measured."""
    return [
        (record["iteration"], {k: v for k, v in record["metrics"].items() if not k.startswith(MEASURED)})
        for record in read_metrics(run)
    ]


def weights(run: RunFolder) -> bytes:
    """Return the trained model's file."""
    return (run.model("final") / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "recorded"), [("ppo", [0, 1, 2, 3]), ("grpo", [0, 1, 2])], ids=["ppo-inside", "grpo-between"]
)
def test_a_killed_training_ends_as_one_left_alone(
    trainings: Trainings, started: dict[str, Future[Any]], name: str, recorded: list[int]
) -> None:
    """Weights and figures are equal to the last bit, and every iteration is in the run folder and in MLflow once."""
    alone: RunFolder = started[name].result()
    resumed, left = started[f"{name} killed"].result()
    assert left["manifest"].progress.iteration == 2
    assert left["recorded"][: len(recorded)] == recorded
    assert len(left["recorded"]) <= ITERATIONS

    assert numbers(resumed) == numbers(alone)
    assert weights(resumed) == weights(alone)
    assert replace(read_manifest(resumed).progress, seconds=0.0) == replace(read_manifest(alone).progress, seconds=0.0)
    assert not list(resumed.path.rglob("*.partial"))

    run_id, uri = read_manifest(resumed).mlflow_run_id, trainings.environment["MLFLOW_TRACKING_URI"]
    assert run_id == left["manifest"].mlflow_run_id
    client = mlflow_run.connect(uri)
    assert client.get_run(run_id).info.status == "FINISHED"
    for metric, first in (("iteration", 0), ("reward/mean", 1)):
        steps = [entry.step for entry in client.get_metric_history(run_id, metric)]
        assert steps == list(range(first, ITERATIONS + 1))


def test_another_seed_ends_elsewhere(started: dict[str, Future[Any]]) -> None:
    """The control: the comparison above can tell two trainings apart."""
    alone, other = started["grpo"].result(), started["seed"].result()
    assert numbers(other) != numbers(alone)
    assert weights(other) != weights(alone)
