"""Where sampling need not be the same again, no response that had ended before a kill is generated again.

So on GPUs, and wherever a rollout begins before the update on the one before: when its weights change is another moment
each time. Left out: that a rollout whose sampling has to be the same comes out the same (test_losses.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest

from penstock.session.rollout.carried import POLICY_VERSIONS
from penstock.state.events import read_events
from penstock.state.experience import read_columns
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from tests.processes import alive, environment_of, words_of
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES = 96, 4  # so many that a rollout outlasts the checkpoint that is written beside it
RECIPE = (
    "configs/quickstart.yaml",
    "sft=null",
    f"data.arithmetic={{digits: 2, sft: 256, train: {2 * PROMPTS}, heldout: 16}}",
    f"rollout={{prompts: {PROMPTS}, samples: {SAMPLES}, max_response_tokens: 50, max_sequences: 8, ignore_eos: true}}",
    "evaluate={every: 0, prompts: 1}",
    "checkpoint.every=1",
)
AHEAD = (
    "iterations=3",
    f"data.arithmetic.train={4 * PROMPTS}",
    "reward.function=tests.flows.reward_functions:low_digits",
    "actor.optimizer={learning_rate: 3e-3, warmup_steps: 0}",
    "algorithm={name: grpo, mini_batches: 2, epochs: 4}",  # keeps the log-probs of the policy before it, and lasts
    "rollout.stream.staleness=1",
    "groups={main: {ranks: 1, roles: [actor]}, generating: {ranks: 1, roles: [rollout]}}",
)


COLUMNS = ("prompt_id", "response_tokens", "logprobs_rollout", "logprobs_old", POLICY_VERSIONS)


def _told(path: Path, newest: int) -> dict[int, list[int]]:
    """The responses of policies up to `newest` in a file that is being written, by their number in the rollout."""
    found: dict[int, list[int]] = {}
    if not path.exists():
        return found
    try:
        with pa.OSFile(str(path), "rb") as source:
            for batch in pa.ipc.open_stream(source):
                for row in (row for row in batch.to_pylist() if max(row["versions"]) <= newest):
                    found[SAMPLES * row["position"] + row["sample"]] = row["tokens"]
    except pa.ArrowInvalid:  # its last batch is not whole yet
        pass
    return found


def _saved(run: RunFolder) -> int:
    """The iteration from whose checkpoint a resume goes on."""
    return read_manifest(run).progress.iteration if run.manifest.is_file() else 0


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """The file into which trainings say what they have to say."""
    return tmp_path / "said"


@pytest.fixture
def start(said: Path, prefect_api: str) -> Callable[..., subprocess.Popen[bytes]]:
    """What starts a training."""
    program = [sys.executable, "-m", "penstock.cli.main", "train"]
    environment = os.environ | {"PREFECT_API_URL": prefect_api}

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        with said.open("ab") as output:
            return subprocess.Popen([*program, *arguments], cwd=ROOT, stdout=output, stderr=output, env=environment)

    return start


def _struck(
    training: subprocess.Popen[bytes], killed: str, resume: Callable[[], subprocess.Popen[bytes]]
) -> subprocess.Popen[bytes]:
    """Kill the one rank of a group, or the flow, which is then resumed; return the training that goes on."""
    started = psutil.Process(training.pid).children(recursive=True)
    if killed == "flow":
        training.kill()
        until(lambda: not any(map(alive, started)), 20, "all that the flow started is gone")
        training.wait()
        return resume()
    ranks = [process for process in started if words_of(process)[-1:] == ["penstock.engines.groups.rank"]]
    (rank,) = [process for process in ranks if environment_of(process).get("PENSTOCK_GROUP") == killed]
    rank.kill()
    return training


@pytest.mark.parametrize("killed", [pytest.param("main", marks=pytest.mark.exhaustive), "flow"])
def test_what_had_ended_is_in_the_experience(
    killed: str, start: Callable[..., subprocess.Popen[bytes]], said: Path, tmp_path: Path
) -> None:
    """A killed rank costs the flow nothing but the rest, and neither does a killed flow that is resumed."""
    run = RunFolder(tmp_path / "run")
    training = start(*RECIPE, "iterations=2", "rollout.reproducible=false", "--run", str(run.path))

    def in_the_second() -> bool:
        """Whether the first iteration will not be done again, and the second has had some responses."""
        return _saved(run) == 1 and len(_told(run.ended(2), 1)) >= 16

    until(lambda: in_the_second() or training.poll() is not None, 300, "some responses", 0.01)
    told = _told(run.ended(2), 1)
    training = _struck(training, killed, lambda: start("--resume", str(run.path)))
    assert training.wait(300) == 0, said.read_text(encoding="utf-8")
    assert 16 <= len(told) < PROMPTS * SAMPLES
    responses = read_columns(run.experience(2), ["response_tokens"])["response_tokens"]
    assert len(responses) == PROMPTS * SAMPLES
    assert {number: responses.row(number).tolist() for number in told} == told
    taken_over = [record["metrics"].get("rollout/taken_over", 0) for record in read_metrics(run)][-2:]
    assert taken_over[0] == 0 and len(told) <= taken_over[1] < PROMPTS * SAMPLES
    assert [event["event"] for event in read_events(run)] == ([] if killed == "flow" else ["RankLost", "recovered"])
    assert not run.ended(1).exists() and not run.ended(2).exists()


@pytest.mark.parametrize(
    "killed",
    [
        "main",
        pytest.param("generating", marks=pytest.mark.exhaustive),
        pytest.param("flow", marks=pytest.mark.exhaustive),
    ],
)
def test_what_had_ended_of_a_rollout_ahead_is_in_its_experience(
    killed: str, start: Callable[..., subprocess.Popen[bytes]], said: Path, tmp_path: Path
) -> None:
    """Killed while the actor learns from the batch before: that is not generated again either.

    No prompt is lost or comes twice, and each token is of the policy that it says: what the policy before the update
    has sampled has its log-probs. Control: tokens of the policy before that have others.
    """
    run = RunFolder(tmp_path / "run")
    training = start(*RECIPE, *AHEAD, "--run", str(run.path))

    def in_the_update() -> bool:
        """Whether the first iteration will not be done again, the second batch is complete, the third has begun."""
        return _saved(run) == 1 and run.experience(2).exists() and len(_told(run.ended(3), 1)) >= 8

    until(lambda: in_the_update() or training.poll() is not None, 300, "some responses", 0.01)
    told = _told(run.ended(3), 1)
    second = read_columns(run.experience(2), ["prompt_id", "response_tokens"])
    training = _struck(training, killed, lambda: start("--resume", str(run.path)))
    assert training.wait(300) == 0, said.read_text(encoding="utf-8")
    assert 8 <= len(told) < PROMPTS * SAMPLES
    batches = [read_columns(run.experience(number), COLUMNS) for number in (1, 2, 3)]
    assert batches[1]["prompt_id"] == second["prompt_id"]
    assert np.array_equal(batches[1]["response_tokens"].values_T, second["response_tokens"].values_T)
    responses = batches[2]["response_tokens"]
    assert {number: responses.row(number).tolist() for number in told} == told
    drawn = [name for batch in batches for name in batch["prompt_id"][::SAMPLES]]
    assert len(set(drawn)) == len(drawn) == 3 * PROMPTS
    of_update, of_before = list[float](), list[float]()
    for number, batch in enumerate(batches, start=1):
        versions_T, sampled_with_T = batch[POLICY_VERSIONS].values_T, batch["logprobs_rollout"].values_T
        gap_T = np.abs(batch["logprobs_old"].values_T - sampled_with_T)
        assert set(versions_T.tolist()) <= {number - 2, number - 1}
        of_update += gap_T[versions_T == number - 1].tolist()
        of_before += gap_T[versions_T == number - 2].tolist()
    assert max(of_update) < 1e-3 < max(of_before)
    figures = [record["metrics"] for record in read_metrics(run) if "rollout/tokens" in record["metrics"]]
    assert max(of.get("rollout/taken_over", 0) for of in figures) >= len(told)
    assert not [*run.path.rglob("*.ended.arrows*")]
