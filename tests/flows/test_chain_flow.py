"""A chain as it is used: killed in its midst it goes on, and ends with the weights that it would have had.

Real trainings on the CPU by the command: supervised, sampling, selected pairs, a reward model, PPO with it, and
supervised training on the best of what that says. Left out: what its recipe may say (tests/configs/test_chain.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.sorting import FlowRunSort

from penstock.configs.chain import Stage
from penstock.flows.chain import chain
from penstock.session.chains.plan import CHAIN_TAG, read_chain_of, stages_left
from penstock.state.chain import ChainFolder
from penstock.state.manifest import read_kind
from penstock.state.run_folder import RunFolder, read_metrics
from tests.processes import alive
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 900.0  # for what takes a minute on a quiet machine
SMALL = "{hidden_size: 96, layers: 1, heads: 3, kv_heads: 3, intermediate_size: 96, max_positions: 64}"
REWARD = "tests.flows.reward_functions:low_digit"  # which a model that knows nothing earns, too
QUICK = (
    f"imitate.model.tiny={SMALL}",
    "imitate.sft.steps=60",
    *(f"{stage}.reward.function={REWARD}" for stage in ("ask", "ask-again")),
    "ask.iterations=1",
    "ask.rollout.prompts=32",
    "judge.trainer.steps=8",
    "judge.trainer.batch=8",
    "judge.trainer.checkpoint_every=4",
    "learn.iterations=3",
    "learn.rollout.prompts=8",
    "learn.checkpoint.every=1",
    "learn.evaluate.every=0",
    "ask-again.iterations=1",
    "ask-again.rollout.prompts=16",
    "best.least=null",
    "settle.sft.steps=4",
    "settle.sft.batch=8",
)
TRAINING = {
    "imitate": "sft",
    "ask": "train",
    "judge": "reward-model",
    "learn": "train",
    "ask-again": "train",
    "settle": "sft",
}
STAGES = ["imitate", "ask", "pairs", "judge", "learn", "ask-again", "best", "settle"]


@dataclass(frozen=True)
class Chains:
    """Starts `penstock chain` as a person does, in a folder of its own."""

    folder: Path
    prefect_api: str

    @property
    def said(self) -> str:
        """What all of the commands have printed."""
        return (self.folder / "said.txt").read_text(encoding="utf-8")

    @property
    def chain(self) -> ChainFolder:
        """The folder of the one chain."""
        (path,) = (self.folder / "runs").glob("sums-chain-*")
        return ChainFolder(path)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        with (self.folder / "said.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.main", "chain", *arguments],
                cwd=ROOT,
                env=inherited | {"PREFECT_API_URL": self.prefect_api},
                stdout=output,
                stderr=output,
            )

    def begin(self) -> subprocess.Popen[bytes]:
        """Start the chain of the repository, made small."""
        return self.start("configs/chain.yaml", *QUICK, f"folder={self.folder / 'runs'}")


def content(folder: Path) -> dict[str, tuple[int, str]]:
    """Return when every file below a folder was written, and what it holds."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


def weights(chain: ChainFolder) -> dict[str, str]:
    """Return a digest of what each stage leaves."""
    left = {stage.name: chain.left_by(stage) for stage in read_chain_of(chain).stages}
    files = {name: path if path.is_file() else path / "model.safetensors" for name, path in left.items()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def states_of(chain: ChainFolder) -> list[str]:
    """Return how the flow runs of a chain ended, the oldest first."""
    of_chain = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"{CHAIN_TAG}{chain.path.name}"]))
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=of_chain, sort=FlowRunSort.START_TIME_ASC)
    return [str(run.state_type.value) for run in found if run.state_type is not None]


