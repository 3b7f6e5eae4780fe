"""Tasks of a finished training, run again from what its folder holds, give what they gave, bit for bit on the CPU.

PPO stands for what an iteration can have: old and reference log-probs, a critic, an adaptive KL coefficient, a sampler
with a memory. The iteration lies two after a checkpoint, so one update is done again before it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.base.ragged import Ragged
from penstock.configs.loading.load import load_config
from penstock.flows.replay import replay
from penstock.flows.train import train
from penstock.state.experience import column_names, read_columns, write_columns
from penstock.state.run_folder import RunFolder
from penstock.tasks.replay.differences import Replayed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
PPO = (
    "iterations=5",
    "data.arithmetic={digits: 2, sft: 64, train: 40, heldout: 8}",
    "sft.steps=4",
    "sft.batch=16",
    "reward.function=tests.flows.reward_functions:low_digit",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 6, max_sequences: 32, temperature: {0: 1.0, 4: 0.9}}",
    "evaluate.every=0",
    "checkpoint={every: 2, keep: 3}",
    "record.experiment=replay",
    "algorithm={name: ppo, mini_batches: 2}",
    "data.sampler={name: adaptive, half_life: 5}",
    "algorithm.kl={place: reward, estimator: k1, coefficient: 0.05, target: 0.01, horizon: 100}",
)
TASKS = [
    "rollout",
    "reward",
    "old_logprobs",
    "reference_logprobs",
    "values",
    "advantage",
    "update_actor",
    "update_critic",
]


@pytest.fixture(scope="module")
def trained(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training of PPO."""
    folder = tmp_path_factory.mktemp("runs") / "ppo"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        train(load_config(ROOT / "configs" / "quickstart.yaml", PPO), run_folder=str(folder))
    return RunFolder(folder)


@pytest.fixture
def altered(trained: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the run, to be changed."""
    return RunFolder(shutil.copytree(trained.path, tmp_path / "altered", symlinks=True))


def test_every_task_gives_what_it_gave(trained: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns and figures of iteration 4, from checkpoint 2; nothing of the run is written, and nothing stays."""
    monkeypatch.chdir(ROOT)
    before, beside = content(trained.path), sorted(trained.path.parent.iterdir())
    done = replay(str(trained.path), 4)
    assert [row for row in done.rows if not row.equal] == []
    assert list(dict.fromkeys(row.task for row in done.rows)) == TASKS
    names = {row.what for row in done.rows}
    assert {"response_tokens", "reward", "logprobs_old", "values", "logprobs_reference", "advantages"} <= names
    assert {"actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "reward/mean", "actor/kl"} <= names
    assert content(trained.path) == before
    assert sorted(trained.path.parent.iterdir()) == beside
    assert done.folder is None


def test_an_altered_update_between_is_noticed(altered: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with other advantages in iteration 3 the update of that iteration, and that of the next, are others."""
    monkeypatch.chdir(ROOT)
    alter(altered.experience(3), "advantages", lambda column: Ragged(-column.values_T, column.offsets_B1))
    done = replay(str(altered.path), 4, ["update_actor"])
    assert ("updates of iteration 3", "actor/loss") in different(done)
    assert ("update_actor", "actor/loss") in different(done)
    assert done.folder is not None
    assert done.folder.is_dir()


def test_an_altered_column_is_named_and_the_command_says_so_by_its_exit_code(altered: RunFolder) -> None:
    """Control: one reward of another worth is found in `reward`, and in what follows from it."""
    alter(altered.experience(4), "reward", lambda rewards_B: np.where(np.arange(len(rewards_B)) == 5, 7.0, rewards_B))
    command = [sys.executable, "-m", "penstock.cli.main", "replay", str(altered.path), "4", "reward", "advantage"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    rows = [line for line in ended.stdout.splitlines() if "1 of 32, at most" in line]
    assert [line.split()[1] for line in rows] == ["reward"]
    assert "advantages" in ended.stdout


def alter(path: Path, name: str, change: object) -> None:
    """Write a column of an experience file as another."""
    columns = read_columns(path, column_names(path))
    write_columns(path, {**columns, name: change(columns[name])})  # type: ignore[operator]


def different(done: Replayed) -> set[tuple[str, str]]:
    """Return task and name of what differs."""
    return {(row.task, row.what) for row in done.rows if not row.equal}


def content(folder: Path) -> dict[str, tuple[int, str]]:
    """Return time and digest of every file."""
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