@pytest.mark.exhaustive
def test_a_chain_that_is_killed_goes_on_and_ends_as_one_left_alone(tmp_path: Path, prefect_api: str) -> None:
    """Killed in the fifth of eight stages. Control: what was done is not touched, and each stage leaves its own."""
    killed, alone = (Chains(tmp_path / name, prefect_api) for name in ("killed", "alone"))
    for chains in (killed, alone):
        chains.folder.mkdir()
    first = killed.begin()
    learning = "learn (train), begins"
    until(lambda: learning in killed.said or first.poll() is not None, WAIT_S, "the fifth stage begins", 0.05)
    run = RunFolder(killed.chain.path / "learn")
    until(lambda: run.checkpoint(1).is_dir() or first.poll() is not None, WAIT_S, "it has a checkpoint", 0.01)
    below = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    assert first.wait(20) == -signal.SIGKILL, killed.said
    until(lambda: not any(alive(process) for process in below), 30, "nothing of it is left")
    done = {name: content(killed.chain.path / name) for name in ("imitate", "ask", "judge")}
    assert [stage.name for stage in stages_left(killed.chain)] == ["learn", "ask-again", "best", "settle"]

    second = killed.start("--resume", str(killed.chain.path))
    assert second.wait(WAIT_S) == 0, killed.said
    assert states_of(killed.chain) == ["CRASHED", "COMPLETED"], "the killed attempt's flow run, and that which goes on"
    assert "learn (train), goes on" in killed.said and killed.said.count("imitate (sft), begins") == 1
    assert {name: content(killed.chain.path / name) for name in done} == done
    assert alone.begin().wait(WAIT_S) == 0, alone.said
    left = weights(killed.chain)
    assert left == weights(alone.chain)
    assert left["ask"] == left["imitate"] and left["ask-again"] == left["learn"], "they learn nothing"
    assert len(set(left.values())) == len(STAGES) - 2
    assert {name: read_kind(RunFolder(killed.chain.path / name)) for name in TRAINING} == TRAINING

    learnt = [record["metrics"] for record in read_metrics(run)]
    assert len(learnt) == 4 and "critic/loss" in learnt[-1], sorted(learnt[-1])
    pairs = [json.loads(line) for line in (killed.chain.path / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert pairs and all(pair["chosen"] != pair["rejected"] for pair in pairs)

    client = MlflowClient(f"sqlite:///{killed.folder / 'runs' / 'mlflow.db'}")
    names = [
        run.info.run_name for run in client.search_runs([found.experiment_id for found in client.search_experiments()])
    ]
    assert sorted(names) == sorted(f"{killed.chain.path.name}/{name}" for name in TRAINING)

    third = killed.start("--resume", str(killed.chain.path))
    assert third.wait(WAIT_S) == 0, killed.said
    assert weights(killed.chain) == left, "a chain that is complete is left as it is"


def test_a_mistake_ends_a_chain_before_its_first_stage(tmp_path: Path, prefect_api: str) -> None:
    """Of the fifth stage, with exit code 2 and nothing written."""
    chains = Chains(tmp_path, prefect_api)
    command = chains.start("configs/chain.yaml", f"folder={tmp_path / 'runs'}", "learn.rollout.smaples=3")
    assert command.wait(WAIT_S) == 2
    assert "samples" in chains.said and "Traceback" not in chains.said
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("prefect_harness")
def test_a_flow_run_says_which_chain_it_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tag, which a retry looks for; here its first stage fails, before an engine starts."""
    monkeypatch.chdir(ROOT)
    begun = list[str]()

    def failing(_: ChainFolder, stage: Stage) -> None:
        begun.append(stage.name)
        raise RuntimeError("a defect")

    monkeypatch.setattr("penstock.flows.chain.carry_out", failing)
    given = [f"folder={tmp_path / 'runs'}", *QUICK]
    state = chain("configs/chain.yaml", given, return_state=True)
    assert state.is_failed() and begun == STAGES[:1]
    with get_client(sync_client=True) as client:
        found = client.read_flow_run(state.state_details.flow_run_id)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"{CHAIN_TAG}{folder.name}" in found.tags
